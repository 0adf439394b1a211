"""Decoded images on disk: a flat file of pixels and a sealed manifest that says which files they are of."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from pfml.data.resampling import PixelBuffer
from pfml.storage.lock import locked_folder
from pfml.storage.manifest import Format, read_manifest, write_manifest

__all__ = ["PixelCache"]

PIXELS = Format("pixel cache", 3, "remove it: it is made again")
#: Bytes that are read, written and hashed at once.
CHUNK = 2**26
#: Seconds in which a process certainly holds a folder that it has made.
YOUNG = 60.0


class PixelCache:
    """The pixels of one list of files, in a subfolder of `folder` named after that list and `short_side`.

    Several processes may store and load it at once: a whole cache gets its name, and loses it, in one step.

    Args:
        folder: May hold the caches of any number of sets.
        paths: The files.
        short_side: See `pfml.data.decoding.shrink`.
    """

    def __init__(self, folder: Path, paths: tuple[Path, ...], short_side: int | None) -> None:
        self.paths = [str(path.absolute()) for path in paths]
        self.short_side = short_side
        name = hashlib.sha256(json.dumps([self.paths, short_side]).encode()).hexdigest()[:16]
        self.folder = Path(folder) / name
        # before any decoding: a file that changes during it will not match the next time
        self._files = [_state(path) for path in self.paths]
        self._manifest = self.folder / "manifest.json"
        self._data = self.folder / "pixels.bin"
        self._found: dict[str, Any] | None = None  # the manifest that `mismatch` found to be right

    def exists(self) -> bool:
        """Whether there is a cache in the folder."""
        return self.folder.exists()

    def mismatch(self) -> str | None:
        """Why the cache cannot be used, or None; compares all but the pixels, which `load` does."""
        try:
            manifest = read_manifest(self._manifest, PIXELS)
        except (OSError, ValueError) as error:
            return f"its manifest cannot be read ({error})"
        expected = self._identity()
        for name, value in expected.items():
            if name != "files" and manifest.get(name) != value:
                return f"it has {name} {manifest.get(name)!r}, now it is {value!r}"
        for path, stored, now in zip(self.paths, manifest["files"], expected["files"], strict=True):
            if stored != now:
                return f"{path} has changed"
        state = _state(str(self._data))
        if state is None or state[0] != manifest["bytes"]:
            return "its pixels are not complete"
        self._found = manifest
        return None

    def sizes(self) -> Tensor:
        """Heights and widths (N, 2)."""
        return torch.tensor(self._checked()["sizes"], dtype=torch.int64).reshape(-1, 2)

    def load(self) -> PixelBuffer | None:
        """The pixels in memory, or None if they are not those that were stored, or have just been replaced."""
        manifest = self._checked()
        try:
            stream = self._data.open("rb")
        except FileNotFoundError:
            return None
        data, digest = torch.empty(manifest["bytes"], dtype=torch.uint8), hashlib.sha256()
        with stream:
            for chunk in data.split(CHUNK):
                view = memoryview(chunk.numpy())
                if stream.readinto(view) != len(view):
                    return None
                digest.update(view)
        if digest.hexdigest() != manifest["sha256"]:
            return None
        sizes = self.sizes()
        lengths = 3 * sizes.prod(1)
        return PixelBuffer(data, lengths.cumsum(0) - lengths, sizes)

    def remove_left_over(self) -> None:
        """Remove what killed processes have left of this cache; what a living one writes stays."""
        for left in self.folder.parent.glob(f".{self.folder.name}.*"):
            # a folder that its process has just renamed is gone
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > YOUNG:  # else its process is about to hold it, and must get it
                    with locked_folder(left) as is_free:  # None on Windows: what a kill leaves stays there
                        if is_free:
                            shutil.rmtree(left, ignore_errors=True)

    def store(self, pixels: PixelBuffer) -> None:
        """Write under a temporary name, and rename when all of it is on disk."""
        self._found = None
        temporary = self._temporary()
        temporary.mkdir(parents=True)
        with locked_folder(temporary):
            self._store(pixels, temporary)

    def _store(self, pixels: PixelBuffer, temporary: Path) -> None:
        try:
            digest = hashlib.sha256()
            with (temporary / self._data.name).open("wb") as stream:
                for chunk in pixels.data.split(CHUNK):
                    view = memoryview(chunk.numpy())
                    digest.update(view)
                    stream.write(view)
                _to_disk(stream)
            manifest = {
                **self._identity(),
                "sizes": pixels.sizes.tolist(),
                "bytes": len(pixels.data),
                "sha256": digest.hexdigest(),
            }
            write_manifest(temporary / self._manifest.name, manifest, PIXELS, indent=None)
            self._put_in_place(temporary)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _put_in_place(self, whole: Path) -> None:
        """Make the folder `whole` the cache. One that is there is moved away: who reads it has all of it or nothing."""
        replaced = self._temporary()
        try:
            with suppress(FileNotFoundError):
                self.folder.rename(replaced)
            whole.rename(self.folder)
        except OSError as error:
            # another process has put its own there in this moment, which will be compared by whoever reads it
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            shutil.rmtree(replaced, ignore_errors=True)

    def _temporary(self) -> Path:
        """A fresh name beside the cache, as `remove_left_over` knows it."""
        return self.folder.with_name(f".{self.folder.name}.{uuid4().hex[:12]}")

    def _checked(self) -> dict[str, Any]:
        """The manifest that `mismatch` found to be right, though another process may have replaced it since."""
        return read_manifest(self._manifest, PIXELS) if self._found is None else self._found

    def _identity(self) -> dict[str, Any]:
        """What must be as it was when the pixels were stored."""
        import PIL

        return {
            "pillow": PIL.__version__,  # decoders of different versions may differ by a gray level
            "short_side": self.short_side,
            "names": self.paths,
            "files": self._files,
        }


def _state(path: str) -> list[int] | None:
    """Length and time of change of a file; None if there is none, which decoding reports."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return [state.st_size, state.st_mtime_ns]


def _to_disk(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
