"""The loss that a run ended with: its proxies, its hyper-parameters, the names of its classes in order.

RUN/loss/loss.json   the method by name, its options, its sizes, the class names; sealed
RUN/loss/*.safetensors   the state of the loss ("state/..."), and where its proxies are ("proxies", (C, M, D)), if any

The proxies lie there by themselves too, so that they can be read without the package that a method may need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfml.field import DecayLaw, PowerLaw
from pfml.losses import PotentialFieldLoss
from pfml.methods import LossConfig, create_loss, method_of
from pfml.own_code import is_reference
from pfml.runs.checkpoint import by_prefix, has_checkpoint, load_checkpoint
from pfml.runs.folder import RunFolder
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors

__all__ = ["TrainedField", "load_field", "load_loss", "load_loss_of_classes", "load_proxies", "save_loss"]

NAME = "loss"
LOSS = Format("loss", 1, "train it again")
STATE = "state/"
#: Numbers that a loss may describe without storing them: one without proxies stores nothing.
MOST_NOT_STORED = 2**26


@dataclass(frozen=True, eq=False)
class TrainedField:
    """The charges that a run has learned, and the law of their field.

    Args:
        proxies: (C, M, D) float32; M is 0 for a method without proxies.
        law: That of the run's loss if it is a field, else the paper's `PowerLaw()`.
        class_names: The C training classes, in the order of the labels.
        method: The loss, as in `LossConfig`.
        has_own_law: Whether the run trained with `law`.
    """

    proxies: Tensor
    law: DecayLaw
    class_names: tuple[str, ...]
    method: str
    has_own_law: bool

    @property
    def proxy_labels(self) -> Tensor:
        """The class of each of the C * M proxies, (C * M,), for `proxies.flatten(0, 1)`."""
        return torch.arange(len(self.proxies)).repeat_interleave(self.proxies.shape[1])


def save_loss(
    folder: Path,
    loss: nn.Module,
    config: LossConfig,
    class_names: tuple[str, ...],
    dim: int,
    num_features: int | None = None,
) -> None:
    """Write the loss to `folder`, replacing one that is there.

    Args:
        folder: RUN/loss.
        loss: As `create_loss` made it of `config`, and as training left it.
        config: Its name and options.
        class_names: In the order of the labels.
        dim: Of the embeddings.
        num_features: Of the backbone, for a loss with heads of its own on them.
    """
    tensors = {f"{STATE}{name}": value for name, value in loss.state_dict().items()}
    proxies = _proxy_points(loss)
    if proxies.numel():
        tensors["proxies"] = proxies
    content = {
        "method": config.name,
        "options": config.options,
        "embedding_dim": dim,
        "class_names": list(class_names),
        **({} if num_features is None else {"num_features": num_features}),
    }
    write_sealed_tensors(folder, NAME, tensors, content, LOSS)


def load_loss(run_folder: str | Path) -> nn.Module:
    """The loss of a run, with the proxies that it has learned; on the CPU, in evaluation mode.

    It is the loss of the run's model; of a run that has not ended, the loss of its last checkpoint.
    """
    return _rebuilt(*_stored(RunFolder(Path(run_folder))))


def load_loss_of_classes(run_folder: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """`load_loss`, and the names of its classes in the order of its proxies."""
    description, tensors = _stored(RunFolder(Path(run_folder)))
    return _rebuilt(description, tensors), description.class_names


def load_field(run_folder: str | Path) -> TrainedField:
    """The proxies of a run's loss and the law of its field; see `load_loss` for which moment of the run."""
    description, tensors = _stored(RunFolder(Path(run_folder)))
    names, dim, method = description.class_names, description.embedding_dim, description.config.name
    if method_of(method).loss is PotentialFieldLoss or not ("proxies" in tensors or is_reference(method)):
        loss = _rebuilt(description, tensors)
        proxies = _proxy_points(loss).reshape(len(names), -1, dim)
        law = loss.field.law if isinstance(loss, PotentialFieldLoss) else None
    else:
        proxies, law = tensors.get("proxies", torch.empty(len(names), 0, dim)), None
    if proxies.ndim != 3 or proxies.shape[0] != len(names) or proxies.shape[2] != dim:
        raise DamagedFileError(
            f"the proxies of {run_folder} must be ({len(names)}, M, {dim}), got shape {tuple(proxies.shape)}"
        )
    # a copy: what is loaded is mapped, and a server that keeps the field would follow changes of the file
    return TrainedField(proxies.float().clone(), law or PowerLaw(), names, method, has_own_law=law is not None)


