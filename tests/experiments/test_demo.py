import json
import re
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from pfml.data import ImageSet, RetrievalData, draw_glyphs
from pfml.data.glyphs import TRAIN_GLYPHS, UNSEEN_GLYPHS
from pfml.evaluation import evaluate, retrieval_metrics
from pfml.experiments import demo
from pfml.experiments.demo import MARK, run_demo
from pfml.models import load_embedder
from pfml.pages.demo import demo_losses, glyph_of, spelled
from pfml.plots.field_slice import measure_field
from pfml.plots.maps import project
from pfml.runs.config_files import read_config, shipped_config

METHODS = ("proxy-anchor", "pfml", "pfml-log")


def small_data():
    return RetrievalData(
        "a few glyphs", train=draw_glyphs(TRAIN_GLYPHS[:25], copies=1), test=draw_glyphs(UNSEEN_GLYPHS[:8], copies=1)
    )


def run(out, **options):
    """The page, and what was printed."""
    screen = StringIO()
    report = run_demo(out, console=Console(file=screen, width=160), epochs=1, data=small_data(), **options)
    return report, screen.getvalue()


def printed_rows(text):
    """Method -> numbers of the printed table."""
    lines = [re.split(r"\s*│\s*", line)[1:-1] for line in text.splitlines() if line.startswith("│")]
    return {name: numbers for name, *numbers in lines}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, coarse_plots):
    """A demo with small plots, and PCA in place of t-SNE, which takes longer than the training."""
    out = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfml.pages.demo.measure_field", partial(measure_field, cells=20))
        patch.setattr("pfml.pages.demo.project", lambda points, seed: project(points, "pca", seed=seed))
        report, text = run(out)
    return out, report.read_text(encoding="utf-8"), text


def test_the_table_compares_pixels_an_untrained_model_and_three_methods(finished):
    rows = printed_rows(finished[2])
    names = ["raw pixels", "untrained model", "Proxy Anchor", "PFML (paper's text)", "PFML (our preset)"]
    assert list(rows) == names
    assert rows["raw pixels"][-2:] == ["-", "-"]
    assert rows["Proxy Anchor"][-1] == "1.00"


def test_the_page_has_every_number_that_was_printed(finished):
    _, html, text = finished
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', html)
    shown = {name.replace("&#39;", "'"): re.findall(r"<td>(?:<strong>)?([^<]*)", cells) for name, cells in rows}
    assert shown == printed_rows(text)


def test_the_numbers_are_those_of_the_saved_models(finished):
    out, _, text = finished
    rows, data = printed_rows(text), small_data()
    for method, name in zip(METHODS, list(rows)[2:], strict=True):
        metrics = evaluate(load_embedder(out / "runs" / method), data)
        expected = [*metrics.recall.values(), metrics.r_precision, metrics.map_at_r]
        assert rows[name][:6] == [f"{100 * value:.1f}" for value in expected]
        results = json.loads((out / "runs" / method / "results.json").read_text())
        assert rows[name][6] == f"{results['alignment']['paper']:.2f}"


def test_raw_pixels_are_the_gray_images(finished):
    images = small_data().test
    metrics = retrieval_metrics(images.images[:, 0].flatten(1).float(), images.labels)
    assert printed_rows(finished[2])["raw pixels"][:6] == [
        f"{100 * value:.1f}" for value in (*metrics.recall.values(), metrics.r_precision, metrics.map_at_r)
    ]


def test_the_best_numbers_are_emphasized(finished):
    strong = set(re.findall(r"<strong>([\d.]+)</strong>", finished[1]))
    columns = list(zip(*(numbers[:6] for numbers in printed_rows(finished[2]).values()), strict=True))
    assert strong == {max(column, key=float) for column in columns}


