"""What a loss sees of the network: unit embeddings, and what else it asks for.

A loss says so by attributes of its own. `needs_length`: embeddings come as the embedding layer gives them, with their
length. `needs_features`: it gets the pooled features of the backbone, for heads of its own. `momentum`: it gets the
embeddings of a network that follows the trained one by this share.
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
        self.head = embedder.head
        self.network = _Features(embedder) if self.needs_length or self.needs_features else embedder
        self.follower = Follower(embedder, self.momentum)

    def of(self, output: Tensor, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The embeddings of a batch as the loss wants them, and its other inputs by name.

        Args:
            output: What `network` has returned for `images`.
            images: The batch.
        """
        inputs = {"features": output} if self.needs_features else {}
        if self.momentum:
            inputs["followed"] = self.follower(images)
        if self.needs_length:
            return self.head.projected(output), inputs
        return self.head.embedded(output) if self.needs_features else output, inputs


class _Features(nn.Module):
    """An embedder up to its embedding layer."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, images: Tensor) -> Tensor:
        return self.embedder.features(images)
