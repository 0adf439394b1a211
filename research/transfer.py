"""Students of teachers on CUB: one line of JSON for each teacher, ensemble and student.

python research/transfer.py --stage validation --root CUB_200_2011 --weights resnet50_he.safetensors --rounds 1
python research/transfer.py --stage test --rounds "3 clean" --done results/transfer-test.jsonl --list    what is left

Stages are those of research/cub.py. Several processes divide the work: first the teachers, whose weights are kept in
--models, then what is made of them. Students that see the same batches and crops are one task, or their teachers'
embeddings are written to files by a task, so that what a teacher says of a batch is computed once.

Whatever --out or --done has a line of is not done again, and nothing is begun that would end after --minutes. A teacher
whose line is there but whose weights are lost is trained again if a student needs it, without a second line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from candidates import FINAL, PROXY_ANCHOR, base_config, candidate_config
from cub import Workbench, _anywhere, append_line, data_of, decode, divide, require_files, with_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from pfml.audit import audit
from pfml.data.image_set import ImageSet
from pfml.data.image_source import ImageSource
from pfml.data.seeding import generator_for
from pfml.data.windows import Windows
from pfml.evaluation import embed, retrieval_metrics
from pfml.experiments.run import device_name, now, versions
from pfml.experiments.tune import with_value
from pfml.losses.distillation import RelationalKLLoss, combined, principal_directions
from pfml.methods import LossConfig
from pfml.models import Embedder, load_embedder
from pfml.models.backbone_table import with_image_size
from pfml.models.head_init import initialize_head
from pfml.runs.checkpoint import has_checkpoint, load_checkpoint
from pfml.runs.config import RunConfig
from pfml.runs.config_files import plain, shipped_config, write_config
from pfml.runs.folder import RunFolder
from pfml.sphere import unit
from pfml.training import Monitor
from pfml.training.environment import precision, reproducible, resolve_device, seeded
from pfml.training.loop import Training
from pfml.training.readback import Batch, Outcome
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
    "64": {"model.embedding_dim": 64},
    "2048": {"model.embedding_dim": 2048},
    "lite2": {
        "model.backbone": "tf_efficientnet_lite2",
        "model.weights": "lite2.safetensors",
        "model.image_size": 256,
    },
    "eff": {"model.backbone": "efficientnet_lite0", "model.weights": "package"},
}


def _named(kinds: str, seeds: str) -> tuple[str, ...]:
    """Teachers of these kinds and seeds: "pa recipe" and "01" are pa-0, recipe-0, pa-1, recipe-1."""
    return tuple(f"{kind}-{seed}" for seed in seeds for kind in kinds.split())


FOUR = _named("pa recipe", "01")
#: Kinds of teachers that are trained on labels which others have corrected begin with one of these: each image has the
#: class that attracts it most (c), or that class if the audit lists its label as noise, by what teachers say (l) or by
#: what a student of teachers says, which has seen no labels and so learned none by heart (j).
CORRECTED = ("c:", "l:", "j:")
#: Teachers whose kind begins so do not see every fourth class, by their seed.
BAGGED, BAGS = "b:", 4
#: Who corrects the labels of others, and the student that does, by stage.
JUDGES = _named("par recipe", "01")
JUDGE = {"validation": "13 judge", "test": "3 judge"}
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
        mixed: The share of a batch whose crops are mixed with others of it (mixup), for teachers and student alike.
        cut: Whether a rectangle of the other crop takes the place of its pixels (CutMix) instead of their mean.
        reduced: Dimensions that its teachers together are reduced to, the principal ones of training images; 0 for all.
    """

    teachers: tuple[str, ...] = FOUR
    changes: dict[str, Any] = field(default_factory=dict)
    start: str = "imagenet"
    beside: float = 0.0
    side: int = 0
    still: bool = False
    mixed: float = 0.0
    cut: bool = False
    reduced: int = 0


def rc(teachers: tuple[str, ...] = FOUR, *, epochs: int = 30, sigma: float = 1.0, **more: Any) -> Student:
    """By relaxed contrastive."""
    changes = {"loss": LossConfig("relaxed-contrastive", {"sigma": sigma}), "epochs": epochs} | more.pop("changes", {})
    return Student(teachers, changes, **more)


def _wide_margin(margin: float) -> LossConfig:
    return LossConfig("relaxed-contrastive", {"sigma": 1.3, "margin": margin})


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
FOUR_PA = _named("pa", "0123")


def _second(names: tuple[str, ...], seed: int = 0) -> tuple[str, ...]:
    """Students as teachers."""
    return tuple(f"s:{name}-{seed}" for name in names)


STUDENTS |= {
    "2 rc, 4 pa": rc(FOUR_PA, **LONG),
    "2 rc, 4 pa.288": rc(_named("pa.288", "0123"), **LONG),
    "2 rc, 4 pa, 2 pa.eff": rc((*FOUR_PA, *_named("pa.eff", "01")), **LONG),
    "2 rc, 4 pa, 4 pa.288": rc((*FOUR_PA, *_named("pa.288", "0123")), **LONG),
    "2 rc, sigma .8": rc(FOUR_PA, sigma=0.8, **LONG),
    "2 rc, sigma 1.3": rc(FOUR_PA, sigma=1.3, **LONG),
    "2 rc, 64 dimensions": rc(FOUR_PA, changes=NETWORKS["64"], **LONG),
    "2 rc, efficientnet": rc(FOUR_PA, changes=NETWORKS["eff"], **LONG),
    # with label noise, as long as those of round 1
    "2 rc, 4 par": rc(_named("par", "0123")),
    "2 rc, 4 recipe": rc(_named("recipe", "0123")),
}
#: What is tested is named by its epochs: 60 on the test classes are twice as many steps as on validation classes.
LENGTHS = {"30": 30, "60": 60}
for _length, _epochs in LENGTHS.items():
    STUDENTS |= {
        f"3 rc, 4 pa, {_length}": rc(FOUR_PA, epochs=_epochs),
        f"3 rc, 4 pa, 64 dimensions, {_length}": rc(FOUR_PA, epochs=_epochs, changes=NETWORKS["64"]),
        f"3 rc, 4 pa, efficientnet, {_length}": rc(FOUR_PA, epochs=_epochs, changes=NETWORKS["eff"]),
        f"3 rc, 4 pa.288, {_length}": rc(_named("pa.288", "0123"), epochs=_epochs),
        f"3 rc, 2 par, 2 recipe, {_length}": rc(_named("par recipe", "01"), epochs=_epochs),
        f"3 rc, 4 par, {_length}": rc(_named("par", "0123"), epochs=_epochs),
        f"3 rc, 4 corrected pa, {_length}": rc(_named("c:pa", "0123"), epochs=_epochs),
        f"3 rc, 2 corrected pa, 2 recipe, {_length}": rc(_named("c:pa c:recipe", "01"), epochs=_epochs),
    }
#: Of two EfficientNet-Lite2 beside the four: the best candidate of round 8 by R@1 and MAP@R together.
MIXED = ((*FOUR_PA, *_named("pa.lite2", "01")), (*_named("par recipe", "01"), *_named("par.lite2", "01")))
STUDENTS |= {
    "3 rc, 4 pa, 2 pa.lite2, 30": rc(MIXED[0], sigma=1.3),
    "3 rc, 4 pa, 2 pa.lite2, 64 dimensions, 30": rc(MIXED[0], sigma=1.3, changes=NETWORKS["64"]),
    "3 rc, 2 par, 2 recipe, 2 par.lite2, 30": rc(MIXED[1], sigma=1.3),
}
STUDENTS |= {
    "4 rc, mixup": rc(FOUR_PA, mixed=1.0, **LONG),
    "4 rc, half mixup": rc(FOUR_PA, mixed=0.5, **LONG),
    "4 rc, half cutmix": rc(FOUR_PA, mixed=0.5, cut=True, **LONG),
}
#: Students of one stream of batches, and so of little cost, as teachers of a second generation.
FIRST_GENERATION = ("2 rc, 4 pa", "2 rc, sigma .8", "2 rc, sigma 1.3", "4 rc, half mixup")
STUDENTS |= {
    "2 rc, second generation": rc(_second(FIRST_GENERATION), **LONG),
    "4 rc, second generation, half mixup": rc(_second(FIRST_GENERATION), mixed=0.5, **LONG),
}

