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

import hashlib
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from pfml.data.decoding import Track
from pfml.packages import require_packages
from pfml.search.backends import BACKENDS, ExactSearcher, Vectors, best_of_both, vectors_at
from pfml.storage.files import DamagedFileError, read_while_replaced, remove_partials, replacing, sha256_of
from pfml.storage.lock import LockedError, claim
from pfml.storage.manifest import Format, read_manifest, write_manifest
from pfml.storage.shard import ShardEntry

__all__ = [
    "IVF_FROM",
    "PRECISIONS",
    "Choice",
    "IvfFile",
    "IvfSearcher",
    "IvfSettings",
    "build_ivf",
    "choose_backend",
    "is_due",
    "open_ivf",
    "read_ivf_settings",
]

log = logging.getLogger(__name__)

IVF = Format("approximate search file", 1, "build it again with pfml index --approximate")
#: How the vectors of the file may be stored.
PRECISIONS = ("float32", "float16", "int8")
#: Images from which on "auto" is approximate, and `pfml index` builds the file.
IVF_FROM = 100_000
#: Fraction of newer rows from which on the file is due to be built again.
NEWER_FRACTION = 0.05
#: Recall@10 that the number of probed lists is chosen for.
RECALL = 0.99
#: Rows of the index that measure it.
MEASURED_ROWS = 512
#: Training vectors of k-means per list, and its iterations.
TRAINED_PER_LIST = 40
ITERATIONS = 10
#: Candidates that are scored again, in multiples of k.
CANDIDATES = 4
#: The k that recall is measured at.
MEASURED_K = 10
#: Fraction of allowed rows below which every list is probed: the nearest allowed rows may lie anywhere.
SPARSE = 0.25
#: Fraction of allowed rows below which more lists are probed, WIDER times as many, until that finds nothing new. Above
#: it a few entries were removed.
SCATTERED = 0.9
WIDER = 4
#: Vectors that are added at once.
ROWS_AT_ONCE = 16_384
#: Bytes that are written at once.
WRITTEN_AT_ONCE = 2**20


