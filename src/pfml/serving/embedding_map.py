"""A map of the embedding: every image and every proxy as a point of a plane, and a class potential under them."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pfml.field import PowerLaw
from pfml.plots.maps import Method, project
from pfml.serving.contributions import pair_potentials
from pfml.serving.gallery import Contents, Gallery
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors

__all__ = ["PLANE", "EmbeddingMap", "MapMaker", "compute_map", "plane_potential"]

MAP = Format("embedding map", 1, "remove it: pfml serve makes it again")
#: The law of the picture's field, in widths of the map: flat enough to see from afar.
PLANE_LAW = PowerLaw(delta=0.04, alpha=2.0)
#: What the picture of a field shows of either axis; the map lies in [0, 1].
PLANE = (-0.5, 1.5)
#: Distances that are held at once.
DISTANCES_AT_ONCE = 2**22
MARGIN = 0.04

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EmbeddingMap:
    """Where the images and proxies lie on the plane.

    Args:
        ids: (n,) of the images.
        places: (n, 2) in [0, 1].
        proxy_places: (p, 2).
        method: "tsne" or "pca".
    """

    ids: Tensor
    places: Tensor
    proxy_places: Tensor
    method: Method


def compute_map(contents: Contents, method: Method, *, most: int = 5000, seed: int = 0) -> EmbeddingMap:
    """The map of at most `most` images, drawn with a seed, and of all proxies."""
    rows = torch.arange(len(contents.ids))
    if len(rows) > most:
        rows = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:most].sort().values
    points = torch.cat([contents.points[rows], contents.proxies]).double()
    # several threads: a map is kept with its index, so that it need not come out the same a second time
    coordinates = project(points, method, perplexity=30.0, keep_aspect=True, margin=MARGIN, threads=None, seed=seed)
    return EmbeddingMap(contents.ids[rows], coordinates[: len(rows)], coordinates[len(rows) :], method)


def plane_potential(made: EmbeddingMap, contents: Contents, label: int, *, side: int = 96) -> Tensor:
    """The potential of a class on a grid (side, side) over `PLANE` squared, rows from the top, as shades in [-1, 1].

    It is a picture, not the field that trained: charges act where the map put them, under `PLANE_LAW`. A shade is
    sign(v) log(1 + |v| / v1), v1 the attraction of one charge on contact, over its 99.5th percentile, clipped.
    """
    rows = torch.searchsorted(contents.ids, made.ids).clamp(max=max(len(contents.ids) - 1, 0))
    labels = torch.cat([contents.labels[rows], contents.proxy_labels])
    charges = torch.cat([made.places, made.proxy_places]).float()[labels >= 0]
    labels = labels[labels >= 0]
    low, high = PLANE
    steps = low + (high - low) * (torch.arange(side) + 0.5) / side
    grid = torch.cartesian_prod(steps.flip(0), steps).flip(1)
    parts = [
        pair_potentials(torch.cdist(some, charges).double(), labels == label, PLANE_LAW).sum(dim=1)
        for some in grid.split(max(DISTANCES_AT_ONCE // max(len(charges), 1), 1))
    ]
    values = torch.cat(parts).reshape(side, side)
    shades = values.sign() * (values.abs() * PLANE_LAW.delta**PLANE_LAW.alpha).log1p()
    largest = float(shades.abs().quantile(0.995)) or 1.0
    return (shades / largest).clamp(-1, 1)


class MapMaker:
    """Makes the map in a thread of its own, once for each state of the index, and keeps it in a folder."""

    def __init__(self, gallery: Gallery, folder: Path, method: Method, most: int) -> None:
        self.gallery = gallery
        self.folder = folder
        self.method = method
        self.most = most
        self.error: str | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._made: tuple[Contents, EmbeddingMap] | None = None

    def current(self) -> tuple[Contents, EmbeddingMap] | None:
        """The map with the charges that it shows; None while it is being made, which this call begins."""
        contents = self.gallery.contents()
        with self._lock:
            made = self._made
            if made is not None and made[0] is contents:
                return made
            if self._thread is None or not self._thread.is_alive():
                self.error = None
                # a daemon: t-SNE cannot be interrupted, and must not hold up the end of the server
                self._thread = threading.Thread(target=self._make, args=(contents,), name="pfml map", daemon=True)
                self._thread.start()
        return None

    def _make(self, contents: Contents) -> None:
        try:
            key = self._key(contents)
            made = self._kept(key)
            if made is None:
                made = compute_map(contents, self.method, most=self.most)
                tensors = {"ids": made.ids, "places": made.places, "proxy_places": made.proxy_places}
                write_sealed_tensors(self.folder, "map", tensors, {"key": key, "method": made.method}, MAP)
        except Exception as error:  # a thread of its own: whoever asks for the map is told
            log.exception("the map could not be made")
            self.error = f"{type(error).__name__}: {error}"
            return
        with self._lock:
            self._made = contents, made

    def _kept(self, key: str) -> EmbeddingMap | None:
        """The map in the folder, if it is that of these charges."""
        if not (self.folder / "map.json").is_file():
            return None
        try:
            content, tensors = read_sealed_tensors(self.folder, "map", MAP)
        except (DamagedFileError, FileNotFoundError) as error:
            log.warning("the map is made again: %s", error)
            return None
        if content.get("key") != key:
            return None
        # copies, since what is loaded is mapped: it would follow the file
        ids, places, proxy_places = (tensors[name].clone() for name in ("ids", "places", "proxy_places"))
        return EmbeddingMap(ids, places, proxy_places, content["method"])

    def _key(self, contents: Contents) -> str:
        """A digest of everything that the map depends on."""
        digest = hashlib.sha256(f"{self.method} {self.most} {len(contents.ids)}".encode())
        for tensor in (contents.ids, contents.points, contents.proxies):
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()
