"""DCML, against the published loss in plain Python."""

import math

import pytest
import torch
from literal_triplets import literal_margin, record_triplets

from pfml.losses import DCMLLoss, dcml

C, D = 5, 12


def literal(embeddings, labels, loss, drawn):
    """Each compositor weighs the sub-embeddings of each sample, and its largest weight is reinforced."""
    width, parts = D // loss.num_parts, loss.num_parts
    composites, reinforcement = [], 0.0
    for compositor in range(loss.num_composites):
        rows = []
        for embedding in embeddings:
            x = math.sqrt(D) * embedding / embedding.norm()
            scores = []
            for part in range(parts):
                row = compositor * parts + part
                scores.append(loss.compositors.weight[row] @ x.detach() + loss.compositors.bias[row])
            shares = [torch.exp(score) / sum(torch.exp(other) for other in scores) for score in scores]
            rows.append(sum(share * x[width * k : width * (k + 1)] for k, share in enumerate(shares)))
            reinforcement = reinforcement - torch.log(max(shares)) / len(embeddings)
        composites.append(rows)
    if loss.of == "all":
        composites = [[torch.cat(rows) for rows in zip(*composites, strict=True)]]
    total, weights = loss.reinforcement * reinforcement, [1.0] * len(composites)
    if loss.ensemble:
        split = [[row[width * k : width * (k + 1)] for k in range(parts)] for row in embeddings]
        composites.append([torch.cat([part / part.norm() for part in row]) for row in split])
        weights.append(loss.ensemble)
    for weight, composite, triplets, beta in zip(weights, composites, drawn, loss.boundaries, strict=True):
        points = [row / row.norm() for row in composite]
        total = total + weight * literal_margin(points, labels.tolist(), triplets, beta, loss.margin)
    return total


def make(**options):
    torch.manual_seed(1)
    loss = DCMLLoss(C, D, **options)
    with torch.no_grad():
        loss.boundaries.copy_(torch.rand(loss.boundaries.shape) + 0.5)
    return loss


def batch(n=9, dtype=torch.float32):
    embeddings = torch.randn(n, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return embeddings.to(dtype).requires_grad_(), torch.arange(n) % (C - 1)


def value_of(loss, n=9):
    torch.manual_seed(3)
    return loss(*batch(n))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"of": "all"},
        {"num_parts": 3, "num_composites": 5, "reinforcement": 0.3, "margin": 0.1},
        {"num_composites": 1},
    ],
    ids=["plain", "all", "other", "one"],
)
def test_value_and_gradients_are_those_of_the_published_loss(options, monkeypatch):
    loss = make(**options).double()
    drawn = record_triplets(monkeypatch, dcml)
    embeddings, labels = batch(dtype=torch.float64)
    value, inputs = loss(embeddings, labels), [embeddings, *loss.parameters()]
    expected = literal(embeddings, labels, loss, drawn)
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    theirs = torch.autograd.grad(expected, inputs)
    for mine, reference in zip(torch.autograd.grad(value, inputs), theirs, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, reference, rtol=1e-7, atol=1e-10)


def test_reinforcement_makes_compositors_choose_one_part():
    torch.manual_seed(0)
    loss = make(compositor_lr=0.05)
    embeddings, labels = torch.randn(32, D), torch.zeros(32, dtype=torch.int64)  # one class: there is no other term
    optimizer = torch.optim.Adam(loss.param_groups(lr=0.0))
    first = loss(embeddings, labels).item()
    for _ in range(100):
        optimizer.zero_grad()
        loss(embeddings, labels).backward()
        optimizer.step()
    assert first > 2
    assert loss(embeddings, labels).item() < 0.2 * first


def test_parts_keep_their_lengths_relative_to_each_other():
    loss, (embeddings, labels) = make(), batch()
    uneven = embeddings * torch.tensor([1.0, 1, 1, 9, 9, 9, 1, 1, 1, 1, 1, 1])
    values = []
    for points in (embeddings, 7 * embeddings, uneven):
        torch.manual_seed(3)
        values.append(loss(points, labels).item())
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0] != pytest.approx(values[2], rel=1e-2)


@pytest.mark.parametrize("labels", [[], [1], [2, 2, 2]])
def test_a_batch_without_triplets_has_no_gradient_for_the_embedding(labels):
    loss, (embeddings, _) = make(), batch(len(labels))
    loss(embeddings, torch.tensor(labels, dtype=torch.int64)).backward()
    assert embeddings.grad.numel() == 0 or embeddings.grad.abs().max() == 0
    assert loss.boundaries.grad.abs().max() == 0


@pytest.mark.parametrize(
    "option",
    [{"num_parts": 2}, {"num_composites": 2}, {"of": "all"}, {"reinforcement": 0.5}, {"margin": 0.4}, {"cutoff": 1.9}],
)
def test_every_option_changes_the_loss(option):
    assert value_of(make(**option), n=40).item() != pytest.approx(value_of(make(), n=40).item(), rel=1e-4)


def test_terms_add_up_to_the_loss():
    loss = make(reinforcement=0.3, ensemble=0.6)
    value, terms = value_of(loss), loss.terms
    expected = terms["composites"] + 0.3 * terms["reinforcement"] + 0.6 * terms["ensemble"]
    torch.testing.assert_close(value, expected)
    alone = make(ensemble=0.0)
    value_of(alone)
    assert set(alone.terms) == {"composites", "reinforcement"}


def test_rates_are_those_of_boundaries_and_compositors():
    loss = make(compositor_lr=0.02)
    boundaries, compositors = loss.param_groups(lr=0.5, weight_decay=0.1)
    assert (boundaries["lr"], compositors["lr"]) == (0.5, 0.02)
    assert boundaries["params"] == [loss.boundaries]
    assert len(compositors["params"]) == 2
    assert DCMLLoss(C, D, beta=0.7).boundaries.mean().item() == pytest.approx(0.7)


def test_its_description_names_the_options():
    assert "5, 12, num_parts=4, num_composites=4, of='each', reinforcement=1.0" in repr(make())


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_classes": 0},
        {"embedding_dim": 10},
        {"num_parts": 0},
        {"num_composites": True},
        {"of": "none"},
        {"reinforcement": -1.0},
        {"ensemble": -1.0},
        {"margin": -0.1},
        {"beta": 0.0},
        {"cutoff": 0.0},
        {"compositor_lr": 0.0},
    ],
)
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DCMLLoss(**{"num_classes": 3, "embedding_dim": 8, **wrong})
