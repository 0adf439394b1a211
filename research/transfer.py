"""Students of teachers on CUB: one line of JSON for each teacher, ensemble and student.

python research/transfer.py --stage validation --root CUB_200_2011 --weights resnet50_he.safetensors --round 1

Stages are those of research/cub.py. Several processes divide the work: first the teachers, whose weights are kept in
--models, then what is made of them. Students that see the same batches and crops are one task, so that what a teacher
says of a batch is computed once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from candidates import FINAL, PROXY_ANCHOR, base_config, candidate_config
from cub import Workbench, _anywhere, data_of, decode, divide, with_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from pfml.data.image_source import ImageSource
from pfml.evaluation import embed, retrieval_metrics
from pfml.experiments.run import device_name, now, versions
from pfml.experiments.tune import with_value
from pfml.losses.distillation import RelationalKLLoss, combined
from pfml.methods import LossConfig
from pfml.models import Embedder, load_embedder
from pfml.models.head_init import initialize_head
from pfml.runs.config import RunConfig
from pfml.runs.config_files import plain, shipped_config, write_config
from pfml.runs.folder import RunFolder
from pfml.training import Monitor
from pfml.training.environment import precision, resolve_device, seeded
from pfml.training.loop import Training
from pfml.training.readback import Batch
from pfml.training.setup import open_sources
from pfml.training.teachers import Teachers

#: kind of teacher -> its configuration on CUB, by the names of candidates.py, and on glyphs
KINDS: dict[str, tuple[str, LossConfig]] = {
    "pa": ("g pa", LossConfig("proxy-anchor")),
    "par": ("g pa", LossConfig("proxy-anchor-robust")),
    "recipe": ("g recipe", LossConfig("pfml-log")),
    "ms": ("g multi-similarity", LossConfig("multi-similarity")),
    "nca": ("g proxy-nca", LossConfig("proxy-nca")),
}
#: Ends of a kind's name -> changes of its backbone: what a student follows need not be what it is.
NETWORKS: dict[str, dict[str, Any]] = {
    "288": {"model.image_size": 288},
    "eff": {"model.backbone": "efficientnet_lite0", "model.weights": "package"},
}


def _named(kinds: str, seeds: str) -> tuple[str, ...]:
    """Teachers of these kinds and seeds: "pa recipe" and "01" are pa-0, recipe-0, pa-1, recipe-1."""
    return tuple(f"{kind}-{seed}" for seed in seeds for kind in kinds.split())


FOUR = _named("pa recipe", "01")
#: On the test classes the student of seed s has the teachers whose seeds begin at s times this.
PER_DRAW = 4


@dataclass(frozen=True)
class Student:
    """A model that follows teachers.

    Args:
        teachers: Their names, kind-seed; of the stage and the noise of the run. Students are s:NAME.
        changes: Of the student's configuration.
        start: "imagenet", or "soup", the mean of the teachers' weights.
        beside: A share of relational KL beside the loss, by the size of its forces.
        side: What teachers see is resized to this; 0 for the student's crops.
        still: Whether teachers see the whole image once, instead of each crop.
    """

    teachers: tuple[str, ...] = FOUR
    changes: dict[str, Any] = field(default_factory=dict)
    start: str = "imagenet"
    beside: float = 0.0
    side: int = 0
    still: bool = False


def rc(teachers: tuple[str, ...] = FOUR, *, epochs: int = 30, sigma: float = 1.0, **more: Any) -> Student:
    """By relaxed contrastive."""
    changes = {"loss": LossConfig("relaxed-contrastive", {"sigma": sigma}), "epochs": epochs} | more.pop("changes", {})
    return Student(teachers, changes, **more)


def other(name: str, options: dict[str, Any], *, epochs: int = 30, **more: Any) -> Student:
    """By another loss."""
    return Student(changes={"loss": LossConfig(name, options), "epochs": epochs}, **more)


EIGHT = _named("pa recipe", "0123")
TWELVE = EIGHT + _named("ms nca", "01")

#: name -> student; what is tried and fails stays
STUDENTS: dict[str, Student] = {
    "1 rc": rc(),
    "1 rc, 2 teachers": rc(_named("pa recipe", "0")),
    "1 rc, 8 teachers": rc(EIGHT),
    "1 rc, 12 teachers": rc(TWELVE),
    "1 rc, 4 pa": rc(_named("pa", "0123")),
    "1 rc, 4 recipe": rc(_named("recipe", "0123")),
    "1 rc, 4 kinds": rc(_named("pa recipe ms nca", "0")),
    "1 rc, sigma .5": rc(sigma=0.5),
    "1 rc, sigma 2": rc(sigma=2.0),
    "1 kl": other("relational-kl", {}),
    "1 kl .05": other("relational-kl", {"temperature": 0.05}),
    "1 equilibrium 1, 2": other("equilibrium-field", {}),
    "1 equilibrium 2, 4": other("equilibrium-field", {"alpha": 2.0, "beta": 4.0}),
    "1 rc + kl": rc(beside=1.0),
    "1 rc, lr 2e-4": rc(changes={"optimizer.lr": 2e-4}),
    "1 rc, 60 epochs": rc(epochs=60),
    "1 rc, 90 epochs": rc(epochs=90),
    "1 rc, from soup": rc(start="soup"),
    "1 rc, from soup, 12 epochs": rc(start="soup", epochs=12),
    "1 rc, teachers at 288": rc(side=288),
    "1 rc, still teachers": rc(still=True),
    "1 rc, crops .2": rc(changes={"augmentation.scale": (0.2, 1.0)}),
    "1 rc, crops .6": rc(changes={"augmentation.scale": (0.6, 1.0)}),
    "1 rc, 50 x 2": rc(changes={"batch.samples_per_class": 2}),
    "1 rc, random batches": rc(changes={"batch.samples_per_class": 0}),
    "1 rc, robust": rc(_named("par recipe", "01")),
    "1 rc, 8 robust": rc(_named("par recipe", "0123")),
    "1 kl, robust": other("relational-kl", {}, teachers=_named("par recipe", "01")),
    "1 equilibrium, robust": other("equilibrium-field", {}, teachers=_named("par recipe", "01")),
}

LONG = {"epochs": 60}


def _second(name: str, seeds: str = "0123") -> tuple[str, ...]:
    """Students of these seeds as teachers."""
    return tuple(f"s:{name}-{seed}" for seed in seeds)


STUDENTS |= {
    "2 rc, 4 pa": rc(_named("pa", "0123"), **LONG),
    "2 rc, 4 pa.288": rc(_named("pa.288", "0123"), **LONG),
    "2 rc, 2 pa.288, 2 recipe.288": rc(_named("pa.288 recipe.288", "01"), **LONG),
    "2 rc, 4 pa, 2 pa.eff": rc((*_named("pa", "0123"), *_named("pa.eff", "01")), **LONG),
    "2 rc, 4 pa.288, 2 pa.eff": rc((*_named("pa.288", "0123"), *_named("pa.eff", "01")), **LONG),
    "2 rc, second generation": rc(_second("2 rc, 4 pa"), **LONG),
    "2 rc, second generation of .288": rc(_second("2 rc, 4 pa.288"), **LONG),
    "2 rc, sigma .8": rc(_named("pa", "0123"), sigma=0.8, **LONG),
    "2 rc, sigma 1.3": rc(_named("pa", "0123"), sigma=1.3, **LONG),
    "2 rc, 4 par": rc(_named("par", "0123"), **LONG),
    "2 rc, 2 par.288, 2 recipe.288": rc(_named("par.288 recipe.288", "01"), **LONG),
    "2 rc, 64 dimensions": rc(_named("pa", "0123"), changes={"model.embedding_dim": 64}, **LONG),
}

#: Groups of teachers whose concatenation and whose soup are measured.
ENSEMBLES: dict[str, tuple[str, ...]] = {
    "pa recipe, seed 0": _named("pa recipe", "0"),
    "pa recipe, seeds 0 1": FOUR,
    "pa recipe, seeds 0 1 2 3": EIGHT,
    "pa recipe seeds 0 1 2 3, ms nca seeds 0 1": TWELVE,
    "pa, seeds 0 1 2 3": _named("pa", "0123"),
    "recipe, seeds 0 1 2 3": _named("recipe", "0123"),
    "all kinds, seed 0": _named("pa recipe ms nca", "0"),
    "par recipe, seeds 0 1": _named("par recipe", "01"),
    "par recipe, seeds 0 1 2 3": _named("par recipe", "0123"),
}


def rounds() -> dict[str, list[Task]]:
    """round -> tasks, in the order in which they are taken."""
    return {
        "1": [
            *(Task("teacher", (name,), 0, 0.0) for name in TWELVE),
            *(Task("teacher", (name,), 0, 0.2) for name in (*_named("par recipe", "0123"), *_named("pa", "01"))),
            Task("students", ("1 rc, 90 epochs", "1 rc, 60 epochs", "1 rc, lr 2e-4", "1 rc, sigma 2"), 0, 0.0),
            Task(
                "students",
                ("1 rc", "1 rc, from soup", "1 kl", "1 equilibrium 1, 2", "1 rc, from soup, 12 epochs"),
                0,
                0.0,
            ),
            Task("students", ("1 rc, 8 teachers", "1 rc, 12 teachers", "1 rc, 4 pa", "1 rc, 4 recipe"), 0, 0.0),
            Task(
                "students", ("1 rc", "1 rc, robust", "1 rc, 8 robust", "1 equilibrium, robust", "1 kl, robust"), 0, 0.2
            ),
            Task("ensembles", tuple(ENSEMBLES), 0, 0.0),
            Task("ensembles", tuple(ENSEMBLES), 0, 0.2),
            Task("students", ("1 rc, still teachers", "1 rc, teachers at 288", "1 rc, sigma .5", "1 rc + kl"), 0, 0.0),
            Task("students", ("1 equilibrium 2, 4", "1 kl .05", "1 rc, 2 teachers", "1 rc, 4 kinds"), 0, 0.0),
            Task("students", ("1 rc", "1 kl", "1 equilibrium 1, 2", "1 rc, from soup", "1 rc, 8 teachers"), 1, 0.0),
            Task("students", ("1 rc, crops .2", "1 rc, crops .6"), 0, 0.0),
            Task("students", ("1 rc, 50 x 2", "1 rc, random batches"), 0, 0.0),
        ],
        "1b": [
            Task("students", ("1 rc, lr 2e-4", "1 rc, sigma 2", "1 rc, sigma .5", "1 rc + kl"), 0, 0.0),
            Task("students", ("1 rc", "1 rc, 4 pa"), 1, 0.0),
            Task("students", ("1 rc, 50 x 2",), 0, 0.0),
            Task("students", ("1 rc, crops .2",), 0, 0.0),
            Task("students", ("1 rc, random batches",), 0, 0.0),
        ],
        "2": [
            *(Task("teacher", (name,), int(name[-1]), 0.0) for name in _named("pa.288", "0123")),
            *(Task("teacher", (name,), int(name[-1]), 0.0) for name in _named("pa", "0123")),
            *(Task("teacher", (name,), int(name[-1]), 0.0) for name in _named("pa.eff recipe.288", "01")),
            Task("answers", ("2 rc, 4 pa", *_named("pa", "0123")), 0, 0.0),
            Task("answers", ("2 rc, 4 pa", *_named("pa.288", "01")), 0, 0.0),
            Task("answers", ("2 rc, 4 pa", *_named("pa.288", "23")), 0, 0.0),
            Task("answers", ("2 rc, 4 pa", *_named("pa.eff recipe.288", "01")), 0, 0.0),
            Task("students", ("2 rc, 4 pa", "2 rc, sigma .8", "2 rc, sigma 1.3", "2 rc, 64 dimensions"), 0, 0.0),
            Task("students", ("2 rc, 4 pa.288", "2 rc, 2 pa.288, 2 recipe.288"), 0, 0.0),
            Task("students", ("2 rc, 4 pa, 2 pa.eff", "2 rc, 4 pa.288, 2 pa.eff"), 0, 0.0),
            *(Task("students", ("2 rc, 4 pa.288",), seed, 0.0) for seed in (1, 2, 3)),
            Task("students", ("2 rc, second generation of .288",), 0, 0.0),
        ],
        "2 noisy": [
            *(Task("teacher", (name,), int(name[-1]), 0.2) for name in _named("par", "0123")),
            *(Task("teacher", (name,), int(name[-1]), 0.2) for name in _named("par.288 recipe.288", "01")),
            Task("students", ("2 rc, 4 par",), 0, 0.2),
            Task("students", ("2 rc, 2 par.288, 2 recipe.288",), 0, 0.2),
        ],
        "smoke 2": [
            *(Task("teacher", (name,), 0, 0.0) for name in _named("pa recipe", "0")),
            Task("answers", ("1 rc, 2 teachers", *_named("pa recipe", "0")), 0, 0.0),
            Task("students", ("1 rc, 2 teachers",), 0, 0.0),
        ],
        "smoke": [
            *(Task("teacher", (name,), 0, 0.0) for name in _named("pa recipe", "0")),
            Task("ensembles", ("pa recipe, seed 0",), 0, 0.0),
            Task("students", ("1 rc, 2 teachers",), 0, 0.0),
        ],
    }


@dataclass(frozen=True)
class Task:
    """Work of one kind; students of one task share their batches and crops as far as their settings do."""

    kind: str
    names: tuple[str, ...]
    seed: int
    noise: float

    @property
    def noise_seed(self) -> int:
        """Seed of the label noise: one for all that is chosen, one for each seed of what is tested."""
        return self.seed // PER_DRAW if self.kind == "teacher" else self.seed


class TeacherRun(Training):
    """A run on labels that leaves results only; compiled from the end of the warm-up on."""

    compiled_network: Callable[[Tensor], Tensor] | None = None

    def save(self) -> None:
        """Nothing: a run takes seconds."""
        self.catch_up()

    def train_epoch(self) -> None:
        """Of a model in eager mode, then of a compiled one."""
        if self.compiled_network is not None:
            warming_up = self.config.is_warm_up(self.state.epoch)
            self.network = self.embedder if warming_up else self.compiled_network
        super().train_epoch()


class StudentRun(TeacherRun):
    """A run that follows teachers."""

    spec: Student
    bench: Bench
    kl = RelationalKLLoss()

    def initialize_head(self) -> None:
        """Or start from the mean of the teachers."""
        if self.spec.start == "soup":
            self.embedder.load_state_dict(soup([self.bench.teacher(name) for name in self.bench.full(self.spec)]))
        else:
            super().initialize_head()

    def targets(self, batch: Batch, pixels: Tensor) -> Tensor:
        """What the teachers say, now or earlier."""
        return self.bench.taught(self, batch.indices, pixels)

    def energy(self, embeddings: Tensor, targets: Tensor, batch: Batch) -> Tensor:
        """With a second loss, for those who ask for it."""
        loss = super().energy(embeddings, targets, batch)
        if self.spec.beside:
            second = self.kl(embeddings, targets)
            sizes = [
                torch.autograd.grad(one, embeddings, retain_graph=True)[0].float().norm() for one in (loss, second)
            ]
            loss = loss + self.spec.beside * sizes[0] / sizes[1].clamp_min(1e-12) * second
        return loss


def soup(embedders: list[Embedder]) -> dict[str, Tensor]:
    """The mean of their weights."""
    states = [each.state_dict() for each in embedders]
    return {
        name: torch.stack([state[name].float() for state in states]).mean(0) if value.is_floating_point() else value
        for name, value in states[0].items()
    }


class Bench:
    """What the tasks of one process share."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        self.options = options
        self.device = resolve_device(options.device)
        self.networks = Workbench(self.device, options.compile)
        self.sources: dict[str, ImageSource] = {}
        self.noise = 0.0
        self.seed = 0
        self.done = already_done(Path(options.out))
        self._teachers: dict[Path, Embedder] = {}
        self._asked: dict[tuple[str, int], Teachers] = {}
        self._answers: dict[tuple[Any, ...], Tensor] = {}

    def config(self, base: RunConfig, seed: int, noise: float, noise_seed: int) -> RunConfig:
        """`base` here and now."""
        options = self.options
        noise_seed = noise_seed if options.stage == "test" else 0
        base = replace(
            base,
            seed=seed,
            evaluate_every=options.evaluate_every,
            device=options.device,
            compile=False,
            data=replace(base.data, root=options.root, noise=replace(base.data.noise, rate=noise, seed=noise_seed)),
            storage=replace(base.storage, workers=options.workers, cache=options.cache),
        )
        return base if options.root is None else replace(base, model=with_weights(base.model, options.weights))

    def begin(self, base: RunConfig, task: Task, kind: type[Training] = Training) -> Any:
        """A run that is ready to start."""
        config = self.config(base, task.seed, task.noise, task.noise_seed)
        data = data_of(config.data, self.options.stage)
        if not self.sources:
            self.sources = open_sources(data, self.device, config.storage, Monitor())
        embedder = self.networks.embedder(config.model)
        folder = RunFolder(Path(tempfile.mkdtemp()))
        write_config(folder.config, config)
        with patch("pfml.training.loop.load_teachers", return_value=None):  # they are asked here, and once for all
            return kind(embedder, data, self.sources, config, folder, Monitor())

    def folder(self, name: str, noise: float) -> Path:
        """Where a teacher is kept."""
        options = self.options
        return Path(options.models) / f"{options.stage}-{noise:g}-{name}".replace(" ", "_").replace(",", "")

    def full(self, spec: Student) -> tuple[str, ...]:
        """The teachers of a student by name; s:NAME-SEED are students themselves."""
        if self.options.stage == "validation":
            return spec.teachers
        parts = (name.rsplit("-", 1) for name in spec.teachers)
        return tuple(f"{kind}-{int(seed) + PER_DRAW * self.seed}" for kind, seed in parts)

    def teacher(self, name: str) -> Embedder:
        """Read from its file, as soon as it is there."""
        folder = self.folder(name, self.noise)
        if folder not in self._teachers:
            while not (folder / "model.json").is_file():
                if time.time() > self.options.deadline or Path(f"{folder}.failed").exists():
                    raise TimeoutError(f"{folder.name} has failed, or no time is left to wait for it")
                time.sleep(0.2)
            self._teachers[folder] = load_embedder(folder).to(self.device)
        return self._teachers[folder]

    @torch.no_grad()
    def taught(self, run: StudentRun, indices: Tensor, pixels: Tensor) -> Tensor:
        """What the teachers of a run say of its batch."""
        spec, config = run.spec, run.config
        answers = []
        for name in self.full(spec):
            file = self.answer_file(name, config)
            if file.is_file() or str(file) in self._answers:
                answers.append(self.written_answers(file)[run.step])
                continue
            key = (name, self.noise, spec.still, spec.side, config.seed, config.batch, config.augmentation, run.step)
            if spec.still:
                key = (name, self.noise, "still")
            if key not in self._answers:
                self._answers[key] = self.answer(name, spec, run, pixels)
            answer = self._answers[key]
            answers.append(answer[indices.to(answer.device)] if spec.still else answer)
        return combined(answers)

    def answer_file(self, name: str, config: RunConfig) -> Path:
        """Where what a teacher says of a stream of batches is kept."""
        text = f"{config.seed} {config.batch} {config.augmentation}"
        stream = hashlib.sha256(text.encode()).hexdigest()[:8]
        return Path(f"{self.folder(name, self.noise)}-{stream}.answers")

    def written_answers(self, file: Path) -> Tensor:
        """(steps, batch, D) on the device."""
        if str(file) not in self._answers:
            self._answers[str(file)] = load_file(file)["answers"].to(self.device)
        return self._answers[str(file)]

    def answer(self, name: str, spec: Student, run: StudentRun, pixels: Tensor) -> Tensor:
        """Of one teacher, of a batch or of all whole images."""
        embedder = self.teacher(name)
        if spec.still:
            return embed(embedder, self.sources["train"], autocast=precision(run.config.autocast)).clone()
        key = str(self.folder(name, self.noise)), spec.side
        if key not in self._asked:
            teachers = Teachers([embedder], self.device, compiling=self.options.compile)
            if spec.side:
                teachers.sides = [spec.side]
            self._asked[key] = teachers
        return self._asked[key](pixels)

    def forget(self) -> None:
        """What was said of batches, before another stream of them."""
        self._answers.clear()


