"""One's own images as Python has them: pairs of path and label, a torch `Dataset`, Hugging Face `datasets`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from pfml.data.dataset_images import DatasetImages
from pfml.data.image_set import ImageSet, Protocol, RetrievalData
from pfml.data.splits import as_divided, divided

__all__ = ["read_dataset", "read_pairs", "read_python_data"]

#: Roles of the parts that a dictionary of datasets may have.
ROLES = ("train", "test", "validation", "gallery")
#: What a column or a field with the labels is called, in the order of preference.
LABEL_NAMES = ("label", "labels", "target", "targets", "class", "fine_label", "coarse_label")
IMAGE_NAMES = ("image", "img", "images", "pixel_values")


def read_python_data(source: Any, *, split: Protocol = "classes", seed: int | None = 0) -> RetrievalData:
    """Pairs, a dataset or an `ImageSet`, divided at random; or a dictionary of them by role, with its own division.

    Args:
        source: What `read_pairs` or `read_dataset` takes, or {"train": ..., "test": ...}, as Hugging Face has it.
        split: What is held out, see `pfml.data.splits.divided`.
        seed: Of the division.
    """
    if isinstance(source, Mapping):
        parts = {role: _read(source[role]) for role in ROLES if role in source}
        if not {"train", "test"} <= parts.keys():
            raise ValueError(
                f"a dictionary of data must have the keys train and test (and may have validation and gallery), "
                f"got {', '.join(map(str, source)) or 'none'}: give source['train'] alone to have it divided"
            )
        return as_divided(_name(source["train"]), parts, split, where="the dictionary", seed=seed)
    return divided(_read(source), _name(source), split, seed=seed)


def read_pairs(pairs: Sequence[tuple[str | Path, Hashable]]) -> ImageSet:
    """Image files and what each of them shows, as (path, label).

    Example:
        >>> read_pairs([("a/1.jpg", "owl"), ("b/1.jpg", "wren"), ("b/2.jpg", "wren")])
        ImageSet(3 images of 2 classes)
    """
    for position, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str | Path):
            raise TypeError(f"pairs must be (path, label), got {pair!r} at index {position}")
    labels, names = _labels([label for _, label in pairs])
    return ImageSet(tuple(Path(path).expanduser() for path, _ in pairs), labels, names)


def read_dataset(
    dataset: Any,
    *,
    image: int | str | None = None,
    label: int | str | None = None,
    class_names: Sequence[str] | None = None,
) -> ImageSet:
    """A torch `Dataset`, or anything with `len(dataset)` and `dataset[k]`, whose items hold an image and a label.

    Images are PIL images, arrays or tensors of any size, not normalized and not augmented. They are asked for when they
    are needed. Labels are read from `dataset.targets` or a column if there is one, else by asking for every item.

    Args:
        dataset: Items are tuples (image, label, ...) or dictionaries.
        image, label: Where they are in an item: a position or a key; None to find them.
        class_names: Of labels 0, 1, ...; None for what the dataset says (`classes`, or Hugging Face's `ClassLabel`),
            else the labels themselves.

    Raises:
        ValueError: If the dataset gives other pixels when it is asked again: a random transform would be drawn once.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"a dataset must have a length and items by position (dataset[0]), got {type(dataset).__name__}: "
            f"make a list of (path, label) of it, or a torch Dataset"
        )
    if not len(dataset):
        raise ValueError(f"a dataset must have an image at least, got an empty {type(dataset).__name__}")
    first = dataset[0]
    image = _key(first, image, IMAGE_NAMES, 0, "image")
    label = _key(first, label, LABEL_NAMES, 1, "label")
    files = _files(dataset)
    values = _stored_labels(dataset, label)
    if values is None:
        values = [dataset[k][label] for k in range(len(dataset))]
    labels, names = _labels([value.item() if hasattr(value, "item") else value for value in values])
    given = class_names if class_names is not None else _class_names(dataset, label)
    if given is not None:
        names = _renamed(names, given)
    if files is not None:
        return ImageSet(files, labels, names)
    images = DatasetImages(dataset, image)
    if not torch.equal(images.read(0), images.read(0)):
        raise ValueError(
            f"{type(dataset).__name__} must give the same image each time, got two different ones: leave out its "
            f"random transform; training crops and flips by itself (pfml.TrainConfig.augmentation)"
        )
    return ImageSet(images, labels, names)


