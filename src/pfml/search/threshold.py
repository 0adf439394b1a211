"""The distance from which an image is unknown, what it was found by, and how often it errs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pfml.search.identity import ModelIdentity
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors

__all__ = ["THRESHOLD", "Rate", "Threshold"]

#: The format of threshold.json.
THRESHOLD = Format("distance threshold", 1, "calibrate again with pfml calibrate")


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
        return self.count / self.total

    def __str__(self) -> str:
        return f"{self.value:.2%} ({self.count:,} of {self.total:,}; 95 %: {self.low:.2%} to {self.high:.2%})"


@dataclass(frozen=True)
class Threshold:
    """An image is unknown if its nearest neighbor is farther than `distance`.

    Args:
        distance: The largest one at which the asked rate was kept on the classes that chose it.
        false_accept_rate: The asked rate: of images whose class is not in the index, the share that is accepted.
        model: What made the vectors; distances of another model mean something else.
        data: The images that it was found by, in words.
        false_accepts: The rate on classes that had no part in the choice.
        false_rejects: On these, of images whose class is in the index, the share that is called unknown.
        wrong_classes: On these, of images whose class is in the index, the share whose nearest neighbor is accepted
            and of another class.
        chosen_on: Number of images and of classes that chose the distance.
        measured_on: Number of images and of classes that the rates were measured on, also the gallery's size there.
        distances: Those that the rates were measured on, "genuine" and "impostor", for plots.
    """

    distance: float
    false_accept_rate: float
    model: ModelIdentity
    data: str
    false_accepts: Rate
    false_rejects: Rate
    wrong_classes: Rate
    chosen_on: tuple[int, int]
    measured_on: tuple[int, int]
    distances: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.distance <= 2:
            raise ValueError(f"a distance on the unit sphere must lie in [0, 2], got {self.distance}")

    def is_unknown(self, distance: float) -> bool:
        """Whether an image with its nearest neighbor at this distance is unknown; at a distance of NaN it is."""
        return not float(distance) <= self.distance

    def save(self, folder: str | Path) -> Path:
        """Write threshold.json to `folder`, whole or not at all, replacing one there; the file.

        The distances lie beside it, in a file that it names with its checksum.
        """
        content = {name: value for name, value in asdict(self).items() if name != "distances"}
        tensors = {name: values.contiguous() for name, values in self.distances.items()}
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
                float(content["distance"]),
                float(content["false_accept_rate"]),
                ModelIdentity(**content["model"]),
                str(content["data"]),
                false_accepts=Rate(**content["false_accepts"]),
                false_rejects=Rate(**content["false_rejects"]),
                wrong_classes=Rate(**content["wrong_classes"]),
                chosen_on=_pair(content["chosen_on"]),
                measured_on=_pair(content["measured_on"]),
                # what is loaded is mapped: it would follow the file
                distances={name: values.clone() for name, values in tensors.items() if name != "none"},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{path} must describe a threshold, got {error!r}") from None


def _pair(values: list[int]) -> tuple[int, int]:
    images, classes = values
    return int(images), int(classes)
