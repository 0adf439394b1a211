"""Candidates on CUB, one line of JSON for each run.

python research/cub.py --stage validation --root CUB_200_2011 --weights resnet50_he.safetensors --names all

Stage "validation" trains on classes 1 to 50 and judges on 51 to 100; choices are made there. Stage "test" trains on
1 to 100 and judges on 101 to 200, once per candidate. Runs share nothing but the decoded images; several processes
divide them. A line has the whole configuration, every evaluation, commit and device; runs that fail have one too.

With --seconds the command ends in time: a run that is not done leaves a checkpoint in --keep, and the same command
resumes it. Give it --done FILE, where FILE is that of --out, so that what has a line is not made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
import trial  # noqa: F401  # makes the method known
from candidates import CANDIDATES, NOISY, candidate_config, extras_of
from torch import Tensor

from pfml import PotentialFieldLoss
from pfml.data import RetrievalData
from pfml.data.image_source import ImageSource
from pfml.evaluation import proxy_alignment, retrieval_metrics
from pfml.experiments.run import device_name, now, versions
from pfml.losses import ProxyAnchorLoss
from pfml.losses.checks import CollapseWarning
from pfml.losses.sample_filter import FIT_LAW, fit, trusted
from pfml.models import Embedder, EmbedderConfig
from pfml.models.head_init import initialize_head
from pfml.runs.checkpoint import has_checkpoint, load_checkpoint
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.config_files import plain, write_config
from pfml.runs.data import prepare_data
from pfml.runs.folder import RunFolder
from pfml.sphere import unit
from pfml.superposition import Charges
from pfml.training import Monitor
from pfml.training.averaging import WeightAverage
from pfml.training.environment import compiled, resolve_device, seeded
from pfml.training.loop import Training, on_device
from pfml.training.readback import Batch, Outcome
from pfml.training.setup import open_sources

STAGES = ("validation", "test")
Task = tuple[str, int, float]


def is_late(deadline: float) -> bool:
    """Whether nothing more should be begun."""
    return time.time() > deadline


class Quick(Training):
    """A run that leaves results, and a checkpoint if its time is up; it also averages its weights over ~100 steps."""

    mean: WeightAverage
    deadline: float = math.inf
    extras: dict[str, float]
    mixup: tuple[float, Tensor] | None = None
    anchor: ProxyAnchorLoss | None = None
    teacher: Tensor | None = None

    def extend(self, extras: dict[str, float]) -> None:
        """What candidates have that the package has not: the keys of `extras`, whose values are shares."""
        if "mixup" in extras and len(extras) > 1:
            raise ValueError(f"mixed images go with nothing else, got {sorted(extras)}")
        if "anchor" in extras and not isinstance(self.loss, PotentialFieldLoss):
            raise ValueError(f"Proxy Anchor comes beside the package's own field, got {type(self.loss).__name__}")
        self.extras, self.mean = extras, WeightAverage(self.embedder, 0.99)
        if "instances" in extras:
            self.batches.batches = two_views(self.batches.batches)  # type: ignore[method-assign]
        if "anchor" in extras:
            sizes = self.data.train.num_classes, self.embedder.embedding_dim
            self.anchor = ProxyAnchorLoss(*sizes).to(self.device)
            groups = self.optimizer.param_groups
            self.optimizer.add_param_group({**groups[-1], "params": [self.anchor.proxies]})
            groups.insert(-1, groups.pop())
        if "early_lr" in extras:
            last = [getattr(self.embedder.backbone, name) for name in ("layer3", "layer4")]
            late = {id(weight) for block in last for weight in block.parameters()}
            backbone = self.optimizer.param_groups[0]
            early = [weight for weight in backbone["params"] if id(weight) not in late]
            backbone["params"] = [weight for weight in backbone["params"] if id(weight) in late]
            rate = extras["early_lr"] * backbone["base_lr"]
            self.optimizer.add_param_group({**backbone, "params": early, "lr": rate, "base_lr": rate})
            self.optimizer.param_groups.insert(1, self.optimizer.param_groups.pop())

    def resume(self) -> int:
        """Start where an earlier command was stopped, if one was; at which epoch that is."""
        if has_checkpoint(self.folder.checkpoints):
            self.state.restore(*load_checkpoint(self.folder.checkpoints))
            self.is_restored = True
        return self.state.epoch

    def save(self) -> None:
        """Nothing until time is up, since most runs take seconds; then a checkpoint, which ends the run."""
        if self.state.epoch == self.config.epochs or not is_late(self.deadline):
            self.catch_up()
            return
        super().save()
        self.writer.wait()
        raise TimeoutError(f"stopped after epoch {self.state.epoch} of {self.config.epochs}")

    def update(self, indices: Tensor, pixels: Tensor) -> list[Outcome]:
        """A step, of mixed images where a candidate asks for them, and its weights into the mean."""
        self.mixup, warm = None, self.state.epoch >= self.config.warm_up_epochs
        if warm and self.extras.get("mixup", 0.0) > float(torch.rand(())):
            share, other = float(torch.rand(())), torch.randperm(len(pixels))
            self.mixup = share, other
            pixels = torch.lerp(pixels[other.to(pixels.device)].float(), pixels.float(), share).to(pixels.dtype)
        outcomes = super().update(indices, pixels)
        if warm:
            self.mean.update()
        return outcomes

    def initialize_head(self) -> None:
        """Also remember the embeddings of the training images by the untrained model."""
        super().initialize_head()
        if "teacher" in self.extras:
            self.teacher = unit(self.embeddings("train").to(self.device))

    def energy(self, embeddings: Tensor, targets: Tensor, batch: Batch, **others: Tensor) -> Tensor:
        """Of images that are two at once, the mean by share; with what candidates add to the loss."""
        if others:
            return super().energy(embeddings, targets, batch, **others)
        if self.mixup is None:
            return self.with_extras(embeddings, targets, batch)
        share, other = self.mixup
        second = super().energy(embeddings, targets[other.to(targets.device)], batch)
        return share * super().energy(embeddings, targets, batch) + (1 - share) * second

    def with_extras(self, embeddings: Tensor, labels: Tensor, batch: Batch) -> Tensor:
        """The loss and what a candidate adds to it: "trust", "anchor", "teacher", "instances"."""
        extras = self.extras
        if "trust" in extras:
            keep = self.fits(embeddings, labels, extras["trust"])
            total = self.loss(embeddings[keep], labels[keep])
        else:
            total = super().energy(embeddings, labels, batch)
        if self.anchor is not None:
            keep = self.loss.trusted(embeddings, labels)
            total = beside(total, self.anchor(embeddings[keep], labels[keep]), embeddings, extras["anchor"])
        if self.teacher is not None:
            taught = self.teacher[batch.indices.to(self.device)]
            total = beside(total, divergence(taught, unit(embeddings.float())), embeddings, extras["teacher"])
        if extras.get("instances"):
            total = beside(total, between_views(unit(embeddings.float())), embeddings, extras["instances"])
        return total

    @torch.no_grad()
    def fits(self, embeddings: Tensor, labels: Tensor, trust: float) -> Tensor:
        """Whom the recipe would trust, by the proxies of any loss that has some."""
        proxies = self.loss.proxy_points()
        owners = torch.arange(len(proxies), device=labels.device).repeat_interleave(proxies.shape[1])
        samples = Charges(unit(embeddings.float()), labels)
        return trusted(fit(samples, Charges(proxies.flatten(0, 1), owners), len(proxies), FIT_LAW), trust)

    def evaluate(self, epoch: int, mean_loss: float) -> None:
        """Also what the field does, where it can tell."""
        super().evaluate(epoch, mean_loss)
        if isinstance(self.loss, PotentialFieldLoss):
            self.state.history[-1]["field"] = self.state_of_the_field()

    @torch.no_grad()
    def state_of_the_field(self) -> dict[str, Any]:
        """Diagnostics of an evenly spread batch, forces on it, how far proxies are from data, and Adam's steps."""
        assert isinstance(self.loss, PotentialFieldLoss)
        embeddings = self.embeddings("train").to(self.device)
        rows = torch.linspace(0, len(embeddings) - 1, 200, device=self.device).long()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CollapseWarning)
            found = asdict(self.loss.diagnostics(embeddings[rows], self.labels[rows]))
        alignment = proxy_alignment(self.loss.proxy_points(), embeddings, self.data.train.labels)
        points = embeddings[rows].clone().requires_grad_()
        with torch.enable_grad():
            (forces,) = torch.autograd.grad(self.loss(points, self.labels[rows]), points)
        sizes = forces.norm(dim=1)
        quantiles = torch.quantile(sizes, torch.tensor([0.0, 0.1, 0.5, 0.9, 0.99, 1.0], device=sizes.device))
        found |= {"w2": alignment.paper, "force_quantiles": quantiles.tolist()}
        for name, group in (("backbone", self.optimizer.param_groups[0]), ("proxies", self.optimizer.param_groups[-1])):
            found[f"step_of_{name}"] = self.effective_step(group)
        return found

    def effective_step(self, group: dict[str, Any]) -> float | None:
        """The mean of |m| / sqrt(v) of Adam: 1 for gradients that always agree, near 0 for ones that cancel."""
        beta1, beta2 = group["betas"]
        ratios = []
        for parameter in group["params"]:
            state = self.optimizer.state.get(parameter, {})
            if "exp_avg" in state:
                t = float(state["step"])
                m, v = state["exp_avg"] / (1 - beta1**t), state["exp_avg_sq"] / (1 - beta2**t)
                ratios.append((m.abs() / (v.sqrt() + group["eps"])).mean())
        return float(torch.stack(ratios).mean()) if ratios else None

    @torch.no_grad()
    def variants(self) -> dict[str, dict[str, float]]:
        """Scores of the averaged weights, and of the trained features with heads that are computed from them."""
        train, judged = (self.embeddings(role, features=True) for role in ("train", "test"))
        found = {"features": self.scored(judged)}
        for start in ("principal", "whitened"):
            head = copy.deepcopy(self.embedder.head)
            initialize_head(head, start, train, self.labels)
            assert head.linear is not None
            found[f"{start} again"] = self.scored(head.linear(judged))
        if not self.config.average:  # the weights are their own mean by now otherwise
            with self.mean.applied():
                found["averaged"] = self.scores("test")
        return found

    def scored(self, points: Tensor) -> dict[str, float]:
        """Retrieval among these points of the classes that judge."""
        return retrieval_metrics(unit(points), self.data.test.labels, recall_at=(1,)).as_dict()


