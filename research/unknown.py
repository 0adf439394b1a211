"""Images of classes that the index lacks: how well each score of `pfml.search.scores` tells them from known ones.

    python research/unknown.py pilot --root CUB_200_2011 --out pilot.jsonl                # CUB classes 1 to 100
    python research/unknown.py measure --root CUB_200_2011 --out results/unknown.jsonl    # 101 to 200, and glyphs
    python research/unknown.py table results/unknown.jsonl

A draw takes some classes. Two thirds of their images are the gallery, 12 % of its labels wrong; the others are known
queries. All images of the classes that were not drawn are unknown queries. Each score is fitted to the gallery alone,
as `pfml calibrate` does. "accepted at" and AUROC are those of the score, with a threshold at exactly that rate of the
unknown queries; "calibrated" is what the threshold of `pfml calibrate` does, which has seen none of the queries.
"corrected" is the same with the labels that the audit suggests. Features of photographs are kept in --features.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from pfml.audit import audit, corrections_of
from pfml.data import ImageSet, LabelNoise, corrupt, load_data
from pfml.evaluation.model_evaluation import embed
from pfml.models import create_embedder
from pfml.search import ModelIdentity, Threshold
from pfml.search.calibration import AUTO, _cross_fitted, _queries
from pfml.search.neighborhood import nearest_neighborhood
from pfml.search.scores import CANDIDATES
from pfml.sphere import unit

MODEL = ModelIdentity("0" * 64, "features of research/unknown.py")
RATES = (0.01, 0.05)
#: Classes and images of each that are embedded.
CLASSES, IMAGES = 60, 50
GALLERY = 2 / 3


@dataclass(frozen=True)
class Draw:
    """Some classes of a data set, with at most so many images of each."""

    data: str
    classes: int
    images: int
    noise: float
    seed: int


SIZES = ((20, 50), (30, 30), (40, 40))


def features(options: argparse.Namespace, name: str) -> tuple[ImageSet, Tensor]:
    """Images and their vectors: of CUB by the packaged backbone, of glyphs their gray pixels, 12 x 12."""
    data = load_data(name, options.root if name == "cub" else None)
    part = data.train if options.what == "pilot" else data.test
    order = torch.randperm(part.num_classes, generator=torch.Generator().manual_seed(0))
    classes = order[:CLASSES].sort().values.tolist()
    rows = torch.cat([(part.labels == label).nonzero()[:, 0][:IMAGES] for label in classes])
    images = part.subset(rows).of_classes(classes)
    if isinstance(images.images, Tensor):
        pixels = adaptive_avg_pool2d(images.images.float().mean(dim=1, keepdim=True), 12).flatten(1)
        return images, unit(pixels - pixels.mean(dim=0))
    file = options.features / f"{name}-{options.what}.safetensors"
    if not file.is_file():
        embedder = create_embedder("efficientnet_lite0", embedding_dim=None).eval()
        options.features.mkdir(parents=True, exist_ok=True)
        save_file({"points": embed(embedder, images, batch_size=64).cpu().contiguous()}, file)
    points = load_file(file)["points"]
    assert len(points) == len(images)
    return images, points


def measured(score: Tensor, other: Tensor) -> dict[str, float]:
    """AUROC, false accepts at 95 % true accepts, accepted share at 1 % and 5 % false accepts."""
    both = torch.cat([score, other])
    _, inverse, counts = both.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[inverse]  # ties share their mean rank
    auroc = (ranks[: len(score)].sum() - len(score) * (len(score) + 1) / 2) / (len(score) * len(other))
    at_95 = score.sort(descending=True).values[int(0.95 * len(score))]
    found = {"auroc": float(auroc), "false_accepts_at_95": float((other >= at_95).double().mean())}
    for rate in RATES:
        first_refused = other.sort(descending=True).values[int(rate * len(other))]
        found[f"accepted_at_{rate:g}"] = float((score > first_refused).double().mean())
    return found


def line_of(images: ImageSet, points: Tensor, draw: Draw) -> dict[str, Any]:
    """What each score does on a draw, with the noisy labels and with corrected ones."""
    random = torch.Generator().manual_seed(1000 * draw.seed + draw.classes)
    order = torch.randperm(images.num_classes, generator=random)
    in_gallery, as_query = [], []
    for label in order[: draw.classes].sort().values.tolist():
        own = (images.labels == label).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=random)[: draw.images]]
        cut = round(GALLERY * len(own))
        in_gallery.append(own[:cut].sort().values)
        as_query.append(own[cut:])
    rows, known = torch.cat(in_gallery), torch.cat(as_query)
    unknown = torch.isin(images.labels, order[draw.classes :]).nonzero()[:, 0]
    classes = order[: draw.classes].sort().values.tolist()
    noisy, _ = corrupt(images.subset(rows).of_classes(classes), LabelNoise(rate=draw.noise, seed=draw.seed))
    number = {label: k for k, label in enumerate(classes)}
    truth = torch.tensor([number[label] for label in images.labels[known].tolist()])
    corrections = corrections_of(audit(points[rows], noisy))
    galleries = {"noisy": noisy, "corrected": corrections.apply(noisy)}
    found: dict[str, dict[str, Any]] = {}
    for labels, gallery in galleries.items():
        near = {
            name: nearest_neighborhood(
                points[some],
                torch.full((len(some),), -1),
                points[rows],
                gallery.labels,
                num_classes=gallery.num_classes,
                without_own_class=False,
            )
            for name, some in {"known": known, "unknown": unknown}.items()
        }
        queries = _queries(points[rows], gallery.labels, None, None, RATES[0])  # as `calibrate_points` does
        found[labels] = {}
        for candidate in (*CANDIDATES, AUTO):
            thresholds = {
                rate: _cross_fitted(queries, gallery.class_names, rate, candidate, MODEL, draw.data, 0)
                for rate in RATES
            }
            scoring = thresholds[RATES[-1]].scoring
            found[labels][candidate] = {
                "chosen": scoring.name,
                **measured(*(scoring.of(each) for each in near.values())),
                "calibrated": {f"{r:g}": _applied(one, gallery, near, truth) for r, one in thresholds.items()},
            }
    sizes = {"known": len(known), "unknown": len(unknown), "gallery": len(rows), "relabeled": len(corrections)}
    return {**asdict(draw), **sizes, "scores": found}


def _applied(threshold: Threshold, gallery: ImageSet, near: dict[str, Any], truth: Tensor) -> dict[str, Any]:
    """What the threshold of `pfml calibrate` accepts of the queries."""
    shares = {}
    for name, each in near.items():
        scores, classes = threshold.scoring.of(each), each.attraction(threshold.scoring.law).labels
        accepted = torch.tensor(
            [
                threshold.is_known(score, gallery.class_names[label])
                for score, label in zip(scores.tolist(), classes.tolist(), strict=True)
            ]
        )
        shares[name] = float(accepted.double().mean())
        if name == "known":
            shares["right class"] = float((accepted & (classes == truth)).double().mean())
    rate = threshold.false_accepts
    return {
        "accepted": shares["known"], "false_accepts": shares["unknown"], "right_class": shares["right class"],
        "measured": [rate.value, rate.low, rate.high], "class_thresholds": len(threshold.class_values),
        "accepted_measured": 1 - threshold.false_rejects.value,
    }  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Write the lines of all draws."""
    torch.set_num_threads(1)
    for name in options.data:
        images, points = features(options, name)
        for seed, (classes, count) in enumerate(SIZES):
            draw = Draw(name, classes, count, options.noise, seed + options.seed)
            line = line_of(images, points, draw)
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "commit": options.commit}) + "\n")
            print(draw, flush=True)


