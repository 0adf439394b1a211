"""Approximate search: an inverted file of faiss, derived from the shards of an index, and built again at will.

ivf.json       the sealed manifest: of which shards it was made, with their checksums; how, and with what recall
ivf-*.faiss    the inverted file: the centers of k-means, and the vectors in lists around them
ivf.lock       held by the one process that builds

A search compares the vectors of the lists whose centers are nearest to the query, and scores the best of them again
with the float32 vectors of the shards. So distances are those of exact search, and only a neighbor may be missed. How
many lists that takes is measured when the file is built. Shards that are newer than the file are searched exactly
beside it.

The file is mapped into memory, which all processes share. It never changes once it has its name; where it was
overwritten all the same, `IvfFile.is_unchanged` tells, and the search is exact.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfml.packages import pip_install, require_packages
from pfml.search.backends import BACKENDS, ExactSearcher, Vectors, best_of_both, num_allowed, vectors_at
from pfml.storage.files import DamagedFileError, read_while_replaced, sha256_of
from pfml.storage.manifest import Format, read_manifest
from pfml.storage.shard import ShardEntry

__all__ = [
    "IVF",
    "IVF_FROM",
    "MEASURED_K",
    "PRECISIONS",
    "Choice",
    "IvfFile",
    "IvfSearcher",
    "IvfSettings",
    "candidates_of",
    "choose_backend",
    "is_due",
    "load_faiss",
    "open_ivf",
    "read_ivf_settings",
    "rescored",
]

log = logging.getLogger(__name__)

IVF = Format("approximate search file", 1, "build it again with pfml index --approximate")
#: How the vectors of the file may be stored; "pq4" is product quantization, four bits for two dimensions.
PRECISIONS = ("float32", "float16", "int8", "pq4")
#: Images from which on "auto" is approximate, and `pfml index` builds the file.
IVF_FROM = 100_000
#: Fraction of newer rows from which on the file is due to be built again.
NEWER_FRACTION = 0.05
#: The k that recall is measured at.
MEASURED_K = 10
#: Fraction of allowed rows below which every list is probed: the nearest allowed rows may lie anywhere.
SPARSE = 0.25
#: Fraction of allowed rows below which more lists are probed, WIDER times as many, until that finds nothing new: the
#: allowed rows may lie far from the query, where many lists are equally near. From it on, only for queries around
#: which most rows are not allowed.
SCATTERED = 0.9
WIDER = 4
#: How many times as many candidates a filtered search scores again.
FILTERED = 4


@dataclass(frozen=True)
class IvfSettings:
    """What an inverted file was made of, and how.

    Args:
        shards: Those whose rows it has, in their order.
        precision: One of `PRECISIONS`.
        lists: How many there are.
        probes: How many of them a search compares.
        candidates: How many rows it then scores again, in multiples of k.
        recall: Recall@10 with so many, of rows of the index among all others.
        file: Name of the file.
        sha256: Of the file.
        bytes: Of the file.
    """

    shards: tuple[ShardEntry, ...]
    precision: str
    lists: int
    probes: int
    candidates: int
    recall: float
    file: str
    sha256: str
    bytes: int

    @property
    def rows(self) -> int:
        """How many vectors it has."""
        return sum(shard.entries for shard in self.shards)


class IvfFile:
    """An inverted file that is open: candidates for the nearest rows.

    Args:
        settings: Of the file.
        lists: faiss's index.
        path: Where it is mapped from; None while it is being built.
    """

    def __init__(self, settings: IvfSettings, lists: Any, path: Path | None = None) -> None:
        self.settings = settings
        self._lists = lists
        self._path = path
        self._state = None if path is None else _state(path)

    def is_unchanged(self) -> bool:
        """Whether the file is what was opened, or was replaced as a whole, which changes nothing for who has it."""
        if self._path is None or self._state is None:
            return True
        try:
            found = _state(self._path)
        except FileNotFoundError:
            return True  # a newer one took its place
        return found == self._state

    def candidates(self, queries: Tensor, count: int, *, probes: int, allowed: Tensor | None = None) -> Tensor:
        """(N, count) int64 rows, -1 where there are fewer in the probed lists.

        Args:
            queries: (N, D) float32 of unit length.
            count: How many.
            probes: Lists to compare.
            allowed: (rows,) bool; None for all.
        """
        return candidates_of(self._lists, queries, count, probes, allowed)


def candidates_of(lists: Any, queries: Tensor, count: int, probes: int, allowed: Tensor | None = None) -> Tensor:
    """`IvfFile.candidates` of faiss's index."""
    import numpy

    faiss = load_faiss()
    options = {"nprobe": probes}
    if allowed is not None:
        options["sel"] = faiss.IDSelectorBitmap(numpy.packbits(allowed.numpy(), bitorder="little"))
    # faiss.contrib.torch_utils, which others may import, puts its own `search` in place of this one
    search = getattr(lists, "search_numpy", lists.search)
    asked = queries.contiguous().numpy()
    return torch.from_numpy(search(asked, count, params=faiss.SearchParametersIVF(**options))[1])