def test_the_page_is_complete_and_refers_to_nothing_outside(finished):
    _, html, _ = finished
    headings = re.findall(r"<h2>(.*?)</h2>", html)
    assert headings == [
        "Results",
        "The data",
        "Learning curves",
        "Maps of unseen glyphs",
        "Proxies in the field",
        "What a query finds",
        "How this page was made",
    ]
    assert not re.search(r"https?://|<script|<link|url\(", html)
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src(?:set)?="([^"]*)"', html))
    assert html.count("<figure>") == 1 + 2 + 3 + 4 + 2 + 4
    assert len(html) < 3e6


def test_the_page_says_how_it_was_made(finished):
    out, html, _ = finished
    assert f"pfml demo --out {out} --epochs 1 --seed 0" in html
    assert f"torch {torch.__version__}" in html
    assert "proxies_per_class: 5" in html


def test_the_data_is_described(finished):
    expected = "a few glyphs: 400 images of 25 glyphs to train on, 128 images of 8 other glyphs to search among."
    assert expected in finished[1]
    assert expected in finished[2]


def test_runs_have_the_shipped_configuration_but_for_the_loss(finished):
    shipped = shipped_config("glyphs")
    for method in METHODS:
        config = read_config(finished[0] / "runs" / method / "config.yaml")
        assert config.loss.name == method
        assert replace(config, loss=shipped.loss, epochs=shipped.epochs, log_every=shipped.log_every) == shipped


def test_both_fields_have_the_proxies_of_the_configuration():
    losses = demo_losses(shipped_config("glyphs"))
    expected = shipped_config("glyphs").loss.options["proxies_per_class"]
    assert [losses[method][1].options for method in METHODS] == [{}] + [{"proxies_per_class": expected}] * 2


def test_a_second_demo_gives_the_same_numbers_and_replaces_only_the_first(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "demo_page", lambda results: "<p>short</p>")
    monkeypatch.setattr(demo, "demo_losses", lambda config: {METHODS[0]: demo_losses(config)[METHODS[0]]})
    out = tmp_path / "demo"
    mine, earlier = out / "runs" / "mine", out / "runs" / METHODS[0]
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("keep")
    earlier.mkdir()
    (earlier / MARK).touch()
    (earlier / "config.yaml").write_text("of an earlier demo")
    report, text = run(out)
    assert report == out / "report.html"
    again, first = printed_rows(text), printed_rows(finished[2])
    assert list(again) == list(first)[:3]
    assert all(row[:-1] == first[name][:-1] for name, row in again.items())
    assert (mine / "notes.txt").read_text() == "keep"


def test_the_seed_reaches_the_runs(tmp_path, monkeypatch):
    seen = []

    def stop(embedder, data, config, **options):
        seen.append((config.seed, config.epochs))
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, seed=7)
    assert seen == [(7, 1)]


def test_a_run_that_no_demo_made_is_not_replaced(tmp_path):
    run_of_mine = tmp_path / "runs" / "pfml"
    run_of_mine.mkdir(parents=True)
    (run_of_mine / "config.yaml").write_text("mine")
    with pytest.raises(FileExistsError, match="must be empty or of an earlier demo"):
        run(tmp_path)
    assert (run_of_mine / "config.yaml").read_text() == "mine"
    assert not (tmp_path / "runs" / "proxy-anchor").exists()


def test_files_instead_of_pixels_are_refused(tmp_path):
    data = small_data()
    files = ImageSet((Path("a.png"),) * len(data.test), data.test.labels, data.test.class_names)
    with pytest.raises(TypeError, match="must be pixels, got files"):
        demo._pixels(replace(data, test=files))


def test_glyphs_are_shown_with_their_names():
    assert glyph_of("U+0416 CYRILLIC CAPITAL LETTER ZHE") == "\u0416"
    assert spelled("U+0416 CYRILLIC CAPITAL LETTER ZHE") == "\u0416  cyrillic capital zhe"
    assert glyph_of("sparrow") == "sparrow"
    assert spelled("sparrow") == "sparrow"
