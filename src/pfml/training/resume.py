"""What a checkpoint holds of a run, and how a run goes on from one; neither depends on the number of ranks."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pfml.data import ImageSet, RetrievalData
from pfml.data.decoding import in_threads
from pfml.models import EmbedderConfig
from pfml.runs.config import TrainConfig
from pfml.runs.config_files import plain
from pfml.runs.folder import RunFolder
from pfml.storage.file_state import FileState, packed, unpacked
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors
from pfml.training.checkpoint import load_checkpoint, part
from pfml.training.ranks import load_loss_state, load_optimizer_state, loss_state, optimizer_state
from pfml.training.teachers import teacher_digests

if TYPE_CHECKING:
    from pfml.training.loop import Training


__all__ = ["go_on", "progress", "refuse_other_pixels", "tensors_of", "write_image_states"]

NAME = "images"
IMAGE_STATES = Format("states of training images", 1, "begin a new run")
#: Files that an error names.
LISTED = 3


def write_image_states(folder: RunFolder, data: RetrievalData, workers: int) -> None:
    """Write what the images of all parts of `data` are now, as the run begins."""
    tensors: dict[str, Tensor] = {}
    pixels: dict[str, str] = {}
    for role, images in _parts(data).items():
        if isinstance(images.images, Tensor):
            pixels[role] = _digest(images.images)
        else:
            states = in_threads(FileState.of, images.images, workers)
            tensors[f"{role}/numbers"], tensors[f"{role}/sha256"] = packed(list(states))
    write_sealed_tensors(folder.checkpoints, NAME, tensors, {"pixels": pixels}, IMAGE_STATES)


def refuse_other_pixels(folder: RunFolder, data: RetrievalData) -> None:
    """Raise ValueError, with the names of the files, unless the images of `data` are those that the run began with.

    A run that an earlier version of pfml began has written nothing to compare with.
    """
    if not (folder.checkpoints / f"{NAME}.json").is_file():
        return
    content, tensors = read_sealed_tensors(folder.checkpoints, NAME, IMAGE_STATES)
    changed: list[str] = []
    total = 0
    for role, images in _parts(data).items():
        total += len(images)
        changed += _changed(images, role, content["pixels"], tensors)
    if changed:
        more = f" and {len(changed) - LISTED:,} more" if len(changed) > LISTED else ""
        raise ValueError(
            f"the run in {folder.path} must be resumed with the images that it began with, but {len(changed):,} of "
            f"{total:,} images have other content: {', '.join(changed[:LISTED])}{more}; restore them, or start anew"
        )


def _changed(images: ImageSet, role: str, pixels: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Names of the images of a part that are not what they were."""
    if isinstance(images.images, Tensor):
        return [] if pixels.get(role) == _digest(images.images) else [f"the {role} images"]
    states = tensors.get(f"{role}/numbers"), tensors.get(f"{role}/sha256")
    if states[0] is None or states[1] is None or len(states[0]) != len(images):
        return [f"the {role} images"]
    names = images.short_names()
    return [names[k] for k, path in enumerate(images.images) if not unpacked(states[0], states[1], k).is_of(path)]


def _parts(data: RetrievalData) -> dict[str, ImageSet]:
    parts = {"train": data.train, "validation": data.validation, "test": data.test, "gallery": data.gallery}
    return {role: images for role, images in parts.items() if images is not None}


def _digest(pixels: Tensor) -> str:
    return hashlib.sha256(pixels.contiguous().numpy().data).hexdigest()


def tensors_of(training: Training) -> dict[str, Tensor]:
    """All tensors that a run needs to go on, on the first rank; all ranks call this together."""
    tensors = {f"embedder/{name}": value for name, value in training.embedder.state_dict().items()}
    tensors |= {f"average/{name}": value for name, value in training.weight_average.state_dict().items()}
    tensors |= {f"loss/{name}": value for name, value in loss_state(training.loss).items()}
    moments = optimizer_state(training.optimizer, training.loss)
    tensors |= {f"optimizer/{name}": value for name, value in moments.items()}
    tensors["generator/cpu"] = torch.get_rng_state()
    if training.device.type == "cuda":
        tensors["generator/cuda"] = torch.cuda.get_rng_state(training.device)
    return tensors


