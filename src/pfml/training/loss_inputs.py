"""What a loss sees of the network: unit embeddings, and what else it asks for.

A loss says so by attributes of its own. `needs_length`: embeddings come as the embedding layer gives them, with their
length. `needs_features`: it gets the pooled features of the backbone, for heads of its own. `momentum`: it gets the
embeddings of a network that follows the trained one by this share. `mixing`: each crop is mixed with one of another
class (see `pfml.data.mixed_crops`), and it gets the embeddings of these, the classes of the others and the shares.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfml.data.mixed_crops import MixedCrops, mix_crops
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
        self.mixing: str | None = getattr(asked, "mixing", None)
        self.head = embedder.head
        self.network = _Features(embedder) if self.needs_length or self.needs_features else embedder
        self.follower = Follower(embedder, self.momentum)

    def mixed(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> MixedCrops | None:
        """The images of a batch, each mixed with one of another class; None for a loss that asks for none.

        Args:
            images: The batch.
            labels: Its classes, on the CPU.
            generator: Of the CPU.
        """
        return None if self.mixing is None else mix_crops(images, labels, self.mixing, generator)

    def of(
        self, output: Tensor, images: Tensor, targets: Tensor, mixed: MixedCrops | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The embeddings of a batch as the loss wants them, and its other inputs by name.

        Args:
            output: What `network` has returned for `images`, followed by those of `mixed`.
            images: The batch.
            targets: Its labels.
            mixed: What `mixed` has returned.
        """
        count = len(images)
        inputs = {"features": output[:count]} if self.needs_features else {}
        if self.momentum:
            inputs["followed"] = self.follower(images)
        embeddings = output
        if self.needs_length:
            embeddings = self.head.projected(output)
        elif self.needs_features:
            embeddings = self.head.embedded(output)
        if mixed is not None:
            inputs |= {"mixed": embeddings[count:], "partner_labels": targets[mixed.partners], "shares": mixed.shares}
        return embeddings[:count], inputs


class _Features(nn.Module):
    """An embedder up to its embedding layer."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, images: Tensor) -> Tensor:
        return self.embedder.features(images)
