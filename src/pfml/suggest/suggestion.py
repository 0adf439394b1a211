"""The rules by which a run on one's own images is suggested.

`suggest` is a pure function of the image counts, of the distances between some images before training, and of the
device. docs/FOLDERS.md says which values come from a measurement of ours; the others are those of the preset `pfml-log`
and of the shipped configurations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pfml.data import RetrievalData, with_validation
from pfml.methods import LossConfig
from pfml.models import EmbedderConfig
from pfml.models.timm_backbone import is_cached
from pfml.runs.config import BatchConfig, DataConfig, OptimizerConfig, RunConfig, ScheduleConfig
from pfml.suggest.preview import InitialDistances
from pfml.training.setup import require_matches

__all__ = ["Suggestion", "suggest", "suggest_loss", "suggest_model", "with_values"]

BACKBONE = "efficientnet_lite0"
#: What is taken in its place where the weights have been downloaded, the first that is there.
LARGER = ("dinov3_small", "dinov2_small")
#: Device -> steps of a training, and epochs at least and at most. The plan follows from the images, not from how fast
#: the machine is at the moment; on a GPU more epochs than these overfit.
STEPS = {"cpu": 150, "cuda": 230}
FEWEST_EPOCHS = {"cpu": 3, "cuda": 8}
MOST_EPOCHS = {"cpu": 12, "cuda": 20}
#: A training step costs as much as so many embeddings: forward, and twice that backward.
STEP_COST = 3.0
#: A training that takes longer deserves a word.
LONG_MINUTES = 30.0
#: Validation on fewer classes than this says nothing: of one class, every neighbor is right.
FEWEST_CLASSES_TO_DIVIDE = 8


@dataclass(frozen=True)
class Suggestion:
    """A whole run, and why.

    Args:
        config: The run; fields without a reason have their defaults.
        reasons: Option, such as "loss.options.delta" -> a sentence that says why it has its value.
    """

    config: RunConfig
    reasons: dict[str, str]

    def value(self, option: str) -> Any:
        """The suggested value of an option, such as "loss.options.delta"."""
        value: Any = self.config
        for part in option.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return value

    def besides(self, given: Collection[str]) -> dict[str, Any]:
        """Option -> value of the suggested options that are not `given`, nor belong to a loss or backbone that is."""
        return {
            option: self.value(option)
            for option in self.reasons
            if option not in given
            and not ("loss.name" in given and option.startswith("loss."))
            and not ("model.backbone" in given and option == "model.pooling")
        }


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """`config` with other values of some options, such as {"optimizer.lr": 1e-4, "loss.options.delta": 0.3}."""
    changes: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for option, value in values.items():
        group, dot, name = option.partition(".")
        if dot:
            groups.setdefault(group, {})[name] = value
        else:
            changes[option] = value
    for group, inner in groups.items():
        old = getattr(config, group)
        options = {name.removeprefix("options."): inner[name] for name in inner if name.startswith("options.")}
        plain = {name: value for name, value in inner.items() if not name.startswith("options.")}
        if options:
            plain["options"] = {**old.options, **options}
        changes[group] = replace(old, **plain)  # at once: a batch size must fit its samples per class
    return replace(config, **changes)


def suggest_model() -> tuple[EmbedderConfig, dict[str, str]]:
    """The model for photographs, and why: a large one if its weights were downloaded before, else what needs no hub."""
    why_features = "the backbone's features as they are, so that training starts from what they know"
    for backbone in LARGER:
        if is_cached(backbone):
            return EmbedderConfig(backbone=backbone, embedding_dim=None, pooling="token"), {
                "model.backbone": "learned from over 100 million images without labels, and its weights are on this "
                f"machine; {BACKBONE} takes a third of the time",
                "model.pooling": "its CLS token describes the whole image",
                "model.embedding_dim": why_features,
            }
    return EmbedderConfig(backbone=BACKBONE, embedding_dim=None), {
        "model.backbone": "its ImageNet weights come with a package, so that no model hub is needed",
        "model.embedding_dim": why_features,
    }


def suggest(
    data: RetrievalData,
    distances: InitialDistances | None,
    device: torch.device,
    *,
    validation: str | None = None,
    batch_size: int | None = None,
    samples_per_class: int | None = None,
    epochs: int | None = None,
) -> Suggestion:
    """How to train on `data`, with a reason for each choice.

    Args:
        data: Without validation classes set apart, unless it has some of its own.
        distances: Between some training images before training; None for a model without pretrained weights.
        device: Where it will train.
        validation: The split of the training classes, if it is decided already; the other values fit it.
        batch_size: Likewise.
        samples_per_class: Likewise.
        epochs: Likewise.

    Raises:
        ValueError: If there are not two classes to train on, or nothing to be found among the unseen ones.
    """
    classes = len(data.train.labels.unique())
    if classes < 2:
        others, advice = "", "add class folders"
        if data.protocol == "classes":
            unseen = data.test.num_classes
            others = f" with {unseen} {'other' if unseen == 1 else 'others'} kept unseen for the test"
            advice = (
                "add class folders until there are 4, divide them into train/ and test/, or hold out images of every "
                "class in place of classes (--data.split images)"
            )
        raise ValueError(f"training must have at least 2 classes to tell apart, got {classes}{others}: {advice}")
    require_matches(data)
    model, reasons = suggest_model()
    why_validation: dict[str, str] = {}
    if validation is None:
        validation, why_validation = _validation(data)
    divided = with_validation(data, validation)
    batch, why_batch = _batch(divided, device, batch_size, samples_per_class)
    loss, why_loss = suggest_loss(divided.train.labels, distances)
    fitting = _epochs(divided, batch, device)
    epochs = epochs or fitting
    steps = epochs * max(len(divided.train) // batch.size, 1)
    why_time = {"epochs": f"{steps:,} steps; with more, it overfits" + _time(divided, distances, epochs)}
    config = RunConfig(
        data=DataConfig(data.name, validation=validation),
        model=model,
        loss=loss,
        batch=batch,
        epochs=epochs,
        warm_up_epochs=0,
        batch_norm="freeze",
        optimizer=OptimizerConfig("adamw", lr=3e-4 if device.type == "cpu" else 1e-4, proxy_lr=0.01, weight_decay=1e-4),
        schedule=ScheduleConfig("cosine"),
        evaluate_every=1 if epochs <= 6 else 2,
        log_every=1 if len(divided.train) < 1000 else 10,
        autocast="bfloat16" if device.type == "cuda" else "none",
    )
    return Suggestion(config, {**reasons, **why_validation, **why_batch, **why_loss, **why_time, **_unmeasured(config)})


def _unmeasured(config: RunConfig) -> dict[str, str]:
    """Choices that do not depend on the data."""
    return {
        "warm_up_epochs": "there is no new layer to warm up",
        "optimizer.name": "weight decay apart from the step, as in our recipes",
        "optimizer.lr": "pretrained weights should move slowly, though a short job on a CPU has few steps to do it in",
        "optimizer.proxy_lr": "the paper's",
        "optimizer.weight_decay": "little, since there is little time",
        "schedule.name": "the last epochs should only settle",
        "evaluate_every": "curves with a handful of points" if config.epochs > 6 else "there are few epochs",
        "log_every": "fine enough for the curves of the report",
        "autocast": "halves the time on a GPU" if config.autocast != "none" else "few CPUs train faster in bfloat16",
    }


def _validation(data: RetrievalData) -> tuple[str, dict[str, str]]:
    """The split of the training classes, and why."""
    key, classes = "data.validation", data.train.num_classes
    if data.protocol != "classes":
        return "none", {key: f"with data.split {data.protocol} all classes train, so the last epoch is reported"}
    if data.validation is not None:
        return "none", {key: f"the data brings {data.validation.num_classes} validation classes of its own"}
    if classes < FEWEST_CLASSES_TO_DIVIDE:
        return "none", {key: f"{classes} training classes are too few to set some apart, so the last epoch is reported"}
    held_out = with_validation(data, "fold-3").validation
    assert held_out is not None
    if int(torch.bincount(held_out.labels).max()) < 2:
        return "none", {key: "no class that could be set apart has two images, so the last epoch is reported"}
    return "fold-3", {
        key: f"{held_out.num_classes} of {classes} training classes choose the epoch, so that the test classes need not"
    }


def _batch(
    data: RetrievalData, device: torch.device, size: int | None, each: int | None
) -> tuple[BatchConfig, dict[str, str]]:
    """P classes times K images, and why; what is given, `size` or K, `each`, stays."""
    counts = torch.bincount(data.train.labels)
    counts = counts[counts > 0]
    images, classes, typical = len(data.train), len(counts), statistics.median(counts.tolist())
    usual = 4 if typical >= 4 and images >= 8 else 2 if images >= 4 else 1
    why_each = f"the typical class has {'' if usual == 4 else 'only '}{typical:g} images"
    if size is not None and each is None:
        fitting = [number for number in (4, 2) if number <= usual and size % number == 0 and size // number <= classes]
        each = fitting[0] if fitting else 0
        why_each = why_each if fitting else f"{size} images are no round number of each of {classes} classes or fewer"
    each = usual if each is None else each
    most = 25 if device.type == "cuda" else 8
    together = max(min(classes, most, images // max(each, 1)), 1)
    where = f"a {'GPU' if device.type == 'cuda' else 'CPU'} takes up to {most}"
    why_size = f"{together} classes at once: there are {classes}, and {where}"
    if not each:
        why_size = f"as many as {together} classes would have with {usual} images each"
    return BatchConfig(size or together * (each or usual), each), {
        "batch.size": why_size,
        "batch.samples_per_class": why_each,
    }


def suggest_loss(labels: Tensor, distances: InitialDistances | None) -> tuple[LossConfig, dict[str, str]]:
    """The logarithmic field with radii that fit the distances between images with these labels, and why."""
    counts = torch.bincount(labels)
    counts = counts[counts > 0]
    typical = statistics.median(counts.tolist())
    proxies = 1 if typical < 8 else 2 if typical < 30 or len(counts) >= 2000 else 5
    options = {"proxies_per_class": proxies, "proxy_init": "kmeans", "alpha": 6.0, "trust": 0.3}
    reasons = {
        "loss.name": "our preset; on glyphs 20 % label noise costs it 2 points of R@1 (docs/METHODS.md)",
        "loss.options.proxies_per_class": f"{len(counts)} classes train, with typically {typical:g} images",
        "loss.options.proxy_init": "proxies start in the middle of the images of their class",
        "loss.options.alpha": "the preset's",
        "loss.options.trust": "sample filtering for noisy labels: images that fit another class far better stay out",
    }
    if distances is None:
        return LossConfig("pfml-log", options), reasons
    if math.isfinite(distances.close_positives):
        delta = round(min(max(distances.close_positives, 0.3), 1.1), 2)
        why = f"a quarter of the positive pairs are closer than {distances.close_positives:.2f}: they need no more pull"
    else:
        delta = round(min(max(0.9 * distances.nearest_negatives, 0.3), 1.1), 2)
        why = f"no class has two images; the nearest of another class is at {distances.nearest_negatives:.2f}"
    reach = round(min(max(distances.negatives, delta + 0.2), 1.35), 2)
    reasons["loss.options.delta"] = why
    reasons["loss.options.delta_rep"] = (
        f"half of the negative pairs are closer than {distances.negatives:.2f}: these should part"
    )
    return LossConfig("pfml-log", {**options, "delta": delta, "delta_rep": reach}), reasons


def _epochs(data: RetrievalData, batch: BatchConfig, device: torch.device) -> int:
    """Epochs for about so many steps as the device is given."""
    steps = max(len(data.train) // batch.size, 1)
    wanted = math.ceil(STEPS[device.type] / steps)
    return min(max(wanted, FEWEST_EPOCHS[device.type]), MOST_EPOCHS[device.type])


def _time(data: RetrievalData, distances: InitialDistances | None, epochs: int) -> str:
    """About how long so many epochs take here, at the speed that was just measured."""
    if distances is None:
        return ""
    evaluated = sum(len(images) for role, images in data.parts.items() if role != "train")
    minutes = epochs * (STEP_COST * len(data.train) + evaluated) / distances.images_per_second / 60
    advice = "; a GPU would take minutes" if minutes > LONG_MINUTES else ""
    return f"; about {max(minutes, 0.1):.2g} min on this machine{advice}"
