"""Speed of training: the whole loop against its optimization step alone, and the share of the loss in a step.

python benchmarks/training.py --data.root CUB_200_2011 --model.weights resnet50_he.safetensors
python benchmarks/training.py --synthetic-images 2000    images of CUB's sizes out of thin air, random weights
python benchmarks/training.py --quick                    a few steps of a small model, also on a CPU
python benchmarks/training.py --beside                   on a CPU, beside a loop of timm and pytorch-metric-learning

All in one process. `step` is model, loss and optimizer on one batch that lies on the device, without checks or log;
`loop` is `pfml.training`'s epochs: crops, checks, log, no evaluation; `saved` is the same with a checkpoint after each
epoch. They take turns, and the median of the rounds counts. The target is loop / step of 85 % or more. `loss` is the
time from before the loss to its gradients within a step of the compiled model, gaps in which the device waits
included; `first` is the first epoch, with all that is compiled in it. Writes training.csv to --out. `--profile` adds
what the device does in a step, by kind of kernel.

`--beside` trains efficientnet_lite0 on JPEG files of 500 x 375 pixels: the same batches and steps by pfml, by a plain
loop (`plain_loop.py`), and the network alone on random numbers. Contestants are processes that take turns.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from machine import BUSY, OthersClock, environment
from pfml.data import ImageSet, RetrievalData, load_data, open_images
from pfml.data.decoded_images import DecodedImages
from pfml.data.image_source import ImageSource
from pfml.data.resampling import PixelBuffer
from pfml.losses.checks import deferred_checks
from pfml.methods import create_loss
from pfml.models import Embedder, EmbedderConfig
from pfml.models.freezing import set_trainable, start_training_mode
from pfml.runs.config_files import write_config
from pfml.runs.folder import RunFolder
from pfml.training import BatchConfig, LossConfig, Monitor, OptimizerConfig, TrainConfig
from pfml.training.environment import compiled, precision, reproducible, resolve_device
from pfml.training.loop import Training, on_device
from pfml.training.optimizer import create_optimizer
from photos import photographs
from plain_loop import CONTESTANTS, Comparison, Times, compare

__all__ = ["Row", "Setting", "benchmark", "loss_share", "main", "measure", "results_table", "synthetic_data"]

TARGET = 0.85
#: name of a size -> classes and proxies per class
SIZES = {"CUB": (100, 15), "SOP": (11_318, 2)}
QUICK_SIZES = {"CUB": (8, 3), "SOP": (60, 2)}


@dataclass(frozen=True)
class Row:
    """What one case gave; NaN where it was not measured, and then `note` may say why."""

    method: str
    network: str
    classes: int
    proxies_per_class: int
    batch: int
    step_ms: float = math.nan
    step_images_per_second: float = math.nan
    loop_images_per_second: float = math.nan
    ratio: float = math.nan
    saved_images_per_second: float = math.nan
    crops_ms: float = math.nan
    loss_ms: float = math.nan
    loss_share: float = math.nan
    first_epoch_seconds: float = math.nan
    rounds: int = 0
    cores_busy_elsewhere: float = math.nan
    gpu_mib_elsewhere: float = math.nan
    note: str = ""


@dataclass(frozen=True, eq=False)
class Setting:
    """What all cases have in common."""

    data: RetrievalData
    source: ImageSource
    embedder: Embedder
    device: torch.device
    batch: int
    autocast: str
    rounds: int
    steps: int
    profile: bool = False

    def config(self, method: str, proxies: int, *, compiled: bool) -> TrainConfig:
        """The configuration of a case; the epochs that are timed come after a warm-up."""
        options = {} if method == "proxy-anchor" else {"proxies_per_class": proxies, "reduction": "points"}
        per_class = 4 if self.batch % 4 == 0 else 0
        return TrainConfig(
            epochs=1_000,
            warm_up_epochs=1,
            loss=LossConfig(method, options),
            batch=BatchConfig(self.batch, per_class),
            optimizer=OptimizerConfig("adamw", lr=1e-5),
            device=str(self.device),
            autocast=self.autocast,  # type: ignore[arg-type]
            compile=compiled,
        )


class EpochsOnly(Training):
    """A run that does not evaluate, and saves only if it is told to."""

    saving = False

    def evaluate(self, epoch: int, mean_loss: float) -> None:
        """Nothing: only the training is timed."""

    def save(self) -> None:
        if self.saving:
            super().save()


def measure(setting: Setting, method: str, size: tuple[int, int], *, compiled: bool) -> Row:
    """Step against loop, in turns."""
    classes, proxies = size
    row = Row(method, "compiled" if compiled else "eager", classes, proxies, setting.batch)
    others = OthersClock()
    with tempfile.TemporaryDirectory() as folder:
        config = setting.config(method, proxies, compiled=compiled)
        write_config(RunFolder(Path(folder)).config, config)  # by which a run knows that its folder is still there
        sources = {"train": setting.source}
        training = EpochsOnly(setting.embedder, setting.data, sources, config, RunFolder(Path(folder)), Monitor())
        training.state.epoch = config.warm_up_epochs
        with reproducible(False), training.writer:
            first = _seconds(setting.device, lambda: training.train_epoch())
            row = replace(row, first_epoch_seconds=first)
            steps = _steps(training, setting)
            _seconds(setting.device, lambda: _repeat(steps, 5))
            if setting.profile:
                print(f"{method}, {row.network}:\n{_kernel_table(setting.device, lambda: next(steps))}", flush=True)
            times: dict[str, list[float]] = {"step": [], "loop": [], "saved": []}
            length = len(training.batches)
            for _ in range(setting.rounds):
                count = min(setting.steps, length)
                times["step"].append(_seconds(setting.device, lambda: _repeat(steps, count)) / count)  # noqa: B023
                for kind in ("loop", "saved"):
                    training.saving = kind == "saved"
                    seconds = _seconds(setting.device, lambda: training.train_epoch())
                    times[kind].append(seconds / length)
        plan = list(training.plan(training.batches.batches(training.state.epoch)))
        crops = _seconds(setting.device, lambda: [None for _ in setting.source.crops(plan)]) / length
    step, loop, saved = (statistics.median(times[kind]) for kind in ("step", "loop", "saved"))
    return replace(
        row,
        step_ms=step * 1e3,
        step_images_per_second=setting.batch / step,
        loop_images_per_second=setting.batch / loop,
        ratio=step / loop,
        saved_images_per_second=setting.batch / saved,
        crops_ms=crops * 1e3,
        rounds=setting.rounds,
        cores_busy_elsewhere=others.cores_busy(),
        gpu_mib_elsewhere=_gpu_mib_elsewhere(setting.device),
    )


def _steps(training: Training, setting: Setting) -> Iterator[None]:
    """Optimization steps on one batch that is there already, and nothing else."""
    pixels, labels = _preloaded(setting, training.data.train.num_classes)
    while True:
        training.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(setting.device.type, precision(setting.autocast), enabled=setting.autocast != "none"):
            embeddings = training.network(pixels)
        with deferred_checks():
            loss = training.loss(embeddings, labels)
        loss.backward()
        training.optimizer.step()
        yield


#: Kind of kernel -> what one of the names has that belong to it; the first that fits.
KINDS_OF_KERNELS = {
    "reductions (inductor)": ("triton_red", "triton_per"),
    "elementwise (inductor)": ("triton_poi",),
    "optimizer": ("adam", "multi_tensor"),
    "convolutions and products": ("conv", "gemm", "xmma", "cutlass", "cudnn", "sm90", "wgrad", "dgrad", "nvjet"),
    "field and crops": ("prepare", "screen", "interact", "gather", "finish", "index", "crop"),
    "copies": ("memcpy", "memset", "copy"),
}
PROFILED_STEPS = 5


def _kernel_table(device: torch.device, step: Callable[[], object]) -> str:
    """Device time of a step by kind of kernel, and the kernels that take most of it."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    with profile(activities=activities) as profiled:
        for _ in range(PROFILED_STEPS):
            step()
        _wait(device)
    of_device = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    times = {each.key: getattr(each, of_device) / 1e3 / PROFILED_STEPS for each in profiled.key_averages()}
    kinds = dict.fromkeys([*KINDS_OF_KERNELS, "the rest"], 0.0)
    for name, time_ in times.items():
        fitting = (kind for kind, parts in KINDS_OF_KERNELS.items() if any(part in name.lower() for part in parts))
        kinds[next(fitting, "the rest")] += time_
    largest = sorted(times, key=lambda name: -times[name])[:8]
    lines = [f"  {kind:36} {kinds[kind]:6.2f} ms" for kind in kinds]
    return "\n".join([*lines, *(f"    {times[name]:6.2f} ms  {name[:90]}" for name in largest)])


