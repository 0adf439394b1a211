"""What is served: the model of a run, its index, its threshold, and the charges of its field."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pfml.field import DecayLaw, PowerLaw
from pfml.models import Embedder, load_embedder
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import TrainedField, load_field
from pfml.search import Entry, Hit, ImageIndex, ModelIdentity, Threshold
from pfml.terminal import readable
from pfml.training.environment import resolve_device

__all__ = ["Contents", "Gallery", "ThresholdFile", "shown_name"]

log = logging.getLogger(__name__)


class ThresholdFile:
    """RUN/threshold.json: refused if it is wrong when the server starts, held to its last good state thereafter.

    Args:
        run: Folder of the run.
        model: What serves; the distances must be its own.
    """

    def __init__(self, run: Path, model: ModelIdentity) -> None:
        self.run = run
        self.path = run / "threshold.json"
        self.model = model
        self._version = self._found()
        self._refused: tuple[int, int, int] | None = None
        self.threshold = self._read()

    def refresh(self) -> None:
        """Read the file again if it is another one than before; one that cannot be read changes nothing.

        Such a file may be half of what is being copied into its place, so that it is tried again at the next look.
        """
        version = self._found()
        if version == self._version:
            return
        try:
            self.threshold = self._read()
        except (OSError, RuntimeError, ValueError) as error:
            if version != self._refused:
                log.warning("the threshold stays as it was: %s", error)
            self._refused = version
            return
        # of before reading: what has replaced the file meanwhile is another version, and is read at the next look
        self._version = version

    def _found(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> Threshold | None:
        threshold = Threshold.load(self.run)
        if threshold is not None:
            threshold.model.require(self.model, f"the threshold {self.path}")
        return threshold


#: Seconds for which the index is taken to be as it was.
LOOK_EVERY = 1.0
#: Size of an index up to which its vectors are held in memory, 130,000 images of 512 dimensions: damage of the files
#: then leaves the state that was read. A larger index is read in every search, and a changed file is refused.
HOLD_BYTES = 2**28


@dataclass(frozen=True, eq=False)
class Contents:
    """The charges of one state of the index, and of the proxies.

    Args:
        ids: (n,) of the images, ascending.
        points: (n, D) their embeddings.
        labels: (n,) their classes, -1 where the class is unknown.
        class_names: The training classes first, then those that only the index has.
        proxies: (p, D), on the unit sphere.
        proxy_labels: (p,).
    """

    ids: Tensor
    points: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    proxies: Tensor
    proxy_labels: Tensor

    def row(self, image: int) -> int | None:
        """The row of an image by its id, None if it is not there."""
        row = int(torch.searchsorted(self.ids, image)) if len(self.ids) else 0
        return row if row < len(self.ids) and int(self.ids[row]) == image else None


class Gallery:
    """A run with its index, for many readers at a time; index and threshold follow what other processes write."""

    def __init__(self, run: Path, embedder: Embedder, index: ImageIndex, field: TrainedField | None) -> None:
        self.run = run
        self.embedder = embedder
        self.model = ModelIdentity.of(embedder)
        index.model.require(self.model, f"the index {index.path}")
        self.index = index
        self.field = field
        self._threshold_file = ThresholdFile(run, self.model)
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._contents: Contents | None = None
        self._problem: str | None = None
        self._said: str | None = None  # what the log was told last
        self._is_searchable = True

    @classmethod
    def open(cls, run: str | Path, *, index: str | Path | None = None, device: str = "auto") -> Gallery:
        """The gallery of a run.

        Args:
            run: Folder of a run, or of a saved embedder.
            index: Folder of the index; by default `index` in the run.
            device: Where to embed.
        """
        run = Path(run)
        place = run / "index" if index is None else Path(index)
        embedder = load_embedder(run).to(resolve_device(device))
        if not (place / "index.json").is_file():
            raise FileNotFoundError(
                f"{place} must hold an index, but there is none: make one with pfml index {run} FOLDER"
            )
        folder = RunFolder(run)
        trained = (folder.loss / "loss.json").is_file() or folder.checkpoints.is_dir()
        return cls(run, embedder, ImageIndex.open(place, hold_bytes=HOLD_BYTES), load_field(run) if trained else None)

    @property
    def threshold(self) -> Threshold | None:
        """The distance beyond which an image is unknown, as of the last `refresh`; None before `pfml calibrate`."""
        return self._threshold_file.threshold

    @property
    def problem(self) -> str | None:
        """What is wrong with the files of the index as of the last `refresh`, without their paths; None if nothing."""
        return self._problem

    @property
    def is_searchable(self) -> bool:
        """Whether the state that is served can be searched, as of the last `refresh`, whatever is on disk."""
        return self._is_searchable

    @property
    def law(self) -> DecayLaw:
        """The law of the field that is shown: the run's if it decays with the distance, else the paper's."""
        law = PowerLaw() if self.field is None else self.field.law
        return law if law.decays else PowerLaw(delta=law.contact)

    @property
    def trained_classes(self) -> tuple[str, ...]:
        """The classes that the run was trained on, in the order of its labels; empty if it does not say."""
        if self.field is not None:
            return self.field.class_names
        trained_on = self.embedder.trained_on
        return () if trained_on is None else trained_on.class_names

    def refresh(self) -> None:
        """Take up what `pfml index` and `pfml calibrate` have written since; looks once a second at most.

        What cannot be read changes nothing: the state before is served, and `problem` and the log say so.
        """
        if time.monotonic() - self._looked < LOOK_EVERY:
            return
        with self._lock:
            self._refresh_index()
            self._threshold_file.refresh()
            self._looked = time.monotonic()

    def _refresh_index(self) -> None:
        refused: Exception | None = None
        try:
            if self.index.refresh(model=self.model):
                self._contents = None
        except (OSError, RuntimeError, ValueError) as error:
            refused = error
        damaged, unreadable = self.index.damaged_files(), self.index.unreadable_files()
        problem = None
        if unreadable:
            problem = f"{_listed(unreadable)} of the index changed on disk, so that searches are refused"
        elif damaged:
            problem = f"{_listed(damaged)} of the index is damaged or gone; what was read before is served"
        elif refused is not None:
            problem = "index.json is damaged, gone or of another model; what was read before is served"
        if problem is not None:
            problem += f" ({len(self.index):,} images): restore the index, or index again and restart pfml serve"
        self._problem, self._is_searchable = problem, not unreadable
        said = problem if refused is None else f"{problem}: {refused}"
        if said != self._said:
            if problem is None:
                log.warning("the index can be read again: %d images", len(self.index))
            else:
                log.warning("the index stays as it was: %s", said)
        self._said = said

    def contents(self) -> Contents:
        """The charges of the index as it is now."""
        self.refresh()
        with self._lock:
            if self._contents is None:
                self._contents = self._read_contents()
            return self._contents

    def search(self, vector: Tensor, k: int, class_names: list[str], *, without: int | None = None) -> list[Hit]:
        """The k nearest images to a vector (D,), of some classes or of all; `without` an image."""
        self.refresh()
        count = k + (without is not None)
        [hits] = self.index.search(vector[None], count, model=self.model, class_names=class_names or None)
        return [hit for hit in hits if hit.id != without][:k]

    def _read_contents(self) -> Contents:
        entries = list(self.index.entries())
        names = dict.fromkeys(self.trained_classes)
        names.update(dict.fromkeys(sorted({entry.class_name for entry in entries if entry.class_name})))
        number = {name: k for k, name in enumerate(names)}
        proxies, proxy_labels = torch.empty(0, self.index.dimension), torch.empty(0, dtype=torch.int64)
        if self.field is not None and self.field.proxies.numel():
            proxies = torch.nn.functional.normalize(self.field.proxies.flatten(0, 1))
            proxy_labels = self.field.proxy_labels
        return Contents(
            torch.tensor([entry.id for entry in entries], dtype=torch.int64),
            self.index.vectors([entry.id for entry in entries]),
            torch.tensor([number.get(entry.class_name, -1) for entry in entries], dtype=torch.int64),
            tuple(names),
            proxies,
            proxy_labels,
        )


def _listed(names: list[str]) -> str:
    """The first of some names, and how many there are besides."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files"


def shown_name(entry: Entry | Hit) -> str:
    """The name of an image without the folder that was indexed, whatever bytes it has: paths stay on this machine."""
    path, source = Path(entry.path), getattr(entry, "source", "")
    around = Path(source) if not source.endswith(".csv") else Path(source).parent
    short = path.relative_to(around) if source and around in path.parents else Path(*path.parts[-2:])
    return readable(str(short))
