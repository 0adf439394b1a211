"""Unit vectors that resemble embeddings: a mixture of classes whose variance decays over the directions.

python benchmarks/embedding_mixture.py --images CUB_200_2011/images

Uniform vectors have no near neighbors, and nobody searches such. Here a class is a Gaussian around its center, and both
have a variance that falls as a power of the rank of the direction, as the spectrum of embeddings does. EXPONENT and
WITHIN are chosen so that the mixture has the intrinsic dimension (maximum likelihood, Levina and Bickel, 2004) and the
ratios of distances of real photographs; this file prints both, for as many images and classes as the folder has.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pfml.models import create_embedder
from pfml.search.embedding import embed_files

__all__ = ["CLASSES", "Mixture"]

CLASSES = 10_000
#: Variance of the direction of rank i: i ** -EXPONENT.
EXPONENT = 1.1
#: Standard deviation within a class over that of the centers.
WITHIN = 1.2
#: Neighbors by which the intrinsic dimension is estimated.
NEIGHBORS = 20
ROWS_AT_ONCE = 16_384


class Mixture:
    """Draws points of some classes; the same seed gives the same classes, whatever is drawn of them.

    Args:
        dimension: D.
        classes: How many.
        exponent: See `EXPONENT`.
        within: See `WITHIN`.
        seed: Of the classes.
    """

    def __init__(
        self,
        dimension: int = 512,
        classes: int = CLASSES,
        *,
        exponent: float = EXPONENT,
        within: float = WITHIN,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.deviations = torch.arange(1, dimension + 1) ** (-exponent / 2)
        # no coordinate of a network is a principal direction
        self.rotation = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator)).Q
        self.centers = torch.randn(classes, dimension, generator=generator) * self.deviations
        self.within = within

    def batches(self, points: int, seed: int) -> Iterator[Tensor]:
        """`points` unit vectors of classes drawn at random, some at a time."""
        generator = torch.Generator().manual_seed(seed)
        for first in range(0, points, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, points - first)
            labels = torch.randint(len(self.centers), (count,), generator=generator)
            noise = torch.randn(count, len(self.deviations), generator=generator) * self.deviations
            yield normalize((self.centers[labels] + self.within * noise) @ self.rotation)

    def points(self, points: int, seed: int) -> Tensor:
        """The same in one tensor."""
        return torch.cat(list(self.batches(points, seed)))


def neighbor_distances(points: Tensor, queries: Tensor) -> Tensor:
    """(queries, NEIGHBORS) distances to the nearest other points, ascending; the queries are points too."""
    similarities = (queries @ points.T).topk(NEIGHBORS + 1).values[:, 1:]
    return (2 - 2 * similarities).clamp_min(1e-12).sqrt()


def describe(name: str, points: Tensor, count: int = 2000) -> None:
    """Print intrinsic dimension and ratios of distances."""
    chosen = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:count]
    near = neighbor_distances(points, points[chosen])
    inverse = (near[:, -1:].log() - near[:, :-1].log()).sum(dim=1) / (NEIGHBORS - 2)
    mean = float(torch.cdist(points[chosen], points[chosen]).mean())
    first, tenth = float(near[:, 0].median()) / mean, float(near[:, 9].median()) / mean
    dimension = 1 / float(inverse.mean())
    print(
        f"{name:<12} intrinsic dimension {dimension:.1f}, distance to neighbor 1: {first:.3f}, 10: {tenth:.3f} of mean"
    )


def real_points(images: Path, dimension: int, per_class: int) -> tuple[Tensor, int]:
    """Principal components of the features of efficientnet_lite0, of unit length, and the number of classes."""
    folders = sorted(path for path in images.iterdir() if path.is_dir())
    files = [str(file) for folder in folders for file in sorted(folder.iterdir())[:per_class]]
    embedder = create_embedder("efficientnet_lite0", embedding_dim=None).eval()
    features = embed_files(embedder, files, batch_size=32, workers=2).vectors
    return principal(features, dimension), len(folders)


def principal(features: Tensor, dimension: int) -> Tensor:
    """The first principal components, of unit length."""
    centered = features - features.mean(dim=0)
    directions = torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -dimension:]
    return normalize(centered @ directions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="A folder of images for each class.")
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--per-class", type=int, default=15, help="Images of each class.")
    options = parser.parse_args()
    photos, classes = real_points(options.images, options.dimension, options.per_class)
    describe("photographs", photos)
    describe("mixture", Mixture(options.dimension, classes).points(len(photos), seed=1))