def beside(first: Tensor, second: Tensor, points: Tensor, share: float) -> Tensor:
    """Two losses, the second scaled so that its forces on the points are `share` times as large as the first's."""
    sizes = [torch.autograd.grad(loss, points, retain_graph=True)[0].float().norm() for loss in (first, second)]
    return first + share * sizes[0] / sizes[1].clamp_min(1e-12) * second


def divergence(taught: Tensor, points: Tensor, temperature: float = 0.1) -> Tensor:
    """How far the neighborhoods of points are from those of the teacher: the mean KL of rows of cosines."""
    away = torch.full((len(points),), -1e4, device=points.device).diag()
    wanted, found = (torch.log_softmax(each @ each.T / temperature + away, dim=1) for each in (taught, points))
    return torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean")


def two_views(batches: Callable[[int], list[Tensor]]) -> Callable[[int], list[Tensor]]:
    """Batches with half of the images of each class, each twice in a row, to be cropped differently."""
    return lambda epoch: [each.view(-1, 4)[:, :2].repeat_interleave(2, dim=1).flatten() for each in batches(epoch)]


def between_views(points: Tensor, temperature: float = 0.1) -> Tensor:
    """How well the other view of an image is found among all images: the mean cross entropy of rows of cosines."""
    away = torch.full((len(points),), -1e4, device=points.device).diag()
    twins = torch.arange(len(points), device=points.device) ^ 1
    return torch.nn.functional.cross_entropy(points @ points.T / temperature + away, twins)