STUDENTS |= {
    # labels that teachers have corrected, then new teachers, then a student
    "5 rc, 4 corrected pa": rc(_named("c:pa", "0123")),
    "5 rc, 2 corrected pa, 2 recipe": rc(_named("c:pa c:recipe", "01")),
    "6 rc, 2 listed pa, 2 recipe": rc(_named("l:pa l:recipe", "01")),
    "6 rc, 2 listed par, 2 recipe": rc(_named("l:par l:recipe", "01")),
}

STUDENTS |= {
    # pairs grow with the square of a batch; statistics of BatchNorm are ImageNet's otherwise
    "7 rc, 50 x 4": rc(FOUR_PA, changes={"batch.size": 200, "average": 0.99}, **LONG),
    "7 rc, 50 x 8, lr 2e-4": rc(
        FOUR_PA,
        changes={"batch.size": 400, "batch.samples_per_class": 8, "average": 0.98, "optimizer.lr": 2e-4},
        **LONG,
    ),
    "7 rc, trained batch norm": rc(FOUR_PA, changes={"batch_norm": "train"}, **LONG),
}

EIGHTH = {"sigma": 1.3, **LONG}
STUDENTS |= {
    # what teachers may have that each other lacks: width, classes, another architecture, resolution
    "8 rc, 4 pa": rc(FOUR_PA, **EIGHTH),
    "8 rc, 4 pa.2048": rc(_named("pa.2048", "0123"), **EIGHTH),
    "8 rc, 4 b:pa": rc(_named("b:pa", "0123"), **EIGHTH),
    "8 rc, 4 pa, 4 b:pa": rc((*FOUR_PA, *_named("b:pa", "0123")), **EIGHTH),
    "8 rc, 4 pa, 2 pa.lite2": rc((*FOUR_PA, *_named("pa.lite2", "01")), **EIGHTH),
    "8 rc, 4 pa, 4 pa.288": rc((*FOUR_PA, *_named("pa.288", "0123")), **EIGHTH),
    "8 rc, margin 1.2": rc(FOUR_PA, **EIGHTH, changes={"loss": _wide_margin(1.2)}),
    "8 rc, margin .8": rc(FOUR_PA, **EIGHTH, changes={"loss": _wide_margin(0.8)}),
    "8 rc, 4 pa, 4 pa.2048, 2 pa.lite2, 4 pa.288": rc(
        (*FOUR_PA, *_named("pa.2048", "0123"), *_named("pa.lite2", "01"), *_named("pa.288", "0123")), **EIGHTH
    ),
}

JITTER = {"augmentation.color_jitter": (0.3, 0.3, 0.3, 0.05)}
STUDENTS |= {
    "9 rc, 4 pa.lite2": rc(_named("pa.lite2", "0123"), **EIGHTH),
    "9 rc, 4 pa, 4 pa.lite2": rc((*FOUR_PA, *_named("pa.lite2", "0123")), **EIGHTH),
    "9 rc, 4 pa.lite2, 64 dimensions": rc(_named("pa.lite2", "0123"), **EIGHTH, changes=NETWORKS["64"]),
    "9 rc, 4 pa, jitter": rc(FOUR_PA, **EIGHTH, changes=JITTER),
    # with label noise
    "9 rc, 2 par, 2 recipe": rc(_named("par recipe", "01"), **EIGHTH),
    "9 rc, 2 par, 2 recipe, 2 par.lite2": rc((*_named("par recipe", "01"), *_named("par.lite2", "01")), **EIGHTH),
}

STUDENTS |= {
    # larger images for teachers and student alike, beside what these teachers reach themselves
    "11 rc, 4 pa.288, 288 pixels": rc(_named("pa.288", "0123"), **EIGHTH, changes=NETWORKS["288"]),
    "3 rc, 4 pa.288, 288 pixels, 30": rc(_named("pa.288", "0123"), sigma=1.3, changes=NETWORKS["288"]),
}

STUDENTS |= {
    # teachers in fewer dimensions, for students of few and of many
    "12 rc, 64 dimensions": rc(MIXED[0], **EIGHTH, changes=NETWORKS["64"]),
    **{
        f"12 rc, 64 dimensions, {dims} of teachers": rc(MIXED[0], **EIGHTH, changes=NETWORKS["64"], reduced=dims)
        for dims in (64, 128, 256)
    },
    **{f"12 rc, {dims} of teachers": rc(MIXED[0], **EIGHTH, reduced=dims) for dims in (128, 256, 512)},
}
TWELFTH = tuple(name for name in STUDENTS if name.startswith("12 "))
#: The same with label noise, beside "9 rc, 2 par, 2 recipe, 2 par.lite2".
TWELFTH_NOISY = tuple(f"12 rc, 2 par, 2 recipe, 2 par.lite2, {dims} of teachers" for dims in (128, 256, 512))
STUDENTS |= {
    name: rc(MIXED[1], **EIGHTH, reduced=dims) for name, dims in zip(TWELFTH_NOISY, (128, 256, 512), strict=True)
}
#: To be tested with as many dimensions of teachers as validation chooses.
REDUCED = {
    dims: (
        f"3 rc, 4 pa, 2 pa.lite2, 64 dimensions, {dims} of teachers, 30",
        f"3 rc, 4 pa, 2 pa.lite2, {dims} of teachers, 30",
    )
    for dims in (64, 128, 256, 512)
}
REDUCED_NOISY = {dims: f"3 rc, 2 par, 2 recipe, 2 par.lite2, {dims} of teachers, 30" for dims in REDUCED}
for _dims, (_small, _large) in REDUCED.items():
    STUDENTS[_small] = rc(MIXED[0], sigma=1.3, changes=NETWORKS["64"], reduced=_dims)
    STUDENTS[_large] = rc(MIXED[0], sigma=1.3, reduced=_dims)
    STUDENTS[REDUCED_NOISY[_dims]] = rc(MIXED[1], sigma=1.3, reduced=_dims)

