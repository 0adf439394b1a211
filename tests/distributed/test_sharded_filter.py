"""Which samples are trusted does not depend on the number of ranks, nor on where they cut the classes."""

import pytest
import torch
from cases import batch_sizes, errors_of_mixed_modes, state_of, trusted_samples, whole_loss
from test_sharded_loss import FILTERED, LOG, OPTIONS, TRUST, WIDE, WORLDS, assert_as_one_process

from pfml.distributed.schedule import shard_sizes, shard_slice
from pfml.distributed.sharded_filter import cuts
from states import Yukawa

#: C, M and B: a class on three of four ranks; ranks without proxies; fewer samples than ranks, and none.
SIZES = [(2, 9, 11), (3, 7, 13), (3, 1, 9), (2, 1, 3), (6, 4, 0), (4, 3, 1, 2)]


def trusted_by_the_definition(state, trust, *, delta=0.2, alpha=3.0):
    """Which samples fit the field of the proxies, in loops."""
    fits = []
    for point, label in zip(state.samples.double(), state.sample_labels.tolist(), strict=True):
        strengths = [0.0] * state.num_classes
        for proxy, owner in zip(state.proxies.double(), state.proxy_labels.tolist(), strict=True):
            r = (point / point.norm() - proxy / proxy.norm()).norm().item()
            strengths[owner] += max(r, delta) ** -alpha
        own = strengths.pop(label)
        fits.append(own / max(strengths))
    median = sorted(fits)[(len(fits) - 1) // 2]
    return [one >= trust * min(1, median) for one in fits]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("sizes", SIZES, ids="C{0[0]} M{0[1]} B{0[2]}".format)
def test_classes_may_be_cut_anywhere_and_ranks_be_empty(world, sizes, size):
    assert_as_one_process(world, size, FILTERED["log, filtered"], sizes=sizes)
    assert_as_one_process(world, size, FILTERED["wide repulsion, filtered"], sizes=sizes)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_acts_as_in_one_process(world, option):
    assert_as_one_process(world, 3, {**LOG, **TRUST, **OPTIONS[option]})


def test_a_law_of_ones_own_acts_as_in_one_process(world):
    assert_as_one_process(world, 3, {"potential": Yukawa(), **TRUST})


@pytest.mark.parametrize("spread", [1.0, 0.05, 0.0])
def test_scattered_crowded_and_coincident_charges(world, spread):
    assert_as_one_process(world, 3, {**LOG, "trust": 1.0}, spread=spread)  # at 0.0 all fit as well as the median


@pytest.mark.parametrize("deal", ["uneven", "empty"])
@pytest.mark.parametrize("size", WORLDS)
def test_the_trusted_are_those_of_the_definition_on_every_rank_and_alone_are_acted_upon(world, size, deal):
    state, law = state_of(0.4), {"delta": 0.3, "alpha": 6.0}
    expected = trusted_by_the_definition(state, 0.9, **law)
    assert 0.3 < sum(expected) / len(expected) < 0.9
    answers = world.run(trusted_samples, size, {**WIDE, **TRUST}, 0.4, deal)
    assert torch.cat([kept for kept, _, _ in answers]).tolist() == expected
    for kept, in_training, in_evaluation in answers:
        assert torch.equal(in_training.abs().sum(dim=1) > 0, kept)
        assert (in_evaluation.abs().sum(dim=1) > 0).all(), "in evaluation mode all labels count"


def test_the_median_is_that_of_the_global_batch(world):
    state, options = state_of(0.4), {**WIDE, "trust": 1.0}
    whole = whole_loss(state, options, torch.float32)
    sizes = batch_sizes(len(state.samples), 4, "uneven")
    answers = world.run(trusted_samples, 4, options, 0.4, "uneven")
    together = torch.cat([kept for kept, _, _ in answers])
    assert torch.equal(together, whole.trusted(state.samples, state.sample_labels))
    batches = zip(state.samples.split(sizes), state.sample_labels.split(sizes), strict=True)
    one_by_one = torch.cat([whole.trusted(*batch) for batch in batches])
    assert not torch.equal(together, one_by_one)


def test_a_rank_in_another_mode_is_refused_by_all_and_no_rank_waits(world):
    answers = world.run(errors_of_mixed_modes, 3, {**WIDE, **TRUST})
    assert len({value for _, value in answers}) == 1
    for (kind, text), _ in answers:
        assert kind == "RuntimeError"
        assert "some in training mode and others not" in text
    assert all(message is None for message, _ in world.run(errors_of_mixed_modes, 3, WIDE))


def test_without_trust_all_are_trusted(world):
    assert all(kept.all() for kept, _, _ in world.run(trusted_samples, 2, WIDE, 0.4, "uneven"))


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize(("num_classes", "per_class"), [(7, 3), (2, 9), (3, 1), (1, 40), (5, 4), (64, 2), (2, 1)])
def test_every_class_is_complete_at_its_owner(num_classes, per_class, world_size):
    sizes = shard_sizes(num_classes * per_class, world_size)
    proxies_at_home = [0] * num_classes
    for rank in range(world_size):
        cut, rows = cuts(sizes, per_class, rank), shard_slice(sizes, rank)
        assert (cut.owner is None) == (cut.head == 0)
        for row in range(rows.start + cut.head, rows.stop):
            proxies_at_home[row // per_class] += 1
        if cut.tail:
            proxies_at_home[(rows.stop - 1) // per_class] += sum(cuts(sizes, per_class, one).head for one in cut.others)
        else:
            assert cut.others == []
        assert all(cuts(sizes, per_class, other).owner == rank for other in cut.others)
    assert proxies_at_home == [per_class] * num_classes
