"""What each rank of a sharded loss computes, sends and holds: measured on this machine, or modeled for any other.

python benchmarks/scaling.py                                            measured at 1, 2 and 4 ranks, beside the model
python benchmarks/scaling.py --simulate --world 64 --classes 500000     the model alone, for ranks that are not there
python benchmarks/scaling.py --time-model                               CPU time, predicted from other sizes and worlds

Measured ranks are processes of this machine that talk by gloo. Pairs, bytes and held memory are those of the busiest
rank. Times are ratios to one rank, of a rank's own work (its CPU time) and of the clock: the clock says nothing about a
cluster where ranks outnumber the cores that are free.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from machine import peak_extra_bytes
from pfml.distributed import ShardedPotentialFieldLoss, StepCost, step_cost
from pfml.distributed.schedule import shard_sizes
from pfml.superposition import NORMALIZATIONS
from scaling_time import TOLERANCE, Case, comparison, fitted, mean_work, shares, timed

__all__ = ["Measured", "busiest", "main", "measure", "modeled"]

MIB = 2**20
#: Classes of the large run for which the time model says where the time would go.
MANY_CLASSES = 500_000


@dataclass(frozen=True)
class Measured:
    """What the ranks of one world reported: the largest number of any rank, and medians of the slowest."""

    cost: StepCost
    extra_bytes: int
    cpu_seconds: float
    seconds: float


def modeled(options: argparse.Namespace, world: int, normalization: str) -> list[StepCost]:
    """The cost of a step on each rank, by the model."""
    problem = _case(options, world, normalization, options.classes).problem()
    return [step_cost(problem, rank) for rank in range(world)]


def _case(options: argparse.Namespace, world: int, normalization: str, classes: int) -> Case:
    return Case(normalization, world, classes, options.batch, options.per_class, options.dim)


def busiest(costs: Sequence[StepCost]) -> StepCost:
    """The largest number of each kind."""
    return StepCost(*(max(numbers) for numbers in zip(*costs, strict=True)))


def measure(options: argparse.Namespace, world: int, normalization: str) -> Measured:
    """Steps of `world` processes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        answers: Any = mp.get_context("spawn").SimpleQueue()
        arguments = (world, f"file://{folder}/rendezvous", vars(options), normalization, answers)
        spawn(_rank, arguments, nprocs=world, join=True)
        found = [answers.get() for _ in range(world)]
    costs, extra, cpu_seconds, seconds = zip(*found, strict=True)
    return Measured(busiest([StepCost(*cost) for cost in costs]), max(extra), max(cpu_seconds), max(seconds))


def _rank(rank: int, world: int, rendezvous: str, options: dict[str, Any], normalization: str, answers: Any) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timeout)
    torch.manual_seed(0)
    loss = ShardedPotentialFieldLoss(
        options["classes"],
        options["dim"],
        proxies_per_class=options["per_class"],
        normalization=normalization,
    )
    mine = shard_sizes(options["batch"], world)[rank]
    embeddings = torch.randn(mine, options["dim"], requires_grad=True)
    labels = torch.randint(0, options["classes"], (mine,))

    def step() -> None:
        loss(embeddings, labels).backward()

    few = slice(0, 1)
    loss(embeddings[few], labels[few]).backward()  # loads code, and leaves gradients behind that are not the step's
    _, extra = peak_extra_bytes(step)
    times = []
    for _ in range(options["repeats"]):
        dist.barrier()
        start = time.process_time(), time.perf_counter()
        step()
        times.append((time.process_time() - start[0], time.perf_counter() - start[1]))
    assert loss.last_step is not None
    answers.put((tuple(loss.last_step), extra, *map(statistics.median, zip(*times, strict=True))))
    dist.destroy_process_group()


def _measured_table(options: argparse.Namespace) -> tuple[Table, bool]:
    """Measured beside modeled numbers, and whether pairs, bytes and held memory agree to the last one."""
    columns = (
        "normalization",
        "ranks",
        "pairs",
        "sent",
        "received",
        "held, MiB",
        "model",
        "RSS, MiB",
        "CPU time",
        "clock",
    )
    table = Table(*columns, title=_title(options))
    exact = True
    for normalization in options.normalizations:
        alone = Measured(StepCost(0, 0, 0, 0), 0, math.nan, math.nan)
        for world in options.worlds:
            found, expected = measure(options, world, normalization), busiest(modeled(options, world, normalization))
            alone = found if world == 1 else alone
            exact &= found.cost == expected
            verdict = "exact" if found.cost == expected else str(tuple(expected))
            cost = found.cost
            table.add_row(
                normalization, f"{world}", f"{cost.pairs:,}", f"{cost.bytes_sent:,}", f"{cost.bytes_received:,}",
                f"{cost.bytes_held / MIB:.1f}", verdict, f"{found.extra_bytes / MIB:.0f}",
                f"{found.cpu_seconds / alone.cpu_seconds:.2f}", f"{found.seconds / alone.seconds:.2f}",
            )  # fmt: skip
    return table, exact


