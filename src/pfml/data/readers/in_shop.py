"""In-Shop Clothes Retrieval: customers' pictures of a garment against the shop's."""

from __future__ import annotations

from pathlib import Path

import torch

from pfml.data.image_set import ImageSet, RetrievalData
from pfml.data.readers.layout import locate, rows
from pfml.data.readers.published import PUBLISHED, with_count_remarks

__all__ = ["read_in_shop"]

LISTS = ("Eval/list_eval_partition.txt", "list_eval_partition.txt")
PARTS = ("train", "query", "gallery")


def read_in_shop(root: Path) -> RetrievalData:
    """In-Shop Clothes Retrieval: queries are searched in a gallery of other pictures of the same garments.

    Args:
        root: The folder of Eval/list_eval_partition.txt (or of the list itself) and of img/ or Img/img/.
    """
    folder = locate("in-shop", root, ("|".join(LISTS),), inside="In-shop Clothes Retrieval Benchmark")
    file = next(folder / name for name in LISTS if (folder / name).is_file())
    # the names in the list begin with "img/"
    pictures = folder / "Img" if (folder / "Img" / "img").is_dir() else folder
    parts: dict[str, list[tuple[Path, str]]] = {part: [] for part in PARTS}
    for name, item, part in rows(file, ("image_name", "item_id", "evaluation_status"), header_lines=2):
        if part not in parts:
            raise ValueError(f"evaluation_status must be one of {', '.join(PARTS)}, got {part!r} for {name} in {file}")
        parts[part].append((pictures / name, item))
    unseen = sorted({item for part in ("query", "gallery") for _, item in parts[part]})
    data = RetrievalData(
        "in-shop",
        train=_image_set(parts["train"], sorted({item for _, item in parts["train"]})),
        test=_image_set(parts["query"], unseen),
        gallery=_image_set(parts["gallery"], unseen),
        recall_at=PUBLISHED["in-shop"].recall_at,
    )
    return with_count_remarks(data)


def _image_set(listed: list[tuple[Path, str]], classes: list[str]) -> ImageSet:
    position = {item: k for k, item in enumerate(classes)}
    labels = torch.tensor([position[item] for _, item in listed], dtype=torch.int64)
    return ImageSet(tuple(path for path, _ in listed), labels, tuple(classes))