def progress(training: Training) -> dict[str, Any]:
    """Where the run stands, and what it is, in plain values."""
    return {
        "step": training.step,
        "epoch": training.epoch,
        "position": training.position,
        "loss_sum": training.loss_sum,
        "term_sums": training.term_sums,
        "history": training.history,
        "scaler": training.scaler.state_dict(),
        "config": _plain_config(training.config),
        "classes": list(training.data.train.class_names),
        "embedding_dim": training.embedder.embedding_dim,
        "network": plain(training.embedder.config),
        "images": training.data.train.fingerprint(),
        "teachers": teacher_digests(training.config),
    }


def go_on(training: Training) -> None:
    """Put a run that has just been made where the checkpoint of its folder has left it."""
    folder, data = training.folder, training.data
    tensors, state = load_checkpoint(folder.checkpoints)
    if tuple(state["classes"]) != data.train.class_names:
        raise ValueError(
            f"the checkpoint in {folder.path} was trained on {len(state['classes'])} classes, "
            f"and the data has other ones ({data.train.num_classes}): resume with the data it was started on"
        )
    if state["images"] != data.train.fingerprint():
        raise ValueError(
            f"the run in {folder.path} was started on other images or labels of these classes: "
            f"resume with the data it was started on"
        )
    if state.get("teachers", []) != teacher_digests(training.config):
        raise ValueError(f"the teachers of the run in {folder.path} are no longer the ones that it began with")
    training.world.by_first(lambda: refuse_other_pixels(folder, data))
    _refuse_other_config(_completed(state["config"], TrainConfig()), _plain_config(training.config))
    network = _completed(state["network"], EmbedderConfig())
    _refuse_other_config({"network": network}, {"network": plain(training.embedder.config)})
    training.embedder.load_state_dict(part(tensors, "embedder/"))
    training.weight_average.load_state_dict(part(tensors, "average/"))
    load_loss_state(training.loss, part(tensors, "loss/"))
    load_optimizer_state(training.optimizer, training.loss, part(tensors, "optimizer/"))
    training.scaler.load_state_dict(state["scaler"])
    training.epoch, training.position, training.loss_sum = state["epoch"], state["position"], state["loss_sum"]
    training.term_sums = dict(state.get("term_sums", {}))  # which older checkpoints do not have
    training.history = state["history"]
    folder.forget_after(training.step, len(training.history))
    torch.set_rng_state(tensors["generator/cpu"])
    if training.device.type == "cuda" and "generator/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator/cuda"], training.device)


def _plain_config(config: TrainConfig) -> dict[str, Any]:
    """How the run trains, without what a `RunConfig` says of data and network beside it."""
    whole = plain(config)
    return {one.name: whole[one.name] for one in fields(TrainConfig)}


def _completed(stored: dict[str, Any], default: Any) -> dict[str, Any]:
    """A stored configuration with the options that the package has gained since, at the values of `default`.

    Options that come later have defaults under which a run is what it was without them.
    """
    values = {**plain(default), **stored}
    for one in fields(default):
        inner = getattr(default, one.name)
        if is_dataclass(inner) and isinstance(values[one.name], dict):
            values[one.name] = _completed(values[one.name], inner)
    return values


def _refuse_other_config(stored: dict[str, Any], given: dict[str, Any]) -> None:
    """A run goes on as it began; only where it runs and what it shows may change."""
    free = {"device", "compile", "log_every", "checkpoint_every"}
    differing = [
        f"{key}: it was {stored.get(key)}, now {value}"
        for key, value in given.items()
        if key not in free and stored.get(key) != value
    ]
    if differing:
        raise ValueError("a run must go on with the configuration it began with, got " + "; ".join(differing))
