"""What a loss sees of the network: unit embeddings, and what else it asks for.

A loss says so by attributes of its own. `needs_length`: embeddings come as the embedding layer gives them, with their
length. `needs_features`: it gets the pooled features of the backbone, for heads of its own; with `feature_pooling` they
are pooled otherwise than for the embedding. `momentum`: it gets the embeddings of a network that follows the trained
one by this share; with `needs_second_crop` they are of another crop of each image.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfml.models import Embedder
from pfml.models.head import POOLINGS
from pfml.training.averaging import Follower
from pfml.training.ranks import loss_of_all

__all__ = ["LossInputs"]


class LossInputs:
    """From images to what the loss of a run is called with.

    Args:
        embedder: The network that trains.
        loss: Says what it needs; one that says nothing gets unit embeddings.

    Attributes:
        network: What passes images on; it returns features if the loss asks for more than unit embeddings.
        follower: The momentum network; without a loss that asks for one it never begins.
        crops_per_image: 2 if the momentum network sees other crops than the one that trains.
    """

    def __init__(self, embedder: Embedder, loss: nn.Module) -> None:
        asked = loss_of_all(loss)
        self.needs_length = getattr(asked, "needs_length", False)
        self.needs_features = getattr(asked, "needs_features", False)
        self.momentum: float = getattr(asked, "momentum", None) or 0.0
        self.crops_per_image = 2 if self.momentum and getattr(asked, "needs_second_crop", False) else 1
        self.head = embedder.head
        self.poolings = [self.head.pooling]
        if self.needs_features:
            self.poolings.append(getattr(asked, "feature_pooling", None) or self.head.pooling)
        if self.poolings[-1] not in POOLINGS:
            raise ValueError(f"feature_pooling must be one of {', '.join(POOLINGS)}, got {self.poolings[-1]!r}")
        plain = not (self.needs_length or self.needs_features)
        self.network = embedder if plain else _Features(embedder, list(dict.fromkeys(self.poolings)))
        self.follower = Follower(embedder, self.momentum)

    def of(self, output: Tensor, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The embeddings of a batch as the loss wants them, and its other inputs by name.

        Args:
            output: What `network` has returned for the batch.
            images: What the momentum network sees.
        """
        output, *others = output.split(self.head.num_features, dim=1) if self.needs_features else [output]
        inputs = {"features": [output, *others][-1]} if self.needs_features else {}
        if self.momentum:
            inputs["followed"] = self.follower(images)
        if self.needs_length:
            return self.head.projected(output), inputs
        return self.head.embedded(output) if self.needs_features else output, inputs


class _Features(nn.Module):
    """An embedder up to its embedding layer, with one pooling or several side by side."""

    def __init__(self, embedder: Embedder, poolings: list[str]) -> None:
        super().__init__()
        self.embedder = embedder
        self.poolings = poolings

    def forward(self, images: Tensor) -> Tensor:
        if len(self.poolings) == 1:
            return self.embedder.features(images)
        if images.ndim == 2:  # features of a frozen backbone, pooled once
            return torch.cat([images] * len(self.poolings), dim=1)
        return self.embedder.features(images, self.poolings)
