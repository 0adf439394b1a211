"""All that an audit finds beside labels: duplicates, outliers, classes to merge or split, images of poor quality."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pfml.audit.duplicates import DuplicateGroup, find_duplicates
from pfml.audit.measures import QualityFault, image_measures, quality_faults
from pfml.audit.structure import ClassFault, Outlier, find_merges, find_outliers, find_splits
from pfml.audit.suspects import Audit
from pfml.data.decoding import Track
from pfml.storage.files import write_csv

__all__ = ["Faults", "find_faults", "write_faults"]


@dataclass(frozen=True)
class Faults:
    """What was found in a set of images, beside suspects.

    Args:
        duplicates: Groups of copies.
        outliers: Images far from all others.
        classes: Classes to merge or to split.
        quality: Images that are dark, bright, blurred or oddly shaped.
    """

    duplicates: list[DuplicateGroup]
    outliers: list[Outlier]
    classes: list[ClassFault]
    quality: list[QualityFault]


def find_faults(audit: Audit, *, track: Track | None = None) -> Faults:
    """The faults of the images of an audit, by their pixels and by their embeddings."""
    measures = image_measures(audit.images, track=track)
    merges, splits = find_merges(audit.points, audit.images), find_splits(audit.points, audit.images)
    return Faults(
        find_duplicates(audit.images, audit.points, measures.thumbnails, audit.roles),
        find_outliers(audit.points, audit.images),
        [*merges, *splits],
        quality_faults(measures),
    )


def write_faults(folder: Path, audit: Audit, faults: Faults) -> list[Path]:
    """Write duplicates.csv, outliers.csv, classes.csv and quality.csv to `folder`; returns their paths."""
    images, names = audit.images, audit.images.class_names
    part = audit.roles or ("",) * len(images)
    label = [names[k] for k in images.labels.tolist()]
    tables: dict[str, list[tuple[object, ...]]] = {
        "duplicates.csv": [("group", "path", "part", "class", "copy", "across_classes", "across_parts")],
        "outliers.csv": [("path", "part", "class", "distance", "median_distance")],
        "classes.csv": [("advice", "classes", "images", "share", "examples")],
        "quality.csv": [("path", "part", "class", "fault", "value", "median")],
    }
    for number, group in enumerate(faults.duplicates, 1):
        across = tuple("yes" if each else "no" for each in (group.is_across_classes, group.is_across_parts))
        kind = "exact" if group.is_exact else "near"
        rows = [(number, images.name_of(k), part[k], label[k], kind, *across) for k in group.indices]
        tables["duplicates.csv"] += rows
    for far in faults.outliers:
        where = images.name_of(far.index), part[far.index], label[far.index]
        tables["outliers.csv"].append((*where, f"{far.distance:.4f}", f"{far.usual:.4f}"))
    for fault in faults.classes:
        classes, sizes = "; ".join(names[c] for c in fault.classes), "; ".join(map(str, fault.sizes))
        examples = "; ".join(map(images.name_of, fault.examples))
        tables["classes.csv"].append((fault.kind, classes, sizes, f"{fault.share:.3f}", examples))
    for poor in faults.quality:
        where = images.name_of(poor.index), part[poor.index], label[poor.index]
        tables["quality.csv"].append((*where, poor.kind, f"{poor.value:.5g}", f"{poor.usual:.5g}"))
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        write_csv(folder / name, rows)
    return [folder / name for name in tables]