def already_done(path: Path) -> set[tuple[str, int, float]]:
    """What an earlier call has done."""
    if not path.is_file():
        return set()
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(each["candidate"], each["seed"], each["noise"]) for each in lines}


def student_config(spec: Student, name: str) -> RunConfig:
    """On CUB: that of all methods there, with a cosine to zero and averaged weights."""
    base = base_config(PROXY_ANCHOR) if name == "cub" else shipped_config("glyphs")
    changes = FINAL | {"average": 0.995, "optimizer.lr": 1e-4, "batch.samples_per_class": 4} if name == "cub" else {}
    for path, value in (changes | spec.changes).items():
        base = replace(base, loss=value, teachers=spec.teachers) if path == "loss" else with_value(base, path, value)
    return base


def teacher_config(kind: str, name: str) -> RunConfig:
    """Of a loss on labels; "pa.288" is pa at 288 pixels."""
    kind, _, network = kind.partition(".")
    candidate, loss = KINDS[kind]
    if name == "cub":
        config = candidate_config(candidate)
        config = replace(config, loss=loss) if kind == "par" else config
        for path, value in NETWORKS[network].items() if network else ():
            config = with_value(config, path, value)
        return config
    return replace(shipped_config("glyphs"), loss=loss, epochs=6)


def lines_of(task: Task, bench: Bench) -> Iterator[dict[str, Any]]:
    """The results of a task."""
    bench.noise, bench.seed = task.noise, task.seed
    work = {"teacher": teach, "answers": write_answers, "ensembles": measure_ensembles, "students": learn}[task.kind]
    yield from work(task, bench)