#: A second generation, of labels that a short student of two teachers has corrected.
SECOND = tuple(f"j:{name}" for name in MIXED[1])
STUDENTS |= {
    name: rc(_named("recipe", "01"), sigma=1.3, epochs=epochs, reduced=128)
    for name, epochs in ((JUDGE["validation"], 24), (JUDGE["test"], 12))
}
STUDENTS |= {
    "13 rc, corrected": rc(SECOND, **EIGHTH),
    **{f"13 rc, corrected, {dims} of teachers": rc(SECOND, **EIGHTH, reduced=dims) for dims in (128, 256)},
    "3 rc, corrected, 30": rc(SECOND, sigma=1.3),
    **{f"3 rc, corrected, {dims} of teachers, 30": rc(SECOND, sigma=1.3, reduced=dims) for dims in REDUCED},
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
OF_TEACHERS = tuple(ENSEMBLES)
#: Students whose weights are averaged: they start from the same weights and head.
AVERAGED = ("8 rc, 4 pa", "9 rc, 4 pa, 4 pa.lite2", "9 rc, 4 pa.lite2")
ENSEMBLES |= {f"students {name}, seeds 0 1": (*_second((name,), 0), *_second((name,), 1)) for name in AVERAGED}
ENSEMBLES |= {
    "students of 4 pa and 4 pa.lite2": (*_second(AVERAGED[:2], 0), *_second(AVERAGED[:2], 1)),
    "students of all, seeds 0 1": (*_second(AVERAGED, 0), *_second(AVERAGED, 1)),
}


#: What round 13 trains, by label noise.
THIRTEENTH = {
    "clean": (
        "12 rc, 64 dimensions", "12 rc, 64 dimensions, 64 of teachers", "12 rc, 64 dimensions, 128 of teachers",
        "12 rc, 128 of teachers", "12 rc, 256 of teachers",
    ),
    "20 %": ("9 rc, 2 par, 2 recipe, 2 par.lite2", *TWELFTH_NOISY[:2]),
    "50 %": ("13 rc, corrected", "13 rc, corrected, 128 of teachers", "13 rc, corrected, 256 of teachers"),
}  # fmt: skip


def drawn(names: tuple[str, ...], draw: int) -> tuple[str, ...]:
    """The teachers of a draw of the test: kind-2 is kind-6 in the draw 1."""
    parts = (name.rsplit("-", 1) for name in names)
    return tuple(f"{kind}-{int(seed) + PER_DRAW * draw}" for kind, seed in parts)


def _on_test(
    noise: float, teachers: tuple[str, ...], students: tuple[str, ...], beside: tuple[str, ...] = ()
) -> list[Task]:
    """Three draws, each with teachers of its own; models that are trained directly come last, as they teach nobody."""
    return [
        *(Task("teachers", drawn(teachers, draw), 0, noise) for draw in range(3)),
        *(Task("students", students, draw, noise) for draw in range(3)),
        *(Task("teachers", tuple(drawn((name,), draw)[0] for draw in range(3)), 0, noise) for name in beside),
    ]


def _test_rounds(length: str) -> dict[str, list[Task]]:
    """What may be tested, with students of one length."""
    small = (f"3 rc, 4 pa, 64 dimensions, {length}", f"3 rc, 4 pa, efficientnet, {length}")
    directly = ("pa.64-0", "recipe.64-0", "pa.eff-0", "recipe.eff-0")
    both, alone = (f"3 rc, 2 par, 2 recipe, {length}",), (f"3 rc, 4 par, {length}",)
    return {
        "clean": _on_test(0.0, FOUR_PA, (f"3 rc, 4 pa, {length}", *small), beside=directly),
        "clean, 288": _on_test(0.0, _named("pa.288", "0123"), (f"3 rc, 4 pa.288, {length}",)),
        "20 %": _on_test(0.2, _named("par recipe", "01"), both),
        "50 %": _on_test(0.5, _named("par recipe", "01"), both, beside=("pa-0",)),
        **{
            f"{noise}, corrected{also}": [
                *(Task("teachers", drawn(JUDGES, draw), 0, rate) for draw in range(3)),
                *_on_test(rate, teachers, (f"3 rc, {title}, {length}",)),
            ]
            for noise, rate in (("20 %", 0.2), ("50 %", 0.5))
            for also, title, teachers in (
                ("", "4 corrected pa", _named("c:pa", "0123")),
                (" and recipe", "2 corrected pa, 2 recipe", _named("c:pa c:recipe", "01")),
            )
        },
        "20 %, par": _on_test(0.2, _named("par", "0123"), alone),
        "50 %, par": _on_test(0.5, _named("par", "0123"), alone, beside=("pa-0", "recipe-0")),
    }


def _mixed_on_test(noise: float, teachers: tuple[str, ...], students: tuple[str, ...]) -> list[Task]:
    """Three draws with teachers of two networks, each network first in a process of its own, which compiles it once."""
    of_both = [
        tuple(name for name in teachers if name.rsplit("-", 1)[0].endswith(".lite2") is is_lite2)
        for is_lite2 in (True, False)
    ]
    return [
        *(Task("teachers", drawn(of_both[0], draw), 0, noise) for draw in range(2)),
        *(Task("teachers", drawn(of_both[1], draw), 0, noise) for draw in range(2)),
        Task("teachers", drawn(of_both[0], 2), 0, noise),
        Task("teachers", drawn(of_both[1], 2), 0, noise),
        *(
            Task("answers", (students[0], *drawn(some, draw)), draw, noise)
            for draw in range(3)
            for some in of_both[::-1]
        ),
        *(Task("students", (name,), draw, noise) for name in students for draw in range(3)),
    ]


def _corrected_on_test(noise: float, student: str) -> list[Task]:
    """Three draws of a second generation: two teachers, the student that judges, six teachers, the student."""
    return [
        *(Task("teachers", (name,), 0, noise) for draw in range(3) for name in drawn(_named("recipe", "01"), draw)),
        *(Task("students", (JUDGE["test"],), draw, noise) for draw in range(3)),
        *_mixed_on_test(noise, SECOND, (student,)),
    ]


def rounds() -> dict[str, list[Task]]:
    """round -> tasks, in the order in which they are taken."""
    return {
        "1": [
            *(Task("teachers", (name,), 0, 0.0) for name in TWELVE),
            *(Task("teachers", (name,), 0, 0.2) for name in (*_named("par recipe", "0123"), *_named("pa", "01"))),
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
            Task("ensembles", OF_TEACHERS, 0, 0.0),
            Task("ensembles", OF_TEACHERS, 0, 0.2),
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
        # one process trains the teachers of one network, which it compiles once
        "2": [
            Task("teachers", FOUR_PA, 0, 0.0),
            Task("teachers", _named("pa.288", "0123"), 0, 0.0),
            Task("teachers", _named("pa.eff recipe.eff", "01"), 0, 0.0),
            Task("teachers", _named("pa.64 recipe.64", "01"), 0, 0.0),
            Task("answers", ("2 rc, 4 pa", *FOUR_PA), 0, 0.0),
            Task("answers", ("2 rc, 4 pa", *_named("pa.288", "01")), 0, 0.0),
            Task("answers", ("2 rc, 4 pa", *_named("pa.288", "23")), 0, 0.0),
            Task("answers", ("2 rc, 4 pa", *_named("pa.eff", "01")), 0, 0.0),
            *(Task("students", (name,), 0, 0.0) for name in ("2 rc, 64 dimensions", "2 rc, 4 pa")),
            *(Task("students", (name,), 0, 0.0) for name in ("2 rc, efficientnet", "2 rc, 4 pa.288")),
            *(Task("students", (name,), 0, 0.0) for name in ("2 rc, 4 pa, 2 pa.eff", "2 rc, sigma 1.3")),
            Task("students", ("2 rc, sigma .8",), 0, 0.0),
            Task("students", ("2 rc, 4 pa, 4 pa.288",), 0, 0.0),
        ],
        "2 noisy": [
            Task("teachers", _named("par", "0123"), 0, 0.5),
            Task("teachers", _named("recipe", "01"), 0, 0.5),
            Task("teachers", _named("recipe", "23"), 0, 0.5),
            Task("teachers", _named("par", "0123"), 0, 0.2),
            Task("students", ("2 rc, 4 par", "1 rc, robust", "2 rc, 4 recipe"), 0, 0.5),
            Task("students", ("2 rc, 4 par",), 0, 0.2),
            Task("teachers", _named("pa", "01"), 0, 0.5),
        ],
        # what a second generation and mixed crops give; the answers of four teachers serve three students
        "4": [
            Task("teachers", FOUR_PA, 0, 0.0),
            Task("students", ("4 rc, half mixup",), 0, 0.0),
            Task("answers", ("2 rc, 4 pa", *FOUR_PA), 0, 0.0),
            *(Task("students", (name,), 0, 0.0) for name in FIRST_GENERATION[:3]),
            Task("students", ("4 rc, half cutmix",), 0, 0.0),
            Task("students", ("2 rc, second generation",), 0, 0.0),
            Task("students", ("4 rc, mixup",), 0, 0.0),
            Task("students", ("4 rc, second generation, half mixup",), 0, 0.0),
        ],
        # labels that the first teachers correct, for the second ones
        **{
            f"5 {100 * noise:g} %": [
                Task("teachers", JUDGES[:2], 0, noise),
                Task("teachers", JUDGES[2:], 0, noise),
                *(Task("teachers", (name,), 0, noise) for name in (*_named("c:pa", "0123"), *_named("c:recipe", "01"))),
                *(Task("students", (name,), 0, noise) for name in STUDENTS if name.startswith("5 ")),
            ]
            for noise in (0.2, 0.5)
        },
        # ... only where the audit is sure enough; filtering stays useful for what it misses
        **{
            f"6 {100 * noise:g} %": [
                Task("teachers", JUDGES[:2], 0, noise),
                Task("teachers", JUDGES[2:], 0, noise),
                *(Task("teachers", (name,), 0, noise) for name in _named("l:pa l:recipe l:par", "01")),
                *(Task("students", (name,), 0, noise) for name in STUDENTS if name.startswith("6 ")),
            ]
            for noise in (0.2, 0.5)
        },
        "7": [
            *(Task("teachers", (name,), 0, 0.0) for name in FOUR_PA),
            *(Task("students", (name,), 0, 0.0) for name in STUDENTS if name.startswith("7 ")),
        ],
        # a student's teachers of other kinds; one process trains the teachers of one network, which it compiles once
        "8": [
            Task("teachers", FOUR_PA, 0, 0.0),
            Task("teachers", _named("pa.lite2", "01"), 0, 0.0),
            Task("teachers", _named("pa.2048", "0123"), 0, 0.0),
            Task("teachers", _named("b:pa", "0123"), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *FOUR_PA), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *_named("pa.2048", "0123")), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *_named("b:pa", "0123")), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *_named("pa.lite2", "01")), 0, 0.0),
            Task("students", ("8 rc, 4 pa.2048", "8 rc, margin 1.2"), 0, 0.0),
            Task("students", ("8 rc, 4 b:pa", "8 rc, 4 pa, 4 b:pa"), 0, 0.0),
            Task("students", ("8 rc, 4 pa, 2 pa.lite2", "8 rc, margin .8"), 0, 0.0),
            Task("students", ("8 rc, 4 pa",), 0, 0.0),
            Task("teachers", _named("pa.288", "0123"), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *_named("pa.288", "01")), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *_named("pa.288", "23")), 0, 0.0),
            Task("students", ("8 rc, 4 pa, 4 pa.288",), 0, 0.0),
            Task("students", ("8 rc, 4 pa, 4 pa.2048, 2 pa.lite2, 4 pa.288",), 0, 0.0),
        ],
        "9": [
            Task("teachers", _named("pa.lite2", "01"), 0, 0.0),
            Task("teachers", FOUR_PA, 0, 0.0),
            Task("teachers", _named("pa.lite2", "23"), 0, 0.0),
            Task("teachers", _named("par recipe", "01"), 0, 0.2),
            Task("teachers", _named("par.lite2", "01"), 0, 0.2),
            Task("answers", ("8 rc, 4 pa", *FOUR_PA), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *_named("pa.lite2", "01")), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *_named("pa.lite2", "23")), 0, 0.0),
            Task("students", ("9 rc, 2 par, 2 recipe", "9 rc, 2 par, 2 recipe, 2 par.lite2"), 0, 0.2),
            Task("students", ("9 rc, 4 pa, jitter",), 0, 0.0),
            Task("students", ("9 rc, 4 pa, 4 pa.lite2",), 0, 0.0),
            Task("students", ("9 rc, 4 pa.lite2",), 0, 0.0),
        ],
        # of round 9 what decides about clean labels
        "9 clean": [
            Task("teachers", _named("pa.lite2", "01"), 0, 0.0),
            Task("teachers", _named("pa.lite2", "23"), 0, 0.0),
            Task("teachers", _named("pa", "01"), 0, 0.0),
            Task("teachers", _named("pa", "23"), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *FOUR_PA), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *_named("pa.lite2", "01")), 0, 0.0),
            Task("answers", ("8 rc, 4 pa", *_named("pa.lite2", "23")), 0, 0.0),
            Task("students", ("9 rc, 4 pa.lite2",), 0, 0.0),
            Task("students", ("9 rc, 4 pa, 4 pa.lite2",), 0, 0.0),
            Task("students", ("9 rc, 4 pa.lite2, 64 dimensions",), 0, 0.0),
        ],
        # the same with a second seed, and what the mean of the weights of students gives
        "10": [
            Task("teachers", _named("pa.lite2", "01"), 0, 0.0),
            Task("teachers", FOUR_PA, 0, 0.0),
            Task("teachers", _named("pa.lite2", "23"), 0, 0.0),
            Task("teachers", _named("par recipe", "01"), 0, 0.2),
            Task("teachers", _named("par.lite2", "01"), 0, 0.2),
            *(
                Task("answers", ("8 rc, 4 pa", *teachers), seed, 0.0)
                for seed in (0, 1)
                for teachers in (FOUR_PA, _named("pa.lite2", "01"), _named("pa.lite2", "23"))
            ),
            Task("students", ("9 rc, 2 par, 2 recipe", "9 rc, 2 par, 2 recipe, 2 par.lite2"), 0, 0.2),
            *(Task("students", (name,), seed, 0.0) for seed in (0, 1) for name in AVERAGED),
            *(Task("ensembles", (title,), 0, 0.0) for title in ENSEMBLES if title.startswith("students ")),
        ],
        # students at 288 pixels, which teachers at 288 pixels are, too
        "11": [
            Task("teachers", _named("pa.288", "01"), 0, 0.0),
            Task("teachers", _named("pa.288", "23"), 0, 0.0),
            Task("students", ("11 rc, 4 pa.288, 288 pixels",), 0, 0.0),
        ],
        "12": [
            Task("teachers", _named("pa.lite2", "01"), 0, 0.0),
            Task("teachers", FOUR_PA, 0, 0.0),
            *(Task("answers", ("8 rc, 4 pa", *some), 0, 0.0) for some in (FOUR_PA, _named("pa.lite2", "01"))),
            *(Task("students", (name,), 0, 0.0) for name in TWELFTH),
        ],
        "12 20 %": [
            Task("teachers", _named("par.lite2", "01"), 0, 0.2),
            Task("teachers", _named("par recipe", "01"), 0, 0.2),
            *(
                Task("answers", (TWELFTH_NOISY[0], *some), 0, 0.2)
                for some in (_named("par recipe", "01"), _named("par.lite2", "01"))
            ),
            *(Task("students", (name,), 0, 0.2) for name in TWELFTH_NOISY),
        ],
        # reduced teachers, with and without label noise, and a second generation; nobody waits long for others
        "13": [
            *(Task("teachers", (name,), 0, 0.5) for name in _named("recipe", "01")),
            Task("teachers", _named("pa.lite2", "01"), 0, 0.0),
            Task("teachers", FOUR_PA, 0, 0.0),
            Task("students", (JUDGE["validation"],), 0, 0.5),
            *(Task("answers", ("8 rc, 4 pa", *some), 0, 0.0) for some in (FOUR_PA, _named("pa.lite2", "01"))),
            Task("teachers", SECOND[4:], 0, 0.5),
            Task("teachers", SECOND[:4], 0, 0.5),
            Task("teachers", _named("par.lite2", "01"), 0, 0.2),
            Task("teachers", _named("par recipe", "01"), 0, 0.2),
            *(Task("students", (name,), 0, 0.0) for name in THIRTEENTH["clean"]),
            *(Task("answers", (TWELFTH_NOISY[0], *some), 0, 0.5) for some in (SECOND[:4], SECOND[4:])),
            *(Task("students", (name,), 0, 0.5) for name in THIRTEENTH["50 %"]),
            *(Task("answers", (TWELFTH_NOISY[0], *some), 0, 0.2) for some in (MIXED[1][:4], MIXED[1][4:])),
            *(Task("students", (name,), 0, 0.2) for name in THIRTEENTH["20 %"]),
        ],
        "13 20 %": [
            *(Task("teachers", (name,), 0, 0.2) for name in _named("recipe", "01")),
            Task("students", (JUDGE["validation"],), 0, 0.2),
            Task("teachers", SECOND[4:], 0, 0.2),
            Task("teachers", SECOND[:4], 0, 0.2),
            *(Task("answers", (TWELFTH_NOISY[0], *some), 0, 0.2) for some in (SECOND[:4], SECOND[4:])),
            *(Task("students", (name,), 0, 0.2) for name in THIRTEENTH["50 %"][1:]),
        ],
        # on the test classes, in 30 or 60 epochs; the second round decides which of them
        **{f"3 {title}, {length}": tasks for length in LENGTHS for title, tasks in _test_rounds(length).items()},
        "3 clean, mixed": _mixed_on_test(
            0.0, MIXED[0], ("3 rc, 4 pa, 2 pa.lite2, 30", "3 rc, 4 pa, 2 pa.lite2, 64 dimensions, 30")
        ),
        "3 20 %, mixed": _mixed_on_test(0.2, MIXED[1], ("3 rc, 2 par, 2 recipe, 2 par.lite2, 30",)),
        "3 50 %, mixed": _mixed_on_test(0.5, MIXED[1], ("3 rc, 2 par, 2 recipe, 2 par.lite2, 30",)),
        # as many dimensions of teachers as round 13 chose, which is what teacher_dims "auto" takes
        "3 clean, reduced": _mixed_on_test(0.0, MIXED[0], (REDUCED[128][0], REDUCED[256][1])),
        **{f"3 clean, mixed, {dims}": _mixed_on_test(0.0, MIXED[0], names) for dims, names in REDUCED.items()},
        **{
            f"3 {noise}, mixed, {dims}": _mixed_on_test(rate, MIXED[1], (name,))
            for noise, rate in (("20 %", 0.2), ("50 %", 0.5))
            for dims, name in REDUCED_NOISY.items()
        },
        **{
            f"3 {noise}, corrected, {dims}": _corrected_on_test(rate, f"3 rc, corrected, {dims} of teachers, 30")
            for noise, rate in (("20 %", 0.2), ("50 %", 0.5))
            for dims in REDUCED
        },
        **{
            f"3 {noise}, corrected": _corrected_on_test(rate, "3 rc, corrected, 30")
            for noise, rate in (("20 %", 0.2), ("50 %", 0.5))
        },
        "3 clean, 288 pixels": _on_test(0.0, _named("pa.288", "0123"), ("3 rc, 4 pa.288, 288 pixels, 30",)),
        "smoke 2": [
            Task("teachers", _named("pa recipe", "0"), 0, 0.0),
            Task("answers", ("1 rc, 2 teachers", *_named("pa recipe", "0")), 0, 0.0),
            Task("students", ("1 rc, 2 teachers",), 0, 0.0),
        ],
        "smoke 8": [
            *(Task("teachers", (name,), 0, 0.0) for name in _named("b:pa", "0123")),
            Task("students", ("8 rc, 4 b:pa",), 0, 0.0),
        ],
        "smoke": [
            *(Task("teachers", (name,), 0, 0.0) for name in _named("pa recipe", "0")),
            Task("ensembles", ("pa recipe, seed 0",), 0, 0.0),
            Task("students", ("1 rc, 2 teachers",), 0, 0.0),
        ],
    }