class Workbench:
    """One model after the other in the same memory, so that what is compiled for the first serves them all."""

    def __init__(self, device: torch.device, compiling: bool) -> None:
        self.device, self.compiling = device, compiling
        self.embedders: dict[EmbedderConfig, Embedder] = {}
        self.networks: dict[tuple[EmbedderConfig, int, type], Callable[[Tensor], Tensor]] = {}

    def embedder(self, config: EmbedderConfig) -> Embedder:
        """A new model with random head, as the current seed has it."""
        fresh = Embedder(config)
        if not self.compiling:
            return fresh
        kept = self.embedders.setdefault(config, on_device(fresh, self.device))
        if kept is not fresh:
            kept.load_state_dict(fresh.state_dict())
            kept.trained_on = None
        return kept

    def network(self, training: Training, config: RunConfig) -> Callable[[Tensor], Tensor]:
        """What the loss sees of the embedder, compiled for the batches of `config`."""
        network = training.inputs.network
        key = config.model, config.batch.size, type(network)
        if key not in self.networks:
            self.networks[key] = compiled(network, self.device)
        return self.networks[key]


class QuickCompiled(Quick):
    """The same with a model that is compiled already."""

    prepared: Callable[[Tensor], Tensor]

    def train_epoch(self) -> None:
        self.compiled = self.prepared
        super().train_epoch()


