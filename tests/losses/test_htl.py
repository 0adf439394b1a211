"""The hierarchical triplet loss against a plain reading of its paper: a tree of sets, triplets one by one."""

import io

import pytest
import torch

from pfml.losses.htl import HierarchicalTripletLoss, single_linkage

C, D = 7, 6


def training_set(seed=3, dtype=torch.float64):
    """Embeddings and labels of classes of 1 to 6 images, some of them near each other."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor([c for c in range(C) for _ in range([5, 2, 6, 1, 4, 3, 5][c])])
    centers = torch.randn(C, D, generator=generator, dtype=dtype)
    centers[1] = centers[0] + 0.3
    points = centers[labels] + 0.4 * torch.randn(len(labels), D, generator=generator, dtype=dtype)
    return torch.nn.functional.normalize(points), labels


def squared(x, y):
    return ((x - y) ** 2).sum()


def literal_tree(embeddings, labels, levels):
    """Spread of each class, and the threshold at which each pair of classes merges, by growing sets."""
    members = [embeddings[labels == c] for c in range(C)]
    distance = [[sum(squared(x, y) for x in p for y in q) / (len(p) * len(q)) for q in members] for p in members]
    spreads = [
        sum(squared(x, y) for x in p for y in p) / (len(p) ** 2 - len(p)) if len(p) > 1 else None for p in members
    ]
    known = [spread for spread in spreads if spread is not None]
    inner = sum(known) / len(known)
    spreads = [inner if spread is None else spread for spread in spreads]
    merges = {}
    for level in range(levels + 1):
        threshold = inner + level * (4 - inner) / levels
        groups = [{c} for c in range(C)]
        while True:
            pair = next(
                (
                    (p, q)
                    for p in groups
                    for q in groups
                    if p is not q and (level == levels or any(distance[i][j] < threshold for i in p for j in q))
                ),
                None,
            )
            if pair is None:
                break
            groups = [g for g in groups if g is not pair[0] and g is not pair[1]] + [pair[0] | pair[1]]
        for group in groups:
            for i in group:
                for j in group:
                    merges.setdefault((i, j), threshold)
    return spreads, merges, distance


def literal(points, labels, spreads, merges, beta):
    points = torch.nn.functional.normalize(points)
    total, count = 0, 0
    for a in range(len(labels)):
        for p in range(len(labels)):
            for n in range(len(labels)):
                if p != a and labels[p] == labels[a] and labels[n] != labels[a]:
                    i, j = int(labels[a]), int(labels[n])
                    margin = beta + merges[i, j] - spreads[i]
                    hinge = squared(points[a], points[p]) - squared(points[a], points[n]) + margin
                    total = total + torch.relu(hinge)
                    count += 1
    return total / (2 * count)


def batch(n=14, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(n, D, generator=generator, dtype=dtype).requires_grad_(), torch.arange(n) % 5


def make(levels=16, **options):
    loss = HierarchicalTripletLoss(C, D, levels=levels, **options).double()
    loss.start_epoch(*training_set())
    return loss


@pytest.mark.parametrize(("levels", "beta"), [(16, 0.1), (3, -0.4)])
def test_value_and_gradient_are_those_of_the_published_loss(levels, beta):
    loss, (points, labels) = make(levels, beta=beta), batch()
    spreads, merges, _ = literal_tree(*training_set(), levels)
    expected = literal(points, labels, spreads, merges, beta)
    value = loss(points, labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    (mine,), (theirs,) = torch.autograd.grad(value, points), torch.autograd.grad(expected, points)
    assert mine.abs().max() > 0
    torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-12)


def test_the_tree_merges_near_classes_first():
    loss = make(levels=8)
    spreads, merges, _ = literal_tree(*training_set(), 8)
    torch.testing.assert_close(loss.spreads, torch.stack(spreads), rtol=1e-8, atol=0)
    everything = loss.margins(torch.arange(C)) + loss.spreads[:, None] - 0.1
    for (i, j), threshold in merges.items():
        assert everything[i, j].item() == pytest.approx(threshold.item(), rel=1e-8)
    assert everything[0, 1] < everything[0, 2:].max()


def test_neighbors_are_the_nearest_classes_by_the_mean_distance_of_their_images():
    loss = make()
    distance = torch.tensor(literal_tree(*training_set(), 4)[2]).fill_diagonal_(torch.inf)
    assert torch.equal(loss.class_neighbors(3), distance.argsort(dim=1)[:, :3])


def test_a_class_without_images_is_nobodys_neighbor():
    points, labels = training_set()
    loss = HierarchicalTripletLoss(C + 1, D)
    loss.start_epoch(points, labels)
    assert (loss.class_neighbors(C - 1)[:C] < C).all()
    assert torch.isfinite(loss.margins(torch.arange(C + 1))).all()


def test_single_linkage_is_that_of_scipy():
    from scipy.sparse.csgraph import minimum_spanning_tree

    points = torch.randn(20, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    distances = torch.cdist(points, points)
    expected = sorted(minimum_spanning_tree(distances.numpy()).data.tolist())
    assert sorted(edge[2] for edge in single_linkage(distances)) == pytest.approx(expected)


def test_before_the_first_tree_all_margins_are_beta():
    loss, (points, labels) = HierarchicalTripletLoss(C, D, beta=0.3).double(), batch()
    zero = dict.fromkeys(((i, j) for i in range(C) for j in range(C)), 0.0)
    assert loss(points, labels).item() == pytest.approx(literal(points, labels, [0.0] * C, zero, 0.3).item())


def test_terms_tell_how_many_triplets_act_and_the_mean_margin():
    loss, (points, labels) = make(), batch()
    loss(points, labels)
    spreads, merges, _ = literal_tree(*training_set(), 16)
    units = torch.nn.functional.normalize(points)
    margins, active = [], []
    for a in range(len(labels)):
        for p in range(len(labels)):
            for n in range(len(labels)):
                if p != a and labels[p] == labels[a] != labels[n]:
                    margins.append(0.1 + merges[int(labels[a]), int(labels[n])] - spreads[int(labels[a])])
                    active.append(squared(units[a], units[p]) + margins[-1] > squared(units[a], units[n]))
    assert loss.terms["margin"].item() == pytest.approx(torch.stack(margins).mean().item())
    assert loss.terms["active"].item() == pytest.approx(torch.stack(active).double().mean().item())
    assert not any(term.requires_grad for term in loss.terms.values())


def test_gradcheck():
    loss, (points, labels) = make(), batch(n=6)
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), (points,))


@pytest.mark.parametrize("labels", [[], [3], [1, 1, 1], [0, 1, 2]])
def test_without_a_triplet_there_is_nothing_to_learn(labels):
    loss = make()
    points = torch.randn(len(labels), D, dtype=torch.float64, requires_grad=True)
    value = loss(points, torch.tensor(labels, dtype=torch.int64))
    value.backward()
    assert value.item() == 0
    assert (points.grad == 0).all()


def test_the_tree_is_part_of_the_state_dict():
    loss, stored = make(), io.BytesIO()
    torch.save(loss.state_dict(), stored)
    stored.seek(0)
    other = HierarchicalTripletLoss(C, D).double()
    assert other(*batch()).item() != loss(*batch()).item()
    other.load_state_dict(torch.load(stored))
    assert torch.equal(other(*batch()), loss(*batch()))
    assert torch.equal(other.class_neighbors(4), loss.class_neighbors(4))


def test_half_precision_and_autocast_are_computed_in_single_precision():
    loss = make().float()
    points, labels = batch(dtype=torch.float32)
    plain = loss(points, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(points, labels), plain)
    assert loss(points.half() * 100, labels).dtype == torch.float32
    torch.testing.assert_close(loss(points.half() * 100, labels), plain, rtol=1e-2, atol=0)


def test_bad_input_is_named():
    points, labels = batch()
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 7\), got 9 at index 2"):
        make()(points, labels.index_fill(0, torch.tensor([2]), 9))
    for wrong in ({"levels": 0}, {"beta": float("nan")}, {"num_classes": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            HierarchicalTripletLoss(**{"num_classes": 3, "embedding_dim": 8, **wrong})
