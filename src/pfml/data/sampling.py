"""Which images make up each batch of an epoch: a function of (seed, epoch)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pfml.data.seeding import generator_for

__all__ = ["BalancedBatches", "EpochBatches", "NeighborBatches", "RandomBatches"]


class EpochBatches(ABC):
    """Batches of image indices, epoch by epoch.

    `batches(epoch)` is all that training needs. For a loop of one's own, or `DataLoader(batch_sampler=...)`, iterate:
    one pass gives the rest of the current epoch, and `state_dict` tells where the next batch comes from. (A DataLoader
    with workers draws batches ahead of their use, and the state runs ahead with it.)
    """

    def __init__(self, *, num_images: int, batch_size: int, seed: int, per_epoch: int | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if batch_size > num_images:
            raise ValueError(f"batch_size must not exceed the {num_images} images, got {batch_size}")
        self.num_images = num_images
        self.batch_size = batch_size
        if per_epoch is not None and per_epoch < 1:
            raise ValueError(f"per_epoch must be at least 1 or None, got {per_epoch}")
        self.seed = seed
        self.per_epoch = per_epoch
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return self.num_images // self.batch_size if self.per_epoch is None else self.per_epoch

    @abstractmethod
    def batches(self, epoch: int) -> list[Tensor]:
        """The batches of an epoch, each (batch_size,) int64, a function of (seed, epoch)."""

    def __iter__(self) -> Iterator[list[int]]:
        todo = self.batches(self.epoch)[self.position :]
        for batch in todo:
            # before the yield: whoever has got a batch and stores the state resumes with the next one
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = self.epoch + 1, 0
            yield batch.tolist()

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position of the next batch."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where `state_dict` was taken; the batches must be those of the same data, sizes and seed."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise ValueError(f"the stored batches have {name}={state.get(name)!r}, these have {mine!r}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "num_images": self.num_images,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "per_epoch": self.per_epoch,
        }


class RandomBatches(EpochBatches):
    """All images in random order; the last images of the order that fill no batch are left out of the epoch.

    Args:
        num_images: N.
        batch_size: Images per batch.
        seed: Of the order.
        per_epoch: Batches in an epoch, of as many passes over the images as they take; None for one pass.
    """

    def __init__(self, num_images: int, batch_size: int, seed: int = 0, *, per_epoch: int | None = None) -> None:
        super().__init__(num_images=num_images, batch_size=batch_size, seed=seed, per_epoch=per_epoch)

    def batches(self, epoch: int) -> list[Tensor]:
        generator = generator_for(self.seed, "random batches", epoch)
        found: list[Tensor] = []
        full = self.num_images // self.batch_size
        while len(found) < len(self):
            order = torch.randperm(self.num_images, generator=generator)
            found += order[: full * self.batch_size].split(self.batch_size)
        return found[: len(self)]


class BalancedBatches(EpochBatches):
    """`classes_per_batch` classes and `samples_per_class` images of each in every batch.

    Classes come in shuffled rounds: none comes again before all have been. So do the images of a class, and one comes
    again within an epoch only when its class has run out. A class with fewer than `samples_per_class` images gives
    all of them and then repeats some in the same batch.

    Args:
        labels: (N,), the class of each image.
        classes_per_batch: P.
        samples_per_class: K; the batch size is P * K.
        seed: Of the order.
        per_epoch: Batches in an epoch; None for as many as the images fill.
    """

    def __init__(
        self,
        labels: Tensor,
        classes_per_batch: int,
        samples_per_class: int,
        seed: int = 0,
        *,
        per_epoch: int | None = None,
    ) -> None:
        if classes_per_batch < 1 or samples_per_class < 1:
            raise ValueError(
                f"classes_per_batch and samples_per_class must be at least 1, "
                f"got {classes_per_batch} and {samples_per_class}"
            )
        batch_size = classes_per_batch * samples_per_class
        super().__init__(num_images=len(labels), batch_size=batch_size, seed=seed, per_epoch=per_epoch)
        labels = labels.cpu()
        counts = labels.unique(return_counts=True)[1].tolist()
        self._members: list[list[int]] = [part.tolist() for part in labels.argsort(stable=True).split(counts)]
        if len(self._members) < classes_per_batch:
            raise ValueError(
                f"classes_per_batch must not exceed the {len(self._members)} classes that have images, "
                f"got {classes_per_batch}"
            )
        self.classes_per_batch = classes_per_batch
        self.samples_per_class = samples_per_class

    def batches(self, epoch: int) -> list[Tensor]:
        generator = generator_for(self.seed, "balanced batches", epoch)
        classes = _Rounds(range(len(self._members)), generator)
        members = [_Rounds(images, generator) for images in self._members]
        return [
            torch.tensor(
                [k for c in classes.take(self.classes_per_batch) for k in members[c].take(self.samples_per_class)]
            )
            for _ in range(len(self))
        ]

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "samples_per_class": self.samples_per_class}


class NeighborBatches(BalancedBatches):
    """Balanced batches of classes that are near each other (Ge et al., ECCV 2018): anchors and their nearest classes.

    Anchor classes come in shuffled rounds. Each brings the nearest classes that are not in the batch yet, as `nearest`
    has them, so a batch is a function of (seed, epoch) and of `nearest`, which follows training.

    Args:
        labels: (N,), the class of each image.
        classes_per_batch: P, a multiple of `neighbors` + 1.
        samples_per_class: K; the batch size is P * K.
        neighbors: Classes that an anchor class brings.
        seed: Of the order.
        per_epoch: Batches in an epoch; None for as many as the images fill.

    Attributes:
        nearest: (C, P - 1), the nearest other classes of each class, nearest first; None draws all classes as
            `BalancedBatches` does.
    """

    def __init__(
        self,
        labels: Tensor,
        classes_per_batch: int,
        samples_per_class: int,
        neighbors: int,
        seed: int = 0,
        *,
        per_epoch: int | None = None,
    ) -> None:
        super().__init__(labels, classes_per_batch, samples_per_class, seed, per_epoch=per_epoch)
        if neighbors < 1 or classes_per_batch % (neighbors + 1):
            raise ValueError(
                f"classes_per_batch must be a multiple of neighbors + 1, got {classes_per_batch} and {neighbors}"
            )
        self.neighbors = neighbors
        self.nearest: Tensor | None = None
        self._numbers = {label: number for number, label in enumerate(labels.unique().tolist())}

    def batches(self, epoch: int) -> list[Tensor]:
        if self.nearest is None:
            return super().batches(epoch)
        nearest = self.nearest.tolist()
        generator = generator_for(self.seed, "neighbor batches", epoch)
        anchors = _Rounds(list(self._numbers), generator)
        members = {label: _Rounds(self._members[number], generator) for label, number in self._numbers.items()}
        found = []
        for _ in range(len(self)):
            classes = anchors.take(self.classes_per_batch // (self.neighbors + 1))
            for anchor in tuple(classes):
                free = [label for label in nearest[anchor] if label in members and label not in classes]
                classes += free[: self.neighbors]
            found.append(torch.tensor([k for label in classes for k in members[label].take(self.samples_per_class)]))
        return found

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "neighbors": self.neighbors}


class _Rounds:
    """Items in one shuffled round after the other."""

    def __init__(self, items: Sequence[int], generator: torch.Generator) -> None:
        self.items = items
        self.generator = generator
        self.left: list[int] = []

    def take(self, count: int) -> list[int]:
        """The next `count` items; they differ from each other if there are that many."""
        taken: list[int] = []
        while len(taken) < count:
            if not self.left:
                order = torch.randperm(len(self.items), generator=self.generator).tolist()
                # the end of the round before may be in `taken`: these items come last in the new round
                shuffled = [self.items[k] for k in order]
                self.left = sorted(shuffled, key=set(taken).__contains__)
            wanted = count - len(taken)
            taken += self.left[:wanted]
            self.left = self.left[wanted:]
        return taken
