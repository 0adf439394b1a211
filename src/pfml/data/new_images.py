"""New images of classes that a model knows: queries to search among the images that it was trained on."""

from __future__ import annotations

from pathlib import Path

from pfml.data.decoding import Track
from pfml.data.image_set import ImageSet, RetrievalData
from pfml.data.own_images import own_images
from pfml.data.readers.folder import listed_folder
from pfml.data.readers.table import listed_images
from pfml.storage.files import sha256_of

__all__ = ["new_images_of_known_classes"]

LISTED = 3


def new_images_of_known_classes(
    where: str | Path, train: ImageSet, *, unreadable: str = "auto", track: Track | None = None
) -> RetrievalData:
    """The images of a folder or CSV as queries among `train`, by the protocol "images".

    Images that `train` has too, by their path or their bytes, are left out: they would find themselves.

    Args:
        where: A folder of class folders, or a .csv file. All classes must be classes of `train`.
        train: The images that a model was trained on.
        unreadable: What happens to files that cannot be read, see `pfml.data.own_images.UNREADABLE`.
        track: Shows the progress, as track(iterable, description, total).
    """
    path = Path(where).expanduser()
    is_table = path.suffix.lower() == ".csv" and path.is_file()
    images, remarks = listed_images(path) if is_table else listed_folder(path)
    others = sorted({*images.class_names} - {*train.class_names})
    if others:
        more = f" and {len(others) - LISTED:,} more" if len(others) > LISTED else ""
        raise ValueError(
            f"all classes of {where} must be classes that the model was trained on, but "
            f"{', '.join(others[:LISTED])}{more} {'is' if len(others) == 1 else 'are'} not: take their images out"
        )
    trained = _shared(images, train)
    if len(trained) == len(images):
        raise ValueError(f"{where} must hold images other than the training images of the run, got these alone")
    if trained:
        about = f"{len(trained):,} of {len(images):,} images of {where} are training images of the run and are left out"
        remarks = (*remarks, about)
        images = images.subset([k for k in range(len(images)) if k not in trained])
    # its files alone are checked: those of `train` were when the run loaded them
    alone = RetrievalData("new images", images.of_classes([]), images, gallery=images, remarks=remarks)
    alone = own_images(str(where), alone, unreadable, track)
    test = alone.test.in_classes(train.class_names)
    return RetrievalData(path.name, train, test, gallery=train, protocol="images", remarks=alone.remarks)


def _shared(images: ImageSet, train: ImageSet) -> set[int]:
    """Positions of the images that `train` has too."""
    if not isinstance(images.images, tuple) or not isinstance(train.images, tuple):
        return set()
    paths = {path.resolve() for path in train.images}
    found = {k for k, path in enumerate(images.images) if path.resolve() in paths}
    sizes: dict[int, list[Path]] = {}
    for path in paths:
        if path.is_file():
            sizes.setdefault(path.stat().st_size, []).append(path)
    digests: dict[int, set[str]] = {}
    for k, path in enumerate(images.images):
        size = path.stat().st_size if path.is_file() else -1
        if k not in found and size in sizes:
            if size not in digests:
                digests[size] = {sha256_of(each) for each in sizes[size]}
            found |= {k} if sha256_of(path) in digests[size] else set()
    return found