def teach(task: Task, bench: Bench) -> Iterator[dict[str, Any]]:
    """Train a teacher and keep it."""
    (name,) = task.names
    kind, seed = name.rsplit("-", 1)
    folder = bench.folder(name, task.noise)
    if (folder / "model.json").is_file():
        return
    task = replace(task, seed=int(seed))
    start = time.perf_counter()
    base = teacher_config(kind, bench.options.data)
    if bench.options.epochs:
        base = replace(base, epochs=bench.options.epochs)
    with seeded(int(seed)):
        run = bench.begin(base, task, TeacherRun)
        run.compiled_network = bench.networks.network(run.embedder, run.config) if bench.options.compile else None
        run.run()
    partial = Path(f"{folder}.partial")
    run.embedder.save(partial)
    partial.rename(folder)
    yield line("teacher", f"teacher {kind}", run, task, start)


def write_answers(task: Task, bench: Bench) -> Iterator[dict[str, Any]]:
    """What teachers say of the batches of a student's epochs, each at its own resolution, for all who ask later.

    The names are those of teachers after that of the student whose batches they are.
    """
    student, *names = task.names
    spec = STUDENTS[student]
    run = bench.begin(student_config(spec, bench.options.data), task, StudentRun)
    todo = [name for name in names if not bench.answer_file(name, run.config).is_file()]
    asked = {name: Teachers([bench.teacher(name)], bench.device, compiling=bench.options.compile) for name in todo}
    said: dict[str, list[Tensor]] = {name: [] for name in todo}
    source = bench.sources["train"]
    for epoch in range(run.config.epochs if todo else 0):
        run.epoch = epoch
        plan = list(run.plan(run.batches.batches(epoch)))
        for side in {teachers.sides[0] for teachers in asked.values()}:
            for crops in source.crops(replace(windows, size=side) for windows in plan):
                for name, teachers in asked.items():
                    if teachers.sides[0] == side:
                        said[name].append(teachers(crops))
    for name, answers in said.items():
        file = bench.answer_file(name, run.config)
        save_file({"answers": torch.stack(answers).cpu()}, f"{file}.partial")
        Path(f"{file}.partial").rename(file)
    yield from ()


