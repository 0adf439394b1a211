"""Files that are whole or absent: written under a temporary name, forced to disk, renamed, and checked when read."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import os
import shutil
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

__all__ = [
    "DamagedFileError",
    "SpecialFileError",
    "create_atomically",
    "load_tensors",
    "named_errors",
    "open_regular",
    "read_while_replaced",
    "refuse_non_finite",
    "refuse_zip_bomb",
    "remove_partials",
    "replacing",
    "save_tensors",
    "sha256_of",
    "write_atomically",
    "write_csv",
    "writing",
]


T = TypeVar("T")
#: How often a reader starts again when a writer has replaced what it was about to read.
ATTEMPTS = 100
#: How many times its own size a zip archive may unpack to; weights, vectors and JSON come nowhere near.
MOST_INFLATED = 100
#: Bytes that any archive may unpack to, however small it is.
SMALL_ARCHIVE = 2**24


class DamagedFileError(ValueError):
    """A file is not what was written: cut short, changed, or filled with numbers that are not finite."""


class SpecialFileError(OSError):
    """What is no regular file: a folder, a named pipe, a device; `reason` says which."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.reason = reason


def open_regular(path: Path | str) -> BufferedReader:
    """A regular file, or a link to one, opened for reading; nothing else is opened, waited for or read.

    Raises:
        SpecialFileError: At a folder, a named pipe, a socket or a device.
    """
    _require_regular(path, os.stat(path).st_mode)  # before it is opened: opening a device may do something
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        # it may have become something else meanwhile; what is open now stays what it is
        _require_regular(path, os.fstat(descriptor).st_mode)
        if os.name != "nt":
            os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _require_regular(path: Path | str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise SpecialFileError(path, "is a folder")
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    raise SpecialFileError(path, f"is {kinds.get(stat.S_IFMT(mode), 'no file')} and must be a regular file")


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that a reader, also after a power cut, finds the old file or the new one."""
    path = Path(path)
    temporary = _temporary(path)
    try:
        _write_to_disk(temporary, content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write rows as a table, the first of them its header; names of files that are not UTF-8 keep their bytes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomically(Path(path), text.getvalue().encode(errors="surrogateescape"))


@contextmanager
def replacing(path: Path) -> Iterator[BufferedWriter]:
    """A file to write within the block; at its end it is forced to disk and becomes `path`, as `write_atomically` does.

    For what is too large for memory. A process that is killed meanwhile leaves what `remove_partials` removes.
    """
    temporary = _temporary(path)
    try:
        with writing(path), open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def create_atomically(path: Path, content: bytes) -> None:
    """Write a new file as `write_atomically` does; of several processes that do so at once, one succeeds.

    Raises:
        FileExistsError: If there is such a file; it stays as it is.
    """
    path = Path(path)
    temporary = _temporary(path)
    try:
        _write_to_disk(temporary, content)
        _link_new(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def save_tensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, *, digest: bool = True
) -> str:
    """Write tensors to a safetensors file as `write_atomically` does; the sha256 of the file, "" without `digest`.

    Tensors may be tied, strided or on any device. Tied ones are stored once for each name.
    """
    path = Path(path)
    # a folder, since safetensors has a temporary file of its own beside the one it is told to write
    staging = _temporary(path)
    staging.mkdir()
    written = staging / path.name
    try:
        try:
            save_file(_separate(tensors), written, metadata)
        except SafetensorError as error:  # its way to say that a disk is full
            refused = OSError(f"{path} could not be written: {error}")
            refused.errno = errno.ENOSPC if f"os error {errno.ENOSPC}" in str(error) else None
            raise refused from None
        written.chmod(staging.stat().st_mode & 0o666)  # as any new file; safetensors makes its files private
        with open(written, "r+b") as file:
            os.fsync(file.fileno())
        sha256 = sha256_of(written) if digest else ""
        os.replace(written, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    _sync_folder(path.parent)
    return sha256


def load_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Args:
        path: The file.
        sha256: What the file must hash to; None to accept any whole file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a safetensors file, but there is no such file")
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise DamagedFileError(
            f"{path} must have sha256 {sha256[:12]}..., got {found[:12]}... ({path.stat().st_size:,} bytes): "
            f"the file was damaged or changed after it was written; restore it from a copy"
        )
    try:
        # safetensors opens a file by a name in UTF-8 only
        return load_file(path) if _is_utf8(path) else load(path.read_bytes())
    except SafetensorError as error:
        raise DamagedFileError(
            f"{path} must be a whole safetensors file, got one that cannot be read: {error}"
        ) from None


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_non_finite(tensors: dict[str, Tensor], where: str | Path) -> None:
    """Raise DamagedFileError at the first tensor with NaN or Inf."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise DamagedFileError(
                f"all weights must be finite, "
                f"got {bad:,} NaN or Inf of {tensor.numel():,} numbers in {name!r} of {where}"
            )


