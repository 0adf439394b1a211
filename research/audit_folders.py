"""How well `pfml audit FOLDER` finds label noise and copies: folders of classes of CUB, the untrained backbone.

    python research/audit_folders.py --root CUB_200_2011 --cache FOLDER --out results/audit.jsonl
    python research/audit_folders.py --table results/audit.jsonl

Folders are drawn from classes 101 to 200; --choose takes classes 1 to 100, by which rules were chosen. In each folder a
part of the labels is changed, at random or to similar classes. Copies of some images are added, some of them to another
class. All images pass through the backbone once; their embeddings and the copies are kept in the cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pfml.audit import audit, find_duplicates
from pfml.audit.measures import ImageMeasures, image_measures
from pfml.audit.structure import find_merges, find_splits
from pfml.data import ImageSet, LabelNoise, corrupt, load_data
from pfml.evaluation import embed
from pfml.models import create_embedder
from pfml.sphere import unit
from pfml.storage.files import load_tensors, save_tensors

#: Classes, images of each and label noise of the folders.
FOLDERS = ((20, 20, 0.12), (20, 40, 0.12), (40, 20, 0.12), (40, 40, 0.12), (30, 30, 0.0), (30, 30, 0.05), (30, 30, 0.2))
#: Label noise that confuses a class has one of so many others, those whose images have the most similar means.
SIMILAR = 3
CLASSES, IMAGES = 40, 40
#: Classes and images of each of the folders with copies, and copies of each kind in them.
COPY_FOLDERS = ((20, 40), (40, 40))
PLANTED = 12
#: Images of which there are copies.
COPIED = 120


def recompressed(source: Path, target: Path) -> None:
    """A copy as a JPEG of low quality."""
    with Image.open(source) as image:
        image.convert("RGB").save(target, quality=50)


def resized(source: Path, target: Path) -> None:
    """A copy of 60 % of the size."""
    with Image.open(source) as image:
        size = round(0.6 * image.width), round(0.6 * image.height)
        image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(target, quality=85)


def cropped(source: Path, target: Path) -> None:
    """A copy without a margin of 4 %."""
    with Image.open(source) as image:
        across, down = round(0.04 * image.width), round(0.04 * image.height)
        image.convert("RGB").crop((across, down, image.width - across, image.height - down)).save(target, quality=85)


COPIES = {"exact": shutil.copyfile, "recompressed": recompressed, "resized": resized, "cropped": cropped}


@dataclass(frozen=True, eq=False)
class Pool:
    """Images with what was computed from them, and kind of copy -> the copies of the images at `copied`, likewise."""

    images: ImageSet
    points: Tensor
    measures: ImageMeasures
    copied: Tensor
    copies: dict[str, Pool]

    def joined(self, others: Pool) -> Pool:
        """These and then others."""
        both = [torch.cat([getattr(one.measures, name) for one in (self, others)]) for name in vars(self.measures)]
        images = ImageSet(
            (*self.images.images, *others.images.images),
            torch.cat([self.images.labels, others.images.labels]),
            self.images.class_names,
        )
        return replace(
            self, images=images, points=torch.cat([self.points, others.points]), measures=ImageMeasures(*both)
        )

    def subset(self, rows: Tensor) -> Pool:
        """Those at `rows`."""
        some = [getattr(self.measures, name)[rows] for name in vars(self.measures)]
        return replace(self, images=self.images.subset(rows), points=self.points[rows], measures=ImageMeasures(*some))


def load_pool(options: argparse.Namespace) -> Pool:
    """All images of the folders; embedded once."""
    data = load_data("cub", options.root)
    every = data.train if options.choose else data.test
    random = torch.Generator().manual_seed(0)
    classes = torch.randperm(every.num_classes, generator=random)[:CLASSES].sort().values.tolist()
    images = every.of_classes(classes)
    few = [(images.labels == c).nonzero()[:IMAGES, 0] for c in range(CLASSES)]
    images = images.subset(torch.cat(few))
    folder = options.cache / ("choose" if options.choose else "measure")
    folder.mkdir(parents=True, exist_ok=True)
    copied = torch.randperm(len(images), generator=random)[:COPIED]
    sets = {"images": images}
    for kind, copy in COPIES.items():
        paths = tuple(folder / f"{kind}-{k}.jpg" for k in copied.tolist())
        for k, path in zip(copied.tolist(), paths, strict=True):
            if not path.is_file():
                copy(images.images[k], path)
        sets[kind] = ImageSet(paths, images.labels[copied], images.class_names)
    if not (folder / "points.safetensors").is_file():
        model = create_embedder("efficientnet_lite0", embedding_dim=None)
        save_tensors(folder / "points.safetensors", {kind: embed(model, some) for kind, some in sets.items()})
    if not (folder / "measures.safetensors").is_file():
        found = {kind: vars(image_measures(some)) for kind, some in sets.items()}
        flat = {f"{kind}.{name}": values for kind, each in found.items() for name, values in each.items()}
        save_tensors(folder / "measures.safetensors", flat)
    points, flat = (load_tensors(folder / f"{name}.safetensors") for name in ("points", "measures"))
    pools = {
        kind: Pool(
            some,
            unit(points[kind]),
            ImageMeasures(*(flat[f"{kind}.{each.name}"] for each in fields(ImageMeasures))),
            copied,
            {},
        )
        for kind, some in sets.items()
    }
    return replace(pools.pop("images"), copies=pools)


def drawn(pool: Pool, classes: int, each: int, random: torch.Generator) -> Tensor:
    """Positions of images of some classes."""
    chosen = torch.randperm(CLASSES, generator=random)[:classes].sort().values.tolist()
    rows = [(pool.images.labels == c).nonzero()[:, 0] for c in chosen]
    return torch.cat([own[torch.randperm(len(own), generator=random)[:each]] for own in rows])


def confused(images: ImageSet, points: Tensor, rate: float, seed: int) -> ImageSet:
    """The images, some of them with the label of a similar class."""
    sums = torch.zeros(images.num_classes, points.shape[1]).index_add(0, images.labels, points)
    means = unit(sums)
    similar = (means @ means.T).fill_diagonal_(-2.0).topk(SIMILAR).indices
    random = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(images), generator=random)[: round(rate * len(images))]
    labels = images.labels.clone()
    labels[chosen] = similar[labels[chosen], torch.randint(SIMILAR, (len(chosen),), generator=random)]
    return images.with_labels(labels)


def measure_labels(pool: Pool, classes: int, each: int, rate: float, seed: int, noise: str) -> dict[str, Any]:
    """Label noise of one folder: how well it is ranked, estimated and corrected; no copies."""
    some = pool.subset(drawn(pool, classes, each, torch.Generator().manual_seed(seed)))
    images = some.images.of_classes(some.images.labels.unique().tolist())
    if noise == "similar":
        given = confused(images, some.points, rate, seed)
    else:
        given, _ = corrupt(images, LabelNoise(rate=rate, seed=seed))
    names = ["k-NN disagreement", *(["cleanlab on k-NN"] if find_spec("cleanlab") else [])]
    found = audit(some.points, given, true_labels=images.labels, compare=names if rate else [])
    wrong = given.labels != images.labels
    sure, listed = found.sure(), found.listed()
    right = found.scores.suggested == images.labels
    return {
        "kind": "labels", "classes": classes, "images": len(images), "rate": rate, "noise": noise, "seed": seed,
        "true_rate": float(wrong.double().mean()), "estimate": found.noise_rate, "interval": found.noise_interval,
        "average_precision": {name: one.average_precision for name, one in found.detections.items()},
        "suggestions": {name: one.suggestion_accuracy for name, one in found.detections.items()},
        "noisy": int(wrong.sum()), "listed": len(listed), "listed_noisy": int(wrong[listed].sum()),
        "listed_corrected": int((wrong & right)[listed].sum()),
        "sure": len(sure), "sure_noisy": int(wrong[sure].sum()), "sure_corrected": int((wrong & right)[sure].sum()),
    }  # fmt: skip


def measure_copies(pool: Pool, classes: int, each: int, seed: int) -> dict[str, Any]:
    """Copies of one folder: each kind of a few images, half of them in another class."""
    random = torch.Generator().manual_seed(seed)
    rows = drawn(pool, classes, each, random)
    whole = pool.subset(rows)
    labels = whole.images.labels.unique()
    position = {int(k): i for i, k in enumerate(rows.tolist())}
    own = [i for i, k in enumerate(pool.copied.tolist()) if k in position]
    own = [own[i] for i in torch.randperm(len(own), generator=random)[: PLANTED * len(COPIES)].tolist()]
    planted: dict[str, list[tuple[int, int]]] = {kind: [] for kind in COPIES}
    for number, i in enumerate(own):
        kind = list(COPIES)[number % len(COPIES)]
        copy = pool.copies[kind].subset(torch.tensor([i]))
        if number // len(COPIES) % 2:
            others = labels[labels != copy.images.labels[0]]
            label = others[torch.randint(len(others), (1,), generator=random)]
            copy = replace(copy, images=copy.images.with_labels(label))
        planted[kind].append((position[int(pool.copied[i])], len(whole.images)))
        whole = whole.joined(copy)
    groups = find_duplicates(whole.images, whole.points, whole.measures.thumbnails)
    of_group = {k: number for number, group in enumerate(groups) for k in group.indices}
    known = [pair for pairs in planted.values() for pair in pairs]
    expected = {k for pair in known for k in pair}
    others = [group for group in groups if not set(group.indices) & expected]
    across = [(one, two) for one, two in known if whole.images.labels[one] != whole.images.labels[two]]
    return {
        "kind": "copies", "classes": classes, "images": len(rows), "seed": seed,
        "planted": {kind: len(pairs) for kind, pairs in planted.items()},
        "found": {
            kind: sum(of_group.get(one, -1) == of_group.get(two, -2) for one, two in pairs)
            for kind, pairs in planted.items()
        },
        "across": len(across),
        "across_found": sum(
            of_group.get(one, -1) == of_group.get(two, -2) and groups[of_group[one]].is_across_classes
            for one, two in across
        ),
        "others": [[str(Path(*whole.images.images[k].parts[-2:])) for k in group.indices] for group in others],
    }  # fmt: skip


def measure_classes(pool: Pool, classes: int, each: int, seed: int) -> dict[str, Any]:
    """A tenth of the classes cut in two at random, and a tenth that are two classes in one."""
    random = torch.Generator().manual_seed(seed)
    some = pool.subset(drawn(pool, classes, each, random))
    labels, number = some.images.labels.unique(return_inverse=True)[1], max(classes // 10, 1)
    order = torch.randperm(classes, generator=random).tolist()
    cut, joined = order[:number], [tuple(order[number + 2 * k : number + 2 * k + 2]) for k in range(number)]
    for one, other in joined:
        labels[labels == other] = one
    for new, label in enumerate(cut):
        own = (labels == label).nonzero()[:, 0]
        labels[own[torch.randperm(len(own), generator=random)[: len(own) // 2]]] = classes + new
    images = ImageSet(some.images.images, labels, tuple(map(str, range(classes + number))))
    merges = {fault.classes for fault in find_merges(some.points, images)}
    splits = {fault.classes[0] for fault in find_splits(some.points, images)}
    pairs, ones = {(label, classes + new) for new, label in enumerate(cut)}, {one for one, _ in joined}
    return {
        "kind": "classes", "classes": classes, "images": len(images), "seed": seed,
        "cut": number, "merges": len(merges), "merges_right": len(merges & pairs),
        "joined": number, "splits": len(splits), "splits_right": len(splits & ones),
    }  # fmt: skip


def table(path: Path) -> str:
    """The lines as Markdown."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    columns = ("folder", "true", "estimate [interval]", "field", "k-NN", "cleanlab", "list", "--apply")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for line in (one for one in lines if one["kind"] == "labels"):
        rates = [100 * line[name] for name in ("true_rate", "estimate")] + [100 * each for each in line["interval"]]
        ranks = [line["average_precision"].get(name) for name in ("field", "k-NN disagreement", "cleanlab on k-NN")]
        lists = [(line[f"{name}_noisy"], line[name]) for name in ("listed", "sure")]
        cells = [
            f"{line['classes']} classes, {line['images']:,} images, {line['noise']} noise, seed {line['seed']}",
            f"{rates[0]:.1f}",
            "{:.1f} [{:.1f}, {:.1f}]".format(*rates[1:]),
            *("" if each is None else f"{100 * each:.1f}" for each in ranks),
            *(f"{right:,} of {many:,} right" for right, many in lists),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    others = [{**line, "others": len(line.get("others", ()))} for line in lines if line["kind"] != "labels"]
    return "\n".join([*rows, "", *map(str, others)])


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/audit"))
    parser.add_argument("--out", type=Path, default=Path("results/audit.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--choose", action="store_true", help="classes 1 to 100")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        print(table(options.table))
        return
    pool = load_pool(options)
    with options.out.open("a", encoding="utf-8") as file:
        for seed in options.seeds:
            lines = [
                measure_labels(pool, *folder, seed, noise)
                for noise in ("random", "similar")
                for folder in FOLDERS
                if folder[2] or noise == "random"
            ]
            lines += [measure_copies(pool, *size, seed) for size in COPY_FOLDERS]
            lines += [measure_classes(pool, *size, seed) for size in COPY_FOLDERS]
            file.writelines(json.dumps(line | {"commit": options.commit}) + "\n" for line in lines)
    print(table(options.out))


if __name__ == "__main__":
    main()
