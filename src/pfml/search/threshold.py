"""The threshold of "unknown": a score of the neighborhood, and the smallest value that is accepted.

`pfml.search.calibration` chooses and measures it; `pfml.search.verdict` applies it. An image is known if the score of
its nearest images (`pfml.search.scores`) reaches the value of its most likely class, or the common one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfml.search.edits import Edits
from pfml.search.identity import ModelIdentity
from pfml.search.scores import Scoring
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors

__all__ = ["THRESHOLD", "Rate", "Threshold"]

#: The format of threshold.json. Version 1 had a distance alone.
THRESHOLD = Format("distance threshold", 2, "calibrate again with pfml calibrate")
#: How many times the asked rate of false accepts is missed by, whatever the interval says.
MISSED = 1.5


@dataclass(frozen=True)
class Rate:
    """A share of images, with the interval that holds the true one with 95 % confidence.

    Args:
        count: How many.
        total: Of how many.
        low: Lower end of the interval.
        high: Upper end of it.
    """

    count: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The share, count / total."""
        return self.count / self.total

    def __str__(self) -> str:
        return f"{self.value:.2%} ({self.count:,} of {self.total:,}; 95 %: {self.low:.2%} to {self.high:.2%})"


@dataclass(frozen=True)
class Threshold:
    """An image is unknown if the score of its neighborhood is below `value`, or below that of its most likely class.

    Args:
        scoring: How neighborhoods are scored.
        value: The smallest score that is accepted.
        distance: The largest distance to the nearest image that is accepted where no neighbor has a class.
        false_accept_rate: The asked rate: of images whose class is not in the index, the share that is accepted.
        model: What made the vectors; scores of another model mean something else.
        data: The images that it was found by, in words.
        false_accepts: The measured rate, cross-fitted: no class is measured by a threshold that it had a part in.
        false_rejects: Of images whose class is in the index, the share that is called unknown.
        wrong_classes: Of images whose class is in the index, the share that is accepted with another class.
        measured_on: Number of images and of classes that the rates were measured on.
        class_values: Class -> the value for images that are most likely of it, where enough impostors are.
        compared: Candidate -> share of known images that it accepts at the asked rate.
        scores: Those that `value` was chosen on, "genuine" and "impostor", for plots.
        gallery_size: Images that the measured ones were searched among; None for the measured ones themselves.
        protocol: "classes" if the model has not seen the classes that were measured on; else what was held out of
            training, "images" or "none".
        class_names: The classes that were measured.
        edits: Of the index, those that these names follow.
    """

    scoring: Scoring
    value: float
    distance: float
    false_accept_rate: float
    model: ModelIdentity
    data: str
    false_accepts: Rate
    false_rejects: Rate
    wrong_classes: Rate
    measured_on: tuple[int, int]
    class_values: Mapping[str, float] = field(default_factory=dict)
    compared: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    gallery_size: int | None = None
    protocol: str = "classes"
    class_names: tuple[str, ...] = field(default=(), repr=False)
    edits: Edits = field(default_factory=Edits, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.distance <= 2:
            raise ValueError(f"a distance on the unit sphere must lie in [0, 2], got {self.distance}")
        for value in (self.value, *self.class_values.values()):
            if not math.isfinite(value):
                raise ValueError(f"the smallest accepted score must be a finite number, got {value}")

    @property
    def searched_in(self) -> int:
        """How many images the measured ones were searched among."""
        return self.measured_on[0] if self.gallery_size is None else self.gallery_size

    @property
    def misses_rate(self) -> bool:
        """Whether the measured rate of false accepts is not the asked one."""
        rate, asked = self.false_accepts, self.false_accept_rate
        return not rate.low <= asked <= rate.high or rate.value > MISSED * asked

    def is_known(self, score: float, class_name: str | None) -> bool:
        """Whether a query is known.

        Args:
            score: Of its neighborhood, by `scoring`; NaN is not known. Without a class, minus the distance.
            class_name: Its most likely class; None if no neighbor has a class.
        """
        if class_name is None:
            return -float(score) <= self.distance
        return float(score) >= self.class_values.get(class_name, self.value)

    def following(self, edits: Edits) -> Threshold:
        """This threshold for the class names after these edits; a merged class has the largest value of its parts.

        So an image is accepted as the merged class only if it would be as each of the classes before.
        """
        parts: dict[str, list[str]] = {}
        for name, now in self._names(edits).items():
            if now is not None:
                parts.setdefault(now, []).append(name)
        values = {
            now: max(self.class_values.get(name, self.value) for name in names)
            for now, names in parts.items()
            if any(name in self.class_values for name in names)
        }
        return replace(self, class_values=values, class_names=tuple(parts), edits=edits)

    def measures(self, edits: Edits) -> bool:
        """Whether the rates are of the classes of an index that has these edits: merged ones have other scores."""
        names = [now for now in self._names(edits).values() if now is not None]
        is_merged = len(set(names)) < len(names)
        if not self.class_names:  # a file that does not tell what was measured
            is_merged = any(edit.kind == "merge" for edit in edits.steps)
        return not is_merged and {*self.edits.steps} <= {*edits.steps}

    def _names(self, edits: Edits) -> dict[str, str | None]:
        """Measured class -> its name in an index that has these edits."""
        later = Edits(tuple(edit for edit in edits.steps if edit not in self.edits.steps))
        return later.names(self.class_names or self.class_values)

    def save(self, folder: str | Path) -> Path:
        """Write threshold.json to `folder`, whole or not at all, replacing one there; the file.

        The scores lie beside it, in a file that it names with its checksum.
        """
        content = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in _fields(self).items()
            if name != "scores"
        }
        tensors = {name: values.contiguous() for name, values in self.scores.items()}
        # an empty set of tensors is nothing that a checksum could speak for
        write_sealed_tensors(Path(folder), "threshold", tensors or {"none": torch.zeros(1)}, content, THRESHOLD)
        return Path(folder) / "threshold.json"

    @classmethod
    def load(cls, folder: str | Path) -> Threshold | None:
        """The threshold in `folder`, None if there is none; a damaged one is refused."""
        path = Path(folder) / "threshold.json"
        if not path.is_file():
            return None
        content, tensors = read_sealed_tensors(Path(folder), "threshold", THRESHOLD)
        try:
            return cls(
                _scoring(content["scoring"]),
                float(content["value"]),
                float(content["distance"]),
                float(content["false_accept_rate"]),
                ModelIdentity(**content["model"]),
                str(content["data"]),
                false_accepts=Rate(**content["false_accepts"]),
                false_rejects=Rate(**content["false_rejects"]),
                wrong_classes=Rate(**content["wrong_classes"]),
                measured_on=_pair(content["measured_on"]),
                class_values={str(name): float(value) for name, value in content["class_values"].items()},
                compared={str(name): float(value) for name, value in content["compared"].items()},
                gallery_size=None if content["gallery_size"] is None else int(content["gallery_size"]),
                protocol=str(content["protocol"]),
                class_names=tuple(map(str, content.get("class_names", ()))),  # not in earlier files
                edits=Edits.read(content.get("edits", ())),
                # what is loaded is mapped: it would follow the file
                scores={name: values.clone() for name, values in tensors.items() if name != "none"},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{path} must describe a threshold, got {error!r}") from None


def _fields(threshold: Threshold) -> dict[str, Any]:
    """The fields, with their dataclasses as dicts."""
    plain = {name: getattr(threshold, name) for name in Threshold.__dataclass_fields__}
    dataclasses = ("scoring", "model", "false_accepts", "false_rejects", "wrong_classes")
    return {**plain, **{name: asdict(plain[name]) for name in dataclasses}, "edits": threshold.edits.content()}


def _scoring(content: dict[str, Any]) -> Scoring:
    weights = tuple(float(weight) for weight in content["weights"])
    numbers = {name: float(content[name]) for name in ("delta", "alpha", "spread")}
    return Scoring(str(content["name"]), **numbers, weights=weights)


def _pair(values: list[int]) -> tuple[int, int]:
    images, classes = values
    return int(images), int(classes)
