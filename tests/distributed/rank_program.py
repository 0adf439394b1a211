"""One rank of a small run, as torchrun or a test starts it: python rank_program.py OUT FAULT.

FAULT is "none", "stall" (rank 1 waits in the middle of its step 6, to be killed there) or "raise" (it fails there).
"""

import sys
import time
from pathlib import Path
from unittest import mock

import torch

from pfml.distributed import open_world
from pfml.distributed.launch import Launch
from pfml.training import train
from pfml.training.optimizer import clip_gradients
from runs import config_of
from small_data import letters, small_embedder


def main(out, fault):
    launch, steps = Launch.of_process(), iter(range(1000))

    def faulty(*arguments):
        if next(steps) == 5 and launch.rank == 1 and launch.restarts == 0:
            if fault == "stall":
                Path(f"{out}.stalls").touch()
                time.sleep(600)
            if fault == "raise":
                raise RuntimeError("this rank has run out of memory")
        clip_gradients(*arguments)

    torch.set_num_threads(1)
    torch.manual_seed(1)
    with open_world(torch.device("cpu")) as world, mock.patch("pfml.training.loop.clip_gradients", faulty):
        config = config_of(checkpoint_every=3)
        train(small_embedder(), letters(), config, out=out, resume=launch.restarts > 0, world=world)
        print(f"rank {world.rank} of {world.size} is done")


main(Path(sys.argv[1]), sys.argv[2])
