import json
import shutil
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from PIL import Image

from pfml.cli import main
from pfml.data import LabelNoise
from pfml.methods import LossConfig
from pfml.pages.page import Plot
from pfml.pages.run import run_page, write_run_page
from pfml.pages.run_analysis import analyze_run, class_scores, hard_pairs, search_unseen
from pfml.plots.grids import choose_queries
from pfml.plots.theme import png_of_image
from pfml.runs.config import DataConfig, RunConfig
from pfml.training import BatchConfig
from pfml.training.runner import run
from small_data import few_glyphs, small_config, small_embedder


@pytest.fixture(scope="module")
def _few_glyphs():
    """The glyphs are a few glyphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfml.data.datasets.read_glyphs", few_glyphs)
        yield


def trained_run(folder, **changes):
    values = small_config(batch=BatchConfig(size=24, samples_per_class=4), **changes)
    fields = {name: getattr(values, name) for name in values.__dataclass_fields__}
    data = DataConfig("glyphs", validation="fold-3", noise=LabelNoise(rate=0.1))
    run(RunConfig(**fields, data=data, model=small_embedder().config), folder)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, _few_glyphs):
    return trained_run(tmp_path_factory.mktemp("run") / "fields & letters")


@pytest.fixture(scope="module")
def page(finished, coarse_plots):
    """The page that the command has written into the run."""
    with redirect_stdout(StringIO()) as printed:
        main(["report", str(finished), "--device=cpu"])
    assert "report.html: curves" in printed.getvalue()
    return (finished / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def _without_plots(monkeypatch):
    """Plots take most of the time of a page: one pixel in place of each of them."""
    pixel = png_of_image(Image.new("RGB", (2, 2)))
    monkeypatch.setattr("pfml.pages.run.in_themes", lambda plot, alt: Plot(pixel, alt))
    monkeypatch.setattr("pfml.pages.run.project", lambda points, seed: points[:, :2])


def circle(*degrees):
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


#: Class 0 at 0 and 2 degrees and astray at 91; class 1 at 90 and 95; class 2 at 180 and 181.
SEARCH = search_unseen(circle(0, 2, 91, 90, 95, 180, 181), torch.tensor([0, 0, 0, 1, 1, 2, 2]))


def test_classes_are_scored_and_sorted_from_the_worst():
    worst, middle, best = class_scores(SEARCH)
    # of class 1, the image at 90 and that at 95 both find the astray one first
    assert (worst.label, worst.queries, worst.recall_at_1) == (1, 2, 0.0)
    assert (worst.confused_with, worst.confusions) == (0, 2)
    assert (middle.label, middle.recall_at_1, middle.confused_with) == (0, pytest.approx(2 / 3), 1)
    assert (best.label, best.recall_at_1, best.map_at_r, best.confused_with) == (2, 1.0, 1.0, None)


def test_a_hard_pair_counts_the_mistakes_of_both_classes():
    (pair,) = hard_pairs(SEARCH, count=5)
    assert pair.labels == (0, 1)
    assert sorted(pair.queries) == [2, 3, 4]
    assert pair.queries[-1] == 4, "the least similar mistake comes last"
    assert pair.share == pytest.approx(3 / 5)
    assert hard_pairs(SEARCH, count=0) == []


def test_the_best_queries_are_of_different_classes():
    chosen = choose_queries(SEARCH.scores, SEARCH.labels, best=2)
    assert SEARCH.labels[chosen].tolist() == [2, 0]


def test_the_command_writes_a_page_with_every_section_that_stands_alone(page):
    assert page.startswith("<!doctype html>")
    for title in (
        *("Results", "Learning curves", "What a query finds", "Map of unseen classes", "Class by class"),
        *("Hardest pairs of classes", "Training classes and their proxies"),
        *("Label noise", "How it was made"),
    ):
        assert f"<h2>{title}</h2>" in page
    assert "<h2>The field of epoch " in page
    assert "Run fields &amp; letters" in page
    assert "Left out" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_page_has_the_run_s_own_numbers(finished, page):
    results = json.loads((finished / "results.json").read_text())
    assert f"{100 * results['last']['test']['recall_at_1']:.1f}" in page
    assert f"{100 * results['validation_selected']['test']['map_at_r']:.1f}" in page
    recall = results["validation_selected"]["test"]["recall_at_1"]
    assert f"{recall:.1%} of {len(few_glyphs().test)} images" in page, "the lead is what the chosen model gives again"
    assert "were made wrong on purpose" in page
    assert "proxies_per_class: 2" in page


@pytest.mark.usefixtures("_without_plots")
def test_without_the_loss_its_sections_say_why_they_are_missing(finished, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(finished, copy, ignore=shutil.ignore_patterns("loss", "checkpoints", "noise.csv"))
    written = write_run_page(copy, tmp_path / "page.html", device="cpu").read_text()
    assert written.count("Left out: ") == 2
    assert "No training label was changed on purpose" in written


@pytest.mark.usefixtures("_few_glyphs", "_without_plots")
def test_a_loss_without_a_field_has_no_diagnostics(tmp_path):
    folder = trained_run(tmp_path / "run", epochs=1, loss=LossConfig("triplet"))
    page = run_page(analyze_run(folder, device="cpu"))
    assert "triplet has no proxies" in page
    assert "triplet is not a potential field" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}"], "must be a folder with config.yaml in it"),
        (["{tmp}/file"], "got the file"),
        (["{tmp}/nowhere"], "must be a folder with config.yaml in it"),
        (["{run}", "--format=md"], "--format belongs to the tables"),
        (["{run}", "--store={tmp}/file"], "--store belongs to the tables"),
    ],
)
def test_anything_else_is_refused_in_a_sentence(finished, tmp_path, arguments, words):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as error:
        main(["report", *(text.format(tmp=tmp_path, run=finished) for text in arguments)])
    assert words in str(error.value.code)


def test_a_run_that_has_not_ended_is_told_how_to_go_on(finished, tmp_path):
    shutil.copy(finished / "config.yaml", tmp_path)
    with pytest.raises(FileNotFoundError, match="pfml train --resume"):
        analyze_run(tmp_path)


def test_without_a_run_the_tables_of_the_paper_are_printed(capsys):
    main(["report", "--experiment=noise", "--format=md"])
    assert "|" in capsys.readouterr().out