def run(
    config: RunConfig,
    data: RetrievalData,
    sources: dict[str, ImageSource],
    bench: Workbench,
    variants: bool,
    extras: dict[str, float],
    folder: Path,
    deadline: float = math.inf,
) -> dict[str, Any]:
    """Every evaluation of a candidate, and what it took.

    Raises:
        TimeoutError: The deadline has passed; `folder` has what a run of the same configuration resumes from.
    """
    start = time.perf_counter()
    with seeded(config.seed):
        write_config(RunFolder(folder).config, config)
        embedder = bench.embedder(config.model)
        kind = QuickCompiled if bench.compiling else Quick
        training = kind(embedder, data, sources, replace(config, compile=False), RunFolder(folder), Monitor())
        if isinstance(training, QuickCompiled):
            training.prepared = bench.network(training, config)
        training.extend(extras)
        training.deadline, resumed = deadline, training.resume()
        results = training.run()
        return {
            "seconds": time.perf_counter() - start,
            **({"seconds_from_epoch": resumed} if resumed else {}),
            "history": training.state.history,
            "alignment": results.get("alignment"),
            "variants": training.variants() if variants else {},
        }


def with_weights(config: EmbedderConfig, file: str) -> EmbedderConfig:
    """The model with weights from a file, unless it says where its own are."""
    return replace(config, weights=file) if config.weights == "default" else config


def data_of(config: DataConfig, stage: str) -> RetrievalData:
    """The classes that train and those that judge."""
    if stage == "test":
        return prepare_data(config)[0]
    data = prepare_data(replace(config, validation="half"))[0]
    assert data.validation is not None
    return replace(data, test=data.validation, validation=None)


def work(tasks: Iterable[Task | None], options: argparse.Namespace) -> None:
    """The tasks of one process, one after the other; None ends them."""
    torch.set_num_threads(1)
    sources: dict[str, ImageSource] = {}
    store = Path(options.out)
    deadline = options.started + options.seconds
    bench = Workbench(resolve_device(options.device), options.compile)
    for name, seed, noise in iter(iter(tasks).__next__, None):
        if is_late(deadline):
            print(f"no time for {name}", flush=True)
            continue
        config = candidate_config(name)
        config = replace(
            config,
            seed=seed,
            epochs=options.epochs or config.epochs,
            evaluate_every=options.evaluate_every,
            device=options.device,
            data=replace(config.data, root=options.root, noise=replace(config.data.noise, rate=noise, seed=seed)),
            model=with_weights(config.model, options.weights),
            storage=replace(config.storage, workers=options.workers, cache=options.cache),
        )
        line: dict[str, Any] = {
            "stage": options.stage, "candidate": name, "seed": seed, "noise": noise, "epochs": config.epochs,
            "extras": extras_of(name), "status": "done", "error": None, "processes": options.jobs,
            "config": plain(_anywhere(config)),
            "device": device_name(options.device), "commit": options.commit, "versions": versions(),
        }  # fmt: skip
        try:
            data = data_of(config.data, options.stage)
            if not sources:  # the images are the same for all, whatever their labels
                sources = open_sources(data, resolve_device(options.device), config.storage, Monitor())
            with run_folder(options.keep, options.stage, name, seed, noise) as folder:
                line |= run(config, data, sources, bench, options.variants, extras_of(name), folder, deadline)
        except TimeoutError as stopped:
            print(f"{name}: {stopped}; the same command resumes it", flush=True)
            continue
        except Exception as error:
            said = f"{type(error).__name__}: {error}".replace(f"{options.cache}", "cache")
            line |= {"status": "failed", "error": said}
            traceback.print_exc()
        line["finished"] = now()
        append_line(store, line)
        print(summary(line), flush=True)


@contextmanager
def run_folder(keep: Path | None, stage: str, name: str, seed: int, noise: float) -> Iterator[Path]:
    """Where a run is while it runs: in `keep`, where it stays if its time is up, or a temporary folder."""
    if keep is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    folder = keep / f"{stage}, {name}, seed {seed}, noise {noise}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except TimeoutError:
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def append_line(path: Path, found: dict[str, Any]) -> None:
    """A line of results, written at once: other processes write to the same file."""
    with path.open("ab", buffering=0) as file:
        file.write(f"{json.dumps(found)}\n".encode())


def require_files(parser: argparse.ArgumentParser, root: Path | None, *weights: str | None) -> None:
    """End the program if something is missing, before the first of many runs would."""
    for path in (root, *(each for each in weights if each not in (None, "none", "default"))):
        if path is not None and not Path(path).exists():
            parser.error(f"there is no {path}")


def work_from(queue: Any, options: argparse.Namespace) -> None:
    """The tasks of one of several processes, which take them from one queue."""
    work(iter(queue.get, Ellipsis), options)