def load_proxies(run_folder: str | Path, class_names: Sequence[str], dim: int) -> Tensor | None:
    """The proxies (C, M, D) of these classes in their order; None if a run has none of some class, or no loss."""
    if not (RunFolder(Path(run_folder)).loss / f"{NAME}.json").is_file():
        return None
    field = load_field(run_folder)
    position = {name: k for k, name in enumerate(field.class_names)}
    if not field.proxies.shape[1] or field.proxies.shape[2] != dim or not set(class_names) <= set(position):
        return None
    return field.proxies[[position[name] for name in class_names]]


@dataclass(frozen=True)
class _Description:
    """What rebuilds a loss."""

    config: LossConfig
    class_names: tuple[str, ...]
    embedding_dim: int
    num_features: int | None = None


def _rebuilt(description: _Description, tensors: dict[str, Tensor]) -> nn.Module:
    _require_stored(description, tensors)
    sizes = len(description.class_names), description.embedding_dim, description.num_features
    loss = create_loss(description.config, *sizes)
    loss.load_state_dict(by_prefix(tensors, STATE))
    return loss.eval()


def _require_stored(description: _Description, tensors: dict[str, Tensor]) -> None:
    """Refuse a description that asks for far more than is stored, before a loss of that size takes all memory."""
    options = {**method_of(description.config.name).options(), **description.config.options}
    sizes = {name: value for name, value in options.items() if isinstance(value, int)}
    copies = max([1, *(value for name, value in sizes.items() if name.endswith("per_class"))])
    described = description.embedding_dim * max(len(description.class_names) * copies, sizes.get("hidden_dim", 1))
    stored = sum(tensor.numel() for tensor in tensors.values())
    if described > max(4 * stored, MOST_NOT_STORED):
        raise DamagedFileError(
            f"a stored loss must hold what it describes, got {stored:,} numbers for {len(description.class_names):,} "
            f"classes of {description.embedding_dim:,} dimensions: train it again"
        )


def _stored(folder: RunFolder) -> tuple[_Description, dict[str, Tensor]]:
    """What rebuilds the loss, and its tensors named as `save_loss` names them."""
    if (folder.loss / f"{NAME}.json").is_file():
        content, tensors = read_sealed_tensors(folder.loss, NAME, LOSS)
        config = {"name": content.get("method"), "options": content.get("options")}
        return _described(folder.loss, {**content, "loss": config}), tensors
    if has_checkpoint(folder.checkpoints):
        tensors, state = load_checkpoint(folder.checkpoints)
        named = {f"{STATE}{name}": value for name, value in by_prefix(tensors, "loss/").items()}
        return _described(folder.checkpoints, {**state, **state["config"], "class_names": state["classes"]}), named
    advice = "give the folder of a run, as pfml train writes it"
    if folder.config.is_file():
        advice = f"it was not trained; train it with pfml train --config {folder.config}"
    raise FileNotFoundError(
        f"{folder.path} must hold the loss that it trained, in {folder.loss} or in a checkpoint, "
        f"but there is neither: {advice}"
    )


def _described(where: Path, content: dict[str, Any]) -> _Description:
    try:
        config = LossConfig(content["loss"]["name"], dict(content["loss"]["options"]))
        num_features = content.get("num_features")
        names, dim = tuple(map(str, content["class_names"])), int(content["embedding_dim"])
        return _Description(config, names, dim, None if num_features is None else int(num_features))
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{where} must describe a loss, got {error!r}") from None


def _proxy_points(loss: nn.Module) -> Tensor:
    """(C, M, D) on the CPU; empty for a loss without proxies."""
    points = getattr(loss, "proxy_points", None)
    return torch.empty(0) if points is None else points().detach().cpu()