def measure_ensembles(task: Task, bench: Bench) -> Iterator[dict[str, Any]]:
    """Concatenations of teachers, and means of their weights."""
    made: dict[str, Tensor] = {}
    run = bench.begin(teacher_config("pa", bench.options.data), task)
    mixed, labels = precision(run.config.autocast), run.data.test.labels

    def points(name: str) -> Tensor:
        if name not in made:
            made[name] = embed(bench.teacher(name), bench.sources["test"], autocast=mixed)
        return made[name]

    untrained = bench.networks.embedder(run.config.model)
    for title in task.names:
        names = ENSEMBLES[title]
        if (title, task.seed, task.noise) in bench.done:
            continue
        if not all(bench.folder(name, task.noise).exists() for name in names):
            continue
        scores = {"concatenation": combined([points(name) for name in names])}
        mean = soup([bench.teacher(name) for name in names])
        mixed_in = Embedder(replace(run.config.model, weights="none")).to(bench.device)
        for share in (1.0, 0.7):
            state = {
                key: torch.lerp(untrained.state_dict()[key].to(value), value, share)
                if value.is_floating_point() and not key.startswith("head.")
                else value
                for key, value in mean.items()
            }
            mixed_in.load_state_dict(state)
            scores[f"soup {share:g}"] = embed(mixed_in, bench.sources["test"], autocast=mixed)
            if mixed_in.head.linear is not None:
                features = embed(mixed_in, bench.sources["train"], autocast=mixed, features=True)
                initialize_head(mixed_in.head, "whitened", features, run.labels)
                scores[f"soup {share:g}, new head"] = embed(mixed_in, bench.sources["test"], autocast=mixed)
        found = {kind: retrieval_metrics(each, labels, recall_at=(1,)).as_dict() for kind, each in scores.items()}
        yield header(task, bench) | {"kind": "ensemble", "candidate": title, "teachers": names, "scores": found}


