"""S2SD, against the published loss in plain Python."""

import math

import pytest
import torch
from literal_triplets import literal_margin, record_triplets

from pfml.losses import S2SDLoss, s2sd

C, D, F = 5, 6, 7


def normalized(vector):
    return vector / vector.norm()


def literal_multi_similarity(points, labels, loss):
    values = []
    for i, x in enumerate(points):
        cosines = [x @ y for y in points]
        positives = [s for j, s in enumerate(cosines) if labels[j] == labels[i] and j != i]
        negatives = [s for j, s in enumerate(cosines) if labels[j] != labels[i]]
        if not positives or not negatives:
            continue
        near = [s for s in positives if s - loss.epsilon < max(negatives)]
        far = [s for s in negatives if s + loss.epsilon > min(positives)]
        if near and far:
            total = torch.log(1 + sum(torch.exp(-loss.alpha * (s - loss.base)) for s in near)) / loss.alpha
            values.append(total + torch.log(1 + sum(torch.exp(loss.beta * (s - loss.base)) for s in far)) / loss.beta)
    return sum(values) / len(values) if values else torch.zeros(())


def literal_divergence(points, targets, temperature):
    """Mean over rows of sum p_target log(p_target / p_points), times temperature^2."""
    total = 0.0
    for i in range(len(points)):
        mine = [(points[i] @ y) / temperature for y in points]
        theirs = [(targets[i] @ y).detach() / temperature for y in targets]
        log_mine = torch.log(sum(torch.exp(one) for one in mine))
        log_theirs = torch.log(sum(torch.exp(one) for one in theirs))
        for a, b in zip(mine, theirs, strict=True):
            total = total + torch.exp(b - log_theirs) * ((b - log_theirs) - (a - log_mine))
    return total / len(points) * temperature**2


def literal(embeddings, labels, features, loss, objective, *, with_features):
    points = [normalized(x) for x in embeddings]
    spaces = []
    for net in loss.targets:
        hidden = [torch.relu(net.linear1.weight @ f + net.linear1.bias) for f in features]
        spaces.append([normalized(net.linear2.weight @ h + net.linear2.bias) for h in hidden])
    own = objective(points, labels.tolist(), 0)
    theirs = sum(objective(space, labels.tolist(), 1 + k) for k, space in enumerate(spaces)) / len(spaces)
    distilled = sum(literal_divergence(points, space, loss.temperature) for space in spaces) / len(spaces)
    value = (own + theirs) / 2 + loss.distillation * distilled
    if with_features:
        pooled = [normalized(f).detach() for f in features]
        value = value + loss.feature_distillation * literal_divergence(points, pooled, loss.temperature)
    return value


def make(**options):
    torch.manual_seed(1)
    loss = S2SDLoss(C, D, F, **{"target_dims": [4, 9], "feature_delay": 1, **options})
    if loss.boundaries is not None:
        with torch.no_grad():
            loss.boundaries.copy_(torch.rand(3, C) + 0.5)
    return loss


def batch(n=9, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    embeddings, features = (torch.randn(n, k, generator=generator, dtype=torch.float64).to(dtype) for k in (D, F))
    return embeddings.requires_grad_(), torch.arange(n) % C, features.requires_grad_()  # of 9, the last class has one


def value_of(loss, n=9, dtype=torch.float32):
    embeddings, labels, features = batch(n, dtype)
    torch.manual_seed(3)
    return loss(embeddings, labels, features=features)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3, "distillation": 3.0, "feature_distillation": 7.0},
        {"alpha": 5.0, "beta": 10.0, "base": 0.2},
    ],
    ids=["plain", "distillation", "multi-similarity"],
)
@pytest.mark.parametrize("extends", ["multi-similarity", "margin"])
def test_value_and_gradients_are_those_of_the_published_loss(extends, options, monkeypatch):
    loss = make(extends=extends, **options).double()
    drawn = record_triplets(monkeypatch, s2sd)

    def objective(points, labels, number):
        if extends == "margin":
            return literal_margin(points, labels, drawn[number], loss.boundaries[number], loss.margin)
        return literal_multi_similarity(points, labels, loss)

    embeddings, labels, features = batch(dtype=torch.float64)
    inputs = [embeddings, features, *loss.parameters()]
    for with_features in (False, True):  # they come after one step
        drawn.clear()
        value = loss(embeddings, labels, features=features)
        expected = literal(embeddings, labels, features, loss, objective, with_features=with_features)
        assert value.item() == pytest.approx(expected.item(), rel=1e-10)
        theirs = torch.autograd.grad(expected, inputs)
        for mine, reference in zip(torch.autograd.grad(value, inputs), theirs, strict=True):
            assert mine.abs().max() > 0
            torch.testing.assert_close(mine, reference, rtol=1e-8, atol=1e-11)


