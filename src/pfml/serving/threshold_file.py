"""The threshold of a run, taken up anew when `pfml calibrate` has written it while the server runs."""

from __future__ import annotations

import logging
from pathlib import Path

from pfml.search import ModelIdentity, Threshold

__all__ = ["ThresholdFile"]

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
