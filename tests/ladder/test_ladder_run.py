"""`pfml train --effort`: the ladder as a run that the other commands read."""

from __future__ import annotations

import json
import re
import shutil
import signal
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import pytest
import torch
import yaml
from PIL import Image
from torch.distributed import HashStore

from pfml.cli import main
from pfml.data.file_images import FileImages
from pfml.ladder.ladder import RUNGS
from pfml.ladder.run import _conclusion, run_ladder
from pfml.models import EmbedderConfig, load_embedder
from pfml.pages.run_analysis import analyze_run
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.folder import RunFolder
from pfml.training import run as train_by_options
from plain_pages import without_plots
from tiny_network import small_pretrained

pytestmark = pytest.mark.usefixtures("one_thread", "_without_plots")


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
def run(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("ladder") / "run"
    embeds_again = mock.patch("pfml.pages.run_analysis.embed", side_effect=AssertionError("embedded a second time"))
    with small_pretrained(), without_plots(), embeds_again, redirect_stdout(StringIO()) as printed:
        main(["train", "--data", str(photos), "--effort", "seconds", "--out", str(out)])
    (out / "printed.txt").write_text(printed.getvalue())
    return out


def test_the_command_prints_each_decision_and_one_table_of_before_and_after(run):
    printed = (run / "printed.txt").read_text()
    rungs = RunFolder(run).entries("rung")
    for rung in rungs[1:]:
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{rung['name']}: ")]
        assert re.search(r": (kept|not kept, since .+)$", line)
    assert "not kept" not in next(line for line in printed.splitlines() if line.startswith("pretrained: "))
    (kept,) = [rung["name"] for rung in rungs if rung["is_kept"]]
    rows = [line for line in printed.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["pretrained backbone", f"the model ({kept})"]
    assert "epoch" not in printed
    assert "report.html: the ladder, search results, a map, the hardest classes, the configuration" in printed
    card = (run / "model" / "README.md").read_text()
    assert "# An image embedder: ladder on " in card
    assert f"This is what `pfml train` kept of the candidates that it tried: {kept} (" in card
    assert "epoch" not in card.partition("## Configuration")[0]
    assert "\n- It has learned what tells" in card
    page = (run / "report.html").read_text()
    assert not any(f"<h2>{title}" in page for title in ("Learning curves", "Training classes", "The field"))


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


@pytest.mark.usefixtures("_small_pretrained")
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


def test_options_that_are_typed_beside_the_effort_of_a_file_are_refused_too(run, photos, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(f"{{effort: seconds, epochs: 5, data: {{name: '{photos}'}}}}")

    def failure(*options):
        with pytest.raises(SystemExit) as exit_:
            main(["train", *map(str, options), "--out", str(tmp_path / "run")])
        return str(exit_.value.code)

    said = failure(f"--config={file}", "--epochs=3", "--optimizer.lr=0.1")
    assert "leave out --epochs, --optimizer.lr, or leave out the effort in --config to train directly" in said
    assert "leave out --recipe, or" in failure("--data", photos, "--effort=seconds", "--recipe=triplet")
    assert "leave out --ensemble, or" in failure(f"--config={file}", "--ensemble=2")
    (tmp_path / "more" / "new").mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(tmp_path / "more" / "new" / "0.png")
    said = failure("--from", run, "--data", tmp_path / "more", "--epochs=3")
    assert said.endswith("leave out --epochs"), "the effort is that of RUN"
    assert not (tmp_path / "run").exists()


def printed(capsys, *arguments):
    main(["train", *map(str, arguments), "--print_config", "--device=cpu"])
    return capsys.readouterr().out


def printed_config(capsys, *arguments):
    return yaml.safe_load(printed(capsys, *arguments))


def what_would_run(*arguments):
    """The configuration that a command would run."""
    with mock.patch("pfml.cli.train._run", return_value={}) as would_run:
        main(["train", *map(str, arguments), "--quiet"])
    return would_run.call_args.args[0]


@pytest.mark.parametrize("effort", RUNGS)
def test_what_is_printed_names_the_rungs_and_no_value_that_the_ladder_leaves_unused(photos, capsys, effort):
    text = printed(capsys, "--data", photos, f"--effort={effort}")
    assert tuple(re.findall(r"(?m)^#   ([\w -]+):", text)) == RUNGS[effort]
    assert ("150 steps of up to 8 classes x 4 images, learning rate 3e-05" in text) == (effort == "hours")
    assert ("larger crops" in text) == (effort != "seconds")
    values = yaml.safe_load(text)
    assert set(values) == {"effort", "seed", "device", "autocast", "data", "model", "storage"}
    assert "embedding_dim" not in values["model"]


def test_what_is_printed_is_a_configuration_of_the_same_run(photos, tmp_path, capsys):
    given = ("--data", photos, "--effort=hours", "--seed=3", "--data.split=images", "--storage.workers=0")
    (tmp_path / "printed.yaml").write_text(printed(capsys, *given))
    again = what_would_run(f"--config={tmp_path / 'printed.yaml'}", "--out", tmp_path / "run")
    assert again == what_would_run(*given, "--device=cpu", "--out", tmp_path / "run")
    assert (again.effort, again.seed, again.storage.workers) == ("hours", 3, 0)
    # also where a file has set what is no option of the ladder
    (tmp_path / "own.yaml").write_text(f"{{effort: seconds, model: {{pooling: max}}, data: {{name: '{photos}'}}}}")
    assert printed_config(capsys, f"--config={tmp_path / 'own.yaml'}")["model"]["pooling"] == "max"


def test_what_a_file_says_of_the_training_and_the_ladder_decides_is_named(run, photos, tmp_path, capsys):
    file = tmp_path / "own.yaml"
    file.write_text(f"{{effort: seconds, epochs: 3, loss: {{name: triplet}}, data: {{name: '{photos}'}}}}")
    with mock.patch("pfml.cli.train._run", return_value={}):
        main(["train", f"--config={file}", f"--out={tmp_path / 'run'}"])
        assert "the ladder decides by itself, whatever --config says: epochs, loss.name\n" in capsys.readouterr().out
        main(["train", f"--config={run / 'config.yaml'}", f"--out={tmp_path / 'run'}"])
        assert "whatever --config says" not in capsys.readouterr().out, "a run's own configuration says no more"


@pytest.mark.usefixtures("_small_pretrained")
@pytest.mark.parametrize("split", ["classes", "images"])
def test_the_page_gets_the_embeddings_of_the_model_that_is_kept(photos, tmp_path, split):
    model, data = EmbedderConfig("efficientnet_lite0"), DataConfig(str(photos), split=split)
    embeds_again = mock.patch("pfml.training.runner.embed_test", side_effect=AssertionError("embedded a second time"))
    with embeds_again:
        done = run_ladder(RunConfig(model=model, data=data, effort="seconds", device="cpu"), tmp_path / "run")
    own = analyze_run(tmp_path / "run", device="cpu").search
    given = analyze_run(tmp_path / "run", device="cpu", embeddings=done.embeddings).search
    torch.testing.assert_close(given.embeddings, own.embeddings)
    assert (given.gallery is None) == (split == "classes")
    if split == "images":
        torch.testing.assert_close(given.gallery, own.gallery)
        right = (own.gallery_labels[own.first] == own.labels).double().mean().item()
        assert done.results["last"]["known"]["accuracy"]["nearest"]["value"] == pytest.approx(right)


def test_the_ladder_opens_its_images_as_storage_says(photos, tmp_path):
    given = ("--effort=seconds", "--storage.storage=files", "--storage.workers=0", "--out", str(tmp_path / "run"))
    stopped = mock.patch("pfml.ladder.run.climb", side_effect=OSError("the disk is full"))
    with stopped as would_climb, pytest.raises(SystemExit, match="the disk is full"):
        main(["train", "--data", str(photos), *given, "--quiet"])
    sources = would_climb.call_args.kwargs["features"].sources
    assert {role: type(source) for role, source in sources.items()} == {"train": FileImages, "test": FileImages}


@pytest.mark.usefixtures("_small_pretrained")
def test_the_bare_command_works_up_the_ladder_unless_an_option_says_how_to_train(photos, capsys):
    assert printed_config(capsys, "--data", photos)["effort"] == "minutes"
    assert printed_config(capsys, "--data", photos, "--data.split=images", "--seed=3")["effort"] == "minutes"
    assert printed_config(capsys, "--data", photos, "--effort=seconds")["effort"] == "seconds"
    assert printed_config(capsys, "--data", photos, "--epochs=3")["effort"] is None
    assert printed_config(capsys, "--data", photos, "--select_by=map_at_r")["effort"] is None  # of epochs
    assert printed_config(capsys, "--data", photos, "--data.validation=none")["effort"] is None
    assert printed_config(capsys, "--data", photos, "--model.backbone=convnet")["effort"] is None
    assert printed_config(capsys, "--data=glyphs", "--loss.name=pfml")["effort"] is None


@pytest.fixture
def two_ranks(monkeypatch):
    """The environment of the first of two processes that torchrun has started, and what it keeps for them."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    kept = HashStore()
    monkeypatch.setattr("pfml.distributed.launch.rendezvous_store", lambda launch: kept)


@pytest.mark.usefixtures("two_ranks")
def test_several_ranks_are_refused_before_anything_is_computed(run, photos, tmp_path, capsys):
    copy, out = shutil.copytree(run, tmp_path / "run"), tmp_path / "out"
    (tmp_path / "more" / "new").mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(tmp_path / "more" / "new" / "0.png")
    files = sorted(tmp_path.rglob("*"))
    for given in (
        ("--data", photos, "--effort=seconds", "--out", out),
        ("--final", copy),
        ("--from", copy, "--data", tmp_path / "more", "--out", out),
        ("--resume", copy),
    ):
        with pytest.raises(SystemExit):
            main(["train", *map(str, given)])
        said = capsys.readouterr().err
        assert "the ladder (effort seconds) runs in one process, got 2 ranks: leave out torchrun" in said
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.usefixtures("two_ranks")
def test_the_bare_command_says_that_several_ranks_train_directly(photos, capsys, monkeypatch):
    monkeypatch.setattr("pfml.cli.train._with_suggestions", lambda config, *_, **__: config)
    main(["train", "--data", str(photos), "--print_config"])
    captured = capsys.readouterr()
    assert "on 2 ranks these images train directly: the ladder (--effort) runs in one process" in captured.err
    assert yaml.safe_load(captured.out)["effort"] is None
    monkeypatch.setenv("RANK", "1")
    main(["train", "--data", str(photos), "--print_config"])
    assert not capsys.readouterr().err  # once is enough


@pytest.mark.usefixtures("_small_pretrained")
def test_one_image_of_each_class_is_refused_before_anything_is_computed_or_trains_unvalidated(tmp_path, capsys):
    for k in range(8):
        (tmp_path / "lone" / f"class {k}").mkdir(parents=True)
        Image.new("RGB", (40, 40), (30 * k, 0, 0)).save(tmp_path / "lone" / f"class {k}" / "0.png")
    given = ("train", "--data", str(tmp_path / "lone"), "--effort=seconds", "--out", str(tmp_path / "run"))
    with pytest.raises(SystemExit, match="it needs a class with two images or more"):
        main([*given])
    assert not (tmp_path / "run").exists()
    assert "nan" not in capsys.readouterr().out
    main([*given, "--data.split=none"])
    said = capsys.readouterr().out
    assert "kept: the pretrained backbone" in said
    assert said.count("nothing says how good it is") == 1


@pytest.mark.usefixtures("_small_pretrained")
def test_a_finished_ladder_is_not_worked_up_again(run, capsys):
    before = (run / "log.jsonl").read_bytes()
    main(["train", f"--resume={run}"])
    assert "is finished: it kept" in capsys.readouterr().out
    assert (run / "log.jsonl").read_bytes() == before


@pytest.mark.usefixtures("_small_pretrained")
def test_an_interrupted_ladder_resumes_to_the_same_model(run, photos, tmp_path):
    out = tmp_path / "run"
    full = mock.patch("pfml.ladder.run.write_untrained", side_effect=OSError("the disk is full"))
    with full, pytest.raises(SystemExit):
        main(["train", "--data", str(photos), "--effort", "seconds", "--out", str(out), "--quiet"])
    assert load_embedder(out) is not None  # usable from the first rung on
    main(["train", f"--resume={out}", "--quiet"])
    whole, again = (RunFolder(each).entries("rung") for each in (run, out))
    assert [rung["settings"] for rung in whole] == [rung["settings"] for rung in again]
    assert [rung["scores"] for rung in whole] == [rung["scores"] for rung in again]


@pytest.mark.usefixtures("_small_pretrained")
def test_the_final_model_is_what_was_kept_fitted_to_all_classes(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    main(["train", f"--final={copy}"])
    said, card = capsys.readouterr().out, (copy / "final" / "model" / "README.md").read_text()
    assert re.search(r"(?m)^│ run +│", said), "the figures of the run, which has no epochs"
    assert "evaluated on nothing" not in said, "that it was evaluated by nothing is said once"
    assert "| rung |" in card
    assert "epoch" not in card.partition("## Configuration")[0]
    final, kept = load_embedder(copy / "final"), load_embedder(copy)
    assert final.config == kept.config
    assert len(final.trained_on.class_names) == 2 * len(kept.trained_on.class_names)
    results = json.loads((copy / "final" / "results.json").read_text())
    assert "test" not in results["last"]
    assert results["protocol"] == "none"


@pytest.mark.parametrize("split", ["images", "none"])
def test_known_classes_work_up_the_ladder_too(photos, tmp_path, request, split):
    if split == "images":
        request.getfixturevalue("_small_pretrained")
    else:  # efficientnet_lite0 itself, on half of the images
        photos = shutil.copytree(photos, tmp_path / "few", ignore=shutil.ignore_patterns("[23].png"))
    out = tmp_path / "run"
    main(["train", "--data", str(photos), "--data.split", split, "--effort=seconds", "--out", str(out), "--quiet"])
    results = json.loads((out / "results.json").read_text())
    assert results["protocol"] == split
    assert ("test" in results["last"]) == ("known" in results["last"]) == (split == "images")
    assert [rung["name"] for rung in results["ladder"]["rungs"]] == ["pretrained", "views", "closed form"]
    assert results["ladder"]["kept"]["name"] in {"pretrained", "views", "closed form"}
    assert (out / "report.html").is_file()


@pytest.mark.usefixtures("_small_pretrained")
@pytest.mark.parametrize(
    ("where", "advice"),
    [
        ("_features", "nothing is stored yet: the same command begins again"),
        ("write_untrained", "resume with: pfml train --resume '{out}'"),
    ],
)
def test_ctrl_c_in_the_ladder_says_how_to_resume(photos, tmp_path, capsys, where, advice):
    out = tmp_path / "a run"
    stop = mock.patch(f"pfml.ladder.run.{where}", side_effect=lambda *_, **__: signal.raise_signal(signal.SIGINT))
    with stop, pytest.raises(SystemExit) as ended:
        main(["train", "--data", str(photos), "--effort", "seconds", "--out", str(out)])
    assert ended.value.code == 130
    assert f"interrupted; {advice.format(out=out)}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("_small_pretrained")
def test_with_too_few_classes_to_validate_the_command_says_what_would_be_enough(photos, tmp_path, capsys):
    for k in range(3):
        shutil.copytree(photos / f"class {k}", tmp_path / "few" / f"class {k}")
    given = ("train", "--data", str(tmp_path / "few"), "--effort=seconds")
    main([*given, "--out", str(tmp_path / "run")])
    enough = "8 classes in all are enough, --data.split images needs 2"
    assert f"validation needs 4 training classes or more, got 1 ({enough}): the backbone" in capsys.readouterr().out
    main([*given, "--data.split=images", "--out", str(tmp_path / "divided")])
    assert "validation needs" not in capsys.readouterr().out


def test_a_folder_that_cannot_train_is_refused_before_a_plan_is_printed(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", "must have at least 2 folders"), ("nowhere", "no such folder or file")):
        with pytest.raises(SystemExit, match=message):
            main(["train", "--data", str(tmp_path / name)])
        assert not capsys.readouterr().out


@pytest.mark.parametrize(("after", "is_chance"), [(0.724, True), (0.6, False), (0.763, False)])
def test_the_last_line_says_whether_the_difference_may_be_chance(after, is_chance):
    kept, base = mock.Mock(candidate="no head"), mock.Mock()
    scores = [
        mock.Mock(
            recall={1: recall}, num_queries=152, as_dict=lambda recall=recall: {"recall_at_1": recall, "map_at_r": 0.3}
        )
        for recall in (0.763, after)
    ]
    found = mock.Mock(rungs=[base, kept], chosen=kept, before=scores[0], after=scores[1])
    said = _conclusion(found, mock.Mock(protocol="classes"))
    assert said.endswith(f"R@1 {after:.1%}, MAP@R 30.0% after") is not is_chance
    assert said.endswith(", though with 152 images the difference of R@1 may be chance") is is_chance