def test_features_are_distilled_after_so_many_steps_of_training_only():
    loss = make(feature_delay=2)
    for _ in range(2):
        value_of(loss)
        assert loss.terms["features"].item() == 0
    loss.eval()
    value_of(loss)
    assert loss.steps.item() == 2
    assert loss.terms["features"].item() > 0


def test_a_state_dict_brings_the_count_of_steps_back():
    loss, other = make(feature_delay=2), make(feature_delay=2)
    for _ in range(2):
        value_of(loss)
    other.load_state_dict(loss.state_dict())
    assert torch.equal(value_of(loss), value_of(other))
    assert other.terms["features"].item() > 0


def test_terms_add_up_to_the_loss():
    loss = make(distillation=3.0, feature_distillation=5.0, feature_delay=0)
    value, terms = value_of(loss), loss.terms
    expected = (terms["embedding"] + terms["targets"]) / 2 + 3 * terms["distillation"] + 5 * terms["features"]
    torch.testing.assert_close(value, expected)
    assert not any(term.requires_grad for term in terms.values())


def test_an_embedding_with_the_cosines_of_its_targets_has_no_divergence():
    loss = make()
    cosines = torch.eye(4)
    assert loss._divergence(cosines, torch.eye(4)).item() == pytest.approx(0, abs=1e-6)
    assert loss._divergence(cosines, torch.eye(4)[[0, 0, 1, 1]]).item() > 0.01


@pytest.mark.parametrize("extends", ["multi-similarity", "margin"])
@pytest.mark.parametrize("labels", [[], [0], [0, 1, 2, 3], [2, 2, 2]])
def test_batches_without_pairs_have_finite_gradients(extends, labels):
    loss = make(extends=extends)
    embeddings, _, features = batch(len(labels))
    loss(embeddings, torch.tensor(labels, dtype=torch.int64), features=features).backward()
    for one in (embeddings, features, *loss.parameters()):
        assert torch.isfinite(one.grad).all()
    if len(labels) > 1:
        assert loss.terms["embedding"].item() == loss.terms["targets"].item() == 0


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.5},
        {"distillation": 2.0},
        {"feature_distillation": 2.0},
        {"alpha": 3.0},
        {"beta": 10.0},
        {"base": 0.1},
        {"epsilon": 0.6},
        {"target_dims": (4, 4)},
        {"extends": "margin"},
    ],
)
def test_every_option_changes_the_loss(option):
    assert value_of(make(feature_delay=0, **option)).item() != pytest.approx(value_of(make(feature_delay=0)).item())


@pytest.mark.parametrize("option", [{"margin": 0.4}, {"cutoff": 1.9}, {"rho": 0.5}])
def test_every_option_of_the_margin_loss_changes_it(option):
    plain, changed = make(extends="margin"), make(extends="margin", **option)
    assert value_of(changed, n=40).item() != pytest.approx(value_of(plain, n=40).item())
    assert S2SDLoss(C, D, F, extends="margin", margin_beta=0.7).boundaries.mean().item() == pytest.approx(0.7)


def test_features_of_another_width_are_refused():
    embeddings, labels, features = batch()
    with pytest.raises(ValueError, match=r"features must be \(9, 7\), got shape \(9, 3\)"):
        make()(embeddings, labels, features=features[:, :3])


def test_parameters_are_one_group():
    (group,) = make(extends="margin").param_groups(lr=0.5, weight_decay=0.1)
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    assert len(group["params"]) == 2 * 4 + 1


def test_its_description_names_the_options():
    assert "extends='multi-similarity', target_dims=(4, 9), temperature=1.0" in repr(make())
    assert "margin=0.2, margin_beta=1.2, cutoff=0.5" in repr(make(extends="margin"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_classes": 0},
        {"num_features": 0},
        {"extends": "triplet"},
        {"target_dims": []},
        {"target_dims": [8, 0]},
        {"temperature": 0.0},
        {"distillation": -1.0},
        {"feature_distillation": math.inf},
        {"feature_delay": -1},
        {"alpha": 0.0},
        {"beta": -2.0},
        {"base": math.nan},
        {"epsilon": -0.1},
        {"margin": -0.1},
        {"margin_beta": 0.0},
        {"cutoff": 0.0},
        {"rho": 1.5},
    ],
)
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        S2SDLoss(**{"num_classes": 3, "embedding_dim": 8, "num_features": 4, **wrong})
