"""Which epoch to report: the last, the best on test, the one that validation chose."""

from __future__ import annotations

from typing import Any

__all__ = ["of_model", "summarize"]


def summarize(history: list[dict[str, Any]], *, select_by: str = "recall_at_1") -> dict[str, Any]:
    """The evaluations to report, by name.

    "best_on_test" is the habit of the literature, and an optimistic one: it chooses on the classes that it reports.
    "validation_selected" chose on other classes; it is None without validation. "model" is the name of that one whose
    weights the run's model has: "validation_selected" where there is validation, else "last".
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
        "model": "validation_selected" if with_validation else "last",
    }


def of_model(results: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of the run's model: that of the epoch that validation chose, else of the last."""
    entry: dict[str, Any] = results[
        results.get("model") or ("validation_selected" if results["validation_selected"] else "last")
    ]
    return entry