def loss_share(setting: Setting, method: str, size: tuple[int, int]) -> Row:
    """How much of a step, compiled on a GPU, the loss takes, for classes of which the data need know nothing."""
    classes, proxies = size
    row = Row(method, "loss", classes, proxies, setting.batch)
    config = setting.config(method, proxies, compiled=False)
    loss = create_loss(config.loss, classes, setting.embedder.embedding_dim).to(setting.device)
    fused = setting.device.type == "cuda"
    optimizer = create_optimizer(config.optimizer, setting.embedder, loss, fused=fused)
    pixels, labels = _preloaded(setting, classes)
    start_training_mode(setting.embedder, batch_norm=config.batch_norm)
    set_trainable(setting.embedder, batch_norm=config.batch_norm, warm_up_epochs=config.warm_up_epochs)
    network = compiled(setting.embedder, setting.device) if fused else setting.embedder
    turns = []
    with reproducible(False):
        for turn in range(5 + setting.steps):
            marks = [_mark(setting.device)]
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(setting.device.type, precision(setting.autocast), enabled=setting.autocast != "none"):
                embeddings = network(pixels)
            marks.append(_mark(setting.device))
            with deferred_checks():
                value = loss(embeddings, labels)
            learned = list(loss.parameters())
            pull, *gradients = torch.autograd.grad(value, [embeddings, *learned])
            marks.append(_mark(setting.device))
            embeddings.backward(pull)
            for parameter, gradient in zip(learned, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            marks.append(_mark(setting.device))
            if turn >= 5:
                turns.append(marks)
    step = statistics.median(_between(marks[0], marks[3]) for marks in turns)
    part = statistics.median(_between(marks[1], marks[2]) for marks in turns)
    return replace(
        row,
        step_ms=step * 1e3,
        step_images_per_second=setting.batch / step,
        loss_ms=part * 1e3,
        loss_share=part / step,
        rounds=setting.steps,
        gpu_mib_elsewhere=_gpu_mib_elsewhere(setting.device),
    )


def _preloaded(setting: Setting, classes: int) -> tuple[Tensor, Tensor]:
    side = setting.embedder.preprocessing.crop
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(setting.batch, 3, side, side, generator=generator)
    labels = torch.arange(setting.batch) // 4 % classes
    return pixels.to(setting.device), labels.to(setting.device)


def _repeat(steps: Iterator[None], count: int) -> None:
    for _ in range(count):
        next(steps)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """From an idle device to an idle device."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mark(device: torch.device) -> Any:
    """This moment of the device's work."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _gpu_mib_elsewhere(device: torch.device) -> float:
    """GPU memory that is neither free nor torch's here: beyond some hundred MiB, another process is on the GPU."""
    if device.type != "cuda":
        return math.nan
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 2**20


def synthetic_data(count: int, classes: int, sides: tuple[int, int], device: torch.device) -> tuple[Any, ImageSource]:
    """Blurred noise in images of different sizes, some wide and some high, decoded already; no file is behind them."""
    generator = torch.Generator().manual_seed(0)
    short, long = sides
    sizes = torch.randint(short, long + 1, (count, 2), generator=generator)
    lengths = 3 * sizes.prod(1)
    data = torch.empty(int(lengths.sum()), dtype=torch.uint8)
    buffer = PixelBuffer(data, lengths.cumsum(0) - lengths, sizes)
    for index, (height, width) in enumerate(sizes.tolist()):
        coarse = torch.rand(1, 3, 8, 8, generator=generator)
        image = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0]
        buffer.image(index).copy_(image * 255)
    names = tuple(f"class {k}" for k in range(classes))
    train = ImageSet(tuple(Path(f"{k}.jpg") for k in range(count)), torch.arange(count) % classes, names)
    test = ImageSet(tuple(Path(f"test {k}.jpg") for k in range(4)), torch.arange(4) % 2, ("x", "y"))
    on_device = buffer.to(device) if device.type == "cuda" else buffer
    return RetrievalData("synthetic", train, test), DecodedImages(on_device, device=device)


