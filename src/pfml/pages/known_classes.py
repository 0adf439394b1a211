"""The section on known classes of a run's page: accuracies, the confusion matrix, the most frequent mistakes."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from pfml.evaluation.classification import classification_metrics, predictor_label
from pfml.pages.page import Table, in_themes, short
from pfml.pages.run_analysis import RunAnalysis
from pfml.plots.confusion import plot_confusion

__all__ = ["known_classes"]

MOST_CLASSES, MOST_MISTAKES = 40, 20
NAME_LENGTH = 26


def known_classes(run: RunAnalysis, proxies: Tensor | None) -> dict[str, Any]:
    """What `known_classes.html` shows of a run with the protocol "images".

    Args:
        run: Its held-out images, searched among images of the same classes.
        proxies: (C, M, D) of the run's loss; None if it has none.
    """
    search, names = run.search, run.data.test.class_names
    assert search.gallery is not None
    assert search.gallery_labels is not None
    found = classification_metrics(
        search.embeddings, search.labels, search.gallery, search.gallery_labels, proxies=proxies
    )
    content = found.as_dict()
    accuracies = tuple(
        (predictor_label(name, content), f"{100 * one.value:.1f}", _in_percent(one.interval))
        for name, one in found.accuracy.items()
    )
    shown = found.most_confused(MOST_CLASSES)
    labels = [short(names[label], NAME_LENGTH) for label in shown]
    mistakes, of_class = found.mistakes, found.of_class
    rows = tuple(
        (short(names[true], 44), short(names[predicted], 44), f"{count:,} of {of_class[true].total:,}")
        for (true, predicted), count in mistakes[:MOST_MISTAKES]
    )
    classes = len({label for pair in found.confusions for label in pair})
    alt = f"Confusion matrix of {len(shown)} classes; {sum(count for _, count in mistakes):,} images are confused"
    return {
        "images": found.num_queries - found.num_without_class,
        "without_class": found.num_without_class,
        "searched_in": "the training images" if run.data.gallery is run.data.train else "the images of the gallery",
        "k": found.k,
        "accuracies": Table(("class by", "accuracy", "95 % interval"), accuracies),
        "matrix": in_themes(partial(plot_confusion, found.matrix(shown), labels), alt),
        "shown": len(shown),
        "classes": classes,
        "mistakes": Table(("class", "taken for", "images"), rows, prose=frozenset({1})),
        "left_out": len(mistakes) - len(rows),
    }


def _in_percent(interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{100 * low:.1f} to {100 * high:.1f}"
