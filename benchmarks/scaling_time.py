"""A model of the CPU time of a rank in one step of a sharded loss, and the measurements that it is fitted to.

    seconds = a * plain pairs + b * pairs where classes may meet + e * pairs that all act + c * bytes + d

A tile of pairs without a class on both of its sides ends after its product, unless a pair is within reach: plain pairs.
Where classes may meet, each pair is looked at for its class: samples with all charges, and the tiles on the diagonal
of a rank's own proxies. In a field without an edge ("anchor") these pairs all act. To prepare a rank's own rows belongs
to b or e, since both grow with them; to prepare guests belongs to c, since they come as bytes.

CPU time still depends on what else runs: processes share caches, and threads share cores. So all processes are at work
in every case as far as they make whole worlds (beside a world of 1 there are others of 1), all cases are measured round
by round, in another order each time, and each step between two runs of a yardstick, which tell how fast the processor
is at that moment: seconds are those of a processor as fast as the median of all yardsticks.
"""

from __future__ import annotations

import datetime
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.table import Table
from scipy.optimize import nnls
from torch.multiprocessing.spawn import spawn

from pfml.backends.sweep import TILE_PAIRS
from pfml.distributed import ShardedPotentialFieldLoss, ShardedProblem, step_cost
from pfml.distributed.schedule import num_pairs, shard_sizes
from pfml.distributed.sharded_field import block_counts, has_effect
from pfml.field import PowerLaw
from pfml.superposition import Field

__all__ = [
    "TOLERANCE",
    "Case",
    "TimeModel",
    "Timed",
    "Work",
    "comparison",
    "fitted",
    "mean_work",
    "rank_work",
    "shares",
    "timed",
]

#: How far a prediction may be from its measurement.
TOLERANCE = 0.20


class Case(NamedTuple):
    """What is run: a normalization, and the sizes of all ranks together."""

    normalization: str
    world: int
    classes: int
    batch: int
    per_class: int
    dim: int

    def problem(self) -> ShardedProblem:
        """The same for the model of costs."""
        return ShardedProblem(
            batch_sizes=shard_sizes(self.batch, self.world),
            num_classes=self.classes,
            proxies_per_class=self.per_class,
            embedding_dim=self.dim,
            field=Field(PowerLaw(), self.normalization),
        )


class Work(NamedTuple):
    """What a rank has to do in one step, in the units of the time model."""

    plain_pairs: int
    class_pairs: int
    acting_pairs: int
    bytes_moved: int
    steps: int = 1


class Timed(NamedTuple):
    """CPU seconds of a rank in a step: the median of the rounds, and half of what lies between their quartiles."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class TimeModel:
    """CPU seconds for each unit of `Work`; for the machine and the dimensions that it was fitted to."""

    per_plain_pair: float
    per_class_pair: float
    per_acting_pair: float
    per_byte: float
    per_step: float

    def parts(self, work: Work) -> tuple[float, ...]:
        """Seconds of each kind of work."""
        return tuple(price * amount for price, amount in zip(astuple(self), work, strict=True))

    def seconds(self, work: Work) -> float:
        """Seconds of a step."""
        return sum(self.parts(work))


def rank_work(problem: ShardedProblem, rank: int) -> Work:
    """What `rank` has to do in one step."""
    cost, own, samples = step_cost(problem, rank), problem.proxy_sizes[rank], sum(problem.batch_sizes)
    with_samples = problem.sweeps * (num_pairs(shard_sizes(samples, problem.world), rank) + samples * own)
    on_diagonal = 0  # of whole tiles, which are computed on both sides of the diagonal
    if has_effect(block_counts(problem.field, problem.weights)[2]):
        on_diagonal = problem.sweeps * own * min(own, math.isqrt(TILE_PAIRS["cpu"]))
    looked_at, all_act = with_samples + on_diagonal, problem.field.other_pair.stop == math.inf
    return Work(
        plain_pairs=max(cost.pairs - with_samples - on_diagonal // 2, 0),
        class_pairs=0 if all_act else looked_at,
        acting_pairs=looked_at if all_act else 0,
        bytes_moved=cost.bytes_sent + cost.bytes_received,
    )


def mean_work(case: Case) -> Work:
    """The work of a rank, on average over the ranks; they differ by a row."""
    works = [rank_work(case.problem(), rank) for rank in range(case.world)]
    return Work(*(round(statistics.mean(amounts)) for amounts in zip(*works, strict=True)))


def fitted(works: Sequence[Work], seconds: Sequence[float]) -> TimeModel:
    """The model with the smallest squares of relative deviations; no work takes less than no time."""
    shares = numpy.array(works, dtype=float) / numpy.array(seconds)[:, None]
    scale = numpy.maximum(shares.max(axis=0), numpy.finfo(float).tiny)  # pairs are many, steps few
    prices, _ = nnls(shares / scale, numpy.ones(len(works)))
    return TimeModel(*(float(price) for price in prices / scale * (shares.max(axis=0) > 0)))


def timed(cases: Sequence[Case], *, rounds: int) -> dict[Case, Timed]:
    """CPU seconds of a rank in a step of each case, on average over the processes, on this machine."""
    processes = max(case.world for case in cases)
    with tempfile.TemporaryDirectory() as folder:
        answers: Any = mp.get_context("spawn").SimpleQueue()
        spawn(_process, (processes, f"file://{folder}/rendezvous", list(cases), rounds, answers), nprocs=processes)
        by_process = [answers.get() for _ in range(processes)]
    return {case: Timed(*of_case) for case, of_case in zip(cases, _at_one_speed(by_process), strict=True)}


def _at_one_speed(by_process: list[list[list[tuple[float, float]]]]) -> Iterator[tuple[float, float]]:
    """Median and spread of each case, from (seconds, seconds of the yardstick) by process, case and round."""
    speed = statistics.median(stick for cases in by_process for rounds in cases for _, stick in rounds)
    for of_case in zip(*by_process, strict=True):
        taking_part = [rounds for rounds in of_case if rounds]
        by_round = [
            speed * statistics.mean(seconds / stick for seconds, stick in of_round)
            for of_round in zip(*taking_part, strict=True)
        ]
        low, median, high = numpy.percentile(by_round, [25, 50, 75])
        yield float(median), float(high - low) / 2


def _process(rank: int, processes: int, rendezvous: str, cases: list[Case], rounds: int, answers: Any) -> None:
    """Put this process's times on `answers`: for each case a list, empty where there is no whole world for it."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=processes, timeout=timeout)
    worlds = {world: _own_group(rank, world, processes) for world in sorted({case.world for case in cases})}
    steps = [_prepared_step(case, worlds[case.world]) for case in cases]
    times: list[list[tuple[float, float]]] = [[] for _ in cases]
    order = random.Random(0)  # the same on all processes
    yardstick: Callable[[], object] = partial(_yardstick, torch.randn(1024, 128))
    for count in range(rounds + 1):
        for case, step, taken in order.sample(list(zip(cases, steps, times, strict=True)), len(cases)):
            dist.barrier()
            if step is None:
                continue
            dist.barrier(worlds[case.world])
            before, seconds, after = map(_cpu_seconds, (yardstick, step, yardstick))
            if count:  # the first round loads code and makes room
                taken.append((seconds, (before + after) / 2))
    dist.barrier()
    answers.put(times)
    dist.destroy_process_group()