def benchmark(todo: Sequence[tuple[Row, Callable[[], Row]]], out: Path, about: dict[str, str]) -> list[Row]:
    """Run all cases, whatever becomes of each, and write training.csv to `out` after every one of them."""
    rows = []
    out.mkdir(parents=True, exist_ok=True)
    for blank, case in todo:
        try:
            rows.append(case())
        except Exception as error:
            traceback.print_exc()
            rows.append(replace(blank, note=f"failed: {type(error).__name__}: {error}".splitlines()[0]))
        _write(rows, out / "training.csv", about)
    return rows


def _write(rows: Sequence[Row], path: Path, about: dict[str, str]) -> None:
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*(column.name for column in fields(Row)), *about])
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row) | about)
    os.replace(part, path)


def results_table(rows: Sequence[Row], about: dict[str, str]) -> Table:
    """One line per case."""
    table = Table(title=f"Training on {about['device']}, torch {about['torch']}; images/s, milliseconds per batch")
    names = (
        "step ms",
        "step",
        "loop",
        "loop / step",
        "saved",
        "crops ms",
        "loss ms",
        "loss",
        "first s",
        "busy",
        "GPU MiB",
    )
    for name in ("method", "network", "classes x proxies", *names):
        table.add_column(name, justify="left" if name in ("method", "network") else "right", no_wrap=True)
    for row in rows:
        start = (row.method, row.network, f"{row.classes:,} x {row.proxies_per_class}")
        if row.note:
            table.add_row(*start, row.note)
            continue
        table.add_row(
            *start,
            _shown(row.step_ms, "{:.1f}"),
            _shown(row.step_images_per_second, "{:,.0f}"),
            _shown(row.loop_images_per_second, "{:,.0f}"),
            _shown(row.ratio, "{:.1%}") + ("" if not row.ratio < TARGET else " !"),
            _shown(row.saved_images_per_second, "{:,.0f}"),
            _shown(row.crops_ms, "{:.2f}"),
            _shown(row.loss_ms, "{:.2f}"),
            _shown(row.loss_share, "{:.1%}"),
            _shown(row.first_epoch_seconds, "{:.1f}"),
            _shown(row.cores_busy_elsewhere, "{:.1f}") if row.cores_busy_elsewhere > BUSY else "",
            _shown(row.gpu_mib_elsewhere, "{:,.0f}"),
        )
    return table


