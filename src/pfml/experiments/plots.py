"""Pictures of a trained embedder: what queries find, and a map of its embeddings; and of the field itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from pfml.data import RetrievalData
from pfml.evaluation import embed, query_scores
from pfml.evaluation.nearest_neighbors import directions
from pfml.models import load_embedder
from pfml.plots.grids import choose_queries, plot_retrievals, retrieve, thumbnails
from pfml.plots.maps import choose_images, plot_glyph_map, project
from pfml.plots.theme import LIGHT, png_of_image
from pfml.storage.files import write_atomically
from pfml.theory.figures import draw_field, draw_pipeline, draw_theory
from pfml.training.environment import resolve_device

__all__ = ["draw_fields", "draw_pictures"]

QUERIES, FOUND = 6, 4  # the supplement shows 4 nearest images of each query
MAP_CLASSES, MAP_IMAGES = 20, 24


def draw_fields(out: Path) -> list[Path]:
    """Write the pictures that need no training and are not there yet into the folder `out`; the paths of the new."""
    out.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, Callable[[Path], None]] = {
        "field.png": draw_field,
        "theory.png": draw_theory,
        "pipeline.png": draw_pipeline,
    }
    missing = [out / name for name in drawings if not (out / name).exists()]
    for path in missing:
        drawings[path.name](path)
    return missing


def draw_pictures(run: Path, data: RetrievalData, out: Path, *, seed: int = 0) -> list[Path]:
    """Write retrieval.png and map.png of the run's last model on the unseen classes into `out`; their paths."""
    out.mkdir(parents=True, exist_ok=True)
    embedder = load_embedder(run / "model").to(resolve_device("auto"))
    points, labels = embed(embedder, data.test).cpu(), data.test.labels
    gallery = None if data.gallery is None else embed(embedder, data.gallery).cpu()
    gallery_labels = None if data.gallery is None else data.gallery.labels
    items = None if gallery is None else directions(gallery, "gallery")
    scores = query_scores(directions(points, "embeddings"), labels, items, gallery_labels)
    queries = choose_queries(scores, labels, random=QUERIES, seed=seed)
    found = retrieve(points, labels, queries, k=FOUND, gallery=gallery, gallery_labels=gallery_labels)
    is_small = isinstance(data.test.images, Tensor)
    side = data.test.images.shape[-1] if isinstance(data.test.images, Tensor) else 128
    sheet = plot_retrievals(found, data.test, data.gallery, side=side, zoom=2 if is_small else 1)
    write_atomically(out / "retrieval.png", sheet)
    chosen = choose_images(labels, classes=MAP_CLASSES, per_class=MAP_IMAGES, seed=seed)
    places = project(points[chosen], seed=seed)
    tiles = thumbnails(data.test, chosen, side=46)
    drawn = plot_glyph_map(places, labels[chosen], tiles, LIGHT) if is_small else _photo_map(places, tiles)
    write_atomically(out / "map.png", drawn)
    return [out / "retrieval.png", out / "map.png"]


def _photo_map(places: Tensor, tiles: Tensor, *, width: int = 1400) -> bytes:
    """A PNG with each photograph (3, side, side) at its place in [0, 1]^2, later ones over earlier ones."""
    from PIL import Image

    side = tiles.shape[-1]
    canvas = torch.ones(3, width, width)
    corners = (places * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, 1.0])) * (width - side)
    for (left, top), tile in zip(corners.round().long().tolist(), tiles, strict=True):
        canvas[:, top : top + side, left : left + side] = tile
    return png_of_image(Image.fromarray(canvas.mul(255).round().byte().permute(1, 2, 0).contiguous().numpy()))
