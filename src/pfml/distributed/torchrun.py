"""What torchrun tells a process about itself, by environment variables; torch is not needed to read them."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Launch"]

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ELASTIC = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a process about itself.

    Attributes:
        rank, size: Among all processes.
        local_rank: Among those of this machine.
        restarts: How often torchrun has started all processes again.
        may_restart: Whether it would do so again.
        by_agent: Whether torchrun itself keeps the store, and not rank 0.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    restarts: int = 0
    may_restart: bool = False
    by_agent: bool = False

    @classmethod
    def of_process(cls) -> Launch:
        """The launch of this process, by its environment; one process by itself without torchrun."""
        if any(name not in os.environ for name in VARIABLES):
            return cls()
        numbers = {name: _number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *ELASTIC)}
        launch = cls(
            rank=numbers["RANK"],
            size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            restarts=numbers["TORCHELASTIC_RESTART_COUNT"],
            may_restart=numbers["TORCHELASTIC_MAX_RESTARTS"] > 0,
            by_agent=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        if not 0 <= launch.rank < launch.size:
            raise ValueError(f"RANK must lie in [0, WORLD_SIZE), got {launch.rank} and {launch.size}")
        return launch


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        raise ValueError(f"the environment variable {name} must be a number, got {text!r}: start with torchrun")
    return int(text)
