"""Scale-out: the field of a global batch, with proxies spread over the ranks of a process group."""

from pfml.distributed.cost import ShardedProblem, StepCost, step_cost
from pfml.distributed.sharded_loss import ShardedPotentialFieldLoss
from pfml.distributed.state import gather_rows, gather_state, shard_rows, shard_state

__all__ = [
    "ShardedPotentialFieldLoss",
    "ShardedProblem",
    "StepCost",
    "gather_rows",
    "gather_state",
    "shard_rows",
    "shard_state",
    "step_cost",
]
