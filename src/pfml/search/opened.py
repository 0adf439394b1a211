"""A run opened for search: its embedder, its index and its threshold, all of one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pfml.models.embedder import Embedder, load_embedder
from pfml.runs.final import final_folder, read_validated
from pfml.runs.folder import RunFolder
from pfml.search.identity import ModelIdentity
from pfml.search.index import ImageIndex
from pfml.search.threshold import Threshold
from pfml.terminal import shell_words
from pfml.training.environment import resolve_device

if TYPE_CHECKING:
    from pfml.runs.saved_loss import TrainedField

__all__ = ["OpenedRun", "load_threshold", "open_run"]


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """What searching with a run takes; made by `open_run`.

    Args:
        folder: Of the run.
        embedder: In evaluation mode, on its device.
        model: Its identity, which index and threshold have too.
        index: The images to search among; None if there is no index, and none was required.
        threshold: Below which score an image is unknown, by the names of the index; None before `pfml calibrate`.
        is_measured: Whether its rates are of the classes that the index has now (`Threshold.measures`).
    """

    folder: Path
    embedder: Embedder
    model: ModelIdentity
    index: ImageIndex | None
    threshold: Threshold | None
    is_measured: bool = True

    @property
    def gallery(self) -> ImageIndex:
        """The index; ValueError if there is none."""
        if self.index is None:
            raise ValueError(f"{self.folder} must have an index to be searched, and has none: {_advice(self.folder)}")
        return self.index

    def field(self) -> TrainedField | None:
        """The proxies and the law of their field; None for a model that has no run around it, or an untrained one."""
        from pfml.runs.saved_loss import load_field  # which loads all losses; a search needs none

        run = RunFolder(self.folder)
        has_loss = (run.loss / "loss.json").is_file() or run.checkpoints.is_dir()
        return load_field(self.folder) if has_loss else None


def open_run(
    folder: str | Path,
    *,
    index: str | Path | None = None,
    backend: str = "exact",
    hold_bytes: int = 0,
    device: str = "auto",
    require_index: bool = True,
) -> OpenedRun:
    """The embedder, the index and the threshold of a run, after comparing that one model made them.

    Args:
        folder: Of a run, or of a saved embedder.
        index: Folder of the index; by default `index` in `folder`.
        backend: See `ImageIndex.create`.
        hold_bytes: See `ImageIndex.open`.
        device: Where to embed: "auto", "cpu", "cuda", ...
        require_index: Whether a missing index is an error; else the index is None.

    Raises:
        FileNotFoundError: If there is no index.
        OtherModelError: If index or threshold belong to another model.
    """
    folder = Path(folder)
    index_folder = folder / "index" if index is None else Path(index)
    if not (index_folder / "index.json").is_file():
        if require_index:
            raise FileNotFoundError(f"{index_folder} must hold an index, but there is none: {_advice(folder)}")
        found = None
    else:
        found = ImageIndex.open(index_folder, backend=backend, hold_bytes=hold_bytes)
    embedder = load_embedder(folder).to(resolve_device(device))
    model = ModelIdentity.of(embedder)
    if found is not None:
        found.model.require(model, f"the index {index_folder}")
    threshold = load_threshold(folder, model)
    if threshold is None or found is None:
        return OpenedRun(folder, embedder, model, found, threshold)
    measured = threshold.measures(found.edits)
    return OpenedRun(folder, embedder, model, found, threshold.following(found.edits), measured)


def load_threshold(folder: Path, model: ModelIdentity) -> Threshold | None:
    """The threshold of a run, None if there is none; OtherModelError if its scores are those of another model."""
    threshold = Threshold.load(folder)
    if threshold is not None:
        threshold.model.require(model, f"the threshold {folder / 'threshold.json'}")
    return threshold


def _advice(folder: Path) -> str:
    earlier = folder.parent / "index"
    belongs = (
        f" ({earlier} belongs to the model before the final one)" if _is_of_final(folder) and earlier.is_dir() else ""
    )
    return f"make one with pfml index {shell_words(str(folder))} FOLDER{belongs}"


def _is_of_final(folder: Path) -> bool:
    return final_folder(folder.parent) == folder and read_validated(folder) is not None
