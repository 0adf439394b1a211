"""Crops mixed of two crops of a batch: CutMix (Yun et al., ICCV 2019), MixUp (Zhang et al., ICLR 2018), a grid.

Where and how much is drawn by a generator of the CPU, so that a resumed run mixes the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.data.pinned_memory import to_device

__all__ = ["MIXINGS", "MixedCrops", "mix_crops"]


@dataclass(frozen=True, eq=False)
class MixedCrops:
    """Mixed crops and what they are made of.

    Attributes:
        crops: (n, 3, height, width).
        partners: (n,): each is mixed with this one of the batch.
        partner_labels: (n,): the classes of these.
        shares: (n,): how much of a mixed crop is not its partner's.
    """

    crops: Tensor
    partners: Tensor
    partner_labels: Tensor
    shares: Tensor


def mix_crops(
    crops: Tensor, labels: Tensor, mixing: str, generator: torch.Generator, rows: slice = slice(None)
) -> MixedCrops:
    """Each crop mixed with one of another class; with itself if there is no other class.

    Args:
        crops: (B, 3, height, width), on any device.
        labels: (B,), on the CPU.
        mixing: A key of `MIXINGS`, or "any" for one of them, drawn for the batch.
        generator: Of the CPU.
        rows: Which crops are wanted; they do not depend on it.
    """
    if crops.dim() != 4:
        raise ValueError(f"only images can be mixed, (B, 3, height, width), got shape {tuple(crops.shape)}")
    if mixing == "any":
        mixing = list(MIXINGS)[int(torch.randint(len(MIXINGS), (), generator=generator))]
    chosen = _partners(labels, generator)[rows]
    drawn = to_device(torch.rand(4, len(crops), 1, generator=generator)[:, rows], crops.device)
    keep = MIXINGS[mixing](drawn, *crops.shape[2:]).to(crops.dtype)[:, None]  # (n, 1, height, width)
    partners, partner_labels = to_device(chosen, crops.device), to_device(labels[chosen], crops.device)
    mixed = torch.lerp(crops[partners], crops[rows], keep.expand_as(crops[rows]))
    return MixedCrops(mixed, partners, partner_labels, keep.mean(dim=(1, 2, 3)))


def _partners(labels: Tensor, generator: torch.Generator) -> Tensor:
    """For each crop one of another class, any of them alike, (B,)."""
    numbers = torch.rand(len(labels), len(labels), generator=generator)
    numbers.fill_diagonal_(-1.0)
    same = labels[:, None] == labels
    same.fill_diagonal_(False)
    return numbers.masked_fill_(same, -2.0).argmax(dim=1) if len(labels) else labels.long()


def _cutmix(drawn: Tensor, height: int, width: int) -> Tensor:
    """1 outside a box of the partner, whose area is uniform and whose center is anywhere."""
    share, center_y, center_x, _ = drawn
    half = (1 - share).sqrt() / 2
    rows = (_positions(height, drawn) - center_y).abs() < half  # (B, height)
    columns = (_positions(width, drawn) - center_x).abs() < half
    return 1.0 - (rows[:, :, None] & columns[:, None, :]).float()


def _mixup(drawn: Tensor, height: int, width: int) -> Tensor:
    """One share for all pixels of an image, uniform in [0, 1]."""
    return drawn[0, :, :, None].expand(-1, height, width)


def _grid(drawn: Tensor, height: int, width: int) -> Tensor:
    """0 in the squares of a grid, which are the partner's, 1 between them.

    A grid has 2 to 7 periods; a square takes 0.5 to 0.9 of a period in height and width.
    """
    periods, side = (2 + 6 * drawn[0]).floor(), 0.5 + 0.4 * drawn[1]
    rows = (_positions(height, drawn) * periods + drawn[2]) % 1 < side
    columns = (_positions(width, drawn) * periods + drawn[3]) % 1 < side
    return 1.0 - (rows[:, :, None] & columns[:, None, :]).float()


def _positions(count: int, like: Tensor) -> Tensor:
    """The centers of so many pixels between 0 and 1."""
    return (torch.arange(count, device=like.device) + 0.5) / count


#: What share of each pixel is kept, (B, height, width), of four uniform numbers for each crop, (4, B, 1).
MIXINGS = {"cutmix": _cutmix, "mixup": _mixup, "grid": _grid}
