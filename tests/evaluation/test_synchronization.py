"""How often evaluation synchronizes with the device, counted on a CPU and on a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pfml.data.image_set import ImageSet
from pfml.data.image_source import open_images
from pfml.evaluation import embed, ranks, retrieval_metrics
from pfml.evaluation.nearest_neighbors import directions
from pfml.models import create_embedder

#: Operations whose result, or its size, must be known before the next one can be given to a GPU.
SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "is_nonzero")
LARGEST_PER_SIDE = 3
ONCE = 40


class Synchronizations(TorchDispatchMode):
    """Counts them."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        of_unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
        self.count += name in SYNCHRONIZING or name.startswith(("unique", "_unique")) or by_mask or of_unknown_size
        return operation(*args, **kwargs)


def crowd(num_points, num_classes, spread, dims=32):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(num_classes, (num_points,), generator=generator)
    centers = torch.randn(num_classes, dims, generator=generator)
    return centers[labels] + spread * torch.randn(num_points, dims, generator=generator), labels


@pytest.fixture
def like_a_gpu(monkeypatch):
    monkeypatch.setattr(ranks, "_may_synchronize", lambda device: False)
    monkeypatch.setattr(ranks, "_where", lambda mask: mask.nonzero().unbind(1))
    monkeypatch.setitem(ranks.TILE_PAIRS, "cpu", 2**20)
    monkeypatch.setattr(ranks, "PAIRS_AT_ONCE", 2**18)  # as much less than a tile as it is on a GPU


@pytest.fixture
def sides(monkeypatch):
    """The synchronizations of each call of `count`: one per side of a tile."""
    counts = []
    count = ranks.RankCounter.count

    def watched(self, *args, **kwargs):
        with Synchronizations() as synchronizations:
            count(self, *args, **kwargs)
        counts.append(synchronizations.count)

    monkeypatch.setattr(ranks.RankCounter, "count", watched)
    return counts


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("spread", [0.2, 0.7, 3.0])
@pytest.mark.parametrize("with_gallery", [False, True])
def test_a_gpu_synchronizes_at_most_three_times_per_side_of_a_tile(sides, spread, with_gallery):
    embeddings, labels = crowd(3_000, 600, spread, dims=16)
    gallery = {"gallery": embeddings[:2_000], "gallery_labels": labels[:2_000]} if with_gallery else {}
    with Synchronizations() as synchronizations:
        retrieval_metrics(embeddings, labels, **gallery)
    assert len(sides) >= 9
    assert max(sides) <= LARGEST_PER_SIDE
    assert synchronizations.count - sum(sides) <= ONCE


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("spread", [0.2, 0.7, 3.0])
@pytest.mark.parametrize("with_gallery", [False, True])
def test_the_path_of_a_gpu_gives_the_same_bits(monkeypatch, spread, with_gallery):
    embeddings, labels = crowd(1_500, 300, spread, dims=16)
    embeddings[50:60] = embeddings[2]
    gallery = {"gallery": embeddings[20:], "gallery_labels": labels[20:]} if with_gallery else {}
    found = retrieval_metrics(embeddings, labels, **gallery)
    monkeypatch.undo()
    assert found == retrieval_metrics(embeddings, labels, **gallery)


@pytest.mark.parametrize("at_once", [1, 50, 2_000])
@pytest.mark.parametrize("may_synchronize", [False, True])
def test_very_many_pairs_are_counted_in_chunks(monkeypatch, at_once, may_synchronize):
    embeddings = torch.ones(100, 16) + 1e-7 * torch.randn(100, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(100) % 7
    expected = retrieval_metrics(embeddings, labels)
    largest = 0
    count_pairs = ranks.RankCounter._count_pairs

    def watched(self, query, *args):
        nonlocal largest
        largest = max(largest, len(query))
        count_pairs(self, query, *args)

    monkeypatch.setattr(ranks, "_may_synchronize", lambda device: may_synchronize)
    monkeypatch.setattr(ranks, "PAIRS_AT_ONCE", at_once)
    monkeypatch.setattr(ranks.RankCounter, "_count_pairs", watched)
    assert retrieval_metrics(embeddings, labels) == expected
    assert largest <= max(at_once, 100)  # a row is not divided


def test_a_tile_of_a_gpu_is_large_and_its_sides_are_even():
    edge = ranks._edge(ranks.TILE_PAIRS["cuda"])
    assert edge % 64 == 0
    assert 6 * edge**2 <= 2**29  # with its masks
    assert len(list(ranks._blocks(60_502, edge))) <= 12
    assert ranks._edge(100) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.2, 0.7, 3.0])
def test_a_gpu_gives_the_same_bits_as_a_cpu(spread):
    embeddings, labels = crowd(20_000, 4_000, spread, dims=128)
    points = directions(embeddings, "embeddings")  # so that both begin with the same bits
    assert retrieval_metrics(points.cuda(), labels.cuda()) == retrieval_metrics(points, labels)


@pytest.mark.gpu
def test_a_gpu_synchronizes_no_more_often_than_counted(monkeypatch):
    embeddings, labels = crowd(30_000, 6_000, 0.7, dims=128)
    embeddings, labels = embeddings.cuda(), labels.cuda()
    seen = 0
    count = ranks.RankCounter.count

    def watched(self, *args, **kwargs):
        nonlocal seen
        seen += 1
        count(self, *args, **kwargs)

    monkeypatch.setattr(ranks.RankCounter, "count", watched)
    synchronizations = gpu_synchronizations(lambda: retrieval_metrics(embeddings, labels))
    assert synchronizations <= LARGEST_PER_SIDE * seen + 2 * ONCE


def gpu_synchronizations(step):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.gpu
@pytest.mark.parametrize("opened_for", ["cpu", "cuda"])
@pytest.mark.parametrize("storage", ["memory", "device"])
def test_embedding_synchronizes_for_no_batch(opened_for, storage):
    if (opened_for, storage) == ("cpu", "device"):
        pytest.skip("pixels are in memory")
    embedder = create_embedder("convnet", embedding_dim=16, image_size=32).cuda()
    pixels = torch.randint(256, (64, 3, 40, 48), dtype=torch.uint8)
    source = open_images(ImageSet(pixels, torch.arange(64) % 4, tuple("abcd")), device=opened_for, storage=storage)
    embed(embedder, source, batch_size=8)
    assert gpu_synchronizations(lambda: embed(embedder, source, batch_size=2)) == gpu_synchronizations(
        lambda: embed(embedder, source, batch_size=16)
    )