@dataclass(frozen=True)
class Task:
    """Work of one kind; students of one task share their batches and crops as far as their settings do.

    The seed is that of students; teachers have theirs in their names.
    """

    kind: str
    names: tuple[str, ...]
    seed: int
    noise: float

    @property
    def noise_seed(self) -> int:
        """Seed of the label noise: one for all that is chosen, one for each seed of what is tested."""
        return self.seed // PER_DRAW if self.kind == "teachers" else self.seed


class TeacherRun(Training):
    """A run on labels that leaves results only; compiled from the end of the warm-up on."""

    compiled_network: Callable[[Tensor], Tensor] | None = None

    def save(self) -> None:
        """Nothing: a run takes seconds."""
        self.catch_up()

    def initialize_proxies(self) -> None:
        """On the CPU: k-means waits for its device thousands of times, and other processes have the GPU meanwhile."""
        if getattr(self.loss, "proxies_ready", True):
            return
        self.loss.cpu()
        embeddings, labels = self.embeddings("train").cpu(), self.labels.cpu()
        generator = generator_for(self.config.seed, "proxies", 0)
        self.loss.initialize_proxies(embeddings, labels, generator=generator)
        self.loss.to(self.device)

    def train_epoch(self) -> None:
        """Of a model in eager mode, then of a compiled one."""
        if self.compiled_network is not None:
            self.compiled = self.compiled_network
        super().train_epoch()


