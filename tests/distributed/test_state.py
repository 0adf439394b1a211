"""What is stored does not depend on the number of ranks."""

import pytest
import torch
from cases import refusals_of_states, shard_of_stored_state

from pfml.distributed import shard_rows, shard_state
from pfml.losses import PotentialFieldLoss


def whole_loss(**options):
    return PotentialFieldLoss(5, 4, proxies_per_class=3, alpha=2.0, **options)


@pytest.mark.parametrize("options", [{}, {"trust": 0.3}], ids=str)
def test_a_state_goes_from_4_ranks_to_2_to_1_to_3_unchanged(world, options):
    start = whole_loss(**options)
    state = start.state_dict()
    for size in (4, 2, 1, 3):
        answers = world.run(shard_of_stored_state, size, state, options)
        sizes = [len(proxies) for proxies, _, _ in answers]
        assert sum(sizes) == 15
        assert max(sizes) - min(sizes) <= 1
        assert torch.equal(torch.cat([proxies for proxies, _, _ in answers]), start.proxies.flatten(0, 1))
        _, state, moments = answers[0]
        assert state.keys() == start.state_dict().keys()
        assert torch.equal(state["_extra_state"], start.state_dict()["_extra_state"])
        assert torch.equal(moments, 2 * start.proxies)
        assert all(gathered is None for _, gathered, _ in answers[1:])
    again = whole_loss(**options)
    again.load_state_dict(state)
    assert torch.equal(again.proxies, start.proxies)


def test_states_that_do_not_fit_are_refused_by_name(world):
    for messages in world.run(refusals_of_states, 3, whole_loss().state_dict()):
        other_rank, whole, alpha, broken, rows = (text for _, text in messages)
        assert "must be of rank" in other_rank
        assert "shard_state" in other_rank
        assert "shard_state" in whole
        assert "law.alpha: stored 4.0, here 2.0" in alpha
        assert "missing or broken" in broken
        assert rows.startswith("rank 1: rows must be (5, ...), one for each proxy, got (4, 4)")


def test_the_parts_of_any_world_are_the_whole():
    whole = torch.randn(7, 3, 2)
    for world in range(1, 30):
        parts = [shard_rows(whole, rank=rank, world=world) for rank in range(world)]
        assert torch.equal(torch.cat(parts), whole.flatten(0, 1))
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 2\), got 2"):
        shard_rows(whole, rank=2, world=2)


def test_a_whole_state_with_other_proxies_is_refused():
    state = whole_loss().state_dict()
    with pytest.raises(ValueError, match=r"proxies of shape \(5, 3, 4\), got \(5, 2, 4\)"):
        shard_state({**state, "proxies": state["proxies"][:, 1:]}, rank=0, world=2)
    with pytest.raises(ValueError, match="missing or broken"):
        shard_state({"proxies": state["proxies"]}, rank=0, world=2)
