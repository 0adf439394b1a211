"""Data sets by name: a new one is a reader in `pfml.data.readers` and a row here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pfml.data.additions import with_added
from pfml.data.glyphs import read_glyphs
from pfml.data.image_set import Protocol, RetrievalData
from pfml.data.readers.benchmark import Benchmark
from pfml.data.readers.cars import CARS, read_cars
from pfml.data.readers.cub import CUB, read_cub
from pfml.data.readers.folder import read_folder
from pfml.data.readers.in_shop import IN_SHOP, read_in_shop
from pfml.data.readers.python_data import read_python_data
from pfml.data.readers.sop import SOP, read_sop
from pfml.data.readers.table import read_table
from pfml.typos import did_you_mean

__all__ = ["BENCHMARKS", "DATASETS", "load_data"]

#: name -> reader of a folder or file; those of one's own images, folder and csv, also take how to divide them
DATASETS: dict[str, Callable[..., RetrievalData]] = {
    "glyphs": read_glyphs,
    "cub": read_cub,
    "cars": read_cars,
    "sop": read_sop,
    "in-shop": read_in_shop,
    "folder": read_folder,
    "csv": read_table,
}

#: The published ones -> their published sizes.
BENCHMARKS: dict[str, Benchmark] = {"cub": CUB, "cars": CARS, "sop": SOP, "in-shop": IN_SHOP}

NEEDED = (
    f"the data must be a folder with a folder per class in it, a .csv file with the columns path and label, or one of "
    f"{', '.join(DATASETS)}"
)


def load_data(
    source: Any,
    root: str | Path | None = None,
    *,
    split: Protocol = "classes",
    seed: int | None = 0,
    added: Sequence[str | Path] = (),
) -> RetrievalData:
    """A data set of `DATASETS` by name, or one's own: a folder of class folders, a CSV table, or what Python has.

    Args:
        source: A key of `DATASETS`; the path of a folder or of a .csv file; pairs (path, label), a torch `Dataset`, a
            split of Hugging Face `datasets`, or a dictionary of such by role (`pfml.data.readers.python_data`).
        root: Where the files of a named data set lie; glyphs have none.
        split: What of one's own images is held out of training: "classes", "images" of every class, or "none" (see
            `pfml.data.splits.divided`). Published data sets have their published test classes.
        seed: Of the division of one's own images.
        added: Folders or .csv files of images that came later, see `pfml.data.additions.with_added`.

    Example:
        >>> load_data("glyphs").test
        ImageSet(6,816 images of 142 classes)
    """
    if not isinstance(source, str | Path):
        if root is not None or added:
            raise ValueError("root and added belong to data sets in files, and these are Python's own: leave them out")
        return read_python_data(source, split=split, seed=seed)
    name = str(source)
    if added:
        data = load_data(name, root, split=split, seed=seed)
        return reduce(lambda data, path: with_added(data, path, seed=seed), added, data)
    if name in DATASETS:
        is_own = name in ("folder", "csv")
        if split != "classes" and not is_own:
            raise ValueError(
                f"{name} is published with test classes that are unseen in training: data.split must be classes, "
                f"got {split!r}"
            )
        if name == "glyphs" and root is None:
            return read_glyphs()
        if root is None:
            raise ValueError(f"{name} must have a root, the {'file' if name == 'csv' else 'folder'} to read, got none")
        return DATASETS[name](Path(root).expanduser(), **({"split": split, "seed": seed} if is_own else {}))
    if not name:  # which pathlib takes for the working directory
        raise ValueError(f"{NEEDED}, got an empty name; for the current folder, give a dot")
    path = Path(name).expanduser()
    is_table = path.suffix.lower() == ".csv" and path.is_file()
    if path.is_dir() or is_table:
        if root is not None:
            raise ValueError(f"a data set given by its path must have no root, got {name} and the root {root}")
        read = read_table if is_table else read_folder
        return read(path, split=split, seed=seed)
    if path.is_file():
        raise ValueError(f"{NEEDED}, got the file {name}, which does not end in .csv")
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    raise ValueError(f"no such folder or file: {name}{did_you_mean(path.name, [*DATASETS, *beside])} ({NEEDED})")
