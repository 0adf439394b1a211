"""A loss by name and options, and what makes it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pfml.methods.method import Method
from pfml.methods.table import METHODS
from pfml.own_code import is_reference, load_reference
from pfml.typos import did_you_mean

__all__ = ["LossConfig", "create_loss", "is_untrained", "method_of"]


@dataclass(frozen=True)
class LossConfig:
    """Which loss.

    Args:
        name: The method; `pfml methods` lists them: pfml, pfml-log, cpml, proxy-anchor, soft-triple, ...; or what makes
            a loss of one's own, "module:Class".
        options: Keyword arguments of the loss that differ from what the name stands for.
    """

    name: str = "pfml"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if is_reference(self.name):
            return  # what it takes is known once it is imported
        if self.name not in METHODS:
            known = ", ".join(METHODS)
            raise ValueError(f"loss.name must be one of {known}, got {self.name!r}{did_you_mean(self.name, METHODS)}")
        names = METHODS[self.name].option_names()
        for option in self.options:
            if option not in names:
                raise ValueError(
                    f"loss.options of {self.name} must be among {', '.join(names) or 'none'}, "
                    f"got {option!r}{did_you_mean(option, names)}"
                )

    @property
    def trains(self) -> bool:
        """Whether a run with this loss trains anything, or only evaluates the backbone."""
        return method_of(self.name).trains


def method_of(name: str) -> Method:
    """The row of `METHODS`, or one for a loss of one's own, which is not imported for that."""
    if not is_reference(name):
        return METHODS[name]

    def create(num_classes: int, embedding_dim: int, **options: Any) -> nn.Module:
        return _own_loss(name, num_classes, embedding_dim, options)

    return Method(create, "a loss of one's own", name.partition(":")[0])


def _own_loss(name: str, num_classes: int, embedding_dim: int, options: dict[str, Any]) -> nn.Module:
    """The loss that `name` makes of those of the two sizes that it takes, and of `options`."""
    make = load_reference(name)
    sizes = {"num_classes": num_classes, "embedding_dim": embedding_dim}
    taken = inspect.signature(make).parameters
    loss = make(**{size: value for size, value in sizes.items() if size in taken}, **options)
    if not isinstance(loss, nn.Module):
        raise TypeError(f"{name} must make a torch.nn.Module, got {type(loss).__name__}")
    return loss


def is_untrained(method: str | None) -> bool:
    """Whether a record or a table row of this method has no training, and so no epochs; no name counts as trained."""
    return method in METHODS and not METHODS[method].trains


def create_loss(config: LossConfig, num_classes: int, embedding_dim: int, num_features: int | None = None) -> nn.Module:
    """The loss that `config` describes, what it learns drawn with torch's global generator.

    Args:
        config: Its name and options.
        num_classes: C.
        embedding_dim: D.
        num_features: Width of the backbone's pooled features, for a loss with heads of its own on them.
    """
    method = method_of(config.name)
    if method.loss is None:
        raise ValueError(
            f"{config.name} trains nothing and has no loss: evaluate the backbone with "
            f"`pfml train --loss.name {config.name}` or pfml.training.run(config, out)"
        )
    sizes = [num_classes, embedding_dim]
    if method.has_heads:
        if num_features is None:
            raise ValueError(f"{config.name} has heads on the features of the backbone: give num_features, their width")
        sizes.append(num_features)
    try:
        return method.loss(*sizes, **{**method.values, **config.options})
    except TypeError as error:  # a value of the wrong kind, which only the loss can tell
        raise ValueError(f"loss.options {config.options} do not fit {config.name}: {error}") from None