def learn(task: Task, bench: Bench) -> Iterator[dict[str, Any]]:
    """Students, one after the other."""
    stream = None
    for name in task.names:
        spec, start = STUDENTS[name], time.perf_counter()
        if (name, task.seed, task.noise) in bench.done:
            continue
        if start_over_time(bench):
            print(f"no time for {name}", flush=True)
            continue
        base = student_config(spec, bench.options.data)
        if bench.options.epochs:
            base = replace(base, epochs=bench.options.epochs)
        if stream != (base.batch, base.augmentation):
            bench.forget()
        stream = base.batch, base.augmentation
        with seeded(task.seed):
            run = bench.begin(base, task, StudentRun)
            run.spec, run.bench = spec, bench
            run.compiled_network = bench.networks.network(run.embedder, run.config) if bench.options.compile else None
            run.run()
        if bench.options.keep:
            folder = bench.folder(f"s:{name}-{task.seed}", task.noise)
            run.embedder.save(folder)
        yield line("student", name, run, task, start) | {
            "teachers": spec.teachers,
            "spec": {"start": spec.start, "beside": spec.beside, "side": spec.side, "still": spec.still},
        }


def start_over_time(bench: Bench) -> bool:
    """Whether nothing more should be begun."""
    return time.time() > bench.options.deadline