class StudentRun(TeacherRun):
    """A run that follows teachers."""

    spec: Student
    bench: Bench
    kl = RelationalKLLoss()
    saved_at = math.inf
    #: A folder is that of one student, and teachers have names here in place of folders.
    identity: ClassVar[dict[str, Any]] = {}

    def continue_from_checkpoint(self) -> None:
        """Where an earlier command was stopped, if one was."""
        if has_checkpoint(self.folder.checkpoints):
            self.state.restore(*load_checkpoint(self.folder.checkpoints))
            print(f"continues at epoch {self.state.epoch}: {self.folder.path.name}", flush=True)
        self.saved_at = time.time()

    def save(self) -> None:
        """Now and then, and when time is up, which ends the run."""
        late = start_over_time(self.bench) and self.state.epoch < self.config.epochs
        if not late and time.time() < self.saved_at + self.bench.options.save_every:
            self.catch_up()
            return
        Training.save(self)
        self.saved_at = time.time()
        if late:
            self.writer.wait()
            raise TimeoutError(f"time is up at epoch {self.state.epoch} of {self.folder.path.name}")

    def update(self, indices: Tensor, pixels: Tensor) -> list[Outcome]:
        """Of a batch whose crops may be mixed."""
        if self.spec.mixed:
            generator = generator_for(self.config.seed, "mixing", self.step)
            pixels = mixed_crops(pixels, self.spec.mixed, generator, cut=self.spec.cut)
        return super().update(indices, pixels)

    def initialize_head(self) -> None:
        """Or start from the mean of the teachers."""
        if self.spec.start == "soup":
            self.embedder.load_state_dict(soup([self.bench.teacher(name) for name in self.bench.full(self.spec)]))
        else:
            super().initialize_head()

    def targets(self, batch: Batch, pixels: Tensor) -> Callable[[], Tensor]:
        """What the teachers say, now or earlier."""
        taught = self.bench.taught(self, batch.indices, pixels)
        return lambda: taught

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


class SomeImages:
    """Those images of a source, in this order."""

    def __init__(self, source: ImageSource, indices: Tensor) -> None:
        self.source, self.indices, self.sizes = source, indices, source.sizes[indices]
        self.device, self.description = source.device, source.description

    def __len__(self) -> int:
        return len(self.indices)

    def crops(self, plan: Iterable[Windows]) -> Iterator[Tensor]:
        """As the source makes them."""
        return self.source.crops(replace(windows, indices=self.indices[windows.indices]) for windows in plan)