def _read(source: Any) -> ImageSet:
    if isinstance(source, ImageSet):
        return source
    is_listed = isinstance(source, list | tuple) and len(source) > 0
    if is_listed and isinstance(source[0], tuple | list) and source[0] and isinstance(source[0][0], str | Path):
        return read_pairs(source)
    return read_dataset(source)


def _name(source: Any) -> str:
    return "images" if isinstance(source, list | tuple | ImageSet) else type(source).__name__


def _key(item: Any, given: int | str | None, usual: Sequence[str], position: int, what: str) -> int | str:
    """Where an item has its image or its label."""
    if given is not None:
        return given
    if isinstance(item, Mapping):
        found = [name for name in usual if name in item]
        if not found:
            raise ValueError(
                f"items of the dataset must have the {what} by a usual name ({', '.join(usual)}), got "
                f"{', '.join(map(str, item))}: name it, read_dataset(dataset, {what}=...)"
            )
        return found[0]
    if isinstance(item, tuple | list) and len(item) > position:
        return position
    raise TypeError(f"items of the dataset must be (image, label) or dictionaries, got {type(item).__name__}")


def _files(dataset: Any) -> tuple[Path, ...] | None:
    """The image files of a folder dataset of torchvision's that leaves them as they are; None for others."""
    if isinstance(dataset, Subset):
        files = _files(dataset.dataset)
        return None if files is None else tuple(files[k] for k in dataset.indices)
    samples, changes = getattr(dataset, "samples", None), ("transform", "transforms", "target_transform")
    if not isinstance(samples, list) or any(getattr(dataset, name, None) is not None for name in changes):
        return None
    is_of_files = all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in samples)
    return tuple(Path(path) for path, _ in samples) if is_of_files and len(samples) == len(dataset) else None


def _stored_labels(dataset: Any, label: int | str) -> Sequence[Any] | None:
    """All labels without asking for an image, if the dataset has them apart."""
    if isinstance(dataset, Subset):
        whole = _stored_labels(dataset.dataset, label)
        return None if whole is None else [whole[k] for k in dataset.indices]
    if getattr(dataset, "target_transform", None) is not None:
        return None
    if isinstance(label, str) and label in getattr(dataset, "column_names", ()):
        return list(dataset[label])
    targets = getattr(dataset, "targets", None)
    if targets is not None and label == 1 and len(targets) == len(dataset):
        return list(targets)
    return None


def _class_names(dataset: Any, label: int | str) -> Sequence[str] | None:
    """The names of labels 0, 1, ... as the dataset knows them."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    feature = (getattr(dataset, "features", None) or {}).get(label) if isinstance(label, str) else None
    names = getattr(feature, "names", None) if feature is not None else getattr(dataset, "classes", None)
    return names if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else None


def _labels(values: Sequence[Any]) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Labels from 0 on, and the name of each, in the order of the values."""
    for position, value in enumerate(values):
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise TypeError(
                f"labels must be whole numbers or texts, got {type(value).__name__} at index {position}: {value!r}"
            )
    kinds = {isinstance(value, str) for value in values}
    if len(kinds) > 1:
        raise TypeError("labels must be all numbers or all texts, got both")
    distinct = sorted(set(values))
    position_of = {value: k for k, value in enumerate(distinct)}
    return torch.tensor([position_of[value] for value in values], dtype=torch.int64), tuple(map(str, distinct))


def _renamed(names: tuple[str, ...], given: Sequence[str]) -> tuple[str, ...]:
    """The given names of the classes that occur, whose labels are `names`."""
    if set(names) <= set(given) and not all(name.isdigit() for name in names):
        return names  # labels are names already
    if not all(name.isdigit() and int(name) < len(given) for name in names):
        raise ValueError(f"labels must lie in [0, {len(given)}), the classes of the dataset, got {names[-1]}")
    return tuple(given[int(name)] for name in names)
