import html
import json
import re
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import pytest
import torch

from pfml.cli import main
from pfml.data import LabelNoise
from pfml.evaluation import verification_metrics
from pfml.methods import LossConfig
from pfml.pages import run as run_module
from pfml.pages.run import run_page, write_run_page
from pfml.pages.run_analysis import analyze_run, class_scores, hard_pairs, search_unseen
from pfml.plots.grids import choose_queries
from pfml.plots.theme import LIGHT
from pfml.plots.verification import rate_text
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.folder import RunFolder
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


class Section(HTMLParser):
    """What a section of a page shows: its text, the cells of its tables, attributes of its images."""

    def __init__(self, html):
        super().__init__()
        self.words, self.tables, self.images, self.strong, self.open = [], [], [], [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.open += [] if tag in ("img", "source") else [tag]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag in ("img", "source"):
            self.images += [(name, value) for name, value in attrs if name in ("alt", "src", "srcset")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        if "strong" in self.open:
            self.strong.append(data)


def sections(page, title):
    """The sections of a page with this title."""
    found = re.findall(r"<section>\n(.*?)</section>", page, re.DOTALL)
    return [Section(html) for html in found if html.startswith(f"<h2>{title}</h2>")]


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
        *("Results", "Learning curves", "Verification", "What a query finds", "Map of unseen classes"),
        *("Class by class",),
        *("Hardest pairs of classes", "Training classes and their proxies"),
        *("Label noise", "How it was made"),
    ):
        assert f"<h2>{title}</h2>" in page
    assert "<h2>The field of epoch " in page
    assert "Run fields &amp; letters" in page
    assert "Left out" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<h2>The ladder</h2>" not in page, "this run has trained at once"


def test_the_page_has_the_run_s_own_numbers(finished, page):
    results = json.loads((finished / "results.json").read_text())
    assert f"{100 * results['last']['test']['recall_at_1']:.1f}" in page
    assert f"{100 * results['validation_selected']['test']['map_at_r']:.1f}" in page
    recall = results["validation_selected"]["test"]["recall_at_1"]
    assert f"{recall:.1%} of {len(few_glyphs().test)} images" in page, "the lead is what the chosen model gives again"
    assert "were made wrong on purpose" in page
    assert "proxies_per_class: 2" in page


def test_verification_has_the_rates_of_all_pairs_and_a_plot_in_both_themes(finished, page):
    embedded = analyze_run(finished, device="cpu").search
    pairs = verification_metrics(embedded.embeddings, embedded.labels)
    (section,) = sections(page, "Verification")
    columns, *rows = section.tables[0]
    assert columns == ["", "error in %", "95 % interval", "accepted up to distance"]
    wanted = {"EER": pairs.eer} | {f"FNMR at FMR {rate_text(rate)}": each for rate, each in pairs.fnmr_at.items()}
    assert {row[0]: (row[1], row[2]) for row in rows} == {
        name: (f"{100 * each.value:.2f}", "{:.2f} to {:.2f}".format(*(100 * end for end in each.interval)))
        for name, each in wanted.items()
    }
    assert len(rows) >= 2
    assert rows[1][3] == f"{pairs.threshold_at[0.01]:.3f}"
    assert f"{pairs.genuine:,} pairs of one class and {pairs.impostors:,} pairs of two classes;" in section.text
    assert f"{pairs.eer.value:.1%} of the pairs of test images are misjudged" in section.text
    assert [(name, len(value)) for name, value in section.images if name == "alt"] != []
    assert sum(name in ("src", "srcset") for name, _ in section.images) == 2


@pytest.mark.usefixtures("_without_plots")
def test_verification_of_many_images_is_that_of_a_sample(finished, monkeypatch):
    monkeypatch.setattr("pfml.pages.run.MOST_VERIFIED", 40)
    (section,) = sections(run_page(analyze_run(finished, device="cpu")), "Verification")
    assert re.search(r"all those of (3\d|40) test images chosen at random", section.text)


@pytest.mark.usefixtures("_without_plots")
def test_one_test_class_has_no_pairs_to_verify(finished):
    analysis = analyze_run(finished, device="cpu")
    search = search_unseen(analysis.search.embeddings, torch.zeros_like(analysis.search.labels))
    (section,) = sections(run_page(replace(analysis, search=search)), "Verification")
    assert "Left out: verification needs images of two classes" in section.text
    assert not section.tables


def with_rungs(finished, folder, *rungs):
    """A copy of a run, with these rungs in its log."""
    shutil.copytree(finished, folder, ignore=shutil.ignore_patterns("loss", "checkpoints", "report.html"))
    log = RunFolder(folder)
    for rung in rungs:
        log.append("rung", 0, **rung)
    log.close()
    return folder


def rung(name, candidate, *, is_kept=False, seconds=2.0, **numbers):
    """Metric -> value, gain and error."""
    return {
        "name": name,
        "candidate": candidate,
        "scores": {metric: value for metric, (value, _, _) in numbers.items()},
        "gains": {metric: {"mean": mean, "error": error} for metric, (_, mean, error) in numbers.items()},
        "seconds": seconds,
        "is_kept": is_kept,
        "later": "unknown keys are passed over",
    }


PRETRAINED = rung("pretrained", "no head", seconds=30.0, recall_at_1=(0.5, 0.0, 0.0), map_at_r=(0.3, 0.0, 0.0))
CLOSED = rung("closed form", "whitened", seconds=0.01, recall_at_1=(0.52, 0.02, 0.01), map_at_r=(0.36, 0.06, 0.02))


@pytest.mark.usefixtures("_without_plots")
def test_the_ladder_is_shown_after_the_results_with_a_plot_of_each_metric(finished, tmp_path, monkeypatch):
    folder = with_rungs(finished, tmp_path / "run", PRETRAINED, CLOSED | {"is_kept": True}, rung("fine-tuned", "<all>"))
    without, plots = run_module.in_themes, {}
    monkeypatch.setattr(run_module, "in_themes", lambda plot, alt: plots.update({alt: plot}) or without(plot, alt))
    page = run_page(analyze_run(folder, device="cpu"))
    assert re.findall(r"<h2>(.*?)</h2>", page)[:3] == ["Results", "The ladder", "Learning curves"]
    (section,) = sections(page, "The ladder")
    assert section.tables[0] == [
        ["rung", "candidate", "R@1", "gain", "MAP@R", "gain", "seconds", "kept"],
        ["pretrained", "no head", "50.0", "-", "30.0", "-", "30.0", ""],
        ["closed form", "whitened", "52.0", "+2.0 ± 2.0", "36.0", "+6.0 ± 3.9", "under 0.1", "kept"],
        ["fine-tuned", "<all>", "-", "-", "-", "-", "2.0", ""],
    ]
    assert section.strong == ["52.0", "+2.0 ± 2.0", "36.0", "+6.0 ± 3.9", "under 0.1", "kept"]
    gains = "Against the pretrained backbone: +2.0 R@1 (95 % interval +0.0 to +4.0), +6.0 MAP@R"
    assert f"Kept: closed form (whitened). {gains}" in section.text
    for label, (_, shown) in zip(("R@1", "MAP@R"), (each for each in section.images if each[0] == "alt"), strict=True):
        assert shown == f"Gain of each rung of the ladder in {label}"
        (axes,) = plots[shown](LIGHT).axes
        assert label in axes.get_xlabel()
        assert len(axes.get_yticklabels()) == 3
    (results,) = sections(page, "Results")
    assert results.tables[0][-1][0] == "the model (closed form)"
    assert "The ladder with" in page
    assert "by the run's model (closed form)" in html.unescape(page)


@pytest.mark.usefixtures("_without_plots")
def test_a_ladder_that_kept_its_lowest_rung_says_that_nothing_was_better(finished, tmp_path):
    folder = with_rungs(finished, tmp_path / "run", PRETRAINED | {"is_kept": True}, CLOSED)
    page = run_page(analyze_run(folder, device="cpu"))
    (section,) = sections(page, "The ladder")
    assert "Kept: pretrained (no head). No other rung proved to be better" in section.text
    assert section.tables[0][1][-1] == "kept"
    assert "training has" not in page


@pytest.mark.usefixtures("_without_plots")
def test_a_ladder_that_could_not_validate_has_a_table_without_numbers(finished, tmp_path):
    folder = with_rungs(finished, tmp_path / "run", rung("pretrained", "no head", is_kept=True))
    (section,) = sections(run_page(analyze_run(folder, device="cpu")), "The ladder")
    assert section.tables == [
        [["rung", "candidate", "seconds", "kept"], ["pretrained", "no head", "2.0", "kept"]],
    ]
    assert "too few to validate" in section.text
    assert not section.images


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
        (["{tmp}/nowhere"], "no such folder: "),
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
