import pytest
import torch
from loops import kept_pairs, multi_similarity

from pfml.losses.das import DASLoss

C, D = 4, 6


class Memory:
    """Both memories in plain Python."""

    def __init__(self, loss):
        self.loss = loss
        self.counts = [[0] * D for _ in range(C)]
        self.differences = [[] for _ in range(C)]

    def see(self, points, labels):
        labels = labels.tolist()
        for x, c in zip(points, labels, strict=True):
            for k in sorted(range(D), key=lambda k: -float(x[k]))[: self.loss.num_scaled]:
                self.counts[c][k] += 1
        for i, c in enumerate(labels):
            self.differences[c] += [points[i] - points[j] for j in range(len(labels)) if j != i and labels[j] == c]
        self.differences = [kept[-self.loss.memory_size :] for kept in self.differences]


def literal(loss, points, labels):
    """The multi-similarity loss of points that are there, in loops."""
    unit = [x / x.norm() for x in points]
    cosine = lambda i, j: unit[i] @ unit[j]  # noqa: E731
    pairs = kept_pairs(points, labels, loss.epsilon)
    terms = multi_similarity(cosine, pairs, alpha=loss.alpha, beta=loss.beta, base=loss.base)
    terms = [term for term, (positives, negatives) in zip(terms, pairs, strict=True) if positives and negatives]
    return sum(terms) / len(terms)


def make(**options):
    return DASLoss(C, D, **{"num_scaled": 2, "memory_size": 7, **options}).double()


def batch(seed=0, labels=(0, 0, 0, 1, 1, 2, 2, 3, 0)):
    points = torch.randn(len(labels), D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (points / points.norm(dim=1, keepdim=True)).requires_grad_(), torch.tensor(labels)


def test_both_memories_are_those_of_plain_python():
    loss = make()
    memory = Memory(loss)
    # 12 differences of class 0 are more than the memory has, and rings wrap around
    for seed, labels in enumerate([(0, 0, 0, 0, 1, 1, 2), (1, 0, 1, 0, 3, 3, 1), (1, 1, 1, 2, 2, 0, 3), (2, 2, 2, 3)]):
        points, targets = batch(seed, labels)
        points = points.detach().float().double()
        loss.memorize(points, targets)
        memory.see(points, targets)
        assert loss.frequencies.tolist() == memory.counts
        for c in range(C):
            assert int(loss.filled[c]) == len(memory.differences[c])
            if not memory.differences[c]:
                continue
            ring = loss.differences[c * 7 : c * 7 + len(memory.differences[c])]
            wanted = torch.stack(memory.differences[c])
            # in the ring the oldest may stand anywhere
            assert all((ring - one).abs().sum(dim=1).min() < 1e-9 for one in wanted)


@pytest.mark.parametrize("options", [{}, {"alpha": 3.0, "beta": 9.0, "base": 0.3, "epsilon": 0.4}])
def test_without_produced_embeddings_it_is_the_published_multi_similarity(options):
    loss, (points, labels) = make(num_produced=0, **options), batch()
    expected = literal(loss, points, labels)
    value = loss(points, labels)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, points)[0] for one in (value, expected)))
    torch.testing.assert_close(loss.terms["pull"] + loss.terms["push"], value.detach())


@pytest.mark.parametrize("detach", [True, False])
def test_the_loss_is_over_samples_and_produced_embeddings(detach):
    loss = make(detach=detach, num_produced=2, shift_weight=0.2, scale_low=0.5, scale_high=2.0)
    points, labels = batch()
    torch.manual_seed(3)
    value = loss(points, labels)
    torch.manual_seed(3)
    on_sphere = points / points.norm(dim=1, keepdim=True)
    produced = [loss.produce(on_sphere, labels) for _ in range(2)]  # the memories have seen the batch
    expected = literal(loss, torch.cat([on_sphere, *produced]), labels.repeat(3))
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, points)[0] for one in (value, expected)))
    assert produced[0].requires_grad == (not detach)


def test_a_produced_embedding_is_scaled_in_the_frequent_features_of_its_class_and_shifted_by_a_memory():
    loss, (points, labels) = make(scale_low=3.0, scale_high=3.0, shift_weight=0.0), batch()
    loss.memorize(points, labels)
    frequent = loss.frequencies[labels].topk(2, dim=1).indices
    expected = points.detach().clone()
    for row, features in enumerate(frequent.tolist()):
        expected[row, features] *= 3
    torch.testing.assert_close(loss.produce(points, labels), expected / expected.norm(dim=1, keepdim=True))
    loss = make(scale_low=1.0, scale_high=1.0, shift_weight=0.5)
    loss.memorize(points, labels)
    produced = loss.produce(points, labels)
    for row, c in enumerate(labels.tolist()):
        memory = loss.differences[c * 7 : c * 7 + int(loss.filled[c])]
        candidates = points[row].detach() + 0.5 * (memory if len(memory) else torch.zeros(1, D))
        candidates = candidates / candidates.norm(dim=1, keepdim=True)
        assert (candidates - produced[row]).abs().sum(dim=1).min() < 1e-12
    torch.testing.assert_close(produced[7], points[7].detach())  # its class has one sample


def test_scales_lie_in_their_range():
    loss, (points, labels) = make(scale_low=0.5, scale_high=2.0, shift_weight=0.0), batch()
    loss.memorize(points, labels)
    ratios = torch.stack([loss.produce(points, labels) / points.detach() for _ in range(300)])  # (300, B, D)
    factors = ratios / ratios.median(dim=2, keepdim=True).values  # four features of six are not scaled
    assert factors.min() >= 0.5 - 1e-9
    assert factors.max() <= 2 + 1e-9
    assert factors.min() < 0.55
    assert factors.max() > 1.9


def test_in_evaluation_mode_nothing_is_produced_or_memorized():
    loss, (points, labels) = make().eval(), batch()
    value = loss(points, labels)
    torch.testing.assert_close(value, literal(loss, points, labels))
    assert loss.frequencies.sum() == 0
    assert loss.filled.sum() == 0


def test_the_memories_are_stored():
    loss, (points, labels) = make(), batch()
    loss(points, labels)
    other = make()
    other.load_state_dict(loss.state_dict())
    values = []
    for one in (loss, other):
        torch.manual_seed(5)
        values.append(one(points, labels))
    assert torch.equal(*values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must be positive"),
        ({"beta": -1.0}, "beta must be positive"),
        ({"num_produced": -1}, "num_produced must be an integer >= 0"),
        ({"memory_size": 0}, "memory_size must be an integer >= 1"),
        ({"num_scaled": 1.5}, "num_scaled must be an integer >= 1"),
        ({"scale_low": 2.0}, "scale_low must lie in"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DASLoss(C, D, **options)
