"""A collection of small images, and a writer of its embeddings for another process."""

import torch

from pfml.models import load_embedder
from pfml.search import embed_collection
from pfml.storage.embeddings import open_embeddings
from small_index import write_images

NAMES = tuple(f"{'abc'[k % 3]}/{k:02d}.png" for k in range(23))
#: Small shards and batches, so that there are many of both.
SMALL = {"shard_images": 4, "batch_size": 3, "workers": 1}


def write_collection(folder):
    return write_images(folder, NAMES, size=24)


def vectors_by_path(folder):
    collection = open_embeddings(folder)
    return dict(zip(collection.paths, collection.vectors(collection.paths), strict=True))


def files_of(folder):
    """Name -> content of all files but the lock, which holds the number of a process."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "lock"}


def embed_in_process(folder, model, images, started):
    torch.set_num_threads(1)
    embedder = load_embedder(model)
    started.set()
    embed_collection(folder, embedder, [images], **SMALL)
