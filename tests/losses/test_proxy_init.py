import torch

from pfml.losses.proxy_init import class_sample_proxies, kmeans_proxies, normal_proxies
from pfml.sphere import unit


def heaps(per_heap=20):
    generator = torch.Generator().manual_seed(3)
    centers = unit(torch.randn(4, 16, generator=generator))
    points = centers.repeat_interleave(per_heap, dim=0) + 0.03 * torch.randn(4 * per_heap, 16, generator=generator)
    return centers, unit(points)


def test_normal_proxies_are_unit_vectors_and_follow_their_generator():
    first, second = (normal_proxies(3, 2, 8, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first.norm(dim=-1), torch.ones(3, 2))


def test_class_samples_are_different_while_there_are_enough():
    _, points = heaps()
    chosen = class_sample_proxies(points, 10)
    assert len({tuple(row.tolist()) for row in chosen}) == 10
    assert len(class_sample_proxies(points[:3], 7)) == 7


def test_kmeans_finds_the_heaps_of_a_class():
    centers, points = heaps()
    for seed in range(5):
        found = kmeans_proxies(points, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.cdist(centers, found).min(dim=1).values.max() < 0.1


def test_kmeans_copes_with_few_and_with_equal_samples():
    _, points = heaps()
    assert kmeans_proxies(points[:2], 5).shape == (5, 16)
    assert torch.isfinite(kmeans_proxies(points[:1].expand(9, -1), 4)).all()
