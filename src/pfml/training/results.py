"""Which epoch to report: the last, the best on test, the one that validation chose."""

from __future__ import annotations

from typing import Any

__all__ = ["summarize"]


def summarize(history: list[dict[str, Any]], *, select_by: str = "recall_at_1") -> dict[str, Any]:
    """The evaluations to report, by name.

    "best_on_test" is the habit of the literature, and an optimistic one: it chooses on the classes that it reports.
    "validation_selected" chose on other classes; it is None without validation.
    """
    if not history:
        raise ValueError("there must be at least one evaluation to report")
    with_validation = [entry for entry in history if "validation" in entry]
    return {
        "last": history[-1],
        "best_on_test": max(history, key=lambda entry: entry["test"][select_by]),
        "validation_selected": (
            max(with_validation, key=lambda entry: entry["validation"][select_by]) if with_validation else None
        ),
        "selected_by": select_by,
    }
