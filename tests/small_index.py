"""Indexes of random vectors, images of plain color, and writers for other processes."""

import os
import resource
import signal
from pathlib import Path

import numpy
import torch
from PIL import Image

from pfml.search import ImageIndex, LockedError, ModelIdentity

MODEL = ModelIdentity("a" * 64, "the model of these tests")
OTHER = ModelIdentity("b" * 64, "another model")
ENTRIES = 20


def unit_vectors(count, dimension=8, seed=0):
    drawn = torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn)


def small_index(folder, entries=ENTRIES, classes=4, **options):
    index = ImageIndex.create(folder, MODEL, 8, **options)
    names = [f"class {k % classes}" for k in range(entries)]
    index.add(unit_vectors(entries), [f"{k}.jpg" for k in range(entries)], names, model=MODEL)
    return index


def clustered_vectors(count, classes, dimension=32, seed=0):
    """Points of classes of low dimension: number n is of class n % classes, whatever the seed."""
    generator = torch.Generator().manual_seed(123)
    centers = torch.randn(classes, dimension, generator=generator)
    spread = torch.arange(1, dimension + 1) ** -0.5
    drawn = torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(centers[torch.arange(count) % classes] + 1.5 * spread * drawn)


def clustered_index(folder, entries, classes, shards=4, seed=0):
    index = ImageIndex.create(folder, MODEL, 32)
    vectors = clustered_vectors(entries, classes, seed=seed)
    for rows in torch.arange(entries).chunk(shards):
        names = [f"class {row % classes}" for row in rows.tolist()]
        index.add(vectors[rows], [f"{row}.jpg" for row in rows.tolist()], names, model=MODEL)
    return index


def build_for_ever(folder, started):
    """Build the file of approximate search again and again."""
    torch.set_num_threads(1)
    index = ImageIndex.open(folder)
    started.set()
    while True:
        index.build_ivf()


def write_images(folder, names=("a/1.png", "a/2.png", "b/3.png", "b/4.png", "b/deep/5.png"), size=32):
    """Images of noise, each its own."""
    for name in names:
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = numpy.random.default_rng(list(name.encode())).integers(0, 256, (size, size, 3), dtype=numpy.uint8)
        Image.fromarray(noise).save(path)
    return Path(folder)


def add_for_ever(folder, started):
    """Add ten vectors at a time, sometimes compacting; the name of the class says which change it was."""
    torch.set_num_threads(1)
    index = ImageIndex.open(folder)
    started.set()
    change = sum(1 for name in index.class_counts() if name.startswith("change"))
    while True:
        paths = [f"{change}/{k}.jpg" for k in range(10)]
        known = [{"change": change, "tags": [str(k)]} for k in range(10)]
        index.add(unit_vectors(10, seed=change), paths, [f"change {change}"] * 10, model=MODEL, metadata=known)
        if change % 3 == 0:
            index.compact(grace_seconds=0.05)
        change += 1


def hold(folder, holding, done):
    with ImageIndex.open(folder).writing():
        holding.set()
        done.wait(300)


def error_of_adding(folder, limit, answers):
    """Add with files limited to so many bytes, as a full disk would."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    index = ImageIndex.open(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        index.add(unit_vectors(4000, seed=9), [f"new/{k}" for k in range(4000)], model=MODEL)
        answers.put("no error")
    except LockedError as error:
        answers.put(f"locked: {error}")
    except OSError as error:
        answers.put(f"{type(error).__name__}: {error}")
    finally:
        answers.close()
        answers.join_thread()
        os._exit(0)