def refuse_zip_bomb(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise DamagedFileError if the entries of the archive say that they unpack to far more than its size.

    No reader gives more of an entry than the entry says, so that nothing needs to be unpacked to know.
    """
    size, total = os.stat(path).st_size, sum(entry.file_size for entry in archive.infolist())
    allowed = MOST_INFLATED * size + SMALL_ARCHIVE
    if total > allowed:
        raise DamagedFileError(
            f"{path} must unpack to at most {MOST_INFLATED} times its {size:,} bytes, got {total:,} bytes: "
            f"if you trust it, unpack it and pack it again without compression"
        )


def read_while_replaced(read: Callable[[], T], state: Callable[[], object], path: Path) -> T:
    """What `read` returns, called again as long as it fails and a writer has replaced what it was reading.

    Args:
        read: Reads several files that belong together.
        state: What changes whenever a writer replaces them.
        path: Named if this never ends.
    """
    for _ in range(ATTEMPTS):
        before = state()
        try:
            return read()
        except (OSError, RuntimeError, DamagedFileError):
            # a file that vanishes while it is being read has many errors; torch's own is a RuntimeError
            if state() == before:
                raise
    raise OSError(f"{path} was replaced {ATTEMPTS} times while it was being read: try again later")


@contextmanager
def named_errors(path: Path, what: str, *errors: type[Exception]) -> Iterator[None]:
    """Make the errors of a parser, which does not know what file it reads, DamagedFileErrors that name `path`.

    Args:
        path: The file that is read within the block.
        what: What it must be, in words.
        errors: Which errors; those of text and of CSV tables if none are given.
    """
    caught = errors or (UnicodeDecodeError, csv.Error)
    try:
        yield
    except DamagedFileError:
        raise
    except caught as error:
        said = str(error).split("\n")[0][:200] or type(error).__name__
        raise DamagedFileError(f"{path} must be {what}, got one that cannot be read: {said}") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name `path` in the errors of writing it within the block: a full disk says only that it is full."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} could not be written: {error.strerror or error}") from None


def sha256_of(path: Path) -> str:
    """The SHA-256 of a regular file, as 64 hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_partials(folder: Path, name: str) -> None:
    """Remove what killed writers of files whose names match the pattern `name` have left in `folder`."""
    for left in folder.glob(f".{name}.partial"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """A fresh name in the same folder, since a rename is atomic within one file system only."""
    return path.with_name(f".{path.name}.{uuid4().hex[:12]}.partial")


def _write_to_disk(path: Path, content: bytes) -> None:
    """Write a new file and force it to disk; where the system can, it has no name before it is whole."""
    try:
        descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except (AttributeError, OSError):  # not Linux, or a file system without such files
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
        if not path.exists():
            # the first argument is absolute; naming a folder is what makes Python follow the link in /proc
            os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)


def _link_new(temporary: Path, path: Path) -> None:
    """Give a file its name unless that is taken."""
    if os.name == "nt":
        os.rename(temporary, path)  # which replaces nothing there
        return
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without links, such as that of a memory card, can only claim the name before the content.
        with open(path, "xb") as file:
            file.write(temporary.read_bytes())
            file.flush()
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Force a rename in `folder` to disk."""
    if os.name == "nt":  # Windows cannot open a folder, and journals the rename itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU, contiguous, no two in one storage (safetensors refuses others)."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        separate[name] = plain
    return separate
