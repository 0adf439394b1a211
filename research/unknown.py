"""Images of classes that the index lacks: how well each score of `pfml.search.scores` tells them from known ones.

    python research/unknown.py pilot --root CUB_200_2011 --out pilot.jsonl                # CUB classes 1 to 100
    python research/unknown.py measure --root CUB_200_2011 --out results/unknown.jsonl    # 101 to 200, and glyphs
    python research/unknown.py table results/unknown.jsonl
    python research/unknown.py count --root CUB_200_2011 --out results/unknown-count.jsonl
    python research/unknown.py commands --root CUB_200_2011 --work FOLDER --out results/unknown-count.jsonl
    python research/unknown.py counted results/unknown-count.jsonl

A draw takes some classes. Two thirds of their images are the gallery, 12 % of its labels wrong; the others are known
queries. All images of the classes that were not drawn are unknown queries. Each score is fitted to the gallery alone,
as `pfml calibrate` does. "accepted at" and AUROC are those of the score, with a threshold at exactly that rate of the
unknown queries; "calibrated" is what the threshold of `pfml calibrate` does, which has seen none of the queries.
"corrected" is the same with the labels that `pfml audit --apply` takes, "true" with the true ones, to compare.
Features of photographs are kept in --features.

"count" is what a user sees: 100 new images of 20 known classes, 60 of unknown ones, and how many are called unknown.
"commands" does the same for one draw by the commands of README.md: it writes the gallery as a folder with wrong labels,
trains, audits, indexes, calibrates and searches.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
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
from pfml.search import ModelIdentity, Threshold, calibrate_points
from pfml.search.calibration import AUTO, _cross_fitted, _queries
from pfml.search.neighborhood import Neighborhood, nearest_neighborhood
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
#: Classes and images of each of a count, known queries of each class, and unknown queries in all.
COUNTED, QUERIES, STRANGERS = (20, 50), 5, 60
#: The default of `pfml calibrate`, and more.
COUNT_RATES = (0.01, 0.05, 0.2)
#: Score and rate of the counts by commands.
BY_COMMANDS = ((AUTO, 0.01), (AUTO, 0.05), ("distance", 0.05))


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
    file = options.features / f"{name}-{'pilot' if options.what == 'pilot' else 'measure'}.safetensors"
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


@dataclass(frozen=True, eq=False)
class Drawn:
    """Images of a draw, by position; the gallery with its true labels, with noisy and with corrected ones."""

    known: Tensor
    unknown: Tensor
    rows: Tensor
    galleries: dict[str, ImageSet]
    relabeled: int

    def truth(self, images: ImageSet) -> Tensor:
        """The labels of the known queries, as those of the gallery."""
        number = {name: k for k, name in enumerate(self.galleries["true"].class_names)}
        return torch.tensor([number[images.class_names[label]] for label in images.labels[self.known].tolist()])


def drawn(images: ImageSet, points: Tensor, draw: Draw, queries: int | None = None) -> Drawn:
    """The images of a draw; `queries` known ones of each class instead of a third."""
    random = torch.Generator().manual_seed(1000 * draw.seed + draw.classes)
    order = torch.randperm(images.num_classes, generator=random)
    in_gallery, as_query = [], []
    for label in order[: draw.classes].sort().values.tolist():
        own = (images.labels == label).nonzero()[:, 0]
        own = own[torch.randperm(len(own), generator=random)[: draw.images]]
        cut = round(GALLERY * len(own)) if queries is None else len(own) - queries
        in_gallery.append(own[:cut].sort().values)
        as_query.append(own[cut:])
    rows, known = torch.cat(in_gallery), torch.cat(as_query)
    unknown = torch.isin(images.labels, order[draw.classes :]).nonzero()[:, 0]
    if queries is not None:
        unknown = unknown[torch.randperm(len(unknown), generator=random)[:STRANGERS].sort().values]
    true = images.subset(rows).of_classes(order[: draw.classes].sort().values.tolist())
    noisy, _ = corrupt(true, LabelNoise(rate=draw.noise, seed=draw.seed))
    corrections = corrections_of(audit(points[rows], noisy))
    galleries = {"noisy": noisy, "corrected": corrections.apply(noisy), "true": true}
    return Drawn(known, unknown, rows, galleries, len(corrections))


def neighborhoods(points: Tensor, sample: Drawn, gallery: ImageSet) -> dict[str, Neighborhood]:
    """Of the known and the unknown queries."""
    return {
        name: nearest_neighborhood(
            points[some],
            torch.full((len(some),), -1),
            points[sample.rows],
            gallery.labels,
            num_classes=gallery.num_classes,
            without_own_class=False,
        )
        for name, some in {"known": sample.known, "unknown": sample.unknown}.items()
    }


def line_of(images: ImageSet, points: Tensor, draw: Draw) -> dict[str, Any]:
    """What each score does on a draw, with noisy, corrected and true labels."""
    sample = drawn(images, points, draw)
    truth = sample.truth(images)
    found: dict[str, dict[str, Any]] = {}
    for labels, gallery in sample.galleries.items():
        near = neighborhoods(points, sample, gallery)
        queries = _queries(points[sample.rows], gallery.labels, None, None, RATES[0])  # as `calibrate_points` does
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
    sizes = {"known": len(sample.known), "unknown": len(sample.unknown), "gallery": len(sample.rows)}
    sizes["relabeled"] = sample.relabeled
    return {**asdict(draw), **sizes, "scores": found}


def accepted_by(threshold: Threshold, gallery: ImageSet, near: Neighborhood) -> tuple[Tensor, Tensor, Tensor]:
    """Score, most likely class, and whether it is accepted, of each query."""
    scores, classes = threshold.scoring.of(near), near.attraction(threshold.scoring.law).labels
    pairs = zip(scores.tolist(), classes.tolist(), strict=True)
    accepted = [threshold.is_known(score, gallery.class_names[label]) for score, label in pairs]
    return scores, classes, torch.tensor(accepted)


def _applied(threshold: Threshold, gallery: ImageSet, near: dict[str, Neighborhood], truth: Tensor) -> dict[str, Any]:
    """What the threshold of `pfml calibrate` accepts of the queries."""
    _, classes, known = accepted_by(threshold, gallery, near["known"])
    unknown = accepted_by(threshold, gallery, near["unknown"])[2]
    rate = threshold.false_accepts
    return {
        "accepted": float(known.double().mean()), "false_accepts": float(unknown.double().mean()),
        "right_class": float((known & (classes == truth)).double().mean()),
        "measured": [rate.value, rate.low, rate.high], "class_thresholds": len(threshold.class_values),
        "accepted_measured": 1 - threshold.false_rejects.value,
    }  # fmt: skip


def count_of(images: ImageSet, points: Tensor, draw: Draw) -> list[dict[str, Any]]:
    """How many of 100 known and of 60 unknown images are called unknown, by labels, score and asked rate."""
    sample = drawn(images, points, draw, QUERIES)
    lines = []
    for labels, gallery in sample.galleries.items():
        near = neighborhoods(points, sample, gallery)
        for score, rate in product((AUTO, "distance"), COUNT_RATES):
            threshold = calibrate_points(
                points[sample.rows], gallery.labels, model=MODEL, class_names=gallery.class_names,
                false_accept_rate=rate, score=score,
            )  # fmt: skip
            known, unknown = (accepted_by(threshold, gallery, each) for each in near.values())
            found = {"labels": labels, "score": score, "rate": rate, "measured": threshold.false_accepts.value}
            lines.append({"by": "python", **found, **_counted(known[0], ~known[2], unknown[0], ~unknown[2])})
    return [{**asdict(draw), "relabeled": sample.relabeled, **line} for line in lines]


def _counted(known: Tensor, refused: Tensor, unknown: Tensor, caught: Tensor) -> dict[str, Any]:
    """The counts, by the scores of both and by whether they are called unknown."""
    counts = {"known": len(known), "refused": int(refused.sum()), "unknown": len(unknown), "caught": int(caught.sum())}
    return counts | {"auroc": measured(known, unknown)["auroc"]}


def by_commands(options: argparse.Namespace, images: ImageSet, points: Tensor, draw: Draw) -> list[dict[str, Any]]:
    """The same count by `pfml train`, `audit`, `index`, `calibrate` and `search`, on folders in --work."""
    sample, work = drawn(images, points, draw, QUERIES), options.work
    noisy = sample.galleries["noisy"]
    files = [*zip(noisy.images, [f"photos/{noisy.class_names[k]}" for k in noisy.labels.tolist()], strict=True)]
    for name, some in {"known": sample.known, "unknown": sample.unknown}.items():
        files += [(images.images[k], name) for k in some.tolist()]
    for file, folder in files:
        (work / folder).mkdir(parents=True, exist_ok=True)
        if not (work / folder / file.name).exists():
            shutil.copyfile(file, work / folder / file.name)

    def pfml(*words: str) -> Any:
        """What a command prints as JSON."""
        print("pfml", *words, flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "pfml", *words, "--json"], cwd=work, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return json.loads(done.stdout)

    def count(run: str, photos: str, labels: str) -> Iterator[dict[str, Any]]:
        pfml("index", run, photos)
        for score, rate in BY_COMMANDS:
            data = ("--data", photos) if photos.endswith(".csv") else ()
            said = pfml("calibrate", run, "--score", score, "--false-accept-rate", str(rate), *data)
            found = [
                [each["verdict"] for each in pfml("search", run, name)["results"]] for name in ("known", "unknown")
            ]
            scores = [torch.tensor([one["score"] for one in each]) for each in found]
            unknown = [torch.tensor([not one["is_known"] for one in each]) for each in found]
            counts = _counted(scores[0], unknown[0], scores[1], unknown[1])
            rates = {"rate": rate, "measured": said["false_accepts"]["count"] / said["false_accepts"]["total"]}
            yield {**asdict(draw), "by": run, "labels": labels, "score": score, **rates, **counts}

    if not (work / "corrected.csv").is_file():
        pfml("train", "--data", "photos", "--out", "trained")
        pfml("train", "--data", "photos", "--loss.name", "zero-shot", "--out", "untrained")
        pfml("audit", "photos", "--apply", "--no-faults", "--out", "corrected.csv")
    lines = [*count("trained", "photos", "noisy"), *count("untrained", "photos", "noisy")]
    return [*lines, *count("untrained", "corrected.csv", "corrected")]


def run(options: argparse.Namespace) -> None:
    """Write the lines of all draws."""
    torch.set_num_threads(1)
    is_count = options.what in ("count", "commands")
    for name in ["cub"] if is_count else options.data:
        images, points = features(options, name)
        for seed in range(options.seed, options.seed + (1 if options.what == "commands" else options.draws)):
            classes, count = COUNTED if is_count else SIZES[seed % len(SIZES)]
            draw = Draw(name, classes, count, options.noise, seed)
            if options.what == "commands":
                lines = by_commands(options, images, points, draw)
            else:
                lines = count_of(images, points, draw) if is_count else [line_of(images, points, draw)]
            with open(options.out, "a", encoding="utf-8") as file:
                file.writelines(json.dumps({**line, "commit": options.commit}) + "\n" for line in lines)
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


def counted(path: Path) -> str:
    """The counts of all draws, as Markdown: per 100 known and 60 unknown images, with the range of the draws."""
    rows = [
        "| by | labels | score | asked | known called unknown, of 100 | unknown caught, of 60 | AUROC | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        groups.setdefault(tuple(line[name] for name in ("by", "labels", "score", "rate")), []).append(line)
    for (by, labels, score, rate), own in groups.items():
        cells = []
        for name in ("refused", "caught"):
            values = [line[name] for line in own]
            cells.append(f"{mean(values):.0f}" + (f" ({', '.join(map(str, values))})" if len(values) > 1 else ""))
        numbers = [mean(line[name] for line in own) for name in ("auroc", "measured")]
        rows.append(f"| {by} | {labels} | {score} | {rate:.0%} | {' | '.join(cells)} | "
                    f"{numbers[0]:.3f} | {numbers[1]:.1%} |")  # fmt: skip
    return "\n".join(rows)


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pilot", "measure", "table", "count", "commands", "counted"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--features", type=Path, default=Path("/tmp/unknown"))
    parser.add_argument("--data", nargs="+", default=["cub", "glyphs"])
    parser.add_argument("--noise", type=float, default=0.12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("/tmp/unknown-commands"))
    parser.add_argument("--out", default="results/unknown.jsonl")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if options.what == "table":
        print(table(options.file))
    elif options.what == "counted":
        print(counted(options.file))
    else:
        run(options)


if __name__ == "__main__":
    main()
