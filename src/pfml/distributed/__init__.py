"""Scale-out: the work of one process over the ranks of a process group, with proxies spread over them."""

from typing import TYPE_CHECKING

from pfml.lazy import lazy_names

if TYPE_CHECKING:
    from pfml.distributed.cost import ShardedProblem, StepCost, step_cost
    from pfml.distributed.gathered_loss import GatheredLoss
    from pfml.distributed.launch import FailedElsewhereError, open_world
    from pfml.distributed.sharded_loss import ShardedPotentialFieldLoss
    from pfml.distributed.state import gather_rows, gather_state, shard_rows, shard_state
    from pfml.distributed.world import Ranks, World
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pfml.distributed.cost": ("ShardedProblem", "StepCost", "step_cost"),
            "pfml.distributed.gathered_loss": ("GatheredLoss",),
            "pfml.distributed.launch": ("FailedElsewhereError", "open_world"),
            "pfml.distributed.sharded_loss": ("ShardedPotentialFieldLoss",),
            "pfml.distributed.state": ("gather_rows", "gather_state", "shard_rows", "shard_state"),
            "pfml.distributed.world": ("Ranks", "World"),
        },
    )

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
