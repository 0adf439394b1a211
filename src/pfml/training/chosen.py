"""The epoch that validation has chosen so far, kept beside the checkpoint until the run ends with it.

RUN/checkpoints/chosen-EPOCH.json   a bundle: the embedder as it was evaluated ("embedder/..."), the loss ("loss/...")

A run that is resumed from an older checkpoint goes by that one's history, so the epoch chosen before stays as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from pfml.bundles import read_bundle, write_bundle

__all__ = ["is_kept", "keep_chosen", "kept_tensors"]


def keep_chosen(folder: Path, epoch: int, tensors: dict[str, Tensor], *, also: Collection[int] = ()) -> None:
    """Keep the state of `epoch` in `folder`, and of the epochs kept before only those in `also`."""
    write_bundle(folder, _name(epoch), tensors, {"epoch": epoch})
    for file in folder.glob("chosen-*"):
        found = re.match(r"chosen-(\d+)[.-]", file.name)
        if found and int(found[1]) not in {epoch, *also}:
            file.unlink(missing_ok=True)


def is_kept(folder: Path, epoch: int) -> bool:
    """Whether `folder` holds the state of `epoch`."""
    return (folder / f"{_name(epoch)}.json").is_file()


def kept_tensors(folder: Path, epoch: int) -> dict[str, Tensor]:
    """The state of `epoch`; a damaged file is refused by name."""
    return read_bundle(folder, _name(epoch))[1]


def _name(epoch: int) -> str:
    return f"chosen-{epoch}"
