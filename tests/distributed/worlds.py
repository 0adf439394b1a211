"""Four real processes that wait for work: every test of this folder runs in them, in groups of 1 to 4 ranks."""

from __future__ import annotations

import datetime
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from processes import CONTEXT

#: Ranks that wait for each other longer than this are told so by gloo; the parent waits a little longer.
TIMEOUT_SECONDS = 60
#: ... or than this, in the two ranks of the group "hasty", which is of no use after it has run out of patience.
HASTY_SECONDS = 3
LARGEST = 4


def _serve(rank, pipe, rendezvous_file):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous_file}", rank=rank, world_size=LARGEST, timeout=timeout
    )
    groups = {size: dist.new_group(range(size), timeout=timeout) for size in range(1, LARGEST + 1)}
    groups["hasty"] = dist.new_group(range(2), timeout=datetime.timedelta(seconds=HASTY_SECONDS))
    pipe.send("ready")
    while (task := pipe.recv()) is not None:
        function, name, arguments = task
        torch.manual_seed(0)
        try:
            pipe.send((True, function(groups[name], *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class World:
    """Started once; `run` sends a function of a process group to the first ranks, and collects what they return."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self._start()

    def _start(self) -> None:
        self.started += 1
        ends = [CONTEXT.Pipe() for _ in range(LARGEST)]
        self.pipes = [parent for parent, _ in ends]
        rendezvous_file = str(self.folder / f"rendezvous-{self.started}")
        self.processes = [
            CONTEXT.Process(target=_serve, args=(rank, child, rendezvous_file), daemon=True)
            for rank, (_, child) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        for rank in range(LARGEST):
            assert self._answer(rank, 60) == "ready"

    def _answer(self, rank, seconds):
        if not self.pipes[rank].poll(seconds):
            self.stop()
            self._start()  # for the next test
            raise TimeoutError(f"rank {rank} did not answer within {seconds} s")
        return self.pipes[rank].recv()

    def run(self, function, name, *arguments):
        """What `function(group, *arguments)` returns on each rank of a world of that size, or of "hasty"."""
        size = 2 if name == "hasty" else name
        for pipe in self.pipes[:size]:
            pipe.send((function, name, arguments))
        answers = [self._answer(rank, 2 * TIMEOUT_SECONDS) for rank in range(size)]
        for rank, (is_fine, answer) in enumerate(answers):
            assert is_fine, f"rank {rank} of {size}:\n{answer}"
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
