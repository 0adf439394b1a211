"""A threshold of given values, as if it had been calibrated."""

from pfml.search import Rate, Threshold
from pfml.search.scores import Scoring
from small_index import MODEL


def made_threshold(
    value=-0.5, *, score="distance", distance=0.5, class_values=None, weights=(), model=MODEL, rate=0.01, **options
):
    """By the plain distance: known up to the distance -value."""
    measured = Rate(1, 100, 0.0, 0.05)
    rates = {"false_accepts": measured, "false_rejects": measured, "wrong_classes": measured}
    scoring = Scoring(score, delta=1e-3, alpha=6.0, spread=0.5, weights=weights)
    content = {**rates, "measured_on": (9, 3), "class_values": class_values or {}, **options}
    return Threshold(scoring, value, distance, rate, model, "made up", **content)