def header(task: Task, bench: Bench) -> dict[str, Any]:
    """What every line has."""
    options = bench.options
    return {
        "stage": options.stage, "data": options.data, "seed": task.seed, "noise": task.noise, "status": "done",
        "error": None, "processes": options.jobs, "device": device_name(options.device), "commit": options.commit,
        "versions": versions(), "finished": now(),
    }  # fmt: skip


def line(kind: str, candidate: str, run: Any, task: Task, start: float) -> dict[str, Any]:
    """Of a run."""
    keys = {"kind": kind, "candidate": candidate, "epochs": run.config.epochs, "history": run.history}
    seconds = {"seconds": time.perf_counter() - start, "config": plain(_anywhere(run.config))}
    return header(task, _bench) | keys | seconds


_bench: Bench


def summary(found: dict[str, Any]) -> str:
    """One line for people."""
    start = f"{found['kind']:9} {found['candidate']:34} seed {found['seed']} noise {found['noise']:g}"
    if found["kind"] == "ensemble":
        scores = found["scores"]
    else:
        scores = {f"{each['epoch']}": each["test"] for each in found["history"]}
    said = " ".join(f"{k}: {100 * v['recall_at_1']:.1f} ({100 * v['map_at_r']:.1f})" for k, v in scores.items())
    return f"{start} {said} {found.get('seconds', 0):.0f} s"


