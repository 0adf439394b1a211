"""The file of approximate search, built: k-means, the vectors in lists around its centers, and the recall measured.

Nothing waits for it: it is written beside the file before, and named last. A build that is killed leaves that one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from threadpoolctl import threadpool_limits

from pfml.data.decoding import Track
from pfml.search.backends import ExactSearcher, Vectors, vectors_at
from pfml.search.ivf import (
    IVF,
    MEASURED_K,
    PRECISIONS,
    IvfFile,
    IvfSettings,
    candidates_of,
    load_faiss,
    open_ivf,
    read_ivf_settings,
    rescored,
)
from pfml.storage.files import DamagedFileError, remove_partials, replacing
from pfml.storage.lock import LockedError, claim
from pfml.storage.manifest import write_manifest
from pfml.storage.shard import ShardEntry

__all__ = ["build_ivf"]

#: Candidates that are scored again, in multiples of k: the least that reaches ENOUGH.
CANDIDATES = (4, 8, 16, 32)
#: Recall@10 that the number of probed lists is chosen for.
RECALL = 0.99
#: The same where all lists are probed, by which the number of candidates is chosen.
ENOUGH = 0.997
#: Rows of the index that measure it.
MEASURED_ROWS = 512
#: Training vectors of k-means per list, and its iterations.
TRAINED_PER_LIST = 40
ITERATIONS = 10
#: Vectors that are added at once.
ROWS_AT_ONCE = 16_384
#: Bytes that are written at once.
WRITTEN_AT_ONCE = 2**20


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
        precision: One of `PRECISIONS`; None for that of the file before, pq4 if there is none.
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
        measured = _measured(lists, shards, follow)
        _publish(folder, lists, IvfSettings(tuple(files), precision, lists.nlist, *measured, "", "", 0))
        found = open_ivf(folder, files)
    assert found is not None
    return found


def _precision_before(folder: Path) -> str:
    try:
        before = read_ivf_settings(folder)
    except DamagedFileError:
        before = None
    return "pq4" if before is None else before.precision


def _num_lists(rows: int) -> int:
    """4 sqrt(n) as a power of two, with enough training vectors for each."""
    return max(min(2 ** round(math.log2(4 * math.sqrt(rows))), rows // TRAINED_PER_LIST), 1)


def _built(shards: Sequence[Vectors], rows: int, precision: str, track: Track) -> Any:
    """faiss's index of all rows."""
    faiss = load_faiss()
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
    index = _empty(centers, dimension, lists, precision)
    # many small trainings, for which threads only wait for one another
    with threadpool_limits(1, user_api="openmp"):
        index.train(sample)
    for shard in track(shards, "adding vectors", len(shards)):
        for tile in shard.split(ROWS_AT_ONCE):
            index.add(tile.numpy())
    return index


def _empty(centers: Any, dimension: int, lists: int, precision: str) -> Any:
    """faiss's index around these centers."""
    faiss = load_faiss()
    product = faiss.METRIC_INNER_PRODUCT
    if precision == "float32":
        return faiss.IndexIVFFlat(centers, dimension, lists, product)
    if precision == "pq4":
        groups = dimension // 2 if dimension % 2 == 0 else dimension
        return faiss.IndexIVFPQFastScan(centers, dimension, lists, groups, 4, product)
    kinds = {"float16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}
    return faiss.IndexIVFScalarQuantizer(centers, dimension, lists, kinds[precision], product, False)


def _measured(lists: Any, shards: Sequence[Vectors], track: Track) -> tuple[int, int, float]:
    """The least numbers of probed lists and of candidates that reach RECALL, of rows among all others, and the recall.

    If none does, these are all lists and the most candidates.
    """
    rows = sum(len(shard) for shard in shards)
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:MEASURED_ROWS].sort().values
    queries = vectors_at(shards, chosen)
    k = min(MEASURED_K + 1, rows)  # a row finds itself
    expected = ExactSearcher(shards).nearest(queries, k, torch.ones(rows, dtype=torch.bool))[1]
    is_other = expected != chosen[:, None]

    def recall(probes: int, candidates: int) -> float:
        found = candidates_of(lists, queries, min(candidates * k, rows), probes)
        best = rescored(shards, queries, found, k)[1]
        is_found = (best[:, :, None] == expected[:, None, :]).any(dim=1) & is_other
        return float(is_found.sum() / is_other.sum()) if is_other.any() else 1.0

    candidates = next((few for few in CANDIDATES if recall(lists.nlist, few) >= ENOUGH), CANDIDATES[-1])
    steps = [2**power for power in range(math.ceil(math.log2(lists.nlist)))] + [lists.nlist]
    for probes in track(steps, "measuring recall", len(steps)):
        if (reached := recall(probes, candidates)) >= RECALL:
            break
    return probes, candidates, reached


def _publish(folder: Path, lists: Any, settings: IvfSettings) -> None:
    """Write the inverted file and then its manifest; the files before are removed."""
    path, digest = folder / f"ivf-{uuid4().hex[:12]}.faiss", hashlib.sha256()
    with replacing(path) as file:

        def write(data: bytes) -> int:
            digest.update(data)
            return file.write(data)

        faiss = load_faiss()
        faiss.write_index(lists, faiss.PyCallbackIOWriter(write, WRITTEN_AT_ONCE))
    written = replace(settings, file=path.name, sha256=digest.hexdigest(), bytes=path.stat().st_size)
    write_manifest(folder / "ivf.json", asdict(written), IVF)
    for stale in folder.glob("ivf-*.faiss"):
        if stale != path:
            stale.unlink(missing_ok=True)