def _yardstick(points: torch.Tensor) -> None:
    """Work of the kind that a step consists of: products, and a look at each of their numbers."""
    for _ in range(4):
        products = points @ points.T
        ((products < 0) & (products > -1)).view(-1).nonzero()


def _cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of all threads of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _own_group(rank: int, world: int, processes: int) -> Any:
    """The group of `world` processes that this one is in; None for those that are left over."""
    firsts = range(0, processes - world + 1, world)
    groups = [(range(first, first + world), dist.new_group(list(range(first, first + world)))) for first in firsts]
    return next((group for ranks, group in groups if rank in ranks), None)


def _prepared_step(case: Case, group: Any) -> Callable[[], object] | None:
    """A forward and backward pass of this process's part of a case; None if it has no part in it."""
    if group is None:
        return None
    torch.manual_seed(0)
    loss = ShardedPotentialFieldLoss(
        case.classes, case.dim, proxies_per_class=case.per_class, normalization=case.normalization, group=group
    )
    mine = shard_sizes(case.batch, case.world)[dist.get_rank(group)]
    embeddings = torch.randn(mine, case.dim, requires_grad=True)
    labels = torch.randint(0, case.classes, (mine,))
    return lambda: loss(embeddings, labels).backward()


def comparison(model: TimeModel, calibration: dict[Case, Timed], measured: dict[Case, Timed]) -> tuple[Table, bool]:
    """All points, in units of the first measured one of their normalization, and whether the predictions hold."""
    columns = ("normalization", "classes", "ranks", "used to", "predicted", "measured", "deviation", "spread of rounds")
    table = Table(*columns, title="CPU time of a rank in a step, as a ratio to the first prediction's measurement")
    units: dict[str, float] = {}
    for case, found in measured.items():
        units.setdefault(case.normalization, found.seconds)
    holds = True
    for purpose, points in (("calibrate", calibration), ("predict", measured)):
        for case, found in points.items():
            seconds, unit = model.seconds(mean_work(case)), units[case.normalization]
            deviation = seconds / found.seconds - 1
            outside = purpose == "predict" and not abs(deviation) <= TOLERANCE
            holds &= not outside
            table.add_row(
                case.normalization, f"{case.classes:,}", f"{case.world}", purpose, f"{seconds / unit:.2f}",
                f"{found.seconds / unit:.2f}", f"{deviation:+.1%}" + (" !" if outside else ""),
                f"± {found.spread / found.seconds:.0%}",
            )  # fmt: skip
    return table, holds


def shares(model: TimeModel, cases: Sequence[Case]) -> Table:
    """Where the time of a step goes, by the model alone."""
    columns = ("normalization", "B", "classes", "ranks", "plain pairs", "pairs where classes may meet", "acting pairs")
    table = Table(*columns, "bytes", "fixed", title="Shares of a step's CPU time, by the model")
    for case in cases:
        parts = model.parts(mean_work(case))
        table.add_row(
            case.normalization, f"{case.batch:,}", f"{case.classes:,}", f"{case.world}",
            *(f"{part / sum(parts):.1%}" for part in parts),
        )  # fmt: skip
    return table