def _shown(value: float, form: str) -> str:
    return "" if math.isnan(value) else form.format(value)


def beside(given: argparse.Namespace) -> int:
    """Time pfml beside the plain loop, and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        images = given.synthetic_images - given.synthetic_images % given.classes
        paths = photographs(Path(folder), images, given.root)
        comparison = Comparison(
            tuple(paths), given.classes, given.beside, given.batch, given.steps, given.workers, given.threads
        )
        times, busy = compare(comparison, given.contestants.split(","), given.rounds)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(beside_table(times, given.batch * given.steps))
    console.print(f"others kept {busy:.1f} cores busy; {environment()['cpu']}, torch {torch.__version__}")
    return 0


def beside_table(times: dict[str, Times], images: int) -> Table:
    """One line per contestant, the first of which the others are compared with; of turns of so many images."""
    table = Table("", "images/s", "x", "core ms per image", "x", "start, s")
    (reference, of_processor), *_ = (each.medians() for each in times.values())
    for name, each in times.items():
        wall, processor = each.medians()
        speeds = f"{images / wall:.1f}", f"{reference / wall:.2f}"
        costs = f"{1e3 * processor / images:.1f}", f"{of_processor / processor:.2f}"
        table.add_row(name, *speeds, *costs, f"{each.start:.0f}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.root", dest="root", type=Path, help="folder of CUB-200-2011")
    parser.add_argument("--model.weights", dest="weights", default="none", help="weights of the backbone")
    parser.add_argument("--model.backbone", dest="backbone", default="resnet50_he")
    parser.add_argument("--synthetic-images", type=int, default=2_000, help="if there is no --data.root")
    parser.add_argument("--batch.size", dest="batch", type=int, default=100)
    parser.add_argument("--autocast", default=None, help="bfloat16 on a GPU, else none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=3, help="turns of step and loop")
    parser.add_argument("--steps", type=int, default=50, help="steps in a turn of step")
    parser.add_argument("--networks", default="eager,loss,compiled", help="of these: the model, or the loss in a step")
    parser.add_argument("--methods", default="pfml,proxy-anchor")
    parser.add_argument("--workers", type=int, default=8, help="threads that decode")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for training.csv")
    parser.add_argument("--profile", action="store_true", help="what the device does in a step, too")
    parser.add_argument("--quick", action="store_true", help="a small model, a few steps")
    parser.add_argument("--beside", nargs="?", const="efficientnet_lite0", help="a backbone, beside the plain loop")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="with --beside: who takes turns")
    parser.add_argument("--classes", type=int, default=20, help="with --beside")
    parser.add_argument("--threads", type=int, default=2, help="with --beside: of torch")
    given = parser.parse_args(arguments)
    if given.beside:
        return beside(given)
    device = resolve_device(given.device)
    autocast = given.autocast or ("bfloat16" if device.type == "cuda" else "none")
    sizes = QUICK_SIZES if given.quick else SIZES
    if given.quick:
        given.backbone, given.batch, given.rounds, given.steps = "convnet", 16, 1, 2
        data, source = synthetic_data(48, sizes["CUB"][0], (36, 50), device)
    elif given.root is not None:
        data = load_data("cub", given.root)
        source = open_images(data.train, device=device, workers=given.workers)
    else:
        data, source = synthetic_data(given.synthetic_images, sizes["CUB"][0], (300, 500), device)
    torch.manual_seed(0)
    # the head of the configurations for CUB
    model = EmbedderConfig(given.backbone, weights=given.weights, pooling="avg+max", layer_norm="features")
    embedder = on_device(Embedder(model), device)
    setting = Setting(data, source, embedder, device, given.batch, autocast, given.rounds, given.steps, given.profile)
    about = environment() | {"device": _device_name(device), "autocast": autocast, "backbone": given.backbone}
    methods, networks = given.methods.split(","), given.networks.split(",")
    rows = benchmark(_cases(setting, methods, networks, sizes), given.out, about)
    console = Console(width=None if sys.stdout.isatty() else 190)
    console.print(results_table(rows, about))
    console.print(source.description, given.out / "training.csv", highlight=False)
    return int(any(row.note for row in rows))


def _cases(
    setting: Setting, methods: Sequence[str], networks: Sequence[str], sizes: dict[str, tuple[int, int]]
) -> list[tuple[Row, Callable[[], Row]]]:
    """Every case with the row that reports it if it fails; compiled ones last, as the riskiest."""
    cases: list[tuple[Row, Callable[[], Row]]] = []
    for network in networks:
        for name in sizes if network == "loss" else ("CUB",):
            for method in methods:
                size = _size(method, sizes[name])
                blank = Row(method, network, *size, setting.batch)
                if network == "loss":
                    cases.append((blank, lambda m=method, s=size: loss_share(setting, m, s)))  # type: ignore[misc]
                else:
                    compiled = network == "compiled"
                    cases.append((blank, lambda m=method, s=size, c=compiled: measure(setting, m, s, compiled=c)))  # type: ignore[misc]
    return cases


def _size(method: str, size: tuple[int, int]) -> tuple[int, int]:
    """Classes and proxies per class; Proxy Anchor has one."""
    return (size[0], 1) if method == "proxy-anchor" else size


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else environment()["cpu"]


if __name__ == "__main__":
    raise SystemExit(main())