def table(path: Path) -> str:
    """Last epochs of all that a file of results holds, as Markdown: means over seeds, R@1 (MAP@R)."""
    found: dict[tuple[str, str, float], list[dict[str, float]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["kind"] == "ensemble":
            scores = {f"{line['candidate']}, {kind}": each for kind, each in line["scores"].items()}
        else:
            scores = {line["candidate"]: line["history"][-1]["test"]}
        for name, score in scores.items():
            found.setdefault((line["kind"], name, line["noise"]), []).append(score)
    rows = ["| | label noise | runs | R@1 | MAP@R |", "|---|---|---|---|---|"]
    for (kind, name, noise), scores in found.items():
        recall, precision_at_r = (
            100 * sum(each[key] for each in scores) / len(scores) for key in ("recall_at_1", "map_at_r")
        )
        rows.append(f"| {kind} {name} | {100 * noise:g} % | {len(scores)} | {recall:.1f} | {precision_at_r:.1f} |")
    return "\n".join(rows)


def work(queue: Any, options: argparse.Namespace) -> None:
    """The tasks of one process."""
    global _bench
    _bench = Bench(options)
    while True:
        task = queue.get()
        if task is None or start_over_time(_bench):
            return
        try:
            for found in lines_of(task, _bench):
                with open(options.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
                print(summary(found), flush=True)
        except Exception:
            if task.kind == "teacher":
                Path(f"{_bench.folder(task.names[0], task.noise)}.failed").touch()
            print(f"FAILED {task}", flush=True)
            traceback.print_exc()


def main() -> None:
    """Divide the tasks of a round among processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("validation", "test"), default="validation")
    parser.add_argument("--data", choices=("cub", "glyphs"), default="cub")
    parser.add_argument("--round")
    parser.add_argument("--table", type=Path, help="print this file of results and do nothing else")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--weights")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--models", default="models")
    parser.add_argument("--keep", action="store_true", help="keep students too, to be teachers")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing is begun after these")
    parser.add_argument("--out", default="results/transfer.jsonl")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return
    options.deadline = time.time() + 60 * options.minutes
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.models).mkdir(parents=True, exist_ok=True)
    tasks = rounds()[options.round]
    if options.cache and options.jobs > 1:
        decode(options, "g pa")
    divide(tasks, work, options)


if __name__ == "__main__":
    main()
