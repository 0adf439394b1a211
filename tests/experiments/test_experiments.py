"""Each experiment end to end through the command line, on a few glyphs, two methods and one epoch."""

import sys

import pytest

from pfml.cli import main
from pfml.data import RetrievalData, draw_glyphs
from pfml.data.glyphs import TRAIN_GLYPHS, UNSEEN_GLYPHS
from pfml.experiments import catalog, tasks
from pfml.experiments.store import ResultsStore
from pfml.plots.maps import project
from pfml.runs.config_files import read_config
from pfml.theory.figures import Window

GRID = Window.grid
METHODS = ["proxy-anchor", "pfml"]
#: Records that each adds, with two methods if it may have them.
COUNTS = {
    "retrieval": 2,
    "small-embedding": 2,
    "noise": 4,
    "alignment": 2,
    "ablation": 5,
    "mlrc": 10,
    "timing": 2,
    "figures": 1,
}


@pytest.fixture(scope="module")
def few_glyphs():
    train, test = draw_glyphs(TRAIN_GLYPHS[:28], copies=1), draw_glyphs(UNSEEN_GLYPHS[:8], copies=1)
    return RetrievalData("glyphs", train, test)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture(autouse=True)
def _thin(monkeypatch, few_glyphs):
    sweeps = {"proxies_per_class": (0, 5), "delta": (0.2,), "alpha": (0.0,), "delta_rep_minus_delta_att": (0.1,)}
    monkeypatch.setattr(catalog, "NOISE_RATES", (0.0, 0.2))
    monkeypatch.setattr(catalog, "TIMED_PROXIES", (5,))
    monkeypatch.setitem(catalog.SWEEPS, "pfml", sweeps)
    monkeypatch.setattr(sys.modules["pfml.runs.data"], "load_data", lambda name, root, **division: few_glyphs)
    monkeypatch.setattr(tasks, "project", lambda points, seed: project(points, "pca", seed=seed))
    monkeypatch.setattr("pfml.theory.figures.DPI", 20)
    monkeypatch.setattr("pfml.theory.figures.Window.grid", lambda self, across: GRID(self, 40))
    tasks.prepared.cache_clear()
    yield
    tasks.prepared.cache_clear()


def experiment(name, out, *options):
    methods = ["pfml"] if name in ("ablation", "figures") else METHODS
    common = ["--datasets", "glyphs", "--methods", *methods, "--epochs", "1", "--seeds", "0", "--out", str(out)]
    main(["experiment", name, *common, *options])


def of(out, name):
    return [one for one in ResultsStore(out / "results.jsonl").records() if one["experiment"] == name]


@pytest.mark.filterwarnings("ignore:alpha=0")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "mlrc" else []) for name in catalog.EXPERIMENTS]
)
def test_an_experiment_runs_from_beginning_to_end(name, out, capsys):
    experiment(name, out)
    found = of(out, name)
    assert len(found) == COUNTS[name]
    assert {one["status"] for one in found} == {"done"}
    assert f"{COUNTS[name]} of {COUNTS[name]} runs are done" in capsys.readouterr().out
    experiment(name, out)
    assert len(of(out, name)) == COUNTS[name]


def test_figures_of_the_field_and_of_each_run_are_written(out):
    experiment("figures", out)
    folder = out / "figures"
    assert {path.name for path in folder.glob("*.png")} == {"field.png", "theory.png", "pipeline.png"}
    for one in of(out, "figures"):
        names = {path.name for path in (folder / one["key"] / "figures").iterdir()}
        assert names == {"retrieval.png", "map.png"}


def test_noise_is_written_beside_the_run(out):
    experiment("noise", out)
    (noisy,) = [one for one in of(out, "noise") if one["settings"] == {"noise": 0.2} and one["method"] == "pfml"]
    folder = out / "noise" / noisy["key"]
    assert len((folder / "noise.csv").read_text().splitlines()) == 1 + round(0.2 * 28 * 16)
    assert read_config(folder / "config.yaml").data.noise.rate == 0.2


def test_a_dry_run_prints_the_plan_and_runs_nothing(tmp_path, capsys):
    experiment("noise", tmp_path / "new", "--dry-run")
    printed = capsys.readouterr().out
    assert "noise: 4 runs, 4 to do, about" in printed
    assert "rough guess" in printed
    assert not (tmp_path / "new").exists()


def test_the_command_alone_lists_the_experiments(capsys):
    main(["experiment"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*catalog.EXPERIMENTS, "theory"))


def test_a_failure_ends_with_status_1(tmp_path, monkeypatch, capsys):
    def fail(run, context):
        raise RuntimeError("no luck")

    monkeypatch.setitem(tasks.TASKS, "train", fail)
    with pytest.raises(SystemExit) as stopped:
        experiment("retrieval", tmp_path)
    assert stopped.value.code == 1
    assert "failed: proxy-anchor on glyphs" in capsys.readouterr().out


def test_a_backbone_can_be_evaluated_as_it_comes(tmp_path):
    main(["experiment", "retrieval", "--datasets=glyphs", "--methods=zero-shot", "--seeds=0", f"--out={tmp_path}"])
    (found,) = of(tmp_path, "retrieval")
    assert found["dim"] == 96
    assert found["results"]["last"]["recall_at_1"] > 0


def test_the_theory_is_an_experiment_too(tmp_path, monkeypatch):
    import pfml.cli.experiments

    asked = []
    monkeypatch.setattr(pfml.cli.experiments, "theory", lambda out, quiet: asked.append(out))
    main(["experiment", "theory", "--out", str(tmp_path)])
    assert asked == [tmp_path / "theory"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["retreival"], "did you mean"),
        (["retrieval", "--root", "cub"], "--root must be NAME=PATH, got 'cub'"),
        (["retrieval", "--seeds", "a"], "--seeds must be numbers such as 0 1, or ranges such as 0-4, got 'a'"),
        (["retrieval", "--jobs", "0", "--datasets", "glyphs"], "jobs must be >= 1, got 0"),
    ],
)
def test_a_mistake_ends_with_a_sentence(options, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        main(["experiment", *options, "--out", str(tmp_path)])
