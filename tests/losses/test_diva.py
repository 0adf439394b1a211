"""DiVA, against the published loss in plain Python."""

import math

import pytest
import torch
from literal_triplets import literal_margin, record_triplets

from pfml.losses import DiVALoss, diva

C, D, WIDTH = 5, 16, 4
NAMES = ("discriminative", "sample", "shared", "intra")


def normalized(vector):
    return vector / vector.norm()


def literal_sample(points, keys, queue, loss):
    """Momentum contrast, each negative's cosine times its distance-weighted share."""
    total = 0.0
    for x, k in zip(points, keys, strict=True):
        weights = []
        for q in queue:
            r = max((x - q).norm().item(), loss.cutoff)
            density = r ** (WIDTH - 2) * (1 - r * r / 4) ** ((WIDTH - 3) / 2)
            weights.append(0.0 if r > loss.queue_cutoff else 1 / density)
        shares = [weight / sum(weights) for weight in weights]
        own = (x @ k) / loss.temperature
        others = [share * (x @ q) / loss.temperature for share, q in zip(shares, queue, strict=True)]
        total = total - own + torch.log(sum(torch.exp(one) for one in [own, *others]))
    return total / len(points)


def literal_decorrelation(heads, loss):
    total = 0.0
    for name in ("sample", "shared", "intra"):
        net = loss.adversaries[name]
        for disc, other in zip(heads["discriminative"], heads[name], strict=True):
            hidden = torch.relu(net.linear1.weight @ other + net.linear1.bias)
            guess = normalized(net.linear2.weight @ hidden + net.linear2.bias)
            total = total + ((disc * guess) ** 2).sum() / WIDTH / len(heads[name])
    return total


def split(embeddings):
    return {name: [normalized(row[WIDTH * i : WIDTH * (i + 1)]) for row in embeddings] for i, name in enumerate(NAMES)}


def make(**options):
    torch.manual_seed(1)
    loss = DiVALoss(C, D, **{"hidden_dim": 6, "temperature": 0.2, "queue_size": 20, **options})
    with torch.no_grad():
        loss.boundaries.copy_(torch.rand(3, C) + 0.5)
    return loss


def batch(n=10, seed=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype)
    return embeddings.requires_grad_(), torch.arange(n) % (C - 1)


def keys_of(n=10, seed=7, dtype=torch.float32):
    return batch(n, seed, dtype)[0].detach()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sample_weight": 0.1, "shared_weight": 0.4, "intra_weight": 0.7, "decorrelation": 100.0, "margin": 0.1},
        {"cutoff": 1.0, "queue_cutoff": 1.2, "temperature": 0.5, "queue_size": 7},
    ],
    ids=["plain", "weights", "distances"],
)
def test_value_and_gradients_are_those_of_the_published_loss(options, monkeypatch):
    loss = make(**options).double()
    (embeddings, labels), earlier, keys = batch(dtype=torch.float64), keys_of(seed=5), keys_of(dtype=torch.float64)
    loss(embeddings, labels, followed=earlier)
    queue = split(earlier.double())["sample"][-loss.queue_size :]
    drawn = record_triplets(monkeypatch, diva)
    value = loss(embeddings, labels, followed=keys)

    heads, of_class = split(embeddings), labels.tolist()
    parts = {
        name: literal_margin(heads[name], of_class, triplets, beta, loss.margin)
        for name, triplets, beta in zip(("discriminative", "shared", "intra"), drawn, loss.boundaries, strict=True)
    }
    parts["sample"] = literal_sample(heads["sample"], split(keys)["sample"], queue, loss)
    expected = sum(loss.weights[name] * part for name, part in parts.items())
    similarity = literal_decorrelation(heads, loss)
    weight = loss.decorrelation * (WIDTH / 128) ** 2
    assert value.item() == pytest.approx((expected - weight * similarity).item(), rel=1e-9)
    assert {name: term.item() for name, term in loss.terms.items()} == pytest.approx(
        {**{name: part.item() for name, part in parts.items()}, "decorrelation": similarity.item()}, rel=1e-9
    )

    of_heads, of_adversaries = [embeddings, loss.boundaries], list(loss.adversaries.parameters())
    mine = torch.autograd.grad(value, [*of_heads, *of_adversaries])
    # the heads get the gradient of "+ similarity", the adversaries of "- similarity"
    for gradient, reference in zip(
        mine, torch.autograd.grad(expected + weight * similarity, of_heads, retain_graph=True), strict=False
    ):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, reference, rtol=1e-7, atol=1e-10)
    for gradient, reference in zip(mine[2:], torch.autograd.grad(-weight * similarity, of_adversaries), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-7, atol=1e-10)


def test_shared_triplets_are_those_of_shuffled_labels(monkeypatch):
    drawn, loss = record_triplets(monkeypatch, diva), make()
    labels = torch.arange(12) % 3
    torch.manual_seed(0)
    for _ in range(50):
        loss(batch(12)[0], labels)
    discriminative, shared, intra = drawn[0::3], drawn[1::3], drawn[2::3]

    def share_of_own_class(batches, column):
        return sum(labels[t[0]] == labels[t[column]] for one in batches for t in one) / (50 * 12)

    assert share_of_own_class(discriminative, 1) == 1
    assert share_of_own_class(discriminative, 2) == 0
    for column in (1, 2):
        assert share_of_own_class(shared, column) == pytest.approx(3 / 11, abs=0.1)
        assert share_of_own_class(intra, column) == 1


