"""One rank of a small run in a process of its own, which nobody but the ranks themselves ends."""

import os
import time
from pathlib import Path
from unittest import mock

import torch

from pfml.distributed import open_world
from pfml.distributed.heartbeat import HASTE
from pfml.distributed.launch import Launch
from pfml.training import train
from pfml.training.optimizer import clip_gradients
from runs import config_of
from small_data import few_glyphs, small_embedder


def run_rank(out, fault, environment):
    """Train as a rank of torchrun does; what it prints goes to a file.

    Args:
        out: The folder of the run; the file is beside it, by the rank's number.
        fault: "stall" (rank 1 waits in the middle of its step 6, to be killed there) or "raise" (it fails there).
        environment: The variables by which torchrun tells a process its rank.
    """
    os.environ.update(environment)
    printed = os.open(printed_by(out, environment["RANK"]), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(printed, stream)
    launch, steps = Launch.of_process(), iter(range(1000))

    def faulty(*arguments):
        if next(steps) == 5 and launch.rank == 1:
            if fault == "stall":
                Path(f"{out}.stalls").touch()
                time.sleep(600)
            raise RuntimeError("this rank has run out of memory")
        clip_gradients(*arguments)

    torch.set_num_threads(1)
    torch.manual_seed(1)
    # where the other rank was killed, nobody is left whose word could come late
    haste = mock.patch("pfml.distributed.heartbeat.HASTE", 1.0 if fault == "stall" else HASTE)
    with haste, open_world(torch.device("cpu")) as world, mock.patch("pfml.training.loop.clip_gradients", faulty):
        train(few_glyphs(), small_embedder(image_size=32), config_of(checkpoint_every=3), out=out, world=world)


def printed_by(out, rank):
    """The file with what a rank has printed."""
    return Path(f"{out}.rank-{rank}")
