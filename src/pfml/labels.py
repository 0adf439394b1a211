"""Labels of any kind as the contiguous integers that a loss needs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["LabelMap"]


class LabelMap:
    """A one-to-one map between label values (strings, integers with gaps, ...) and 0, 1, ..., C - 1.

    Example:
        >>> species = LabelMap(["wren", "owl", "wren", "kite"])
        >>> species.encode(["owl", "wren"])
        tensor([1, 2])
        >>> species.decode(torch.tensor([0, 2]))
        ['kite', 'wren']
        >>> len(species)
        3
    """

    def __init__(self, values: Iterable[Hashable] | Tensor) -> None:
        distinct = set(_as_list(values))
        try:
            self.classes: tuple[Hashable, ...] = tuple(sorted(distinct))  # type: ignore[type-var]
        except TypeError:
            kinds = sorted({type(value).__name__ for value in distinct})
            raise TypeError(f"labels must be of one kind so that they can be sorted, got {', '.join(kinds)}") from None
        self._index = {value: k for k, value in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.classes)

    def __repr__(self) -> str:
        return f"LabelMap({len(self)} classes: {', '.join(map(str, self.classes[:3]))}{', ...' * (len(self) > 3)})"

    def encode(self, values: Iterable[Hashable] | Tensor) -> Tensor:
        """The integers of `values`, int64 (n,)."""
        listed = _as_list(values)
        try:
            return torch.tensor([self._index[value] for value in listed], dtype=torch.int64)
        except KeyError as error:
            where = next(k for k, value in enumerate(listed) if value not in self._index)
            raise ValueError(f"label {error.args[0]!r} at index {where} is not among the {len(self)} classes") from None

    def decode(self, indices: Tensor | Sequence[int]) -> list[Hashable]:
        """The label values of `indices`."""
        return [self.classes[int(k)] for k in indices]


def _as_list(values: Iterable[Hashable] | Tensor) -> list[Hashable]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
