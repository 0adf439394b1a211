"""A run folder with everything that an export takes, made in a second."""

import torch

from pfml.data import draw_glyphs
from pfml.methods import create_loss
from pfml.models import TrainedOn, create_embedder
from pfml.runs.saved_loss import save_loss
from pfml.search import ImageIndex, ModelIdentity
from pfml.training import LossConfig
from small_threshold import made_threshold

CLASSES = ("A", "B", "C")


def few_glyphs(characters="ABC"):
    return draw_glyphs(characters, copies=1)


def save_model(folder, seed=0):
    torch.manual_seed(seed)
    embedder = create_embedder("convnet", embedding_dim=8)
    embedder.save(folder, trained_on=TrainedOn("letters", ("x", "y")))
    return embedder.eval()


def save_index(folder, embedder):
    images = few_glyphs()
    identity = ModelIdentity.of(embedder)
    index = ImageIndex.create(folder, identity, embedder.embedding_dim)
    points = embedder.encode(images.images)
    paths = [f"letters/{k:03d}.png" for k in range(len(images))]
    names = [CLASSES[label] for label in images.labels.tolist()]
    half = len(images) // 2
    index.add(points[:half], paths[:half], names[:half], model=identity)
    index.add(points[half:], paths[half:], names[half:], model=identity)
    index.remove(paths=paths[:2])
    return index


def save_threshold(folder, embedder, distance=0.01):
    threshold = made_threshold(value=-distance, distance=distance, model=ModelIdentity.of(embedder))
    threshold.save(folder)
    return threshold


def save_run(folder):
    embedder = save_model(folder / "model")
    config = LossConfig("pfml", {"proxies_per_class": 2})
    save_loss(folder / "loss", create_loss(config, 2, 8), config, ("x", "y"), 8)
    save_index(folder / "index", embedder)
    save_threshold(folder, embedder)
    return embedder
