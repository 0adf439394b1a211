"""The gallery: the model of a run, its index and threshold, and the charges of its field, kept up to date."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pfml.field import DecayLaw, PowerLaw
from pfml.search import (
    Edit,
    Edits,
    Hit,
    LockedError,
    ModelIdentity,
    OpenedRun,
    Query,
    Threshold,
    open_run,
    search_queries,
)
from pfml.search.opened import load_threshold
from pfml.serving.workers import BusyError

__all__ = ["Contents", "Gallery", "RunFileError", "ThresholdFile"]

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)

log = logging.getLogger(__name__)


class RunFileError(OSError):
    """A file of the run cannot be read or written; `is_full` if the disk is full."""

    def __init__(
        self, path: Path, verb: Literal["read", "write"], error: OSError, where: str = "the folder of the run"
    ) -> None:
        self.is_full = error.errno in FULL
        name = f"{path.parent.name}/{path.name}"
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        advice = "free space on the disk" if self.is_full else f"let the user that runs pfml serve {verb} it"
        outcome = "nothing was saved" if verb == "write" else "the queue cannot be shown"
        may = "may not" if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else "cannot"
        super().__init__(
            f"{outcome}: pfml serve {may} {verb} {name} in {where}, got {reason!r}; {advice}, then try again"
        )


class ThresholdFile:
    """RUN/threshold.json: an error at the start if it is wrong, later kept in its last valid state.

    Args:
        run: Folder of the run.
        model: The model that is served, to which the threshold must belong.
    """

    def __init__(self, run: Path, model: ModelIdentity) -> None:
        self.run = run
        self.path = run / "threshold.json"
        self.model = model
        self._version = self._found()
        self._refused: tuple[int, int, int] | None = None
        self.threshold = self._read()

    def refresh(self) -> None:
        """Read the file again if it has changed; a file that cannot be read changes nothing.

        Such a file may be half copied, so that the next refresh tries again.
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
        # taken before reading: a file that was replaced meanwhile has another version, and is read at the next refresh
        self._version = version

    def _found(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> Threshold | None:
        return load_threshold(self.run, self.model)


#: Seconds between two checks of the files.
REFRESH_INTERVAL = 1.0
#: Seconds that a request waits for files to be loaded; then it is answered by the state before.
REFRESH_PATIENCE = 1.0
#: Size of an index up to which its vectors are held in memory, 130,000 images of 512 dimensions: the server then
#: survives damage of the files. A larger index is read in every search, and a changed file is refused.
HOLD_BYTES = 2**28
#: Seconds that a change waits for another writer, and between two attempts.
WRITE_PATIENCE = 10.0
WRITE_POLL = 0.02
WRITING = "another process is writing the index: try again when it has ended"


@dataclass(frozen=True, eq=False)
class Contents:
    """The charges of the field: the images in one state of the index, and the proxies.

    Args:
        ids: (n,) ids of the images, ascending.
        vectors: Reads the embeddings of the images at some of these positions, (m,) int64 -> (m, D).
        labels: (n,) classes of the images, -1 where the class is unknown.
        class_names: The training classes first, then those that only the index has; all as the index calls them.
        proxies: (p, D) unit vectors.
        proxy_labels: (p,) classes of the proxies, -1 for those of deleted classes.
    """

    ids: Tensor
    vectors: Callable[[Tensor], Tensor]
    labels: Tensor
    class_names: tuple[str, ...]
    proxies: Tensor
    proxy_labels: Tensor

    @cached_property
    def points(self) -> Tensor:
        """(n, D) embeddings of the images, read at the first use: of a million images they are gigabytes."""
        return self.vectors(torch.arange(len(self.ids)))

    def row(self, image: int) -> int | None:
        """The row of an image by its id; None if there is none."""
        row = int(torch.searchsorted(self.ids, image)) if len(self.ids) else 0
        return row if row < len(self.ids) and int(self.ids[row]) == image else None


class Gallery:
    """A run with its index, safe for concurrent readers; follows what other processes write.

    Args:
        opened: The run; it must have an index.
    """

    def __init__(self, opened: OpenedRun) -> None:
        self.run = opened.folder
        self.embedder = opened.embedder
        self.model = opened.model
        self.index = opened.gallery
        self.field = opened.field()
        self._threshold_file = ThresholdFile(self.run, self.model)
        self._lock = threading.RLock()
        self._refresher = ThreadPoolExecutor(1, thread_name_prefix="pfml refresh")
        self._starting = threading.Lock()
        self._refreshing: Future[None] | None = None
        self._waited_until = 0.0  # for that one
        self._seen = self._manifest_state()
        self._refreshed_at = time.monotonic()
        self._contents: Contents | None = None
        self._is_stale = True  # whether the index has changed since they were read
        self._followed: tuple[Threshold, Edits, Threshold, bool] | None = None
        self._problem: str | None = None
        self._logged: str | None = None  # the last message of the log
        self._is_searchable = True

    @classmethod
    def open(
        cls,
        run: str | Path,
        *,
        index: str | Path | None = None,
        device: str = "auto",
        backend: str = "auto",
        hold_bytes: int | None = None,
    ) -> Gallery:
        """Open the gallery of a run.

        Args:
            run: Folder of a run, or of a saved embedder.
            index: Folder of the index; by default `index` in the run.
            backend: How to search; see `ImageIndex.create`.
            device: Device of the model.
            hold_bytes: Size of an index up to which its vectors are held in memory; by default `HOLD_BYTES`.
        """
        held = HOLD_BYTES if hold_bytes is None else hold_bytes
        return cls(open_run(run, index=index, backend=backend, hold_bytes=held, device=device))

    @property
    def threshold(self) -> Threshold | None:
        """The score below which an image is unknown, as of the last `refresh`; None before `pfml calibrate`."""
        return self._threshold()[0]

    @property
    def is_measured(self) -> bool:
        """Whether the rates of the threshold are of the classes that the index has now (`Threshold.measures`)."""
        return self._threshold()[1]

    def _threshold(self) -> tuple[Threshold | None, bool]:
        """The threshold by the names of the index, and whether its rates are of these classes."""
        found, edits, known = self._threshold_file.threshold, self.index.edits, self._followed
        if found is None:
            return None, True
        if known is None or known[0] is not found or known[1] is not edits:
            known = found, edits, found.following(edits), found.measures(edits)
            self._followed = known
        return known[2], known[3]

    @property
    def problem(self) -> str | None:
        """What is wrong with the files of the index as of the last `refresh`, without paths; None if nothing is."""
        return self._problem

    @property
    def is_searchable(self) -> bool:
        """Whether the index can be searched, as of the last `refresh`."""
        return self._is_searchable

    @property
    def law(self) -> DecayLaw:
        """The decay law of the field: that of the run if it decays, else the calibrated one, else that of the paper.

        The paper's is made for trained embeddings: at the distances of a pretrained backbone all images pull alike.
        """
        if self.field is not None and self.field.has_own_law and self.field.law.decays:
            return self.field.law
        if self.threshold is not None:
            return self.threshold.scoring.law
        law = PowerLaw() if self.field is None else self.field.law
        return law if law.decays else PowerLaw(delta=law.contact)

    @property
    def trained_classes(self) -> tuple[str, ...]:
        """The training classes as the index calls them, without deleted ones; empty if the run does not record them."""
        names = self.index.edits.names(self.trained_as).values()
        return tuple(dict.fromkeys(name for name in names if name is not None))

    @property
    def trained_as(self) -> tuple[str, ...]:
        """The training classes as they were called in training, in the order of their labels."""
        if self.field is not None:
            return self.field.class_names
        trained_on = self.embedder.trained_on
        return () if trained_on is None else trained_on.class_names

    @property
    def num_proxies(self) -> int:
        """Proxies of classes that were not deleted."""
        if self.field is None or not self.field.proxies.numel():
            return 0
        now = self.index.edits.names(self.trained_as)
        is_there = torch.tensor([now[name] is not None for name in self.trained_as])
        return int(is_there[self.field.proxy_labels].sum())

    def given_class(self, name: str) -> str:
        """What the run and its sources call a class that the index calls `name`."""
        given = {**self.index.edits.names(self.trained_as), **self.index.given_classes}
        return name if given.get(name) == name else next((one for one, now in given.items() if now == name), name)

    def refresh(self) -> None:
        """Load what `pfml index`, `pfml calibrate` and other processes of the server have written since.

        Files are checked once a second, and at once if the manifest of the index is new. They are loaded in a thread.
        All callers wait for it, until `REFRESH_PATIENCE` after its start: a large index is loaded while searches run.
        Files that cannot be read change nothing: the previous state is served, and `problem` and the log say so.
        """
        if time.monotonic() - self._refreshed_at < REFRESH_INTERVAL and self._manifest_state() == self._seen:
            return
        with self._starting:
            if self._refreshing is None or self._refreshing.done():
                self._refreshing = self._refresher.submit(self._refresh)
                self._waited_until = time.monotonic() + REFRESH_PATIENCE
            refreshing, patience = self._refreshing, self._waited_until - time.monotonic()
        with suppress(TimeoutError):
            refreshing.result(max(patience, 0.0))

    def _refresh(self) -> None:
        with self._lock:
            self._seen = self._manifest_state()
            self._refresh_index()
            self._threshold_file.refresh()
            self._refreshed_at = time.monotonic()

    def _manifest_state(self) -> tuple[int, int, int] | None:
        """By what one tells that the manifest of the index was replaced."""
        try:
            found = os.stat(self.index.path / "index.json")
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _refresh_index(self) -> None:
        refused: Exception | None = None
        try:
            self._is_stale |= self.index.refresh(model=self.model)
        except (OSError, RuntimeError, ValueError) as error:
            refused = error
        damaged, unreadable = self.index.damaged_files(), self.index.unreadable_files()
        problem = None
        if unreadable:
            problem = f"{_listed(unreadable)} of the index changed on disk; searches are refused"
        elif damaged:
            problem = f"{_listed(damaged)} of the index is damaged or missing; the previous state is served"
        elif refused is not None:
            problem = "index.json is damaged, missing or of another model; the previous state is served"
        if problem is not None:
            problem += f" ({len(self.index):,} images): restore the index, or index again and restart pfml serve"
        self._problem, self._is_searchable = problem, not unreadable
        message = problem if refused is None else f"{problem}: {refused}"
        if message != self._logged:
            if problem is None:
                log.warning("the index can be read again: %d images", len(self.index))
            else:
                log.warning("the index stays as it was: %s", message)
        self._logged = message

    def contents(self) -> Contents:
        """The charges of the current state."""
        self.refresh()
        with self._lock:
            if self._contents is None or self._is_stale:
                self._contents = self._read_contents()
                self._is_stale = False
            return self._contents

    def edit(self, edit: Edit) -> Edit:
        """Edit the index; on disk, and seen by all later requests, before this returns.

        Raises:
            BusyError: If another process is writing the index.
            RunFileError: If it cannot be written.
        """
        with self._changing():
            return self.index.edit(edit)

    def undo(self, number: int) -> tuple[Edit, int]:
        """Undo an edit; which it was, and how many of its images do not return (`ImageIndex.missing`)."""
        with self._changing():
            edit = self.index.undo(number)
            return edit, self.index.missing(edit)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Write the index within the block."""
        with self._lock:
            try:
                yield
            except LockedError:
                raise BusyError(WRITING) from None
            except RunFileError:
                raise
            except OSError as error:
                raise RunFileError(self.index.path / "index.json", "write", error) from error
            finally:
                self._is_stale = True

    @contextmanager
    def writing(self, wait: float = WRITE_PATIENCE) -> Iterator[None]:
        """Several changes of the index in a row within the block, while other writers wait, those of this server too.

        Raises:
            BusyError: If another process or thread writes for longer than `wait` seconds.
        """
        until = time.monotonic() + wait
        with ExitStack() as held:
            while True:  # without our own lock, so that searches run meanwhile
                try:
                    held.enter_context(self.index.writing())
                    break
                except LockedError:
                    if time.monotonic() >= until:
                        raise BusyError(WRITING) from None
                    time.sleep(WRITE_POLL)
                except OSError as error:
                    raise RunFileError(self.index.path / "index.json", "write", error) from error
            held.enter_context(self._changing())
            yield

    def search(self, vector: Tensor, k: int, class_names: list[str], *, without: int | None = None) -> list[Hit]:
        """The k images nearest to a vector (D,), in `class_names` or in all classes, except `without`."""
        self.refresh()
        count = k + (without is not None)
        [hits] = self.index.search(vector[None], count, model=self.model, class_names=class_names or None)
        return [hit for hit in hits if hit.id != without][:k]

    def find(self, query: Query, k: int, class_names: list[str] | None = None, where: str = "") -> list[Hit]:
        """The k images nearest to a query, in `class_names` or in all classes, that pass the filter `where`."""
        self.refresh()
        only = class_names or None
        [hits] = search_queries(self.index, [query], k, model=self.model, class_names=only, where=where)
        return hits

    def _read_contents(self) -> Contents:
        ids, classes, vectors = self.index.as_tensors()
        names = dict.fromkeys(self.trained_classes)
        names.update(dict.fromkeys(sorted({classes.texts[k] for k in classes.codes.unique().tolist()} - {""})))
        number = {name: k for k, name in enumerate(names)}
        label_of = torch.tensor([*(number.get(name, -1) for name in classes.texts), -1], dtype=torch.int64)
        proxies, proxy_labels = torch.empty(0, self.index.dimension), torch.empty(0, dtype=torch.int64)
        if self.field is not None and self.field.proxies.numel():
            proxies = torch.nn.functional.normalize(self.field.proxies.flatten(0, 1))
            trained = self.index.edits.names(self.trained_as)
            numbers = [number.get(trained[name] or "", -1) for name in self.trained_as]
            proxy_labels = torch.tensor(numbers, dtype=torch.int64)[self.field.proxy_labels]
        return Contents(
            ids,
            vectors,
            label_of[classes.codes.long()],
            tuple(names),
            proxies,
            proxy_labels,
        )


def _listed(names: list[str]) -> str:
    """The first name, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more files"