def decode(options: argparse.Namespace, name: str) -> None:
    """Fill the cache once, before all processes would."""
    config = candidate_config(name)
    data = data_of(replace(config.data, root=options.root), options.stage)
    storage = replace(config.storage, workers=options.jobs * options.workers, cache=options.cache)
    open_sources(data, torch.device("cpu"), storage, Monitor())


def _anywhere(config: RunConfig) -> RunConfig:
    """Without the paths of this machine."""
    return replace(
        config,
        data=replace(config.data, root=None),
        model=replace(config.model, weights=Path(config.model.weights).name),
        storage=replace(config.storage, cache=None),
    )


def named(words: Iterable[str]) -> list[str]:
    """The candidates of these names; a word that is none selects all that begin with it."""
    found = {
        word: [word] if word in CANDIDATES else [name for name in CANDIDATES if name.startswith(word)] for word in words
    }
    return list(CANDIDATES) if "all" in found else [name for names in found.values() for name in names]


def already_done(stage: str, paths: Iterable[Path]) -> set[Task]:
    """What files of results have, other than failures."""
    lines = [json.loads(text) for path in paths if path.is_file() for text in path.read_text().splitlines()]
    return {
        (line["candidate"], line["seed"], line["noise"])
        for line in lines
        if line["stage"] == stage and line["status"] == "done"
    }


def summary(line: dict[str, Any]) -> str:
    """One line for people."""
    if line["status"] != "done":
        return f"{line['candidate']}: {line['error']}"
    scores = [(100 * each["test"]["recall_at_1"], 100 * each["test"]["map_at_r"]) for each in line["history"]]
    best = max(range(len(scores)), key=lambda k: scores[k][0])
    curve = " ".join(f"{recall:.1f}" for recall, _ in scores)
    return (
        f"{line['candidate']:28} seed {line['seed']} noise {line['noise']} last {scores[-1][0]:.1f} "
        f"({scores[-1][1]:.1f}) best {scores[best][0]:.1f} at {line['history'][best]['epoch']}: {curve} / "
        + " ".join(f"{100 * each['recall_at_1']:.1f}" for each in line["variants"].values())
        + f" {line['seconds']:.0f} s"
    )


def divide(
    tasks: Iterable[Any], worker: Callable[[Any, argparse.Namespace], None], options: argparse.Namespace
) -> None:
    """Let `options.jobs` processes take the tasks from one queue; None ends each.

    They end with this process, whatever they do: a run that is being compiled would heed a signal minutes later.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for task in [*tasks, *[None] * options.jobs]:
        queue.put(task)
    processes = [context.Process(target=worker, args=(queue, options)) for _ in range(options.jobs)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        queue.cancel_join_thread()  # or this process would wait until somebody takes the tasks that are left
        for process in processes:
            if process.pid is not None:
                process.kill()


def main() -> None:
    """Divide the runs that are asked for among processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=STAGES, default="validation")
    parser.add_argument("--names", nargs="+", default=["all"], help='candidates, beginnings of their names, or "all"')
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0])
    parser.add_argument("--few-noisy", action="store_true", help="label noise only for those in NOISY")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--evaluate-every", type=int, default=3)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--variants", action="store_true", help="also score averaged weights and new heads")
    parser.add_argument("--compile", action="store_true", help="compile one model for all runs of a process")
    parser.add_argument("--out", default="results/cub.jsonl")
    parser.add_argument("--done", type=Path, nargs="+", default=[], help="files of results that are not made again")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop runs when the command has taken so long")
    parser.add_argument(
        "--keep", type=Path, help="folder for runs that --seconds has stopped; the same command resumes them"
    )
    options = parser.parse_args()
    if options.seconds < math.inf and (options.keep is None or options.variants):
        parser.error("--seconds needs --keep FOLDER, where stopped runs stay, and goes without --variants")
    options.started = time.time()
    done = already_done(options.stage, options.done)
    tasks = [
        (name, seed, noise)
        for seed in options.seeds
        for name in named(options.names)
        for noise in options.noise
        if (name, seed, noise) not in done and (not (options.few_noisy and noise) or name in NOISY)
    ]
    unsaved = {"anchor", "teacher"}
    if options.seconds < math.inf and (names := {name for name, *_ in tasks if unsaved & extras_of(name).keys()}):
        parser.error(f"--seconds cannot stop {', '.join(sorted(names))}: no checkpoint holds what they add to the loss")
    require_files(parser, options.root, options.weights)
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    if not tasks:
        print("nothing is left to do")
        return
    if options.jobs == 1:
        work([*tasks, None], options)
        return
    if options.cache:
        decode(options, tasks[0][0])
    divide(tasks, work_from, options)


if __name__ == "__main__":
    main()