def _simulated_table(options: argparse.Namespace) -> Table:
    """What the busiest rank of a large world does in one step."""
    columns = ("normalization", "ranks", "proxies", "pairs", "of one rank's", "GFLOP", "sent, MiB", "received, MiB")
    table = Table(*columns, "held, MiB", "rank by rank", "FLOP per byte sent", title=_title(options))
    for normalization in options.normalizations:
        costs, alone = modeled(options, options.world, normalization), modeled(options, 1, normalization)[0]
        most, least = busiest(costs), min(cost.pairs for cost in costs)
        held = shard_sizes(options.classes * options.per_class, options.world)[0]
        table.add_row(
            normalization, f"{options.world}", f"{held:,}", f"{most.pairs:.3e}", f"1 / {alone.pairs / most.pairs:.1f}",
            f"{2 * options.dim * most.pairs / 1e9:,.0f}", f"{most.bytes_sent / MIB:,.0f}",
            f"{most.bytes_received / MIB:,.0f}", f"{most.bytes_held / MIB:,.0f}", f"{least / most.pairs:.3f}",
            f"{2 * options.dim * most.pairs / most.bytes_sent:,.0f}" if most.bytes_sent else "none sent",
        )  # fmt: skip
    return table


def _time_model(options: argparse.Namespace, console: Console) -> bool:
    """Print measured beside predicted times, and where the time goes; whether all predictions hold."""
    calibrating, predicted = (
        [_case(options, world, name, size) for name in options.normalizations for size in sizes for world in worlds]
        for sizes, worlds in (
            (options.calibration_classes, options.calibration_worlds),
            ([options.classes], options.worlds),
        )
    )
    found = timed([*calibrating, *predicted], rounds=options.repeats)
    model = fitted([mean_work(case) for case in calibrating], [found[case].seconds for case in calibrating])
    table, holds = comparison(
        model, {case: found[case] for case in calibrating}, {case: found[case] for case in predicted}
    )
    console.print(_title(options), table)
    large = [
        _case(options, options.world, name, MANY_CLASSES)._replace(batch=64 * options.world)
        for name in options.normalizations
    ]
    console.print(shares(model, [*predicted, *large]))
    return holds


def _title(options: argparse.Namespace) -> str:
    return f"B = {options.batch:,}, C = {options.classes:,}, M = {options.per_class}, D = {options.dim}, float32"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--simulate", action="store_true", help="the model alone, nothing is run")
    instead.add_argument(
        "--time-model", action="store_true", help="CPU time of --worlds at --classes, predicted from the calibration's"
    )
    parser.add_argument(
        "--calibration-classes", type=int, nargs="+", default=[3_000, 6_000], help="others than --classes"
    )
    parser.add_argument("--calibration-worlds", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--world", type=int, default=64, help="ranks to simulate")
    parser.add_argument(
        "--worlds", type=int, nargs="+", default=[1, 2, 4], help="ranks to run; 1 first, for the ratios"
    )
    parser.add_argument("--batch", type=int, help="samples of all ranks together; 256, or 64 for each simulated rank")
    parser.add_argument("--classes", type=int, help="2,000, or 8,000 with --time-model")
    parser.add_argument("--per-class", type=int, default=2, help="proxies of each class")
    parser.add_argument("--dim", type=int, help="of the embedding; 128, or 512 if simulated")
    parser.add_argument("--normalizations", nargs="+", choices=tuple(NORMALIZATIONS), default=list(NORMALIZATIONS))
    parser.add_argument("--repeats", type=int, default=5, help="steps to time; rounds with --time-model")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; 1 if a measured number is not the model's, or a time is not within the tolerance."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.classes = options.classes if options.classes is not None else (8_000 if options.time_model else 2_000)
    if options.time_model and options.classes in options.calibration_classes:
        parser.error(f"--calibration-classes must be others than those predicted, got {options.classes} in both")
    options.batch = options.batch if options.batch is not None else (64 * options.world if options.simulate else 256)
    options.dim = options.dim if options.dim is not None else (512 if options.simulate else 128)
    console = Console(width=160)
    if options.simulate:
        console.print(_simulated_table(options))
        return 0
    if options.time_model:
        holds = _time_model(options, console)
        if not holds:
            console.print(f"[red]a predicted time deviates by more than {TOLERANCE:.0%}: see the rows with !")
        return 0 if holds else 1
    table, exact = _measured_table(options)
    console.print(table)
    if not exact:
        console.print("[red]the model does not agree with the measurement: see the column model")
    return 0 if exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
