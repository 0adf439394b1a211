"""A method chosen by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pfml.training.methods.table import METHODS
from pfml.words import did_you_mean

__all__ = ["LossConfig", "create_loss"]


@dataclass(frozen=True)
class LossConfig:
    """Which loss.

    Args:
        name: The method; `pfml methods` lists them: pfml, pfml-log, cpml, proxy-anchor, soft-triple, ...
        options: Keyword arguments of the loss that differ from what the name stands for.
    """

    name: str = "pfml"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
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


def create_loss(config: LossConfig, num_classes: int, embedding_dim: int) -> nn.Module:
    """The loss that `config` describes, its proxies drawn with torch's global generator."""
    method = METHODS[config.name]
    try:
        return method.loss(num_classes, embedding_dim, **{**method.values, **config.options})
    except TypeError as error:  # a value of the wrong kind, which only the loss can tell
        raise ValueError(f"loss.options {config.options} do not fit {config.name}: {error}") from None
