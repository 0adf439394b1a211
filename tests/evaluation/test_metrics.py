"""The table of metrics: one row is enough for a metric to be computed, printed, and shown in tables and cards."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from pfml.cli.console import print_scores
from pfml.evaluation import METRICS, Metric, retrieval_metrics
from pfml.evaluation.metrics import HEADLINE, find_metric, meanings, metric_label, metric_text, shown_metrics, summary


def reciprocal_rank(ranked):
    """Mean of one over the rank of the first match."""
    return (1 / ranked.scores.first_rank.double()).mean().item()


@pytest.fixture
def _with_a_new_metric(monkeypatch):
    monkeypatch.setitem(METRICS, "mrr", Metric("mrr", "MRR", "MRR: mean reciprocal rank", reciprocal_rank))


def embedded():
    points = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.8, 0.2]])
    return points, torch.tensor([0, 0, 1, 1])


@pytest.mark.usefixtures("_with_a_new_metric")
def test_a_new_row_is_computed_and_printed():
    # images 0 and 1 find each other first, 2 finds 3 first, and 3 finds 1 and 0 before 2
    scores = retrieval_metrics(*embedded()).as_dict()
    assert scores["mrr"] == pytest.approx((1 + 1 + 1 + 1 / 3) / 4)
    screen = StringIO()
    print_scores(Console(file=screen, width=120), "scores", {"a run": scores})
    assert "MRR" in screen.getvalue()
    assert "83.3" in screen.getvalue()
    assert "MRR: mean reciprocal rank" in meanings(shown_metrics(scores))


def test_the_keys_keep_their_order_for_files():
    scores = retrieval_metrics(*embedded(), recall_at=(2, 1), nmi=True).as_dict()
    metrics = ["recall_at_1", "recall_at_2", "precision_at_1", "r_precision", "map_at_r", "nmi"]
    assert list(scores) == [*metrics, "num_queries", "num_without_match"]
    assert "nmi" not in retrieval_metrics(*embedded()).as_dict()


def test_keys_have_labels_and_counts_have_none():
    assert [metric_label(key) for key in ("recall_at_1000", "r_precision", "map_at_r", "nmi", "alignment")] == [
        "R@1000",
        "RP",
        "MAP@R",
        "NMI",
        "W2",
    ]
    assert find_metric("num_queries") is None
    assert find_metric("map_at_8") is None
    with pytest.raises(ValueError, match="a metric must be one of recall_at_{k}, .* got 'num_queries'"):
        metric_label("num_queries")


def test_tables_show_metrics_in_the_order_of_the_rows_and_no_counts():
    keys = ["nmi", "num_queries", "map_at_r", "recall_at_1", "precision_at_1", "recall_at_10"]
    assert shown_metrics(keys) == ["recall_at_1", "recall_at_10", "map_at_r", "nmi"]


def test_shares_are_written_in_percent_and_distances_as_they_are():
    assert metric_text("recall_at_1", 0.6134) == "61.3"
    assert metric_text("alignment", 0.6134) == "0.61"
    assert metric_text("seconds_per_epoch", 12.34) == "12.3"
    assert find_metric("recall_at_4").unit_name == "Percent"


def test_a_summary_has_the_headline_metrics():
    assert summary({"recall_at_1": 0.5, "map_at_r": 0.25, "r_precision": 0.3}) == "R@1 50.0%, MAP@R 25.0%"
    assert all(find_metric(key) is not None for key in HEADLINE)