def mixed_crops(pixels: Tensor, share: float, generator: torch.Generator, *, cut: bool) -> Tensor:
    """The first crops of a random order of a batch, each with another one of the batch.

    Mixup takes the mean by a weight that is uniform in [0, 1]; CutMix replaces a rectangle of that share of the area.
    """
    count, height, width = len(pixels), *pixels.shape[-2:]
    order = torch.randperm(count, generator=generator)
    chosen, others = order[: round(share * count)], order.roll(1)[: round(share * count)]
    weights = torch.rand(len(chosen), generator=generator)
    if cut:
        places = torch.rand(len(chosen), 2, generator=generator)
        sides = weights.sqrt()[:, None] * torch.tensor([height, width])
        starts = places * (torch.tensor([height, width]) - sides)
        rows, columns = torch.arange(height)[None], torch.arange(width)[None]
        inside = [
            (line >= starts[:, k, None]) & (line < (starts + sides)[:, k, None])
            for k, line in enumerate((rows, columns))
        ]
        share_of_other = (inside[0][:, None, :, None] & inside[1][:, None, None, :]).float()
    else:
        share_of_other = weights[:, None, None, None]
    chosen, others = chosen.to(pixels.device), others.to(pixels.device)
    result = pixels.clone()
    result[chosen] = torch.lerp(pixels[chosen], pixels[others], share_of_other.to(pixels))
    return result


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
        self.done = already_done(*options.done, *options.out)
        self.promised = {
            self.answer_file(name, self.stream(task.names[0], task.seed), task.noise)
            for task in options.tasks
            if task.kind == "answers"
            for name in task.names[1:]
        }
        self._teachers: dict[Path, Embedder] = {}
        self._asked: dict[tuple[tuple[str, ...], float, int], Teachers] = {}
        self._answers: dict[tuple[Any, ...], Tensor] = {}
        self._labels: dict[tuple[str, float, int], Tensor] = {}
        self._bases: dict[tuple[tuple[str, ...], float, int], Tensor] = {}
        #: by the way to correct, the noise and its seed: the shares of the labels that are right
        self.right: dict[tuple[str, float, int], dict[str, float]] = {}

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

    def begin(
        self,
        base: RunConfig,
        task: Task,
        kind: type[Training] = Training,
        place: Path | None = None,
        *,
        corrected: str = "",
        left_out: int | None = None,
    ) -> Any:
        """A run that is ready to start, with its files in `place`, or anywhere.

        Its labels are corrected in this way; it does not see the classes whose number has the rest `left_out`.
        """
        config = self.config(base, task.seed, task.noise, task.noise_seed)
        data = data_of(config.data, self.options.stage)
        if not self.sources:
            self.sources = open_sources(data, self.device, config.storage, Monitor())
        if corrected:
            labels = self.corrected_labels(corrected, data.train, config, task)
            data = replace(data, train=data.train.with_labels(labels))
        sources = self.sources
        if left_out is not None:
            classes = [number for number in range(data.train.num_classes) if number % BAGS != left_out]
            seen = (data.train.labels % BAGS != left_out).nonzero()[:, 0]
            sources = {**sources, "train": SomeImages(sources["train"], seen)}
            data = replace(data, train=data.train.of_classes(classes))
        embedder = self.networks.embedder(config.model)
        folder = RunFolder(Path(place or tempfile.mkdtemp()))
        folder.path.mkdir(parents=True, exist_ok=True)
        write_config(folder.config, config)
        with patch("pfml.training.loop.load_teachers", return_value=None):  # they are asked here, and once for all
            return kind(embedder, data, sources, config, folder, Monitor())

    def corrected_labels(self, way: str, images: ImageSet, config: RunConfig, task: Task) -> Tensor:
        """Of training images: the class that attracts each most in the field of the judges of the draw.

        A class that would lose all its images keeps them.
        """
        key = way, task.noise, task.noise_seed
        if key not in self._labels:
            names = judges(way, self.options.stage, task.noise_seed)
            mixed = precision(config.autocast)
            points = combined([embed(self.teacher(name), self.sources["train"], autocast=mixed) for name in names])
            found = audit(points, images)
            wrong = found.scores.score > 0 if way == "c:" else found.confidence >= 0.5
            labels = torch.where(wrong, found.scores.suggested, images.labels)
            emptied = torch.bincount(labels, minlength=images.num_classes) == 0
            labels = torch.where(emptied[images.labels], images.labels, labels)
            self._labels[key] = labels
            clean = replace(config.data, noise=replace(config.data.noise, rate=0.0))
            true = data_of(clean, self.options.stage).train.labels
            self.right[key] = {
                "given": (images.labels == true).double().mean().item(),
                "corrected": (labels == true).double().mean().item(),
            }
        return self._labels[key]

    def folder(self, name: str, noise: float) -> Path:
        """Where a teacher is kept."""
        options = self.options
        return Path(options.models) / f"{options.stage}-{noise:g}-{name}".replace(" ", "_").replace(",", "")

    def full(self, spec: Student) -> tuple[str, ...]:
        """The teachers of a student by name; s:NAME-SEED are students themselves."""
        return spec.teachers if self.options.stage == "validation" else drawn(spec.teachers, self.seed)

    def teacher(self, name: str) -> Embedder:
        """Read from its file, as soon as it is there."""
        folder = self.folder(name, self.noise)
        if folder not in self._teachers:
            self.wait_for(folder / "model.json", Path(f"{folder}.failed"))
            self._teachers[folder] = load_embedder(folder).to(self.device)
        return self._teachers[folder]

    def wait_for(self, file: Path, failed: Path) -> None:
        """Until another process has written a file."""
        while not file.is_file():
            if start_over_time(self) or failed.exists():
                raise TimeoutError(f"{file} has failed, or no time is left to wait for it")
            time.sleep(0.2)

    @torch.no_grad()
    def taught(self, run: StudentRun, indices: Tensor, pixels: Tensor) -> Tensor:
        """What the teachers of a run say of its batch."""
        spec, config, names = run.spec, run.config, self.full(run.spec)
        files = {} if spec.mixed else {name: self.answer_file(name, config, self.noise) for name in names}
        steps = config.epochs * len(run.batches)
        said = {name: self.written_answers(file)[run.step] for name, file in files.items() if self.has(file, steps)}
        stream = spec.still, spec.side, spec.mixed, spec.cut, config.seed, config.batch, config.augmentation, run.step
        keys = {name: (name, self.noise, *((True,) if spec.still else stream)) for name in names if name not in said}
        if missing := tuple(name for name, key in keys.items() if key not in self._answers):
            answers = self.asked_now(missing, spec, run, pixels)
            self._answers |= {keys[name]: answer for name, answer in zip(missing, answers, strict=True)}
        for name, key in keys.items():
            answer = self._answers[key]
            said[name] = answer[indices.to(answer.device)] if spec.still else answer
        together = combined([said[name] for name in names])
        return together @ self.basis(names, spec.reduced, config) if spec.reduced else together

    def basis(self, names: tuple[str, ...], dims: int, config: RunConfig) -> Tensor:
        """The principal dimensions of teachers, (all of theirs, dims); as `Teachers.reduce` finds them."""
        key = names, self.noise, dims
        if key not in self._bases:
            mixed = precision(config.autocast)
            points = combined([embed(self.teacher(name), self.sources["train"], autocast=mixed) for name in names])
            self._bases[key] = principal_directions([points], dims)[0]
        return self._bases[key]

    def teachers_of(self, embedders: list[Embedder]) -> Teachers:
        """Teachers as they are asked here."""
        return Teachers(embedders, self.device, compiling=self.options.compile)

    def stream(self, student: str, seed: int) -> RunConfig:
        """The configuration that says which batches and crops a student sees."""
        config = student_config(STUDENTS[student], self.options.data)
        return replace(config, seed=seed)

    def answer_file(self, name: str, config: RunConfig, noise: float) -> Path:
        """Where what a teacher says of a stream of batches is kept."""
        text = f"{config.seed} {config.batch} {config.augmentation}"
        stream = hashlib.sha256(text.encode()).hexdigest()[:8]
        return Path(f"{self.folder(name, noise)}-{stream}.answers")

    def has(self, file: Path, steps: int) -> bool:
        """Whether a file has the answers to so many batches, after a while if a task of this call writes it."""
        if (file,) not in self._answers and file in self.promised:
            self.wait_for(file, Path(f"{file}.failed"))
        return ((file,) in self._answers or file.is_file()) and len(self.written_answers(file)) >= steps

    def written_answers(self, file: Path) -> Tensor:
        """(steps, batch, D) on the device."""
        if (file,) not in self._answers:
            self._answers[(file,)] = load_file(file)["answers"].to(self.device)
        return self._answers[(file,)]

    def asked_now(self, names: tuple[str, ...], spec: Student, run: StudentRun, pixels: Tensor) -> list[Tensor]:
        """The answers of each of several teachers, about a batch or about all whole images."""
        embedders = [self.teacher(name) for name in names]
        if spec.still:
            mixed = precision(run.config.autocast)
            return [embed(each, self.sources["train"], autocast=mixed).clone() for each in embedders]
        key = names, self.noise, spec.side
        if key not in self._asked:
            teachers = self.teachers_of(embedders)
            if spec.side:
                teachers.sides = [spec.side] * len(embedders)
            self._asked[key] = teachers
        return apart(self._asked[key](pixels), embedders)

    def awaited(self, task: Task) -> list[Path]:
        """What others may wait for, of a task that has failed."""
        if task.kind == "answers":
            stream = self.stream(task.names[0], task.seed)
            paths = [self.answer_file(name, stream, task.noise) for name in task.names[1:]]
        elif task.kind == "students":
            paths = [self.folder(f"s:{name}-{task.seed}", task.noise) for name in task.names]
        else:
            paths = [self.folder(name, task.noise) for name in task.names]
        return [path for path in paths if not path.exists()]

    def forget(self) -> None:
        """What was said of batches, before another stream of them."""
        self._answers.clear()


