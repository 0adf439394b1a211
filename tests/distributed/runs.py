"""Training runs inside the processes of a `World`: functions of a process group that return plain values."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from cases import message_of

from pfml.data import with_validation
from pfml.data.resampling import resample
from pfml.data.splits import divided
from pfml.distributed import Ranks
from pfml.evaluation import embed, evaluate
from pfml.losses.checks import CollapseWarning
from pfml.losses.distillation import principal_directions
from pfml.models.head import Head
from pfml.runs.checkpoint import load_checkpoint, save_checkpoint
from pfml.search import ModelIdentity
from pfml.training import BatchConfig, LossConfig, OptimizerConfig, train
from pfml.training.loop import Training
from small_data import InterruptAt, few_glyphs, small_config, small_embedder


def config_of(**changes):
    """Two epochs of four steps of 31 images: no number of ranks but one divides them."""
    values = {
        "batch_norm": "freeze",
        "batch": BatchConfig(size=31, samples_per_class=0),
        "optimizer": OptimizerConfig("adamw", lr=1e-3, eps=1e-2, clip_norm=0.5),
        "loss": LossConfig("pfml", {"proxies_per_class": 2, "reduction": "points"}),
    }
    return small_config(**{**values, **changes})


def training(group, out, changes, resume=False, interrupt_at=None):
    """What `train` returns to each rank; None if it was interrupted. Without a group, in this process alone."""
    # every rank begins with weights of its own: those of the first must count
    torch.manual_seed(1 if group is None else 1 + dist.get_rank(group))
    monitor = None if interrupt_at is None else InterruptAt(interrupt_at)
    world = None if group is None else Ranks(group)
    results = None
    with suppress(KeyboardInterrupt):
        results = train(
            few_glyphs(),
            small_embedder(image_size=32),
            config_of(**changes),
            out=out,
            resume=resume,
            monitor=monitor,
            world=world,
        )
    return results


def training_on_known_classes(group, out):
    """`training` on images of all classes, of which some are held out and searched among the others."""
    torch.manual_seed(1 if group is None else 1 + dist.get_rank(group))
    data, world = divided(few_glyphs().train, "letters", "images"), None if group is None else Ranks(group)
    return train(data, small_embedder(image_size=32), config_of(epochs=1), out=out, world=world)


def training_with_choice(group, out, changes, resume=False, interrupt_at=None):
    """`training` with validation classes that choose the first epoch; a digest of the network that each rank has."""
    torch.manual_seed(1 if group is None else 1 + dist.get_rank(group))
    monitor = None if interrupt_at is None else InterruptAt(interrupt_at)
    embedder, data = small_embedder(image_size=32), with_validation(few_glyphs(), "half")
    config = config_of(**{"epochs": 3, "batch": BatchConfig(size=15, samples_per_class=0), **changes})
    world = None if group is None else Ranks(group)

    def falling(training, role, _scores=Training.scores):
        found = _scores(training, role)
        return found | {"recall_at_1": 1 / (2 + len(training.state.history))} if role == "validation" else found

    with suppress(KeyboardInterrupt), mock.patch.object(Training, "scores", falling):
        train(data, embedder, config, out=out, resume=resume, monitor=monitor, world=world)
    return ModelIdentity.of(embedder).digest


def outcome(folder):
    """The tensors and the state that a run ended with."""
    return load_checkpoint(Path(folder) / "checkpoints")


def evaluation(group, batch_size):
    """Embeddings and metrics of the test images, by this rank."""
    world = None if group is None else Ranks(group)
    torch.manual_seed(3)
    embedder = small_embedder(image_size=32)
    points = embed(embedder, few_glyphs().test, batch_size=batch_size, world=world)
    return points, evaluate(embedder, few_glyphs().test, batch_size=batch_size, nmi=True, world=world)


def refusal(group, out, changes):
    """What `train` raises on each rank."""
    return message_of(training, group, out, changes)


def refusal_of_other_task(group, out):
    """What `train` raises where one rank has another seed."""
    return message_of(training, group, out, {"seed": int(dist.get_rank(group) == 2)})


def faulty_training(group, out, fault):
    """What a run raises in which something goes wrong on one rank only."""
    rank, faults = dist.get_rank(group), []

    def broken(function, culprit, at, result):
        """`function` as it is, but for one call on one rank, which gives `result` or raises it."""
        calls = iter(range(1000))

        def called(*arguments, **options):
            if rank == culprit and next(calls) == at:
                faults.append(fault)
                if isinstance(result, Exception):
                    raise result
                return result(function(*arguments, **options))
            return function(*arguments, **options)

        return called

    if fault == "image":
        target, culprit = "pfml.data.decoded_images.resample", 1
        function = broken(resample, culprit, 2, ValueError("photo 7 cannot be read"))
    elif fault == "memory":
        target, culprit = "pfml.data.decoded_images.resample", 1
        function = broken(resample, culprit, 2, MemoryError())
    elif fault == "disk":
        target, culprit = "pfml.runs.checkpoint.save_checkpoint", 0
        function = broken(save_checkpoint, culprit, 0, OSError("no space left"))
    else:
        target, culprit = "pfml.models.head.Head.forward", 2
        function = broken(Head.forward, culprit, 2, lambda points: points * torch.nan)
    with mock.patch(target, function):
        message = message_of(training, group, out, {})
    assert bool(faults) == (rank == culprit)
    return message


def warned_training(group, out):
    """The warnings of a run whose network gives one point for all images."""
    from pfml.distributed.launch import warnings_of_the_first

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("once")
        with warnings_of_the_first(dist.get_rank(group)), mock.patch("pfml.models.head.Head.forward", collapsed):
            training(group, out, {"epochs": 1})
    return [str(one.message) for one in heard if issubclass(one.category, CollapseWarning)]


def collapsed(head, features):
    return 0 * head.linear(features.mean((2, 3))) + torch.eye(8)[0]


def choices(group):
    """A number drawn within `own_draws`, and one drawn after it."""
    torch.manual_seed(0)
    with Ranks(group).own_draws(5, 17):
        own = torch.rand(()).item()
    return own, torch.rand(()).item()


def training_with_turned_directions(group, folder, changes):
    """Rounding may give ranks other signs of the directions that reduce teachers; here the second has them."""
    sign = 1 - 2 * dist.get_rank(group)

    def turned(batches, dims):
        directions, kept = principal_directions(batches, dims)
        return directions * sign, kept

    with mock.patch("pfml.training.teachers.principal_directions", turned):
        return training(group, folder, changes)
