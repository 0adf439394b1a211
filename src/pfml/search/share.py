"""A share of a collection: which images one of several processes takes, without a word between them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["WHOLE", "Share"]


@dataclass(frozen=True)
class Share:
    """The `number`-th of `count` shares of the images.

    An image belongs to a share by a digest of its path. So it stays where it is when others come or go, and processes
    that list a growing folder at different moments neither miss an image nor take one twice. Shares are equal but for
    chance: of N images in c shares, N / c give or take its square root.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"a share must be from 1/{self.count} to {self.count}/{self.count}, got {self}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def holds(self, path: str) -> bool:
        """Whether the image of this path is in the share."""
        if self.is_whole:
            return True
        digest = hashlib.sha256(path.encode(errors="surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % self.count == self.number - 1

    @classmethod
    def parsed(cls, text: str) -> Share:
        """The share of a text such as "2/8", or "all"."""
        if text == "all":
            return WHOLE
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or int(found[2]) < 1:
            raise ValueError(f"a share must be NUMBER/COUNT, such as 2/8 for the second of eight, or all, got {text!r}")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def of_process(cls, environment: Mapping[str, str] = os.environ) -> Share:
        """The share that torchrun gives this process by RANK and WORLD_SIZE; the whole where it did not start it."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return WHOLE
        rank, count = environment["RANK"], environment["WORLD_SIZE"]
        if not rank.isdecimal() or not count.isdecimal() or int(rank) >= int(count):
            raise ValueError(
                f"RANK must be a number from 0 to WORLD_SIZE - 1, got RANK={rank!r} and WORLD_SIZE={count!r}: "
                f"unset them, or name the share with --shard"
            )
        return cls(int(rank) + 1, int(count))


#: All images.
WHOLE = Share(1, 1)
