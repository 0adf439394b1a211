"""`pfml train --effort`: the ladder as a run that the other commands read."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from pfml.cli import main
from pfml.models import load_embedder
from pfml.runs.config import RunConfig
from pfml.runs.folder import RunFolder
from pfml.training import run as train_by_options

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Eight classes of plain images, green and blue by class, red anything."""
    folder = tmp_path_factory.mktemp("ladder") / "photos"
    for k in range(8):
        (folder / f"class {k}").mkdir(parents=True)
        for n in range(4):
            color = (60 * n, 30 * (k % 4), 100 * (k // 4))
            Image.new("RGB", (40, 40), color).save(folder / f"class {k}" / f"{n}.png")
    return folder


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory, coarse_plots):
    out = tmp_path_factory.mktemp("ladder") / "run"
    main(["train", "--data", str(photos), "--effort", "seconds", "--out", str(out), "--quiet"])
    return out


def test_the_run_says_each_rung_and_which_was_kept(run):
    rungs = RunFolder(run).entries("rung")
    assert [rung["name"] for rung in rungs] == ["pretrained", "views", "closed form"]
    assert sum(rung["is_kept"] for rung in rungs) == 1
    assert all(set(rung["scores"]) == {"recall_at_1", "map_at_r"} for rung in rungs)
    assert json.loads((run / "results.json").read_text())["ladder"]["kept"]["name"] in {
        "pretrained",
        "views",
        "closed form",
    }
    before = RunFolder(run).entries("untrained")[0]["test"]
    assert before["num_queries"] == 16


def test_the_other_commands_read_it(run, photos, capsys):
    results = json.loads((run / "results.json").read_text())
    main(["evaluate", str(run), "--json"])
    evaluated = json.loads(capsys.readouterr().out)["metrics"]
    assert evaluated["map_at_r"] == pytest.approx(results["last"]["test"]["map_at_r"], abs=1e-6)
    main(["index", str(run), str(photos), "--quiet"])
    main(["search", str(run), str(photos / "class 3" / "0.png"), "--k", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["results"][0]["hits"][0]["distance"] == pytest.approx(0, abs=1e-3)
    embedder = load_embedder(run)
    assert (embedder.trained_on is None) == (embedder.head.linear is None)
    assert (run / "report.html").is_file()


def test_what_trains_or_tunes_by_other_options_refuses_an_effort(photos, tmp_path):
    with pytest.raises(ValueError, match="effort must be None"):
        train_by_options(RunConfig(effort="seconds"), tmp_path / "run")
    with pytest.raises(SystemExit, match="leave out --effort"):
        main(["tune", "--data", str(photos), "--effort", "seconds", "--out", str(tmp_path / "study")])
    assert not list(tmp_path.iterdir())


def test_options_that_the_ladder_decides_are_refused(photos, tmp_path):
    def failure(*options):
        with pytest.raises(SystemExit) as exit_:
            main(["train", "--data", str(photos), "--effort", "seconds", "--out", str(tmp_path / "run"), *options])
        return str(exit_.value.code)

    assert "leave out --epochs" in failure("--epochs", "3")
    assert "leave out --ensemble" in failure("--ensemble", "2")
    assert "needs a backbone with pretrained weights" in failure("--model.weights", "none")
    assert not (tmp_path / "run").exists()
