"""Images with labels, and the train/test division of a retrieval data set."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pfml.data.dataset_images import DatasetImages

__all__ = ["PROTOCOLS", "ImageSet", "Protocol", "RetrievalData", "SeenClassError"]

#: What is held out of training -> what the numbers are about, as tables and reports call it.
PROTOCOLS = {
    "classes": "unseen classes",
    "images": "held-out images of known classes",
    "none": "nothing held out",
}
Protocol = Literal["classes", "images", "none"]


class SeenClassError(ValueError):
    """An evaluation was asked for on classes that the model was trained on."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images, as files or as pixels, and what each of them shows.

    Args:
        images: Paths of image files, pixels as a uint8 tensor (N, 3, height, width), or those of a dataset.
        labels: (N,) int64, each the position of a class in `class_names`.
        class_names: One name per class. Names identify classes across sets: a model trained on a class is not
            evaluated on a class of the same name.
        sources: What to call each image in messages and lists, if `images` are pixels.
        pixels: File -> its pixels, uint8 (3, height, width), of files that were decoded when they were checked
            (`pfml.data.without_unreadable`), so that they need not be opened again. `open_images` moves them into the
            buffer of its source and leaves views of it here, so that they are in memory once.
    """

    images: tuple[Path, ...] | Tensor | DatasetImages
    labels: Tensor
    class_names: tuple[str, ...]
    sources: tuple[str, ...] | None = None
    pixels: dict[Path, Tensor] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.images, Tensor) and (self.images.dtype != torch.uint8 or self.images.shape[1:2] != (3,)):
            raise ValueError(
                f"pixels must be uint8 of shape (N, 3, height, width), "
                f"got {self.images.dtype} of shape {tuple(self.images.shape)}"
            )
        if self.labels.shape != (len(self.images),) or self.labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be int64 of shape ({len(self.images)},), one per image, "
                f"got {self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )
        if len(self.labels) and not (self.labels.min() >= 0 and self.labels.max() < len(self.class_names)):
            raise ValueError(
                f"labels must lie in [0, {len(self.class_names)}), the classes, "
                f"got {int(self.labels.min())} to {int(self.labels.max())}"
            )
        if len(set(self.class_names)) != len(self.class_names):
            twice = next(name for name in self.class_names if self.class_names.count(name) > 1)
            raise ValueError(f"class names must differ, got {twice!r} twice")
        if self.sources is not None and len(self.sources) != len(self.images):
            raise ValueError(f"sources must name {len(self.images)} images, got {len(self.sources)}")

    @classmethod
    def unlabeled(cls, images: Sequence[Path] | Tensor) -> ImageSet:
        """Images of which nothing is known, all of one class."""
        images = images if isinstance(images, Tensor) else tuple(images)
        return cls(images, torch.zeros(len(images), dtype=torch.int64), ("unlabeled",))

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"ImageSet({len(self):,} images of {self.num_classes:,} classes)"

    @property
    def num_classes(self) -> int:
        """How many classes there are names for."""
        return len(self.class_names)

    def name_of(self, index: int) -> str:
        """The file of an image, or its name if it has none."""
        if self.sources is not None:
            return self.sources[index]
        if isinstance(self.images, DatasetImages):
            return self.images.name_of(index)
        return f"image {index}" if isinstance(self.images, Tensor) else str(self.images[index])

    def fingerprint(self) -> str:
        """A digest of which images these are, by name, and of their labels; a move of the whole set keeps it."""
        digest = hashlib.sha256(repr((self.class_names, self.labels.tolist())).encode())
        if self.sources is None and isinstance(self.images, Tensor):
            digest.update(self.images.contiguous().numpy().data)
        elif self.sources is None and isinstance(self.images, DatasetImages):
            digest.update(self.images.fingerprint().encode())
        else:
            digest.update(repr(self.short_names()).encode(errors="surrogatepass"))
        return digest.hexdigest()

    def short_names(self) -> list[str]:
        """The name of each image without the folders that all share."""
        if self.sources is not None or not isinstance(self.images, tuple) or not len(self):
            return [self.name_of(k) for k in range(len(self))]
        folders = [path.absolute().parent for path in self.images]
        shared = os.path.commonpath(folders)
        names = zip(folders, self.images, strict=True)
        return [(folder.relative_to(shared) / path.name).as_posix() for folder, path in names]

    def subset(self, indices: Tensor | Sequence[int]) -> ImageSet:
        """The images at `indices`, in that order; the classes stay as they are."""
        indices = torch.as_tensor(indices, dtype=torch.int64)
        chosen = indices.tolist()
        images: tuple[Path, ...] | Tensor | DatasetImages
        if isinstance(self.images, tuple):
            images = tuple(self.images[k] for k in chosen)
        else:
            images = self.images[indices] if isinstance(self.images, Tensor) else self.images.subset(indices)
        sources = None if self.sources is None else tuple(self.sources[k] for k in chosen)
        return replace(self, images=images, labels=self.labels[indices], sources=sources)

    def of_classes(self, classes: Sequence[int]) -> ImageSet:
        """The images of these classes only, labeled 0, 1, ... in the order of `classes`."""
        position = torch.full((self.num_classes,), -1, dtype=torch.int64)
        position[torch.as_tensor(classes, dtype=torch.int64)] = torch.arange(len(classes))
        kept = self.subset((position[self.labels] >= 0).nonzero()[:, 0])
        names = tuple(self.class_names[c] for c in classes)
        return replace(kept, labels=position[kept.labels], class_names=names)

    def joined(self, others: ImageSet) -> ImageSet:
        """These images and then `others`; classes of one name are one. Both are of one kind, pixels of one size."""
        images: tuple[Path, ...] | Tensor | DatasetImages
        if isinstance(self.images, Tensor) and isinstance(others.images, Tensor):
            images = torch.cat([self.images, others.images])
        elif isinstance(self.images, tuple) and isinstance(others.images, tuple):
            images = self.images + others.images
        elif isinstance(self.images, DatasetImages) and isinstance(others.images, DatasetImages):
            images = self.images.joined(others.images)
        else:
            raise TypeError("images must all be files, all be pixels, or all be of datasets, got one of each")
        sources = None if self.sources is None or others.sources is None else self.sources + others.sources
        names = tuple(dict.fromkeys((*self.class_names, *others.class_names)))
        labels = torch.cat([self.labels, others.in_classes(names).labels])
        pixels = {**(self.pixels or {}), **(others.pixels or {})} or None
        return ImageSet(images, labels, names, sources, pixels)

    def in_classes(self, class_names: Sequence[str]) -> ImageSet:
        """The images with labels that count `class_names`, which must include their own."""
        position = {name: k for k, name in enumerate(class_names)}
        labels = torch.tensor([position[name] for name in self.class_names], dtype=torch.int64)
        return replace(self, labels=labels[self.labels], class_names=tuple(class_names))

    def renamed(self, names: Mapping[str, str | None]) -> ImageSet:
        """The images with some classes renamed: classes of one name become one, those renamed to None are left out."""
        now = [names.get(name, name) for name in self.class_names]
        class_names = tuple(dict.fromkeys(name for name in now if name is not None))
        position = {name: k for k, name in enumerate(class_names)}
        labels = torch.tensor([-1 if name is None else position[name] for name in now], dtype=torch.int64)[self.labels]
        kept = (labels >= 0).nonzero()[:, 0]
        return replace(self.subset(kept), labels=labels[kept], class_names=class_names)

    def with_labels(self, labels: Tensor) -> ImageSet:
        """The images with other labels of the same classes."""
        return replace(self, labels=labels)


@dataclass(frozen=True, eq=False)
class RetrievalData:
    """What one trains on, and what one searches for: unseen classes, or other images of the classes that train.

    Args:
        name: As in `pfml.data.DATASETS`.
        train: Images to learn from.
        test: Queries: of classes that `train` does not have, or by `protocol` other images of its classes, or none.
        gallery: Where queries are searched; None to search the test images among each other (self excluded).
        validation: Classes taken out of the training classes for choices; see `pfml.data.with_validation`.
        recall_at: The K of Recall@K that the literature reports on this set.
        remarks: Sentences about the data that a user should read, such as image counts that are not the published ones.
        is_halved: Whether the classes were divided into halves because nothing said how to divide them.
        protocol: What is held out of training, a key of `PROTOCOLS`. "images" tests on the training classes, in their
            order; "none" has no test images.
        seed: By which classes or images are held out for choices; None, as for published sets, takes classes in order.
        added_classes: Names of classes that came later, by addition; validation classes are taken of each by itself.
    """

    name: str
    train: ImageSet
    test: ImageSet
    gallery: ImageSet | None = None
    validation: ImageSet | None = None
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    remarks: tuple[str, ...] = ()
    is_halved: bool = False
    protocol: Protocol = "classes"
    seed: int | None = None
    added_classes: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol must be one of {', '.join(PROTOCOLS)}, got {self.protocol!r}")
        if self.gallery is not None and self.gallery.class_names != self.test.class_names:
            raise ValueError("gallery and test must have the same class names in the same order")
        if self.protocol == "images" and self.test.class_names != self.train.class_names:
            raise ValueError(
                "with the protocol images, test and train must have the same class names in the same order"
            )
        if self.protocol == "none" and len(self.test):
            raise ValueError(f"with the protocol none there must be no test images, got {len(self.test):,}")
        if self.protocol != "images":
            refuse_seen_classes(self.train.class_names, self.test, "test")
        if self.validation is not None:
            refuse_seen_classes(self.train.class_names, self.validation, "validation")
            refuse_seen_classes(self.test.class_names, self.validation, "validation")

    @property
    def parts(self) -> dict[str, ImageSet]:
        """Role -> its images, of train, validation, test and gallery; training images that are the gallery, once."""
        every = {"train": self.train, "validation": self.validation, "test": self.test, "gallery": self.gallery}
        is_twice = self.gallery is self.train
        return {
            role: images
            for role, images in every.items()
            if images is not None and not (is_twice and role == "gallery")
        }

    def joined(self) -> tuple[ImageSet, tuple[str, ...]]:
        """The images of all parts as one set, in the order of `parts`, and the role of each image.

        Classes of one name are one. Labels of training images stay as they are, since their classes come first.
        """
        parts = {role: images for role, images in self.parts.items() if role == "train" or len(images)}
        roles = tuple(role for role, images in parts.items() for _ in range(len(images)))
        return reduce(ImageSet.joined, parts.values()), roles

    def with_parts(self, parts: Mapping[str, ImageSet]) -> RetrievalData:
        """The data with other images in some roles; where the gallery is the training images, it stays that."""
        train = parts.get("train", self.train)
        gallery = train if self.gallery is self.train else parts.get("gallery", self.gallery)
        test, validation = parts.get("test", self.test), parts.get("validation", self.validation)
        return replace(self, train=train, validation=validation, test=test, gallery=gallery)


def refuse_seen_classes(seen: Sequence[str], images: ImageSet, role: str) -> None:
    """Raise SeenClassError if `images` shows a class of `seen`."""
    shared = sorted(set(seen) & set(images.class_names))
    if shared:
        more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
        raise SeenClassError(
            f"the {role} classes must be unseen, but {', '.join(shared[:3])}{more} "
            f"{'is' if len(shared) == 1 else 'are'} also trained on"
        )
