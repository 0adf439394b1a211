"""How well `pfml audit FOLDER` finds outliers, poor images and near copies that were planted, beside other tools.

    python research/audit_faults.py --root CUB_200_2011 --cache FOLDER --out results/audit-faults.jsonl
    python research/audit_faults.py --table results/audit-faults.jsonl

Folders are those of research/audit_folders.py: classes 101 to 200 of CUB, --choose takes 1 to 100, by which rules were
chosen. Planted are

    outliers    glyphs, noise, corners of photographs, birds of classes that the folder lacks; `OUTLIERS` of one kind;
    quality     darkened, brightened, blurred images and strips of images, each in three strengths;
    copies      as in research/audit_folders.py.

Average precision is that of the ranking of all images of the folder, or of all pairs of near images, with what was
planted as the positives. cleanvision and imagehash run in the interpreter --other-python, which has them; without it
they are left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from audit_folders import COPIES, PLANTED, Pool, drawn, load_pool
from PIL import Image, ImageFilter
from torch import Tensor

from pfml.audit import audit
from pfml.audit.duplicates import find_duplicates
from pfml.audit.measures import ImageMeasures, image_measures, quality_faults
from pfml.audit.structure import find_outliers, outlier_distances
from pfml.data import ImageSet, load_data
from pfml.evaluation import embed, nearest
from pfml.models import create_embedder
from pfml.sphere import unit
from pfml.storage.files import load_tensors, save_tensors

#: Classes and images of each of the folders.
FOLDERS = ((20, 40), (30, 20), (40, 40))
#: Planted outliers of one kind in a folder, and how many there are to draw from.
OUTLIERS, KEPT = (1, 5, 20), 40
#: Images that are made worse, of each kind and strength; planted in a folder are half of those whose image it has.
SPOILED = 60
STRENGTHS: dict[str, tuple[float, ...]] = {
    "dark": (0.35, 0.2, 0.1),
    "bright": (0.35, 0.2, 0.1),
    "blurred": (1.5, 3, 6),
    "oddly shaped": (3, 4, 6),
}
#: Name of a fault here -> the name of cleanvision.
CLEANVISION = {"dark": "dark", "bright": "light", "blurred": "blurry", "oddly shaped": "odd_aspect_ratio"}

#: Cosine from which on fastdup joins images by default; different bits of 64 up to which hashes are taken as equal.
FASTDUP, HAMMING = 0.96, 8


def spoiled(image: Image.Image, kind: str, strength: float) -> Image.Image:
    """An image that is dark, bright, blurred or oddly shaped.

    Args:
        image: RGB.
        kind: One of `STRENGTHS`.
        strength: The share of luminance, or of its distance to white, that is left; the radius of the Gaussian blur in
            pixels; or the longer side over the shorter one.
    """
    if kind == "dark":
        return image.point(lambda value: value * strength)
    if kind == "bright":
        return image.point(lambda value: 255 - (255 - value) * strength)
    if kind == "blurred":
        return image.filter(ImageFilter.GaussianBlur(strength))
    width, height = image.width, round(image.width / strength)
    top = (image.height - height) // 2
    return image.crop((0, top, width, top + height))


def _glyphs(count: int, pool: Pool) -> list[Image.Image]:
    pixels = load_data("glyphs").test.images
    rows = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:count]
    return [Image.fromarray(pixels[k].permute(1, 2, 0).numpy()).resize((320, 320)) for k in rows.tolist()]


def _noise(count: int, pool: Pool) -> list[Image.Image]:
    """Coarse and fine noise."""
    random = torch.Generator().manual_seed(0)
    found = []
    for k in range(count):
        side = (5, 20, 80, 320)[k % 4]
        pixels = torch.randint(256, (side, side, 3), generator=random, dtype=torch.uint8)
        found.append(Image.fromarray(pixels.numpy()).resize((320, 320), Image.Resampling.BICUBIC))
    return found


def _corners(count: int, pool: Pool) -> list[Image.Image]:
    """The upper left fifth of photographs."""
    rows = torch.randperm(len(pool.images), generator=torch.Generator().manual_seed(1))[:count]
    found = []
    for k in rows.tolist():
        with Image.open(pool.images.images[k]) as image:
            found.append(image.convert("RGB").crop((0, 0, image.width // 5, image.height // 5)).resize((320, 320)))
    return found


MADE: dict[str, Callable[[int, Pool], list[Image.Image]]] = {"glyphs": _glyphs, "noise": _noise, "corners": _corners}


def planted(options: argparse.Namespace, pool: Pool) -> tuple[dict[str, Tensor], dict[str, Pool]]:
    """Embeddings of outliers by kind; spoiled images by kind and strength, `copied` from these positions."""
    folder = options.cache / ("choose" if options.choose else "measure") / "faults"
    folder.mkdir(parents=True, exist_ok=True)
    rows = torch.randperm(len(pool.images), generator=torch.Generator().manual_seed(2))[:SPOILED]
    sets = {kind: [folder / f"{kind}-{k}.png" for k in range(KEPT)] for kind in MADE}
    for kind, paths in sets.items():
        if not paths[-1].is_file():
            for image, path in zip(MADE[kind](KEPT, pool), paths, strict=True):
                image.save(path)
    worse = {}
    for kind, strengths in STRENGTHS.items():
        for strength in strengths:
            paths = [folder / f"{kind}-{strength:g}-{k}.webp" for k in rows.tolist()]
            for k, path in zip(rows.tolist(), paths, strict=True):
                if not path.is_file():
                    with Image.open(pool.images.images[k]) as image:
                        spoiled(image.convert("RGB"), kind, strength).save(path, quality=90)
            worse[f"{kind} {strength:g}"] = ImageSet(tuple(paths), pool.images.labels[rows], pool.images.class_names)
    if not (folder / "points.safetensors").is_file():
        model = create_embedder("efficientnet_lite0", embedding_dim=None)
        save_tensors(
            folder / "points.safetensors", {kind: embed(model, ImageSet.unlabeled(some)) for kind, some in sets.items()}
        )
    if not (folder / "measures.safetensors").is_file():
        flat = {
            f"{kind}.{name}": values
            for kind, some in worse.items()
            for name, values in vars(image_measures(some)).items()
        }
        save_tensors(folder / "measures.safetensors", flat)
    points, flat = (load_tensors(folder / f"{name}.safetensors") for name in ("points", "measures"))
    pools = {
        kind: Pool(
            some,
            pool.points[rows],
            ImageMeasures(*(flat[f"{kind}.{name}"] for name in vars(pool.measures))),
            rows,
            {},
        )
        for kind, some in worse.items()
    }
    return {kind: unit(each) for kind, each in points.items()}, pools


def average_precision(score: Tensor, positive: Tensor) -> float:
    """Of the ranking by score, highest first; images of equal score are ranked together."""
    values, inverse = score.double().unique(return_inverse=True)
    groups = len(values) - 1 - inverse  # the highest is 0
    hits = torch.bincount(groups, weights=positive.double(), minlength=len(values)).cumsum(0)
    total = torch.bincount(groups, minlength=len(values)).cumsum(0)
    gained = torch.diff(hits, prepend=hits.new_zeros(1))
    return float((gained * hits / total).sum() / positive.sum())


def _distance(points: Tensor, k: int) -> Tensor:
    return (2 - 2 * nearest(points, None, k)[0].double()).clamp(min=0).sqrt()


def outlier_scores(points: Tensor, images: ImageSet) -> dict[str, Tensor]:
    """Name -> how far each image is from the others; "as suspects" is the ranking of the labels."""
    from cleanlab.outlier import OutOfDistribution

    return {
        "pfml": outlier_distances(points, images.labels),
        "pfml, as suspects": audit(points, images).scores.score,
        "nearest image": _distance(points, 1)[:, 0],
        "k-NN, k = 10": _distance(points, 10).mean(dim=1),
        "cleanlab": 1 - torch.from_numpy(OutOfDistribution().fit_score(features=points.numpy(), verbose=False)),
    }


def measure_outliers(
    pool: Pool, outliers: dict[str, Tensor], classes: int, each: int, seed: int
) -> list[dict[str, Any]]:
    """Outliers of each kind in one folder: how well each score ranks them, and what is listed."""
    random = torch.Generator().manual_seed(seed)
    rows = drawn(pool, classes, each, random)
    present = pool.images.labels[rows].unique()
    own, others = pool.images.subset(rows).of_classes(present.tolist()), ~torch.isin(pool.images.labels, present)
    kinds = {**outliers, **({"other birds": pool.points[others]} if others.any() else {})}
    lines = []
    for kind, some in kinds.items():
        for count in OUTLIERS:
            added = some[torch.randperm(len(some), generator=random)[:count]]
            points = torch.cat([pool.points[rows], added])
            positive = torch.arange(len(points)) >= len(rows)
            labels = own.labels[torch.randint(len(own), (len(added),), generator=random)]  # of any class of the folder
            paths = tuple(Path(f"{k}.webp") for k in range(len(points)))
            images = ImageSet(paths, torch.cat([own.labels, labels]), own.class_names)
            listed = torch.tensor([one.index for one in find_outliers(points, images)], dtype=torch.long)
            lines.append(
                {
                    "kind": "outliers",
                    "fault": kind,
                    "classes": classes,
                    "images": len(rows),
                    "seed": seed,
                    "planted": count,
                    "listed": len(listed),
                    "listed_right": int(positive[listed].sum()),
                    "average_precision": {
                        name: average_precision(score, positive)
                        for name, score in outlier_scores(points, images).items()
                    },
                }
            )
    return lines


def measure_quality(
    options: argparse.Namespace, pool: Pool, worse: dict[str, Pool], classes: int, each: int, seed: int
) -> list[dict[str, Any]]:
    """Poor images of each kind and strength in one folder, in place of the originals."""
    random = torch.Generator().manual_seed(seed)
    rows = drawn(pool, classes, each, random)
    position = {int(k): i for i, k in enumerate(rows.tolist())}
    lines = []
    for name, spoils in worse.items():
        kind = name.rsplit(" ", 1)[0]
        own = [i for i, k in enumerate(spoils.copied.tolist()) if k in position]
        own = [own[i] for i in torch.randperm(len(own), generator=random)[: max(len(own) // 2, 1)].tolist()]
        positive = torch.zeros(len(rows), dtype=torch.bool)
        files = [pool.images.images[k] for k in rows.tolist()]
        values = {each: getattr(pool.measures, each)[rows].clone() for each in vars(pool.measures)}
        for i in own:
            at = position[int(spoils.copied[i])]
            positive[at], files[at] = True, spoils.images.images[i]
            for each_name, each_values in values.items():
                each_values[at] = getattr(spoils.measures, each_name)[i]
        measures = ImageMeasures(**values)
        score = {
            "dark": -measures.highlights,
            "bright": measures.shadows,
            "blurred": -measures.sharpness,
            "oddly shaped": measures.elongation,
        }[kind]
        listed = [one.index for one in quality_faults(measures) if one.kind == kind]
        found = {"pfml": (score, torch.tensor(listed, dtype=torch.long))}
        if options.other_python:
            found["cleanvision"] = cleanvision(options, files, kind)
        for tool, (ranked, chosen) in found.items():
            lines.append(
                {
                    "kind": "quality",
                    "fault": name,
                    "tool": tool,
                    "classes": classes,
                    "images": len(rows),
                    "seed": seed,
                    "planted": int(positive.sum()),
                    "listed": len(chosen),
                    "listed_right": int(positive[chosen].sum()),
                    "average_precision": average_precision(ranked, positive),
                }
            )
    return lines


#: What runs in --other-python: it reads paths and prints file -> what the tool says of it.
PROGRAMS = {
    "cleanvision": (
        "from cleanvision import Imagelab\n"
        "lab = Imagelab(filepaths=files)\n"
        "lab.find_issues({name: {} for name in names}, n_jobs=1, verbose=False)\n"
        "found = {file: {name: [float(row[name + '_score']), bool(row['is_' + name + '_issue'])] for name in names}\n"
        "         for file, row in lab.issues.iterrows()}\n"
    ),
    "imagehash": (
        "import imagehash\nfrom PIL import Image\n"
        "found = {file: imagehash.phash(Image.open(file)).hash.flatten().tolist() for file in files}\n"
    ),
}
_SAID: dict[str, dict[str, Any]] = {tool: {} for tool in PROGRAMS}


def said(options: argparse.Namespace, tool: str, files: list[Path]) -> list[Any]:
    """What a tool says of each file, which it reads once."""
    known = _SAID[tool]
    new = [str(file) for file in files if str(file) not in known]
    if new:
        names = [*CLEANVISION.values()]
        program = f"import json, sys\nfiles, names = json.load(sys.stdin)\n{PROGRAMS[tool]}print(json.dumps(found))"
        done = subprocess.run(
            [options.other_python, "-c", program], input=json.dumps([new, names]), capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        known.update(json.loads(done.stdout.splitlines()[-1]))
    return [known[str(file)] for file in files]


def cleanvision(options: argparse.Namespace, files: list[Path], kind: str) -> tuple[Tensor, Tensor]:
    """How poor each image is to cleanvision, and which it lists."""
    found = [one[CLEANVISION[kind]] for one in said(options, "cleanvision", files)]
    listed = [k for k, (_, is_issue) in enumerate(found) if is_issue]
    return -torch.tensor([score for score, _ in found], dtype=torch.float64), torch.tensor(listed, dtype=torch.long)


def measure_copies(options: argparse.Namespace, pool: Pool, classes: int, each: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of copies in one folder: what is found, and what the cosine and perceptual hashes find."""
    random = torch.Generator().manual_seed(seed)
    rows = drawn(pool, classes, each, random)
    whole = pool.subset(rows)
    position = {int(k): i for i, k in enumerate(rows.tolist())}
    own = [i for i, k in enumerate(pool.copied.tolist()) if k in position]
    own = [own[i] for i in torch.randperm(len(own), generator=random)[: PLANTED * len(COPIES)].tolist()]
    pairs = []
    for number, i in enumerate(own):
        pairs.append((position[int(pool.copied[i])], len(whole.images)))
        whole = whole.joined(pool.copies[list(COPIES)[number % len(COPIES)]].subset(torch.tensor([i])))
    count = len(whole.images)
    upper = torch.ones(count, count).triu(1).bool()
    positive = torch.zeros(count, count, dtype=torch.bool)
    positive[tuple(torch.tensor(pairs).T)] = True
    in_groups = torch.zeros(count, count, dtype=torch.bool)
    for group in find_duplicates(whole.images, whole.points, whole.measures.thumbnails):
        for one in group.indices:
            in_groups[one, [k for k in group.indices if k > one]] = True
    cosine = (whole.points @ whole.points.T).double()
    scores = {"cosine": (cosine, cosine >= FASTDUP)}
    if options.other_python:
        bits = torch.tensor(said(options, "imagehash", [*whole.images.images])).double()
        apart = bits @ (1 - bits).T
        apart = apart + apart.T
        scores["imagehash, phash"] = (-apart, apart <= HAMMING)
    best = {}
    for name, (score, _) in scores.items():
        ranked, of_rank = score[upper], positive[upper]
        best[name] = [average_precision(ranked, of_rank), recall_at(ranked, of_rank, 0.98)]
    listed = {"pfml": in_groups, **{name: chosen & upper for name, (_, chosen) in scores.items()}}
    return [
        {
            "kind": "copies",
            "tool": name,
            "classes": classes,
            "images": len(rows),
            "seed": seed,
            "planted": len(pairs),
            "listed": int(chosen.sum()),
            "listed_right": int((chosen & positive).sum()),
            **({} if name not in best else {"average_precision": best[name][0], "recall_at_98": best[name][1]}),
        }
        for name, chosen in listed.items()
    ]


