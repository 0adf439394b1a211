"""The map of the embedding: images and proxies as points of a plane, and the potential of a class on that plane."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import cast, get_args

import torch
from torch import Tensor

from pfml.field import PowerLaw
from pfml.plots.maps import Method, project
from pfml.serving.contributions import pair_potentials
from pfml.serving.gallery import Contents, Gallery
from pfml.storage.files import DamagedFileError
from pfml.storage.lock import locked_file
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors

__all__ = ["PLANE", "EmbeddingMap", "MapMaker", "chosen_method", "compute_map", "plane_potential", "remaining_map"]

MAP = Format("embedding map", 2, "remove it: pfml serve computes it again")
#: The decay law of the potential on the map, in widths of the map: flat enough to be seen at a distance.
PLANE_LAW = PowerLaw(delta=0.04, alpha=2.0)
#: The interval of both axes on which the potential is computed; the map lies in [0, 1].
PLANE = (-0.5, 1.5)
#: Distances in memory at a time.
DISTANCES_AT_ONCE = 2**22
#: Charges on the plane whose potential is summed.
MOST_CHARGES = 20_000
MARGIN = 0.04
#: Niceness of the thread that computes a map, and of those that it starts.
MAP_PRIORITY = 10
#: Images on a map by t-SNE, whose time grows fast with their number, and by other methods, if nobody says how many.
FEW_POINTS, MANY_POINTS = 5_000, 100_000

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EmbeddingMap:
    """The coordinates of images and proxies on the plane.

    Args:
        ids: (n,) ids of the images.
        points: (n, 2) in [0, 1].
        proxy_points: (p, 2) in [0, 1].
        method: By which it was projected.
    """

    ids: Tensor
    points: Tensor
    proxy_points: Tensor
    method: Method


def chosen_method(method: str, images: int, points: int | None) -> tuple[Method, int]:
    """How the map of an index is made, and of how many images at most.

    Args:
        method: One of `Method`, or "auto": UMAP for more than `FEW_POINTS`, if it is installed, else t-SNE.
        images: Of the index.
        points: What a person asked for; None if they did not.
    """
    if method == "auto":
        is_large = min(images, images if points is None else points) > FEW_POINTS
        method = "umap" if is_large and find_spec("umap") is not None else "tsne"
    if method not in get_args(Method):
        raise ValueError(f"the method of a map must be one of auto, {', '.join(get_args(Method))}, got {method!r}")
    if points is None:
        points = FEW_POINTS if method == "tsne" else MANY_POINTS
    return cast(Method, method), points


def compute_map(contents: Contents, method: Method, *, most: int = 5000, seed: int = 0) -> EmbeddingMap:
    """The map of at most `most` images, a subsample by `seed`, and of all proxies."""
    rows = _sampled(contents, most, seed)
    points = torch.cat([contents.vectors(rows), contents.proxies]).double()
    # several threads: a map is kept with its index, so that it need not come out the same a second time
    coordinates = project(points, method, perplexity=30.0, keep_aspect=True, margin=MARGIN, threads=None, seed=seed)
    return EmbeddingMap(contents.ids[rows], coordinates[: len(rows)], coordinates[len(rows) :], method)


def _sampled(contents: Contents, most: int, seed: int = 0) -> Tensor:
    """The positions of the images on the map."""
    rows = torch.arange(len(contents.ids))
    if len(rows) <= most:
        return rows
    return torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:most].sort().values


def plane_potential(embedding_map: EmbeddingMap, contents: Contents, label: int, *, side: int = 96) -> Tensor:
    """The potential of a class on a grid (side, side) over `PLANE` squared, rows from the top, scaled to [-1, 1].

    It illustrates the field of training, and differs from it: charges act from their points on the map, by `PLANE_LAW`.
    A value is sign(v) log(1 + |v| / v1), with v1 the attraction of one charge on contact, divided by its 99.5th
    percentile and clipped.
    """
    rows = torch.searchsorted(contents.ids, embedding_map.ids).clamp(max=max(len(contents.ids) - 1, 0))
    labels = torch.cat([contents.labels[rows], contents.proxy_labels])
    acts = (labels >= 0).nonzero()[:, 0]
    acts = acts[:: -(-len(acts) // MOST_CHARGES) or 1]  # of many, some stand for all: scaling takes their number out
    charges = torch.cat([embedding_map.points, embedding_map.proxy_points]).float()[acts]
    labels = labels[acts]
    low, high = PLANE
    steps = low + (high - low) * (torch.arange(side) + 0.5) / side
    grid = torch.cartesian_prod(steps.flip(0), steps).flip(1)
    parts = [
        pair_potentials(torch.cdist(some, charges).double(), labels == label, PLANE_LAW).sum(dim=1)
        for some in grid.split(max(DISTANCES_AT_ONCE // max(len(charges), 1), 1))
    ]
    values = torch.cat(parts).reshape(side, side)
    scaled = values.sign() * (values.abs() * PLANE_LAW.delta**PLANE_LAW.alpha).log1p()
    largest = float(scaled.abs().quantile(0.995)) or 1.0
    return (scaled / largest).clamp(-1, 1)


def remaining_map(embedding_map: EmbeddingMap, before: Contents, contents: Contents) -> EmbeddingMap | None:
    """The map of `before` for `contents` that have no other image: those that are left stay where they are.

    None if `contents` have another image or other proxies.
    """
    rows = torch.searchsorted(before.ids, contents.ids).clamp(max=max(len(before.ids) - 1, 0))
    if len(contents.ids) > len(before.ids) or not torch.equal(before.ids[rows], contents.ids):
        return None
    left = torch.isin(embedding_map.ids, contents.ids)
    # another index may have the same ids
    now, then = (each.vectors(torch.searchsorted(each.ids, embedding_map.ids[left])) for each in (contents, before))
    if not torch.equal(now, then) or not torch.equal(before.proxies, contents.proxies):
        return None
    return replace(embedding_map, ids=embedding_map.ids[left], points=embedding_map.points[left])


class MapMaker:
    """Computes the map in a thread, once for each state of the index, and caches it in a folder.

    A map of an earlier state serves as long as no image was added: names of classes change nothing on it.
    """

    def __init__(self, gallery: Gallery, folder: Path, method: Method, most: int) -> None:
        self.gallery = gallery
        self.folder = folder
        self.method = method
        self.most = most
        self.error: str | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._made: tuple[Contents, EmbeddingMap] | None = None
        self._shown: tuple[Contents, EmbeddingMap] | None = None

    def current(self) -> tuple[Contents, EmbeddingMap] | None:
        """The map with the charges that it shows; None while it is being computed, which this call starts."""
        contents = self.gallery.contents()
        with self._lock:
            if self._shown is not None and self._shown[0] is contents:
                return self._shown
            if self._made is not None and (left := remaining_map(self._made[1], self._made[0], contents)) is not None:
                self._shown = contents, left
                return self._shown
            if self._thread is None or not self._thread.is_alive():
                self.error = None
                # a daemon: t-SNE cannot be interrupted, and must not delay the shutdown of the server
                self._thread = threading.Thread(target=self._make, args=(contents,), name="pfml map", daemon=True)
                self._thread.start()
        return None

    def _make(self, contents: Contents) -> None:
        with suppress(AttributeError, OSError):  # behind requests, where the system can say so of a thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), MAP_PRIORITY)
        try:
            key = self._key(contents)
            self.folder.mkdir(parents=True, exist_ok=True)
            # of several processes of a server one computes it, and the others read it then
            with open(self.folder / "map.lock", "ab") as file, locked_file(self.folder / "map.lock", file.fileno()):
                made = self._cached(key)
                if made is None:
                    made = compute_map(contents, self.method, most=self.most)
                    tensors = {"ids": made.ids, "points": made.points, "proxy_points": made.proxy_points}
                    write_sealed_tensors(self.folder, "map", tensors, {"key": key, "method": made.method}, MAP)
        except Exception as error:  # in a thread: the next request for the map gets it
            log.exception("the map could not be computed")
            self.error = f"{type(error).__name__}: {error}"
            return
        with self._lock:
            self._made = self._shown = contents, made

    def _cached(self, key: str) -> EmbeddingMap | None:
        """The map in the folder, if it belongs to these charges."""
        if not (self.folder / "map.json").is_file():
            return None
        try:
            content, tensors = read_sealed_tensors(self.folder, "map", MAP)
        except (DamagedFileError, FileNotFoundError) as error:
            log.warning("the map is computed again: %s", error)
            return None
        if content.get("key") != key:
            return None
        # copies, since the loaded tensors are mapped from the file
        ids, points, proxy_points = (tensors[name].clone() for name in ("ids", "points", "proxy_points"))
        return EmbeddingMap(ids, points, proxy_points, content["method"])

    def _key(self, contents: Contents) -> str:
        """A digest of everything that the map depends on."""
        digest = hashlib.sha256(f"{self.method} {self.most} {len(contents.ids)}".encode())
        for tensor in (contents.ids, contents.vectors(_sampled(contents, self.most)), contents.proxies):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()
