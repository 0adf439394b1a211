"""One's own images: a folder per class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pfml.data.image_set import ImageSet, Protocol, RetrievalData
from pfml.data.splits import as_divided, class_order, divided
from pfml.terminal import readable

__all__ = ["IMAGE_SUFFIXES", "image_files", "image_paths", "listed_folder", "read_folder"]

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jp2", ".ppm", ".pgm"),
    *(".heic", ".heif", ".hif"),  # which need pillow-heif, and are named where it is not installed
)


def read_folder(root: Path, *, split: Protocol = "classes", seed: int | None = 0) -> RetrievalData:
    """The images below `root`: each of its folders is a class, with all images in it and in its folders.

    If `root` has folders `train` and `test` that hold class folders, these are the division; else they are divided at
    random. Hidden files and folders are left out.

    Args:
        root: The folder around the class folders.
        split: What is held out, see `pfml.data.splits.divided`.
        seed: Of the division.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"the root of class folders must be a folder, got {root}, which is none")
    if all(_class_folders(root / part) for part in ("train", "test")):
        others = [path.name for path in _visible(root) if path.name not in ("train", "test")]
        remarks = _left_out(others, root, "neither train nor test")
        (train, about_train), (test, about_test) = (_image_set(root / part) for part in ("train", "test"))
        every = (*remarks, *about_train, *about_test)
        return as_divided("folder", {"train": train, "test": test}, split, where=str(root), seed=seed, remarks=every)
    images, remarks = _image_set(root)
    if images.num_classes < 2:
        raise ValueError(
            f"{root} must have at least 2 folders with images ({', '.join(IMAGE_SUFFIXES)}), one per class, "
            f"got {images.num_classes}{_about_loose_images(root) or _about_deeper_classes(root)}"
        )
    return divided(images, "folder", split, seed=seed, remarks=remarks)


def listed_folder(root: Path) -> tuple[ImageSet, tuple[str, ...]]:
    """All images of the class folders in `root`, however many there are, and remarks on what was left out."""
    if not root.is_dir():
        raise FileNotFoundError(f"the root of class folders must be a folder, got {root}, which is none")
    if all(_class_folders(root / part) for part in ("train", "test")):
        raise ValueError(f"{root} is divided into train and test already: give a folder of class folders")
    images, remarks = _image_set(root)
    if not len(images):
        raise ValueError(f"{root} must have a folder with images per class, got none{_about_loose_images(root)}")
    return images, remarks


def image_files(roots: Sequence[Path]) -> list[Path]:
    """The image files that `roots` name: files as they are, and all images in folders and below them, sorted."""
    return [Path(path) for path in image_paths(roots)]


def image_paths(roots: Sequence[Path]) -> Iterator[str]:
    """The paths of `image_files`, one by one, as texts: millions of `Path` take several times the memory."""
    is_any = False
    for root in roots:
        if not root.exists():
            raise FileNotFoundError(f"images must be files or folders, got {root}, which does not exist")
        for path in filter(_is_image, _files_below(root)) if root.is_dir() else [str(root)]:
            is_any = True
            yield path
    if not is_any:
        raise ValueError(f"there are no images ({', '.join(IMAGE_SUFFIXES)}) in {', '.join(map(str, roots))}")


def _image_set(folder: Path) -> tuple[ImageSet, tuple[str, ...]]:
    """The images of the class folders in `folder`, and remarks on what was left out."""
    below = {name: _images_below(folder / name) for name in class_order(p.name for p in _class_folders(folder))}
    empty = [name for name, (found, _) in below.items() if not found]
    others = [str(path.relative_to(folder)) for _, left_out in below.values() for path in left_out]
    files: dict[str, list[Path]] = {}
    for name, (found, _) in below.items():
        shown = readable(name)
        if shown in files:  # bytes that are no UTF-8, and the same bytes written out
            raise ValueError(f"class folders must have names that differ in print, got {shown} twice in {folder}")
        if found:
            files[shown] = found
    labels = torch.arange(len(files)).repeat_interleave(torch.tensor([len(found) for found in files.values()]).long())
    images = ImageSet(tuple(path for found in files.values() for path in found), labels, tuple(files))
    loose = [path.name for path in _visible(folder) if not path.is_dir()]
    remarks = _left_out(loose, folder, "not in a class folder") + _left_out(empty, folder, "no images in it")
    return images, remarks + _left_out(others, folder, "not an image file, by the ending of the name")


def _about_loose_images(root: Path) -> str:
    """What to do about images that lie in `root` itself, to end a message with; empty if there are none."""
    loose = sum(_is_image(path.name) for path in _visible(root) if not path.is_dir())
    if not loose:
        return ""
    around = Path(os.path.normpath(root / ".."))
    is_class = len(_class_folders(around)) > 1
    advice = f"if it is one class, give the folder around it, {around}" if is_class else "sort them into such folders"
    return f"; images lie loose in it ({loose:,}), in no class folder: {advice}"


def _about_deeper_classes(root: Path) -> str:
    """What to do where the class folders lie in the only folder of `root`, to end a message with; else empty."""
    folders = _class_folders(root)
    deeper = len(_class_folders(folders[0])) if len(folders) == 1 else 0
    return f"; if the {deeper:,} folders in {folders[0]} are the classes, give that one" if deeper > 1 else ""


def _class_folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()] if folder.is_dir() else []


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _left_out(names: Sequence[str], folder: Path, reason: str) -> tuple[str, ...]:
    return (readable(f"{_listed(names)} in {folder} left out: {reason}"),) if names else ()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _images_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """The images in `folder` and in the folders in it, links followed, sorted; and the other files there."""
    found: list[Path] = []
    others: list[Path] = []
    for path in _files_below(folder):
        (found if _is_image(path) else others).append(Path(path))
    return found, others


def _is_image(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES


def _files_below(folder: Path) -> Iterator[str]:
    """All files in `folder` and in the folders in it, links followed, in the order of `Path`; hidden ones left out."""
    # a link to a folder around this one would give it the images of all other classes
    visited = {str(parent) for parent in Path(os.path.realpath(folder)).parents}
    # a path of the working directory begins with the name of the file
    return _walked("" if folder == Path() else str(folder), visited)


def _walked(folder: str, visited: set[str]) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in visited:
        return
    visited.add(real)
    _, folders, files = next(os.walk(folder or os.curdir), (folder, [], []))
    deeper = set(folders)
    # in order, so that what links lead to twice is found under the same name on every machine
    for name in sorted((*folders, *files), key=os.path.normcase):
        if name.startswith("."):
            continue
        path = os.path.join(folder, name)
        if name in deeper:
            yield from _walked(path, visited)
        else:
            yield path
