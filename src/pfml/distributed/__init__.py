"""Scale-out: the work of one process over the ranks of a process group, with proxies spread over them."""

from pfml.distributed.cost import ShardedProblem, StepCost, step_cost
from pfml.distributed.gathered_loss import GatheredLoss
from pfml.distributed.launch import FailedElsewhereError, open_world
from pfml.distributed.sharded_loss import ShardedPotentialFieldLoss
from pfml.distributed.state import gather_rows, gather_state, shard_rows, shard_state
from pfml.distributed.world import Ranks, World

__all__ = [
    "FailedElsewhereError",
    "GatheredLoss",
    "Ranks",
    "ShardedPotentialFieldLoss",
    "ShardedProblem",
    "StepCost",
    "World",
    "gather_rows",
    "gather_state",
    "open_world",
    "shard_rows",
    "shard_state",
    "step_cost",
]