def recall_at(score: Tensor, positive: Tensor, precision: float) -> float:
    """The highest recall of a threshold with at least this precision, chosen with the truth at hand."""
    values, inverse = score.unique(return_inverse=True)
    hits = torch.bincount(inverse, weights=positive.double(), minlength=len(values)).flip(0).cumsum(0)
    total = torch.bincount(inverse, minlength=len(values)).flip(0).cumsum(0)
    enough = hits[hits / total >= precision]
    return float(enough.max() / positive.sum()) if len(enough) else 0.0


def table(path: Path) -> str:
    """Means over folders, as Markdown."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    rows = [
        "| outliers | planted | pfml | as suspects | nearest image | k-NN, k = 10 | cleanlab | listed, right | found |",
        "|---" * 9 + "|",
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(
            (line["kind"], line.get("fault"), line.get("tool"), line["planted"] if line["kind"] == "outliers" else 0),
            [],
        ).append(line)
    for (kind, fault, _, count), own in groups.items():
        if kind == "outliers":
            scores = [
                f"{mean(line['average_precision'][name] for line in own):.1%}" for name in own[0]["average_precision"]
            ]
            rows.append(f"| {fault} | {count} | {' | '.join(scores)} | {_listed(own)} |")
    rows += ["", "| fault | tool | average precision | listed, right | found |", "|---" * 5 + "|"]
    for (kind, fault, tool, _), own in groups.items():
        if kind == "quality":
            rows.append(
                f"| {fault} | {tool} | {mean(line['average_precision'] for line in own):.1%} | {_listed(own)} |"
            )
    rows += ["", "| copies: tool | average precision | recall at 98 % | listed, right | found |", "|---" * 5 + "|"]
    for (kind, _, tool, _), own in groups.items():
        if kind == "copies":
            cells = [
                f"{mean(line[name] for line in own):.1%}" if name in own[0] else ""
                for name in ("average_precision", "recall_at_98")
            ]
            rows.append(f"| {tool} | {' | '.join(cells)} | {_listed(own)} |")
    return "\n".join(rows)


def _listed(lines: list[dict[str, Any]]) -> str:
    """Two cells: right of listed, and right of planted."""
    right, listed, count = (sum(line[name] for line in lines) for name in ("listed_right", "listed", "planted"))
    return f"{right:,} of {listed:,} | {right:,} of {count:,}"


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/audit"))
    parser.add_argument("--out", type=Path, default=Path("results/audit-faults.jsonl"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--choose", action="store_true", help="classes 1 to 100")
    parser.add_argument("--other-python", help="an interpreter that has cleanvision and imagehash")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        print(table(options.table))
        return
    pool = load_pool(options)
    outliers, worse = planted(options, pool)
    with options.out.open("a", encoding="utf-8") as file:
        for seed in options.seeds:
            for size in FOLDERS:
                lines = measure_outliers(pool, outliers, *size, seed)
                lines += measure_quality(options, pool, worse, *size, seed)
                lines += measure_copies(options, pool, *size, seed)
                file.writelines(json.dumps(line | {"commit": options.commit}) + "\n" for line in lines)
    print(table(options.out))


if __name__ == "__main__":
    main()
