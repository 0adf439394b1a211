"""Images that requests add: files in a folder of the server, entries of its index, and no file without an entry.

An image of a class lies in FOLDER/CLASS/NAME, so that `pfml index RUN FOLDER` finds what is indexed already. A change
is one commit of the index, under its lock:

1. a journal lists the files that will have no entry if the change is not made, or that have none once it is;
2. new files are written and forced to disk;
3. the index is committed;
4. files of removed entries are deleted, and so is the journal.

After a kill at any moment, the next change or the next start deletes the listed files that have no entry.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from pfml.data.readers.folder import IMAGE_SUFFIXES
from pfml.search import Entry
from pfml.search.listing import plain_path
from pfml.serving.gallery import Gallery, RunFileError
from pfml.serving.images import BadUploadError
from pfml.serving.workers import BusyError
from pfml.storage.file_state import FileState
from pfml.storage.files import create_atomically, remove_partials, sha256_of, write_atomically
from pfml.storage.values import Value

__all__ = ["AddedImage", "AddedImages", "NewImage", "class_folder", "file_name"]

#: Characters of a class, as in `pfml.search.index`, and bytes of a name, below what file systems take.
LONGEST_CLASS = 200
LONGEST_NAME = 150
#: First bytes of a file -> the end of its name; WebP has its mark further on.
SUFFIXES = {
    b"\xff\xd8": ".jpg",
    b"\x89PNG": ".png",
    b"GIF8": ".gif",
    b"BM": ".bmp",
    b"RIFF": ".webp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class NewImage:
    """An image to add.

    Args:
        name: Of its file, by `file_name`.
        class_name: As the index calls it; "" if the class is unknown.
        content: The file.
        vector: (D,) its embedding.
        metadata: Column -> value; of an image that is there already it replaces what is known, unless it is empty.
    """

    name: str
    class_name: str
    content: bytes
    vector: Tensor
    metadata: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class AddedImage:
    """An entry, and whether it is new."""

    entry: Entry
    is_new: bool


class AddedImages:
    """The images that were added by requests.

    Args:
        folder: Where their files lie; made if it does not exist. It belongs to the server.
        gallery: The index.
    """

    def __init__(self, folder: Path, gallery: Gallery) -> None:
        self.folder = plain_path(folder.expanduser())
        self.gallery = gallery
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self._journals()):
            with suppress(BusyError), gallery.writing(wait=0.0):  # a process that is busy with it will see to it
                self._recover()

    def add(self, images: Sequence[NewImage]) -> list[AddedImage]:
        """Add all images or none; on disk, and seen by all later requests, before this returns.

        The same image of the same name and class is one entry. Another image of a name that is taken gets a part of its
        checksum into its name.

        Raises:
            BusyError: If another process is writing the index for too long.
            BadUploadError: If a name cannot be stored, or the image has another class already.
            RunFileError: If the disk or its rights refuse the files.
        """
        with self.gallery.writing():
            self._recover()
            placed: dict[Path, NewImage] = {}
            paths = []
            for image in images:
                path = self._path(image, placed)
                placed.setdefault(path, image)
                paths.append(path)
            known = {path: self._entry(path, image) for path, image in placed.items()}
            new = {path: image for path, image in placed.items() if known[path] is None}
            if new:
                self._commit(new)
            index = self.gallery.index
            told = {path: image for path, image in placed.items() if path not in new and image.metadata}
            if told:
                index.set_metadata(list(told), [image.metadata for image in told.values()])
            return [AddedImage(_found(index.find(path)), path in new) for path in paths]

    def remove(self, entry: Entry) -> bool:
        """Remove an entry with its file; False if it is none of ours, and nothing was done."""
        path = Path(entry.path)
        if entry.source != str(self.folder) or self.folder not in path.parents:
            return False
        with self.gallery.writing():
            self._recover()
            with self._journal({path: entry.file.sha256}):
                self.gallery.index.remove(paths=[path])
                with self._written(path):
                    path.unlink(missing_ok=True)
        return True

    def _commit(self, new: dict[Path, NewImage]) -> None:
        with self._journal({path: _sha256(image) for path, image in new.items() if not path.exists()}):
            for path, image in new.items():
                with self._written(path):
                    path.parent.mkdir(exist_ok=True)
                    if not path.exists():
                        create_atomically(path, image.content)
            self.gallery.index.add(
                torch.stack([image.vector for image in new.values()]),
                list(new),
                [self._given(image) for image in new.values()],
                model=self.gallery.model,
                sources=[str(self.folder)] * len(new),
                files=[FileState.of(path) for path in new],
                metadata=[image.metadata for image in new.values()],
            )

    def _given(self, image: NewImage) -> str:
        return self.gallery.given_class(image.class_name) if image.class_name else ""

    def _path(self, image: NewImage, placed: dict[Path, NewImage]) -> Path:
        """Where an image is to lie: at its name, or beside another image that has it."""
        folder = class_folder(self.folder, self._given(image))
        self._refuse_other_class(folder, image)
        digest = _sha256(image)
        name = Path(image.name)
        for path in (folder / name, folder / f"{name.stem}-{digest[:12]}{name.suffix}"):
            if path in placed:
                is_ours = placed[path].content == image.content
            else:
                is_ours = not os.path.lexists(path) or (_is_plain(path) and sha256_of(path) == digest)
            if is_ours:
                return path
        raise BadUploadError(409, f"the name {image.name!r} is taken by another image: choose another one")

    def _refuse_other_class(self, folder: Path, image: NewImage) -> None:
        """Refuse an image that was added under the same name to another class."""
        others = (one for one in self.folder.iterdir() if one.is_dir() and one != folder and one.name[0] != ".")
        for path in (self.folder / image.name, *(one / image.name for one in others)):
            entry = self._entry(path, image) if path.parent != folder else None
            if entry is not None:
                raise BadUploadError(
                    409,
                    f"the image {image.name!r} is in the index as image {entry.id} of another class: delete it there "
                    f"first, or move its class by an edit",
                )

    def _entry(self, path: Path, image: NewImage) -> Entry | None:
        """The entry of this very image at a path, None if there is none."""
        entry = self.gallery.index.find(path)
        return entry if entry is not None and entry.file.sha256 == _sha256(image) and path.is_file() else None

    def _journals(self) -> Iterator[Path]:
        return self.folder.glob(".journal-*.json")

    @contextmanager
    def _journal(self, files: dict[Path, str]) -> Iterator[None]:
        """List files that are to go unless they have an entry; after an error in the block they go at once."""
        journal = self.folder / f".journal-{uuid4().hex[:12]}.json"
        listed = [[str(path.relative_to(self.folder)), sha256] for path, sha256 in files.items()]
        with self._written(journal):
            write_atomically(journal, json.dumps(listed).encode())
        try:
            yield
        except Exception:
            with suppress(OSError, RuntimeError, ValueError):  # then the next change or start recovers
                self._recover()
            raise
        journal.unlink(missing_ok=True)

    def _recover(self) -> None:
        """Delete what interrupted changes have left; the caller holds the lock of the index, so none is under way."""
        remove_partials(self.folder, ".journal-*.json")
        for journal in self._journals():
            try:
                listed = [(self.folder / path, sha256) for path, sha256 in json.loads(journal.read_bytes())]
            except (OSError, ValueError, TypeError):
                log.warning("%s cannot be read: remove it when you have looked at it", journal)
                continue
            self.gallery.index.refresh(model=self.gallery.model)
            for path, sha256 in listed:
                remove_partials(path.parent, path.name)
                # the file of somebody else, who took the name since, stays
                if self.gallery.index.find(path) is None and _is_plain(path) and sha256_of(path) == sha256:
                    path.unlink()
                if path.parent != self.folder:
                    with suppress(OSError):  # it is not empty
                        path.parent.rmdir()
            journal.unlink()

    @contextmanager
    def _written(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFileError(path, "write", error, "the folder of added images") from error


def class_folder(folder: Path, class_name: str) -> Path:
    """The folder of a class in `folder`, which is `folder` itself for images of unknown class.

    Raises:
        BadUploadError: If no folder can have this name, or a link of this name leads elsewhere.
    """
    if not class_name:
        return folder
    is_name = class_name.isprintable() and class_name == class_name.strip() and not class_name.startswith(".")
    if not is_name or len(class_name) > LONGEST_CLASS or len(class_name.encode()) > 255 or {*class_name} & {*"/\\"}:
        raise BadUploadError(
            422,
            f"the class of an added image names a folder: at most {LONGEST_CLASS} printable characters without / and "
            f"\\, no dot in front and no spaces around them, got {class_name!r}",
        )
    found = folder / class_name
    if found.is_symlink() or (found.exists() and not found.is_dir()):
        raise BadUploadError(409, f"the folder of the class {class_name!r} must be a plain folder, and is none")
    return found


def file_name(given: str | None, content: bytes) -> str:
    """The name under which an upload is stored: that of its file without folders, with the suffix of its format."""
    name = unicodedata.normalize("NFC", (given or "").replace("\\", "/").rpartition("/")[2])
    name = "".join(one if one.isprintable() else "_" for one in name).strip(" .")
    suffix = next((end for start, end in SUFFIXES.items() if content.startswith(start)), ".img")
    stem, dot, end = name.rpartition(".")
    if dot and f".{end.lower()}" in IMAGE_SUFFIXES:
        name, suffix = stem, f".{end}"
    name = name.encode()[:LONGEST_NAME].decode(errors="ignore").strip(" .")
    return f"{name or 'image'}{suffix}"


def _sha256(image: NewImage) -> str:
    return hashlib.sha256(image.content).hexdigest()


def _is_plain(path: Path) -> bool:
    """Whether a regular file of the folder itself has this name."""
    return path.is_file() and not path.is_symlink()


def _found(entry: Entry | None) -> Entry:
    assert entry is not None
    return entry
