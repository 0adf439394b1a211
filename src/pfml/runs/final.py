"""The final model of a run: RUN/final, a run of its own on all images of RUN, with nothing held out.

RUN/final/validated.json   the figures of RUN, the evidence for these settings: nothing evaluates the final model

RUN's own model stays what it was, and so do its index and its threshold: an index belongs to one model. Those of the
final model lie in RUN/final, like everything else of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pfml.data.image_set import PROTOCOLS
from pfml.models.embedder import learned_by
from pfml.runs.folder import RunFolder, of_model
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import Format, read_manifest, write_manifest

__all__ = ["Validated", "final_classes", "final_folder", "preferred_folder", "read_validated", "write_validated"]

FILE = "validated.json"
VALIDATED = Format("validated figures", 1, "train the final model again")


@dataclass(frozen=True)
class Validated:
    """What was measured of a run with the settings of a final model.

    Args:
        run: The name of its folder.
        protocol: What the run held out of training, a key of `pfml.data.image_set.PROTOCOLS`.
        epoch: That of its model.
        choice: What chose this epoch: "last" or "validation_selected", as in results.json.
        classes: How many it trained on.
        steps: Of its training, up to that epoch; 0 if it was not trained by gradient descent.
        scores: Its metrics on what was held out.
    """

    run: str
    protocol: str
    epoch: int
    choice: str
    classes: int
    steps: int
    scores: dict[str, float]

    @classmethod
    def of(cls, folder: RunFolder, *, classes: int, steps: int) -> Validated:
        """The figures of a run that has ended."""
        results = folder.read_results()
        entry = of_model(results)
        choice = results.get("model") or ("validation_selected" if results["validation_selected"] else "last")
        name = folder.path.resolve().name
        return cls(
            name, results.get("protocol", "classes"), entry["epoch"], choice, classes, steps, entry.get("test", {})
        )


def final_folder(run: str | Path) -> Path:
    """The folder of the final model of a run."""
    return Path(run) / "final"


def preferred_folder(run: str | Path) -> Path:
    """The folder whose model is for use: RUN/final once that is trained, else RUN itself.

    `pfml.load_embedder(RUN)` and `pfml evaluate RUN` keep the model of RUN, whose figures are known.
    """
    final = RunFolder(final_folder(run))
    is_done = final.results.is_file() and (final.model / "model.json").is_file()
    return final.path if is_done else Path(run)


def final_classes(run: str | Path) -> int | None:
    """How many classes the final model of a run has learned; None if there is none."""
    chosen = preferred_folder(run)
    learned = None if chosen == Path(run) else learned_by(chosen)
    return None if learned is None else len(learned.class_names)


def write_validated(folder: str | Path, validated: Validated) -> None:
    """Write the figures to the folder of a final model."""
    write_manifest(Path(folder) / FILE, asdict(validated), VALIDATED)


def read_validated(folder: str | Path) -> Validated | None:
    """The figures in the folder of a final model; None in that of any other run."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    content: dict[str, Any] = read_manifest(path, VALIDATED)
    try:
        found = Validated(**content)
        known = found.protocol in PROTOCOLS and isinstance(found.scores, dict)
    except TypeError as error:
        raise DamagedFileError(f"{path} must have the figures of a run: {error}") from None
    if not known:
        raise DamagedFileError(f"{path} must have the figures of a run, got the protocol {found.protocol!r}")
    return found
