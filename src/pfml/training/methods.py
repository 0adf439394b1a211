"""The losses that can be trained by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pfml.losses import PotentialFieldLoss, ProxyAnchorLoss
from pfml.words import did_you_mean

__all__ = ["METHODS", "LossConfig", "Method", "create_loss"]


@dataclass(frozen=True)
class Method:
    """A loss class with the values that a name stands for."""

    loss: type[nn.Module]
    description: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def option_names(self) -> list[str]:
        """What may be set: the keyword-only arguments of the loss."""
        parameters = inspect.signature(self.loss).parameters.values()
        return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]


METHODS: dict[str, Method] = {
    "pfml": Method(PotentialFieldLoss, "the paper's text: Eq. 6, delta 0.2, alpha 3, 15 proxies per class"),
    "pfml-log": Method(
        PotentialFieldLoss,
        "our preset: the logarithm of each anchor's potentials, repulsion reaching further than attraction",
        {"normalization": "log", "delta": 0.6, "delta_rep": 1.2, "alpha": 6.0, "proxy_attraction": False},
    ),
    "cpml": Method(PotentialFieldLoss, "the paper's contrast: forces that grow with distance", {"potential": "cpml"}),
    "proxy-anchor": Method(ProxyAnchorLoss, "Kim et al., CVPR 2020"),
}


@dataclass(frozen=True)
class LossConfig:
    """Which loss.

    Args:
        name: A key of `METHODS`: pfml, pfml-log, cpml, proxy-anchor.
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
                    f"loss.options of {self.name} must be among {', '.join(names)}, "
                    f"got {option!r}{did_you_mean(option, names)}"
                )


def create_loss(config: LossConfig, num_classes: int, embedding_dim: int) -> nn.Module:
    """The loss that `config` describes, its proxies drawn with torch's global generator."""
    method = METHODS[config.name]
    try:
        return method.loss(num_classes, embedding_dim, **{**method.values, **config.options})
    except TypeError as error:  # a value of the wrong kind, which only the loss can tell
        raise ValueError(f"loss.options {config.options} do not fit {config.name}: {error}") from None
