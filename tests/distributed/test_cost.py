"""The model of a step's cost, against what steps report, and the plan of who meets whom."""

from dataclasses import replace

import pytest
import torch
from cases import step_costs
from test_sharded_loss import LOG, WIDE

from pfml.distributed import ShardedProblem, step_cost
from pfml.distributed.schedule import num_pairs, schedule, shard_sizes, shard_slice
from pfml.field import PowerLaw
from pfml.superposition import Field


@pytest.mark.parametrize("world", range(1, 10))
@pytest.mark.parametrize("total", [0, 1, 2, 7, 30])
def test_every_pair_is_computed_once(world, total):
    sizes = shard_sizes(total, world)
    met = torch.zeros(total, total, dtype=torch.int64)
    for owner in range(world):
        mine = shard_slice(sizes, owner)
        met[mine, mine] += torch.ones(sizes[owner], sizes[owner], dtype=torch.int64).triu(1)
        for block in schedule(sizes, owner):
            remote = shard_slice(sizes, block.remote)
            met[mine, remote][block.own_rows, block.remote_rows] += 1
    assert torch.equal(met + met.T, 1 - torch.eye(total, dtype=torch.int64))
    assert sum(num_pairs(sizes, owner) for owner in range(world)) == total * (total - 1) // 2


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8, 64])
def test_ranks_share_the_pairs_evenly(world):
    sizes = shard_sizes(6400, world)
    pairs = [num_pairs(sizes, owner) for owner in range(world)]
    assert max(pairs) <= 1.02 * sum(pairs) / world


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        LOG,
        {"normalization": "anchor", "alpha": 16.0},
        {"proxy_space": "free", "normalize_embeddings": False},
        {**LOG, "proxy_attraction": False, "proxy_repulsion": False},
        {**WIDE, "sample_sample": False},
        {**WIDE, "trust": 0.9},
        {**LOG, "trust": 0.9},
        {"normalization": "anchor", "alpha": 16.0, "proxy_space": "free", "trust": 0.9},
    ],
    ids=str,
)
def test_pairs_bytes_and_memory_are_exactly_those_of_the_model(world, options, size):
    steps = [("uneven", torch.float32, True), ("empty", torch.float64, True), ("even", torch.float32, False)]
    for of_rank in world.run(step_costs, size, options, steps):
        for reported, modeled in of_rank:
            assert reported == modeled


def test_what_is_sent_is_received():
    for normalization in ("none", "log", "anchor"):
        problem = ShardedProblem((7, 0, 3, 9, 2), 1000, 3, 16, Field(PowerLaw(), normalization))
        costs = [step_cost(problem, rank) for rank in range(problem.world)]
        assert sum(cost.bytes_sent for cost in costs) == sum(cost.bytes_received for cost in costs) > 0


def test_what_is_sent_for_trust_grows_with_the_batch_and_not_with_the_classes():
    batch = (7, 0, 3, 9, 2)

    def sent_for_trust(sizes, num_classes, rank):
        plain = ShardedProblem(sizes, num_classes, 3, 16, Field(PowerLaw()))
        with_trust = replace(plain, trusted_sizes=sizes)
        assert sum(step_cost(with_trust, rank).bytes_sent for rank in range(5)) == sum(
            step_cost(with_trust, rank).bytes_received for rank in range(5)
        )
        return step_cost(with_trust, rank).bytes_sent - step_cost(plain, rank).bytes_sent

    for rank in range(5):
        few, many = sent_for_trust(batch, 16, rank), sent_for_trust(batch, 100_001, rank)
        assert few == many
        assert 0 < many <= 5 * 8 * sum(batch)
        assert sent_for_trust([10 * size for size in batch], 16, rank) == pytest.approx(10 * few, rel=0.05)
