"""The published sizes of the benchmarks, and what to tell a user whose copy has another size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pfml.data.image_set import ImageSet, RetrievalData

__all__ = ["PUBLISHED", "Published", "with_count_remarks"]


@dataclass(frozen=True)
class Published:
    """A benchmark: what it is called, who made it, and the sizes that papers report."""

    title: str
    authors: str
    train: tuple[int, int]  # images, classes
    test: tuple[int, int]
    gallery: tuple[int, int] | None = None
    recall_at: tuple[int, ...] = (1, 2, 4, 8)


PUBLISHED = {
    "cub": Published(
        "CUB-200-2011", "Wah, Branson, Welinder, Perona and Belongie, California Institute of Technology",
        train=(5_864, 100), test=(5_924, 100),
    ),
    "cars": Published(
        "Cars-196", "Krause, Stark, Deng and Fei-Fei, Stanford University",
        train=(8_054, 98), test=(8_131, 98),
    ),
    "sop": Published(
        "Stanford Online Products", "Song, Xiang, Jegelka and Savarese, Stanford University",
        train=(59_551, 11_318), test=(60_502, 11_316), recall_at=(1, 10, 100, 1000),
    ),
    "in-shop": Published(
        "In-Shop Clothes Retrieval of DeepFashion", "Liu, Luo, Qiu, Wang and Tang, Chinese University of Hong Kong",
        train=(25_882, 3_997), test=(14_218, 3_985), gallery=(12_612, 3_985), recall_at=(1, 10, 20, 30),
    ),
}  # fmt: skip


def with_count_remarks(data: RetrievalData) -> RetrievalData:
    """`data`, with a remark for each count that differs from the published one."""
    published = PUBLISHED[data.name]
    remarks = list(data.remarks)
    parts: list[tuple[str, ImageSet | None, tuple[int, int] | None]] = [
        ("training", data.train, published.train),
        ("test" if published.gallery is None else "query", data.test, published.test),
        ("gallery", data.gallery, published.gallery),
    ]
    for part, images, counts in parts:
        if images is not None and counts is not None:
            found = (len(images), images.num_classes)
            for kind, expected, number in zip(("images", "classes"), counts, found, strict=True):
                if number != expected:
                    remarks.append(_sentence(published.title, f"{part} {kind}", expected, number))
    return replace(data, remarks=tuple(remarks))


def _sentence(title: str, what: str, expected: int, found: int) -> str:
    difference = abs(expected - found)
    verb = "is" if difference == 1 else "are"
    trouble = "missing" if found < expected else "too many"
    return (
        f"{title} has {expected:,} {what}, found {found:,}: {difference:,} {verb} {trouble}; "
        "numbers will not be comparable"
    )
