"""What every backbone is: images in, features out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

__all__ = ["Backbone"]


class Backbone(nn.Module, ABC):
    """A model without its classifier: normalized images to a feature map (B, C, h, w) or to tokens (B, T, C)."""

    #: C
    num_features: int
    #: How many tokens stand before those of the patches (CLS, registers); 0 for feature maps.
    num_prefix_tokens: int = 0
    #: Which published weights a file must hold, in words, where neither the hub nor a package has them.
    published_weights: str = ""
    #: The model of timm's that it is, whose weights on timm's hub fit; empty for others.
    timm_name: str = ""

    def weight_root(self) -> nn.Module:
        """The module whose parameter names are those of published weight files."""
        return self

    def patch_embedding(self) -> nn.Module | None:
        """The layer that turns patches into tokens, if there is one."""
        return None

    def new_parameters(self) -> list[nn.Parameter]:
        """The parameters that no published weights exist for."""
        return []

    def parameter_layers(self) -> list[list[nn.Parameter]]:
        """The parameters by layer, from the images on; by the order in which the module defines its parts."""
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.weight_root().named_parameters():
            first, *rest = name.split(".")
            part = f"{first}.{rest[0]}" if rest and rest[0].isdigit() else first
            groups.setdefault(part, []).append(parameter)
        return list(groups.values())

    @torch.no_grad()
    def takes(self, image_size: int) -> bool:
        """Whether it takes images of this height and width, and is the same if it is built for them."""
        modes = {part: part.training for part in self.modules()}
        like = next(self.parameters(), torch.empty(0))
        self.eval()
        try:
            features: Tensor = self(like.new_zeros(2, 3, image_size, image_size))
            return features.shape[-1 if features.ndim == 3 else 1] == self.num_features
        except Exception:  # whatever it stumbles over: timm's models have errors of many types for this
            return False
        finally:
            for part, training in modes.items():
                part.training = training

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Features of images (B, 3, H, W) that `Preprocessing.normalize` has prepared."""
