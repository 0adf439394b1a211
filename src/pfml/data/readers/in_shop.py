"""In-Shop Clothes Retrieval: customers' photos of a garment against the shop's."""

from __future__ import annotations

from pathlib import Path

import torch

from pfml.data.image_set import ImageSet, RetrievalData
from pfml.data.readers.benchmark import Benchmark, locate, rows, with_count_remarks

__all__ = ["IN_SHOP", "read_in_shop"]

IN_SHOP = Benchmark(
    "In-Shop Clothes Retrieval of DeepFashion", "Liu, Luo, Qiu, Wang and Tang, Chinese University of Hong Kong",
    train=(25_882, 3_997), test=(14_218, 3_985), gallery=(12_612, 3_985), recall_at=(1, 10, 20, 30),
)  # fmt: skip

LISTS = ("Eval/list_eval_partition.txt", "list_eval_partition.txt")
PARTS = ("train", "query", "gallery")


def read_in_shop(root: Path) -> RetrievalData:
    """In-Shop Clothes Retrieval: queries are searched in a gallery of other photos of the same garments.

    Args:
        root: The folder of Eval/list_eval_partition.txt (or of the list itself) and of img/ or Img/img/.
    """
    folder = locate(IN_SHOP, root, ("|".join(LISTS),), inside="In-shop Clothes Retrieval Benchmark")
    file = next(folder / name for name in LISTS if (folder / name).is_file())
    # the names in the list begin with "img/"
    photos = folder / "Img" if (folder / "Img" / "img").is_dir() else folder
    parts: dict[str, list[tuple[Path, str]]] = {part: [] for part in PARTS}
    for name, item, part in rows(file, ("image_name", "item_id", "evaluation_status"), header_lines=2):
        if part not in parts:
            raise ValueError(f"evaluation_status must be one of {', '.join(PARTS)}, got {part!r} for {name} in {file}")
        parts[part].append((photos / name, item))
    unseen = sorted({item for part in ("query", "gallery") for _, item in parts[part]})
    data = RetrievalData(
        "in-shop",
        train=_image_set(parts["train"], sorted({item for _, item in parts["train"]})),
        test=_image_set(parts["query"], unseen),
        gallery=_image_set(parts["gallery"], unseen),
        recall_at=IN_SHOP.recall_at,
    )
    return with_count_remarks(data, IN_SHOP)


def _image_set(listed: list[tuple[Path, str]], classes: list[str]) -> ImageSet:
    position = {item: k for k, item in enumerate(classes)}
    labels = torch.tensor([position[item] for _, item in listed], dtype=torch.int64)
    return ImageSet(tuple(path for path, _ in listed), labels, tuple(classes))
