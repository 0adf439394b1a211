"""What a loss sees of the network: unit embeddings, and what else it asks for.

A loss says so by attributes of its own. `needs_length`: embeddings come as the embedding layer gives them, with their
length. `needs_features`: it gets the pooled features of the backbone, for heads of its own. `momentum`: it gets the
embeddings of a network that follows the trained one by this share. `needs_nodes`: it gets the sub-embeddings of a
relational layer. `needs_routed`: it gets the embeddings of the routed stream of a factorized backbone, and how far its
blocks are from whole ones.
"""

from __future__ import annotations

from torch import Tensor, nn

from pfml.models import Embedder
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
    """

    def __init__(self, embedder: Embedder, loss: nn.Module) -> None:
        asked = loss_of_all(loss)
        self.needs_length = getattr(asked, "needs_length", False)
        self.needs_features = getattr(asked, "needs_features", False)
        self.momentum: float = getattr(asked, "momentum", None) or 0.0
        self.needs_nodes = getattr(asked, "needs_nodes", False)
        self.needs_routed = getattr(asked, "needs_routed", False)
        self.head = embedder.head
        if self.needs_nodes and self.head.relation is None:
            raise ValueError("this loss needs a relational layer: set model.relations to 4, or train with its recipe")
        if self.needs_routed and embedder.config.sub_blocks == 1:
            raise ValueError(
                "this loss needs a factorized backbone: set model.sub_blocks to 3, or train with its recipe"
            )
        needs_more = self.needs_length or self.needs_features or self.needs_nodes
        self.network = (
            _RoutedFeatures(embedder) if self.needs_routed else _Features(embedder) if needs_more else embedder
        )
        self.follower = Follower(embedder, self.momentum)

    def of(self, output: Tensor, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The embeddings of a batch as the loss wants them, and its other inputs by name.

        Args:
            output: What `network` has returned for `images`.
            images: The batch.
        """
        inputs: dict[str, Tensor] = {}
        if self.needs_routed:
            output, routed, distance = output.split([self.head.num_features, self.head.num_features, 1], dim=1)
            inputs |= {"routed": self.head.embedded(routed), "distance": distance[:, 0]}
        if self.needs_features:
            inputs["features"] = output
        if self.needs_nodes:
            inputs["nodes"] = self.head.nodes(output)
        if self.momentum:
            inputs["followed"] = self.follower(images)
        if self.needs_length:
            return self.head.projected(output), inputs
        return output if isinstance(self.network, Embedder) else self.head.embedded(output), inputs


class _Features(nn.Module):
    """An embedder up to its embedding layer."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, images: Tensor) -> Tensor:
        return self.embedder.features(images)


class _RoutedFeatures(_Features):
    """Two streams of a factorized embedder up to its embedding layer."""

    def forward(self, images: Tensor) -> Tensor:
        return self.embedder.routed_features(images)