@dataclass(frozen=True)
class IvfSettings:
    """What an inverted file was made of, and how.

    Args:
        shards: Those whose rows it has, in their order.
        precision: One of `PRECISIONS`.
        lists: How many there are.
        probes: How many of them a search compares.
        recall: Recall@10 with so many, of rows of the index among all others.
        file: Name of the file.
        sha256: Of the file.
        bytes: Of the file.
    """

    shards: tuple[ShardEntry, ...]
    precision: str
    lists: int
    probes: int
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
        import numpy

        faiss, selected = _faiss(), None
        if allowed is not None:
            selected = faiss.IDSelectorBitmap(numpy.packbits(allowed.numpy(), bitorder="little"))
        options = faiss.SearchParametersIVF(nprobe=probes, **({} if selected is None else {"sel": selected}))
        # faiss.contrib.torch_utils, which others may import, puts its own `search` in place of this one
        search = getattr(self._lists, "search_numpy", self._lists.search)
        return torch.from_numpy(search(queries.contiguous().numpy(), count, params=options)[1])


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
        if self.exact.is_few(int(allowed.count_nonzero()), len(allowed)):
            return self.exact.nearest(queries, k, allowed)
        if not self.file.is_unchanged():
            log.warning("%s was changed while it was in use: the index is searched exactly", self.file.settings.file)
            return self.exact.nearest(queries, k, allowed)
        open_rows = allowed[:rows]
        count = int(open_rows.count_nonzero())
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
        probes = _probes(settings, k, fraction)
        mask = None if count == len(allowed) else allowed
        found = self._probed(queries, k, count, probes, mask)
        # what is allowed may lie far from the query, where more lists are as near as the first ones
        unsettled = torch.arange(len(queries)) if fraction < SCATTERED else _short(found)
        while probes < settings.lists and len(unsettled):
            probes = min(WIDER * probes, settings.lists)
            wider = self._probed(queries[unsettled], k, count, probes, mask)
            is_new = (wider[1].sort().values != found[1][unsettled].sort().values).any(dim=1)
            for old, new in zip(found, wider, strict=True):
                old[unsettled] = new
            unsettled = unsettled[is_new] if fraction < SCATTERED else _short(found)
        return found

    def _probed(
        self, queries: Tensor, k: int, count: int, probes: int, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows = self.file.candidates(queries, min(CANDIDATES * k, count), probes=probes, allowed=allowed)
        return rescored(self.shards, queries, rows, k)


def _short(found: tuple[Tensor, Tensor]) -> Tensor:
    """The queries for which less than k rows were found."""
    return (found[1][:, -1] < 0).nonzero()[:, 0]


def rescored(shards: Sequence[Vectors], queries: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Similarities and rows of the best k of the candidates `rows`, by the vectors of the shards."""
    needed, places = rows.clamp_min(0).unique(return_inverse=True)
    vectors = vectors_at(shards, needed)
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
        if settings.precision not in PRECISIONS or not 0 < settings.probes <= settings.lists:
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
    faiss = _faiss()
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
        return Choice("exact", f"{meanwhile}: pip install 'pfml[faiss]' for approximate search", None, manifest)
    try:
        file = open_ivf(folder, shards, None if before is None else before.file)
    except DamagedFileError as error:
        return Choice("exact", f"{meanwhile}, since {error}", None, manifest)
    if file is None:
        advice = "pfml index --approximate int8 builds what approximate search needs"
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


def build_ivf(
    folder: Path,
    files: Sequence[ShardEntry],
    shards: Sequence[Vectors],
    *,
    precision: str | None = None,
    track: Track | None = None,
) -> IvfFile:
    """Build the inverted file of an index, in place of the one before; nobody waits for it.

    Args:
        folder: Of the index.
        files: Its shards' files.
        shards: Their vectors.
        precision: One of `PRECISIONS`; None for that of the file before, int8 if there is none.
        track: Shows the progress, as track(iterable, description, total).

    Raises:
        LockedError: If another process is building it.
    """
    precision = _precision_before(folder) if precision is None else precision
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    rows = sum(len(shard) for shard in shards)
    if not rows:
        raise ValueError(f"{folder} must have images to build an approximate search file of, and has none")
    follow: Track = (lambda items, _label, _total: items) if track is None else track
    with claim(folder / "ivf.lock") as ours:
        if not ours:
            raise LockedError(f"{folder} has its approximate search file built by another process: wait for it")
        remove_partials(folder, "ivf-*")
        lists = _built(shards, rows, precision, follow)
        probes, recall = _measured(lists, files, shards, precision, follow)
        _publish(folder, lists, IvfSettings(tuple(files), precision, lists.nlist, probes, recall, "", "", 0))
        found = _open(folder, files, None)
    assert found is not None
    return found


def _precision_before(folder: Path) -> str:
    try:
        before = read_ivf_settings(folder)
    except DamagedFileError:
        before = None
    return "int8" if before is None else before.precision


def _num_lists(rows: int) -> int:
    """4 sqrt(n) as a power of two, with enough training vectors for each."""
    return max(min(2 ** round(math.log2(4 * math.sqrt(rows))), rows // TRAINED_PER_LIST), 1)


def _built(shards: Sequence[Vectors], rows: int, precision: str, track: Track) -> Any:
    """faiss's index of all rows."""
    faiss = _faiss()
    dimension, lists = shards[0].shape[1], _num_lists(rows)
    step = max(rows // (TRAINED_PER_LIST * lists), 1)
    tiles = (tile[::step].clone() for shard in shards for tile in shard.split(ROWS_AT_ONCE))
    sample = torch.cat(list(tiles)).numpy()
    centers = faiss.IndexFlatIP(dimension)
    clustering = faiss.Clustering(dimension, lists)
    clustering.spherical, clustering.niter, clustering.seed = True, 1, 0
    clustering.max_points_per_centroid = len(sample)
    for _ in track(range(ITERATIONS), "k-means", ITERATIONS):
        centers.reset()
        clustering.train(sample, centers)  # from the centers of the iteration before
    kinds = {"float16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}
    product = faiss.METRIC_INNER_PRODUCT
    if precision == "float32":
        index = faiss.IndexIVFFlat(centers, dimension, lists, product)
    else:
        index = faiss.IndexIVFScalarQuantizer(centers, dimension, lists, kinds[precision], product, False)
    index.train(sample)
    for shard in track(shards, "adding vectors", len(shards)):
        for tile in shard.split(ROWS_AT_ONCE):
            index.add(tile.numpy())
    return index


def _measured(
    lists: Any, files: Sequence[ShardEntry], shards: Sequence[Vectors], precision: str, track: Track
) -> tuple[int, float]:
    """The least power of two of probed lists that reaches RECALL, or all, and the recall: rows among all others."""
    rows = sum(len(shard) for shard in shards)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(rows, generator=generator)[:MEASURED_ROWS].sort().values
    queries = vectors_at(shards, chosen)
    k = min(MEASURED_K + 1, rows)  # a row finds itself
    expected = ExactSearcher(shards).nearest(queries, k, torch.ones(rows, dtype=torch.bool))[1]
    steps = [2**power for power in range(math.ceil(math.log2(lists.nlist)))] + [lists.nlist]
    recall = 0.0
    for probes in track(steps, "measuring recall", len(steps)):
        settings = IvfSettings(tuple(files), precision, lists.nlist, probes, recall, "", "", 0)
        candidates = IvfFile(settings, lists).candidates(queries, min(CANDIDATES * k, rows), probes=probes)
        found = rescored(shards, queries, candidates, k)[1]
        is_other = expected != chosen[:, None]
        is_found = (found[:, :, None] == expected[:, None, :]).any(dim=1)
        recall = float((is_found & is_other).sum() / is_other.sum().clamp_min(1)) if is_other.any() else 1.0
        if recall >= RECALL:
            break
    return probes, recall


def _publish(folder: Path, lists: Any, settings: IvfSettings) -> None:
    """Write the inverted file and then its manifest; the files before are removed."""
    path, digest = folder / f"ivf-{uuid4().hex[:12]}.faiss", hashlib.sha256()
    with replacing(path) as file:

        def write(data: bytes) -> int:
            digest.update(data)
            return file.write(data)

        faiss = _faiss()
        faiss.write_index(lists, faiss.PyCallbackIOWriter(write, WRITTEN_AT_ONCE))
    written = replace(settings, file=path.name, sha256=digest.hexdigest(), bytes=path.stat().st_size)
    write_manifest(folder / "ivf.json", asdict(written), IVF)
    for stale in folder.glob("ivf-*.faiss"):
        if stale != path:
            stale.unlink(missing_ok=True)


def _text(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _state(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return (found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev)


def _faiss() -> Any:
    require_packages("faiss", purpose="approximate search", install="pfml[faiss]")
    import faiss

    return faiss
