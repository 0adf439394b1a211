"""What a loss sees of the network: unit embeddings, and what else it asks for.

A loss says so by attributes of its own:

    needs_length        embeddings as the embedding layer gives them, with their length
    needs_features      features (B, F): the pooled features of the backbone, for heads of its own
    feature_pooling     ... pooled otherwise than for the embedding
    momentum            followed (B, D): embeddings of a network that follows the trained one by this share
    needs_second_crop   ... of another crop of each image
    mixing              mixed (B, D), partner_labels and shares (B,): each crop mixed with one of another class
                        (`pfml.data.mixed_crops`)
    needs_nodes         nodes (B, K, D / K): the sub-embeddings of a relational layer
    needs_routed        routed (B, D) and distance (B,): the routed stream of a factorized backbone
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfml.data.mixed_crops import MixedCrops, mix_crops
from pfml.models import Embedder
from pfml.models.head import POOLINGS
from pfml.training.averaging import Follower
from pfml.training.ranks import loss_of_all

__all__ = ["Crops", "LossInputs"]


@dataclass(frozen=True, eq=False)
class Crops:
    """The crops of a batch.

    Attributes:
        own: What the loss gets embeddings of, (B, 3, height, width).
        second: What the momentum network sees; `own` unless the loss asks for a second crop.
        mixed: `own`, each mixed with one of another class; None for a loss that asks for none.
    """

    own: Tensor
    second: Tensor
    mixed: MixedCrops | None = None

    @property
    def passed(self) -> Tensor:
        """What passes through the network that trains."""
        return self.own if self.mixed is None else torch.cat([self.own, self.mixed.crops])


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
        self.needs_length: bool = getattr(asked, "needs_length", False)
        self.needs_features: bool = getattr(asked, "needs_features", False)
        self.needs_nodes: bool = getattr(asked, "needs_nodes", False)
        self.needs_routed: bool = getattr(asked, "needs_routed", False)
        self.momentum: float = getattr(asked, "momentum", None) or 0.0
        self.mixing: str | None = getattr(asked, "mixing", None)
        self.crops_per_image = 2 if self.momentum and getattr(asked, "needs_second_crop", False) else 1
        self.head = embedder.head
        self.poolings = [self.head.pooling]
        if self.needs_features:
            self.poolings.append(getattr(asked, "feature_pooling", None) or self.head.pooling)
        self._check(embedder)
        self.network = self._network(embedder)
        self.follower = Follower(embedder, self.momentum)

    def _check(self, embedder: Embedder) -> None:
        if self.poolings[-1] not in POOLINGS:
            raise ValueError(f"feature_pooling must be one of {', '.join(POOLINGS)}, got {self.poolings[-1]!r}")
        if self.needs_nodes and self.head.relation is None:
            raise ValueError("this loss needs a relational layer: set model.relations to 4, or train with its recipe")
        if self.needs_routed and embedder.config.sub_blocks == 1:
            raise ValueError(
                "this loss needs a factorized backbone: set model.sub_blocks to 3, or train with its recipe"
            )

    def _network(self, embedder: Embedder) -> nn.Module:
        if self.needs_routed:
            return _RoutedFeatures(embedder)
        if self.needs_length or self.needs_features or self.needs_nodes:
            return _Features(embedder, list(dict.fromkeys(self.poolings)))
        return embedder

    def crops(self, pixels: Tensor, labels: Tensor, generator: torch.Generator) -> Crops:
        """The crops of a batch.

        Args:
            pixels: Its images, and second crops of them if the loss asks for these.
            labels: Its classes, on the CPU.
            generator: Of the CPU, for what is drawn.
        """
        own, *others = pixels.chunk(self.crops_per_image)
        mixed = None if self.mixing is None else mix_crops(own, labels, self.mixing, generator)
        return Crops(own, others[0] if others else own, mixed)

    def of(self, output: Tensor, crops: Crops, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The embeddings of a batch as the loss wants them, and its other inputs by name.

        Args:
            output: What `network` has returned for `crops.passed`.
            crops: The batch.
            targets: Its labels.
        """
        count, inputs = len(crops.own), dict[str, Tensor]()
        pooled = output
        if self.needs_routed:
            pooled, routed, distance = output.split([self.head.num_features, self.head.num_features, 1], dim=1)
            inputs |= {"routed": self.head.embedded(routed)[:count], "distance": distance[:count, 0]}
        if self.needs_features:
            parts = pooled.split(self.head.num_features, dim=1)
            pooled, inputs["features"] = parts[0], parts[-1][:count]
        if self.needs_nodes:
            inputs["nodes"] = self.head.nodes(pooled)[:count]
        if self.momentum:
            inputs["followed"] = self.follower(crops.second)
        if self.needs_length:
            embeddings = self.head.projected(pooled)
        else:
            embeddings = pooled if isinstance(self.network, Embedder) else self.head.embedded(pooled)
        if crops.mixed is not None:
            partners = targets[crops.mixed.partners]
            inputs |= {"mixed": embeddings[count:], "partner_labels": partners, "shares": crops.mixed.shares}
        return embeddings[:count], inputs


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


class _RoutedFeatures(nn.Module):
    """Two streams of a factorized embedder up to its embedding layer."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, images: Tensor) -> Tensor:
        return self.embedder.routed_features(images)