def apart(together: Tensor, embedders: list[Embedder]) -> list[Tensor]:
    """The embeddings whose `combined` is given."""
    widths = [each.embedding_dim for each in embedders]
    return [each * math.sqrt(len(embedders)) for each in together.split(widths, dim=1)]


Key = tuple[str, int, float]


def already_done(*paths: Path) -> set[Key]:
    """What earlier calls have done."""
    texts = [text for path in paths if path.is_file() for text in path.read_text(encoding="utf-8").splitlines()]
    return {(each["candidate"], each["seed"], each["noise"]) for each in map(json.loads, texts)}


def key_of_teacher(name: str, noise: float) -> Key:
    """By which the line of a teacher is known."""
    kind, seed = name.rsplit("-", 1)
    return f"teacher {kind}", int(seed), noise


def way_to_correct(name: str) -> str:
    """How the labels of a teacher were corrected, by its name: one of `CORRECTED`, or "" for labels as given."""
    return next((way for way in CORRECTED if name.startswith(way)), "")


def judges(way: str, stage: str, draw: int) -> tuple[str, ...]:
    """Who corrects labels in this way."""
    draw = draw if stage == "test" else 0
    return (f"s:{JUDGE[stage]}-{draw}",) if way == "j:" else drawn(JUDGES, draw)