class IvfSearcher:
    """The inverted file, candidates scored again, and newer shards beside it; see `pfml.search.backends.Searcher`.

    Args:
        file: Of the first of these shards.
        shards: All of the index.
    """

    def __init__(self, file: IvfFile, shards: Sequence[Vectors]) -> None:
        self.file = file
        self.shards = shards
        self.exact = ExactSearcher(shards)
        self.newer = ExactSearcher(shards[len(file.settings.shards) :])

    def nearest(self, queries: Tensor, k: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """See `Searcher.nearest`."""
        rows = self.file.settings.rows
        if self.exact.is_few(num_allowed(allowed), len(allowed)):
            return self.exact.nearest(queries, k, allowed)
        if not self.file.is_unchanged():
            log.warning("%s was changed while it was in use: the index is searched exactly", self.file.settings.file)
            return self.exact.nearest(queries, k, allowed)
        open_rows = allowed[:rows]
        count = num_allowed(open_rows)
        found = self._approximate(queries, min(k, count), open_rows, count)
        if rows < len(allowed):
            values, newer = self.newer.nearest(queries, k, allowed[rows:])
            found = best_of_both(found, (values, newer + rows), k)
        return found

    def _approximate(self, queries: Tensor, k: int, allowed: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The best of the rows of the file."""
        if k == 0:
            return queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        settings, fraction = self.file.settings, count / len(allowed)
        probes, wanted = _probes(settings, k, fraction), min(settings.candidates * max(k, MEASURED_K), count)
        if fraction < SCATTERED:
            found = self._filtered(queries, k, count, probes, allowed)
            unsettled = torch.arange(len(queries))
        else:
            rows = self.file.candidates(queries, wanted, probes=probes)
            if count < len(allowed):
                rows[~allowed[rows.clamp_min(0)]] = -1
            found = rescored(self.shards, queries, rows, k)
            # a few entries were removed; are those the ones around the query?
            unsettled = ((rows >= 0).sum(dim=1) < max(k, wanted // 2)).nonzero()[:, 0]
        while probes < settings.lists and len(unsettled):
            probes = min(WIDER * probes, settings.lists)
            wider = self._filtered(queries[unsettled], k, count, probes, allowed)
            is_new = (wider[1].sort().values != found[1][unsettled].sort().values).any(dim=1)
            for old, new in zip(found, wider, strict=True):
                old[unsettled] = new
            unsettled = unsettled[is_new | (wider[1] < 0).any(dim=1)]
        return found

    def _filtered(self, queries: Tensor, k: int, count: int, probes: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """The best allowed rows of the probed lists, -1 where there are fewer."""
        wanted = min(FILTERED * self.file.settings.candidates * max(k, MEASURED_K), count)
        rows = self.file.candidates(queries, wanted, probes=probes, allowed=allowed)
        return rescored(self.shards, queries, rows, k)


def rescored(shards: Sequence[Vectors], queries: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Similarities and rows of the best k of the candidates `rows`, by the vectors of the shards."""
    if len(queries) == 1:
        scores = (vectors_at(shards, rows[0].clamp_min(0), mapped=True) @ queries[0])[None]
    else:
        needed, places = rows.clamp_min(0).unique(return_inverse=True)
        vectors = vectors_at(shards, needed, mapped=True)
        scores = torch.stack([vectors[some] @ query for some, query in zip(places, queries, strict=True)])
    values, columns = scores.masked_fill_(rows < 0, -torch.inf).topk(k, dim=1)
    return values, rows.gather(1, columns)


def _probes(settings: IvfSettings, k: int, fraction: float) -> int:
    """Lists to probe for k neighbors where a fraction of the rows is allowed."""
    if fraction < SPARSE:
        return settings.lists
    probes = settings.probes * max(k / MEASURED_K, 1.0) ** 0.5 / fraction
    return min(math.ceil(probes), settings.lists)


def read_ivf_settings(folder: Path) -> IvfSettings | None:
    """What the manifest in the folder of an index says; None if there is none.

    Raises:
        DamagedFileError: If it cannot be read.
    """
    path = folder / "ivf.json"
    try:
        content = read_manifest(path, IVF)
    except FileNotFoundError:
        return None
    try:
        shards = tuple(ShardEntry(**one) for one in content.pop("shards"))
        settings = IvfSettings(shards=shards, **content)
        is_sane = 0 < settings.probes <= settings.lists and settings.candidates > 0
        if settings.precision not in PRECISIONS or not is_sane:
            raise ValueError(f"{settings.precision}, {settings.probes} of {settings.lists} lists")
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} must describe an approximate search file, got {error!r}") from None
    return settings


def open_ivf(folder: Path, shards: Sequence[ShardEntry], known: IvfFile | None = None) -> IvfFile | None:
    """The inverted file in the folder of an index, after comparing its checksum; None if there is none.

    Args:
        folder: Of the index.
        shards: Those of the index; the file must have been made of the first of them.
        known: Taken if it is the same file.

    Raises:
        DamagedFileError: If it is damaged, or was made of other shards.
    """
    path = folder / "ivf.json"
    return read_while_replaced(lambda: _open(folder, shards, known), lambda: _text(path), path)


def _open(folder: Path, shards: Sequence[ShardEntry], known: IvfFile | None) -> IvfFile | None:
    settings = read_ivf_settings(folder)
    if settings is None:
        return None
    path = folder / Path(settings.file).name
    if tuple(shards[: len(settings.shards)]) != settings.shards:
        raise DamagedFileError(
            f"{path} was made of another index, or of this one before it was compacted: build it again with pfml index"
        )
    if known is not None and known.settings == settings and known.is_unchanged():
        return known
    if not path.is_file() or path.stat().st_size != settings.bytes or sha256_of(path) != settings.sha256:
        raise DamagedFileError(f"{path} is not what was written: it was damaged or removed; build it with pfml index")
    faiss = load_faiss()
    # Windows cannot map it
    flags = faiss.IO_FLAG_MMAP if os.name != "nt" else faiss.IO_FLAG_READ_ONLY
    return IvfFile(settings, faiss.read_index(str(path), flags), path)


@dataclass(frozen=True, eq=False)
class Choice:
    """How an index is searched.

    Args:
        backend: A key of `BACKENDS`, or "ivf".
        remark: What a user should know of it, in a sentence; "" for nothing.
        file: Of "ivf".
        manifest: What ivf.json held, by which a newer one is noticed.
    """

    backend: str
    remark: str = ""
    file: IvfFile | None = None
    manifest: bytes | None = None

    def is_outdated(self, folder: Path) -> bool:
        """Whether the approximate search file of the folder has changed since."""
        return self.backend != "faiss" and self.manifest != _text(folder / "ivf.json")


def choose_backend(
    asked: str, folder: Path, shards: Sequence[ShardEntry], entries: int, before: Choice | None = None
) -> Choice:
    """What `asked`, a backend or "auto", means for an index.

    Args:
        asked: "ivf" is exact search as long as there is no file for it.
        folder: Of the index.
        shards: Those of the index.
        entries: Images that count.
        before: Its file is taken if it is the same.
    """
    manifest = _text(folder / "ivf.json")
    if asked in BACKENDS or (asked == "auto" and entries < IVF_FROM):
        return Choice("exact" if asked == "auto" else asked, manifest=manifest)
    meanwhile = f"exact search of {entries:,} images"
    if find_spec("faiss") is None:
        return Choice("exact", f"{meanwhile}; for approximate search, {pip_install('faiss')}", None, manifest)
    try:
        file = open_ivf(folder, shards, None if before is None else before.file)
    except DamagedFileError as error:
        return Choice("exact", f"{meanwhile}, since {error}", None, manifest)
    if file is None:
        advice = "pfml index --approximate pq4 builds what approximate search needs"
        return Choice("exact", f"{meanwhile}: {advice}", None, manifest)
    settings, newer = file.settings, sum(shard.entries for shard in shards[len(file.settings.shards) :])
    beside = f"; {newer:,} newer images are searched exactly" if newer else ""
    how = f"{settings.probes:,} of {settings.lists:,} lists in {settings.precision}, recall@10 {settings.recall:.3f}"
    return Choice("ivf", f"approximate search of {entries:,} images: {how}{beside}", file, manifest)


def is_due(folder: Path, shards: Sequence[ShardEntry], entries: int) -> bool:
    """Whether the approximate search file is missing from an index that is large, is refused, or lacks many rows."""
    try:
        file = open_ivf(folder, shards)
    except DamagedFileError:
        return True
    if file is None:
        return entries >= IVF_FROM
    rows = sum(shard.entries for shard in shards)
    return rows - file.settings.rows > NEWER_FRACTION * rows


def _text(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return (found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)


def load_faiss() -> Any:
    """The package; an error that says what to install if it is missing."""
    require_packages("faiss", purpose="approximate search", install="pfml[faiss]")
    import faiss

    return faiss