def table(path: Path) -> str:
    """Means over draws, as Markdown."""
    found = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    rows = [
        "| data | labels | score | AUROC | false accepts at 95 % | accepted at 1 % | at 5 % | x plain "
        "| calibrated to 5 %: accepted | false accepts | said by `pfml calibrate` |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in found:
        for labels, scores in line["scores"].items():
            for score, values in scores.items():
                groups.setdefault((line["data"], labels, score), []).append(values)
    for (data, labels, score), own in groups.items():
        plain = mean(line["accepted_at_0.05"] for line in groups[data, labels, "distance"])
        at_5 = mean(line["accepted_at_0.05"] for line in own)
        applied = [line["calibrated"]["0.05"] for line in own]
        cells = [
            f"{mean(line['auroc'] for line in own):.3f}",
            f"{mean(line['false_accepts_at_95'] for line in own):.1%}",
            f"{mean(line['accepted_at_0.01'] for line in own):.1%}",
            f"{at_5:.1%}",
            f"{at_5 / plain:.2f}",
            f"{mean(each['accepted'] for each in applied):.1%}",
            f"{mean(each['false_accepts'] for each in applied):.1%}",
            f"{mean(each['measured'][0] for each in applied):.1%}",
        ]
        rows.append(f"| {data} | {labels} | {score} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pilot", "measure", "table"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--features", type=Path, default=Path("/tmp/unknown"))
    parser.add_argument("--data", nargs="+", default=["cub", "glyphs"])
    parser.add_argument("--noise", type=float, default=0.12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="results/unknown.jsonl")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if options.what == "table":
        print(table(options.file))
    else:
        run(options)


if __name__ == "__main__":
    main()