def judges_of(name: str, stage: str) -> tuple[str, ...]:
    """Who corrects the labels of a teacher."""
    way = way_to_correct(name)
    return judges(way, stage, int(name.rsplit("-", 1)[1]) // PER_DRAW) if way else ()


def distinct(tasks: list[Task]) -> list[Task]:
    """Everything once, as rounds may have tasks in common."""
    seen: set[tuple[Any, ...]] = set()
    left = []
    for task in tasks:
        first, names = (task.names[:1], task.names[1:]) if task.kind == "answers" else ((), task.names)
        keys = {name: (task.kind, first, name, task.seed, task.noise) for name in names}
        if new := tuple(name for name, key in keys.items() if key not in seen):
            left.append(replace(task, names=first + new))
        seen.update(keys.values())
    return left


def of_students(tasks: list[Task], stage: str) -> list[str]:
    """Those tasks' names whose teachers or judges are students, which stay only if they are kept."""
    known: dict[str, Callable[[str], tuple[str, ...]]] = {
        "students": lambda name: STUDENTS[name].teachers,
        "ensembles": lambda name: ENSEMBLES[name],
        "teachers": lambda name: judges_of(name, stage),
    }
    groups = {name: known[task.kind](name) for task in tasks if task.kind in known for name in task.names}
    return [name for name, group in groups.items() if any(each.startswith("s:") for each in group)]


def to_do(tasks: list[Task], done: set[Key], stage: str) -> list[Task]:
    """Without what has its line, unless somebody else needs it: weights are lost with the machine, lines are not."""
    tasks = distinct(tasks)
    needed: set[tuple[str, float]] = set()
    left = []
    for task in reversed(tasks):  # what is needed comes before those who need it
        names = task.names
        if task.kind in ("students", "ensembles"):
            known = STUDENTS if task.kind == "students" else ENSEMBLES
            names = tuple(
                name
                for name in names
                if (name, task.seed, task.noise) not in done or (f"s:{name}-{task.seed}", task.noise) in needed
            )
            groups = [known[name].teachers if task.kind == "students" else known[name] for name in names]
            if stage == "test" and task.kind == "students":
                groups = [drawn(group, task.seed) for group in groups]
            needed |= {(name, task.noise) for group in groups for name in group}
        elif task.kind == "answers":
            names = tuple(name for name in names[1:] if (name, task.noise) in needed)
            names = (task.names[0], *names) if names else ()
        else:
            names = tuple(
                name for name in names if key_of_teacher(name, task.noise) not in done or (name, task.noise) in needed
            )
            needed |= {(judge, task.noise) for name in names for judge in judges_of(name, stage)}
        if names:
            left.append(replace(task, names=names))
    return left[::-1]


def student_config(spec: Student, name: str) -> RunConfig:
    """On CUB: that of all methods there, with a cosine to zero and averaged weights."""
    base = base_config(PROXY_ANCHOR) if name == "cub" else shipped_config("glyphs")
    changes = FINAL | {"average": 0.995, "optimizer.lr": 1e-4, "batch.samples_per_class": 4} if name == "cub" else {}
    for path, value in (changes | spec.changes).items():
        base = replace(base, loss=value, teachers=spec.teachers) if path == "loss" else with_value(base, path, value)
    return base


def teacher_config(kind: str, name: str) -> RunConfig:
    """Of a loss on labels; "pa.288" is pa at 288 pixels, "c:pa" is pa on other labels."""
    kind, _, network = kind.removeprefix(way_to_correct(kind)).removeprefix(BAGGED).partition(".")
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
    work = {"teachers": teach, "answers": write_answers, "ensembles": measure_ensembles, "students": learn}[task.kind]
    yield from work(task, bench)


def teach(task: Task, bench: Bench) -> Iterator[dict[str, Any]]:
    """Train teachers and keep them."""
    for name in task.names:
        kind, seed = name.rsplit("-", 1)
        folder = bench.folder(name, task.noise)
        if (folder / "model.json").is_file() or start_over_time(bench):
            continue
        one = replace(task, names=(name,), seed=int(seed))
        start = time.perf_counter()
        base = teacher_config(kind, bench.options.data)
        if bench.options.epochs:
            base = replace(base, epochs=bench.options.epochs)
        with seeded(int(seed)):
            left_out = int(seed) % BAGS if kind.startswith(BAGGED) else None
            run = bench.begin(base, one, TeacherRun, corrected=way_to_correct(name), left_out=left_out)
            run.compiled_network = bench.networks.network(run, run.config) if bench.options.compile else None
            run.run()
        # the line before the weights: what has weights is not trained again
        if key_of_teacher(name, task.noise) not in bench.done:
            way = way_to_correct(name)
            corrected = {"right_labels": bench.right[way, one.noise, one.noise_seed]} if way else {}
            yield line("teacher", f"teacher {kind}", run, one, start) | corrected
        keep(run.embedder, folder)


def keep(embedder: Embedder, folder: Path) -> None:
    """Save a model so that it is there as a whole or not at all."""
    partial = Path(f"{folder}.partial")
    embedder.save(partial)
    partial.rename(folder)


#: Batches that teachers see at once, where nobody waits for the first of them.
TOGETHER = 4


def write_answers(task: Task, bench: Bench) -> Iterator[dict[str, Any]]:
    """What teachers say of the batches of a student's epochs, each at its own resolution, for all who ask later.

    The names are those of teachers after that of the student whose batches they are.
    """
    student, *names = task.names
    base = student_config(STUDENTS[student], bench.options.data)
    run = bench.begin(base, task, StudentRun, corrected=way_to_correct(names[0]))  # batches are drawn by labels
    files = {name: bench.answer_file(name, run.config, task.noise) for name in names}
    todo = [name for name, file in files.items() if not file.is_file()]
    sides = {name: bench.teacher(name).preprocessing.crop for name in todo}
    for side in sorted(set(sides.values())):
        group = [name for name in todo if sides[name] == side]
        embedders = [bench.teacher(name) for name in group]
        teachers = bench.teachers_of(embedders)
        with torch.no_grad(), reproducible(False):
            batches = list(stream_of(run, bench.options.epochs or run.config.epochs, side, teachers))
        for name, answers in zip(group, apart(torch.cat(batches), embedders), strict=True):
            stacked = answers.view(-1, run.config.batch.size, answers.shape[1])
            save_file({"answers": stacked.cpu()}, f"{files[name]}.partial")
            Path(f"{files[name]}.partial").rename(files[name])
    yield from ()


def stream_of(run: StudentRun, epochs: int, side: int, teachers: Teachers) -> Iterator[Tensor]:
    """What teachers say of all crops of a run, in order; several batches at once, of one size, as graphs ask for."""
    for epoch in range(epochs):
        run.state.epoch = epoch
        plan = list(run.plan(run.batches.batches(epoch)))
        crops = run.sources["train"].crops(replace(windows, size=side) for windows in plan)
        for count in [TOGETHER] * (len(plan) // TOGETHER) + [len(plan) % TOGETHER]:
            seen = [next(crops).clone() for _ in range(count)]
            if seen:
                seen += [seen[-1]] * (TOGETHER - count)
                yield teachers(torch.cat(seen))[: count * run.config.batch.size]


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
        folder = bench.folder(f"s:{name}-{task.seed}", task.noise)
        is_done = (name, task.seed, task.noise) in bench.done
        if is_done and (not bench.options.keep or (folder / "model.json").is_file()):
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
            corrected = way_to_correct(spec.teachers[0])
            run = bench.begin(base, task, StudentRun, Path(f"{folder}.run"), corrected=corrected)
            run.spec, run.bench = spec, bench
            run.compiled_network = bench.networks.network(run, run.config) if bench.options.compile else None
            run.continue_from_checkpoint()
            continued = run.state.epoch
            run.run()
        if not is_done:  # the line before the weights, and the checkpoint until both are there
            yield line("student", name, run, task, start) | {
                "teachers": bench.full(spec),
                **({"seconds_from_epoch": continued} if continued else {}),
                "spec": {
                    key: getattr(spec, key) for key in ("start", "beside", "side", "still", "mixed", "cut", "reduced")
                },
            }
        if bench.options.keep and not folder.exists():
            keep(run.embedder, folder)
        shutil.rmtree(run.folder.path)


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
    keys = {"kind": kind, "candidate": candidate, "epochs": run.config.epochs, "history": run.state.history}
    seconds = {"seconds": time.perf_counter() - start, "config": plain(_anywhere(run.config))}
    return header(task, _bench) | keys | seconds | (views(run, _bench) if kind == "student" else {})


def views(run: Training, bench: Bench) -> dict[str, Any]:
    """The test of a trained model that sees larger images than it was trained on, and their mirror images as well."""
    own, test = run.embedder.preprocessing, bench.sources["test"]
    mixed, labels = precision(run.config.autocast), run.data.test.labels
    found = {}
    for side in bench.options.views:
        run.embedder.preprocessing = with_image_size(own, side)
        try:
            plain, mirrored = (embed(run.embedder, test, autocast=mixed, mirrored=each) for each in (False, True))
        finally:
            run.embedder.preprocessing = own
        for name, points in ((f"{side}", plain), (f"{side}, flip test", unit(plain + mirrored))):
            found[name] = retrieval_metrics(points, labels, recall_at=(1,)).as_dict()
    return {"views": found} if found else {}


_bench: Bench

#: Microseconds of an H200 for an image: trained, as round 1 had it with four processes, and seen by a teacher.
TRAINED, SEEN = 140.0, 44.0
#: ... and how many times as long other networks take: the larger image by its area, the small one by guess.
TIMES = {"": 1.0, "288": 1.65, "64": 1.0, "2048": 1.0, "eff": 0.8, "lite2": 1.5}
#: Steps of 100 images in an epoch.
STEPS = {"validation": 29, "test": 58}
#: Seconds of a run besides its steps: images into the head and its test, k-means for the recipe, files.
AROUND = 2.0


def estimate(task: Task, stage: str) -> float:
    """Seconds of an otherwise idle H200, without what is compiled."""
    epoch = 100 * STEPS[stage] * 1e-6

    def network(name: str) -> float:
        return TIMES[name.rsplit("-", 1)[0].partition(".")[2]] if not name.startswith("s:") else 1.0

    if task.kind == "teachers":
        return sum(8 * epoch * TRAINED * network(name) + AROUND for name in task.names)
    if task.kind == "answers":
        return sum(STUDENTS[task.names[0]].changes["epochs"] * epoch * SEEN * network(name) for name in task.names[1:])
    if task.kind == "ensembles":
        return 20.0 * len(task.names)
    seconds, asked = 0.0, dict[str, float]()
    for spec in (STUDENTS[name] for name in task.names):
        own = next((kind for kind, changes in NETWORKS.items() if changes.items() <= spec.changes.items()), "")
        seconds += spec.changes["epochs"] * epoch * TRAINED * TIMES[own] + AROUND
        for name in spec.teachers:
            asked[name] = max(asked.get(name, 0.0), spec.changes["epochs"] * epoch * SEEN * network(name))
    return seconds + sum(asked.values())


def files_of(tasks: list[Task]) -> set[str]:
    """Files of weights that networks of tasks start from, besides --weights."""
    kinds = {
        name.rsplit("-", 1)[0].partition(".")[2] for task in tasks if task.kind == "teachers" for name in task.names
    }
    return {
        changes["model.weights"] for kind, changes in NETWORKS.items() if kind in kinds and "model.weights" in changes
    }


def estimates(tasks: list[Task], stage: str) -> str:
    """What tasks may take, one line each; students whose teachers' answers are written do not ask them."""
    written = {(name, task.noise, task.seed) for task in tasks if task.kind == "answers" for name in task.names[1:]}
    rows, total = [], 0.0
    for task in tasks:
        seconds = estimate(task, stage)
        if task.kind == "students":
            names = {name for student in task.names for name in STUDENTS[student].teachers}
            for name in drawn(tuple(names), task.seed) if stage == "test" else names:
                if (name, task.noise, task.seed) in written:
                    seconds -= estimate(Task("answers", (task.names[0], name), 0, 0.0), stage)
        total += seconds
        rows.append(f"{seconds:5.0f} s  {task.kind:9} seed {task.seed} noise {task.noise:g}  {'; '.join(task.names)}")
    return "\n".join([*rows, f"{total:5.0f} s of an otherwise idle H200, {len(tasks)} tasks"])


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
            seen = {f"{line['candidate']}, seen at {view}": each for view, each in line.get("views", {}).items()}
            scores = {line["candidate"]: line["history"][-1]["test"]} | seen
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
                for path in options.out:
                    append_line(path, found)
                print(f"{time.time() - options.begun:4.0f} s: {summary(found)}", flush=True)
        except Exception:
            for path in _bench.awaited(task):
                Path(f"{path}.failed").touch()
            print(f"FAILED {task}", flush=True)
            traceback.print_exc()


def main() -> None:
    """Divide the tasks of a round among processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("validation", "test"), default="validation")
    parser.add_argument("--data", choices=("cub", "glyphs"), default="cub")
    parser.add_argument("--rounds", nargs="+", choices=rounds(), default=[], metavar="ROUND")
    parser.add_argument("--list", action="store_true", help="print the tasks that are left, and what they may take")
    parser.add_argument("--table", type=Path, help="print this file of results and do nothing else")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--weights")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--models", default="models")
    parser.add_argument("--keep", action="store_true", help="keep students too, to be teachers")
    parser.add_argument(
        "--views",
        type=int,
        nargs="+",
        default=[],
        help="also test each student on crops of these sides, plain and mirrored",
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--minutes", type=float, default=60.0, help="nothing goes on after these, but is saved")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints of a student")
    parser.add_argument(
        "--out", type=Path, nargs="+", default=[Path("results/transfer.jsonl")], help="each gets all lines"
    )
    parser.add_argument("--done", type=Path, nargs="+", default=[], help="files of results that are not made again")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return
    options.begun = time.time()
    options.deadline = options.begun + 60 * options.minutes
    done = already_done(*options.done, *options.out)
    options.tasks = to_do([task for name in options.rounds for task in rounds()[name]], done, options.stage)
    if options.list:
        print(estimates(options.tasks, options.stage))
        return
    if not options.keep and (names := of_students(options.tasks, options.stage)):
        parser.error(f"{'; '.join(names)}: students are teachers and judges only with --keep")
    require_files(parser, options.root, options.weights, *files_of(options.tasks))
    for path in (*options.out, Path(options.models) / "any"):
        path.parent.mkdir(parents=True, exist_ok=True)
    for stale in Path(options.models).glob("*.failed"):
        stale.unlink()
    if options.cache and options.jobs > 1:
        decode(options, "g pa")
    divide(options.tasks, work, options)


if __name__ == "__main__":
    main()