def test_the_queue_holds_the_latest_keys_in_training_mode_only():
    loss, (embeddings, labels) = make(queue_size=15), batch()
    batches = [keys_of(seed=seed) for seed in range(3)]
    for keys in batches:
        loss(embeddings, labels, followed=keys)
    expected = torch.stack([*split(batches[1])["sample"][5:], *split(batches[2])["sample"]])
    found = {tuple(round(v, 5) for v in row) for row in loss.queue.tolist()}
    assert found == {tuple(round(v, 5) for v in row) for row in expected.tolist()}
    before = loss.queue.clone()
    loss.eval()(embeddings, labels, followed=batches[0])
    assert torch.equal(loss.queue, before)
    assert loss.queued.item() == 30


def test_an_empty_queue_has_nothing_to_tell_apart():
    loss, (embeddings, labels) = make(), batch()
    loss(embeddings, labels, followed=keys_of())
    assert loss.terms["sample"].item() == pytest.approx(0, abs=1e-6)
    loss(embeddings, labels, followed=keys_of())
    assert loss.terms["sample"] > 0.1


def test_keys_beyond_the_cutoff_have_equal_and_finite_shares():
    loss, (embeddings, labels) = make(queue_cutoff=0.1, cutoff=0.5), batch()
    for _ in range(2):
        value = loss(embeddings, labels, followed=keys_of())
    value.backward()
    assert torch.isfinite(embeddings.grad).all()
    shares = loss._shares(torch.zeros(3, 20), torch.arange(20) < 8)
    torch.testing.assert_close(shares[:, :8], torch.full((3, 8), 1 / 8))
    assert shares[:, 8:].abs().max() == 0


def test_without_a_network_that_follows_there_is_no_sample_term():
    loss = make()
    loss(*batch())
    assert "sample" not in loss.terms
    assert loss.queued.item() == 0


def test_followed_embeddings_get_no_gradient():
    loss, (embeddings, labels) = make(), batch()
    followed = keys_of().requires_grad_()
    loss(embeddings, labels, followed=followed)
    loss(embeddings, labels, followed=followed).backward()
    assert followed.grad is None


def test_a_state_dict_brings_the_queue_back():
    loss, other, (embeddings, labels) = make(), make(), batch()
    loss(embeddings, labels, followed=keys_of())
    other.load_state_dict(loss.state_dict())
    values = []
    for one in (loss, other):
        torch.manual_seed(3)
        values.append(one(embeddings, labels, followed=keys_of(seed=9)))
    assert torch.equal(*values)


def test_the_lengths_of_the_heads_change_nothing():
    loss, (embeddings, labels) = make(), batch()
    values = []
    for factors in ([1, 1, 1, 1], [3, 0.1, 7, 100]):
        torch.manual_seed(3)
        values.append(loss(embeddings * torch.tensor(factors).repeat_interleave(WIDTH), labels))
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)


def test_adversaries_learn_to_predict_and_heads_to_be_unpredictable():
    torch.manual_seed(0)
    source = torch.randn(64, WIDTH)
    embeddings = torch.cat([source, source, source, source], dim=1)
    loss = make(decorrelation=1000.0 * 32**2, hidden_dim=32, adversary_lr=1e-2)
    labels = torch.zeros(64, dtype=torch.int64)  # one class: there are no other terms
    optimizer = torch.optim.Adam(loss.param_groups(lr=0.0))

    def similarity(points):
        loss(points, labels)
        return loss.terms["decorrelation"].item()

    start = similarity(embeddings)
    for _ in range(60):
        optimizer.zero_grad()
        loss(embeddings, labels).backward()
        optimizer.step()
    learned = similarity(embeddings)
    assert learned > 1.1 * start
    points = embeddings.clone().requires_grad_()
    heads = torch.optim.Adam([points], lr=0.03)
    for _ in range(60):
        heads.zero_grad()
        loss(points, labels).backward()
        heads.step()
    assert similarity(points.detach()) < 0.8 * learned


def test_rates_are_those_of_boundaries_and_adversaries():
    loss = make(adversary_lr=0.02)
    boundaries, adversaries = loss.param_groups(lr=0.5, weight_decay=0.1)
    assert (boundaries["lr"], adversaries["lr"]) == (0.5, 0.02)
    assert boundaries["weight_decay"] == adversaries["weight_decay"] == 0.1
    assert len(boundaries["params"]) + len(adversaries["params"]) == len(list(loss.parameters()))


def test_its_description_names_the_options():
    options = (
        "5, 16, sample_weight=0.3, shared_weight=0.3, intra_weight=0.3, decorrelation=1500.0, margin=0.2, beta=1.2"
    )
    assert options in repr(make())


def test_momentum_is_told_to_the_training_loop():
    assert make(momentum=0.7).momentum == 0.7


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_classes": 0},
        {"embedding_dim": 10},
        {"queue_size": 0},
        {"hidden_dim": 1.5},
        {"sample_weight": -1.0},
        {"shared_weight": math.inf},
        {"intra_weight": -0.1},
        {"decorrelation": -1.0},
        {"margin": -0.2},
        {"beta": 0.0},
        {"cutoff": 0.0},
        {"temperature": 0.0},
        {"queue_cutoff": -1.0},
        {"momentum": 1.0},
        {"adversary_lr": 0.0},
    ],
)
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DiVALoss(**{"num_classes": 3, "embedding_dim": 8, **wrong})
