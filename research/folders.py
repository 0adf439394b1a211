"""The ladder on folders that are parts of CUB: what `pfml train --data FOLDER` gains, for unseen and for known classes.

    python research/folders.py pilot --root CUB_200_2011 --out pilot.jsonl     # classes 1 to 100: every candidate
    python research/folders.py measure --root CUB_200_2011 --out results/folders.jsonl    # classes 101 to 200
    python research/folders.py further --root CUB_200_2011 results/folders.jsonl    # judged by more images
    python research/folders.py command --root CUB_200_2011 --out commands.jsonl           # the same by the command
    python research/folders.py table results/folders.jsonl

All images pass through the backbone once for all folders; from their features `pfml.ladder.ladder.climb` works up the
ladder of each folder, as the command does. Each model is also judged by all other images of the test classes in CUB,
since a folder holds out few; "further" adds that to lines without it. The pilot is for choosing the rules of the
ladder. "command" makes folders of files, runs the command as a user does, and reads its results, which takes many times
as long.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pfml.data import ImageSet, LabelNoise, RetrievalData, corrupt, load_data
from pfml.data.splits import divided
from pfml.evaluation import RetrievalMetrics
from pfml.evaluation.metrics import HEADLINE
from pfml.ladder.crossfit import divisions
from pfml.ladder.fine_tuning import FineTuning
from pfml.ladder.heads import LinearHead, closed_form_grid, train_head
from pfml.ladder.ladder import (
    FEW_IMAGES,
    LARGER,
    Candidate,
    Features,
    Rung,
    View,
    _held_out,
    _Ladder,
    _metrics,
    climb,
    fit,
)
from pfml.ladder.run import _fitting_field
from pfml.models import Embedder, create_embedder
from pfml.runs.config import RunConfig
from pfml.storage.files import write_atomically
from pfml.training.environment import resolve_device
from pfml.training.progress import Monitor


@dataclass(frozen=True)
class Folder:
    """A part of CUB: some classes with at most so many images of each, some labels changed, divided by a protocol."""

    classes: int
    images: int
    noise: float
    protocol: str
    seed: int

    @property
    def name(self) -> str:
        noise = f", {100 * self.noise:.0f} % label noise" if self.noise else ""
        return f"{self.classes} classes of {self.images}{noise}"


#: Classes, images of each and label noise of those that are measured; none was used to choose anything.
MEASURED = ((10, 20, 0.0), (12, 60, 0.2), (20, 8, 0.0), (20, 30, 0.2), (30, 12, 0.2), (40, 20, 0.0))
#: Those of the pilot.
PILOT = tuple((classes, images, noise) for classes in (8, 12, 20, 40) for images in (8, 20, 60) for noise in (0.0, 0.2))


def folders(sizes: tuple[tuple[int, int, float], ...], protocols: list[str], seeds: list[int]) -> list[Folder]:
    """All combinations."""
    return [Folder(*size, protocol, seed) for seed in seeds for protocol in protocols for size in sizes]


def chosen_images(every: ImageSet, folder: Folder) -> torch.Tensor:
    """Positions of the images of a folder: classes and images at random by the seed."""
    random = torch.Generator().manual_seed(1000 * folder.seed + 10 * folder.classes + folder.images)
    classes = torch.randperm(every.num_classes, generator=random)[: folder.classes]
    found = []
    for label in classes.sort().values.tolist():
        own = (every.labels == label).nonzero()[:, 0]
        found.append(own[torch.randperm(len(own), generator=random)[: folder.images]].sort().values)
    return torch.cat(found)


def pilot(options: argparse.Namespace) -> None:
    """Write, for each folder and candidate, what validation says and what the test images say."""
    device = resolve_device(options.device)
    torch.set_num_threads(options.threads)
    every = load_data("cub", options.root).train
    if options.limit:
        every = every.of_classes(range(options.limit))
    nothing = every.of_classes([])
    backbone = create_embedder("efficientnet_lite0", weights=options.weights, embedding_dim=None).eval().to(device)
    whole = Features(backbone, RetrievalData("cub", every, nothing, protocol="none"))
    pass_once(whole, views_of(whole), options.features)
    tasks = folders(PILOT, ["classes", "images"], options.seeds)
    with ThreadPoolExecutor(options.jobs) as pool, open(options.out, "a", encoding="utf-8") as file:
        for lines in pool.map(lambda folder: list(pilot_lines(whole, every, folder)), tasks):
            for line in lines:
                file.write(json.dumps(line) + "\n")
            file.flush()
            print(lines[0]["folder"], len(lines), flush=True)


def data_of(every: ImageSet, folder: Folder) -> tuple[RetrievalData, dict[str, torch.Tensor]]:
    """The data of a folder, and role -> the positions of its images among all."""
    positions = chosen_images(every, folder)
    images = every.subset(positions)
    images = images.of_classes(images.labels.unique().tolist())
    data = divided(images, "folder", folder.protocol, seed=folder.seed)  # type: ignore[arg-type]
    where = {str(path): int(k) for path, k in zip(images.images, positions.tolist(), strict=True)}
    if folder.noise:
        noisy, _ = corrupt(data.train, LabelNoise(rate=folder.noise, seed=folder.seed))
        data = data.with_parts({"train": noisy})
    return data, {role: torch.tensor([where[str(p)] for p in part.images]) for role, part in data.parts.items()}


def features_of(whole: Features, data: RetrievalData, rows: dict[str, torch.Tensor]) -> Features:
    """The features of a folder, taken from those of all images."""
    features = Features(whole.backbone, data)
    for (size, mirrored, _), found in whole._passes.items():
        for role, some in rows.items():
            features._passes[size, mirrored, role] = {pooling: each[some] for pooling, each in found.items()}
    return features


def pilot_lines(whole: Features, every: ImageSet, folder: Folder) -> Iterator[dict[str, Any]]:
    """One line for each candidate on one folder."""
    data, rows = data_of(every, folder)
    features = features_of(whole, data, rows)

    def train(some: torch.Tensor, labels: torch.Tensor, start: LinearHead) -> LinearHead:
        return train_head(some, labels, start, _fitting_field)

    ladder = _Ladder(features, train, None, 0)
    base, labels = features.base, data.train.labels
    ladder.parts = divisions(labels, ladder.protocol, repeats=2 if len(labels) <= FEW_IMAGES else 1)
    grid = closed_form_grid(backbone_width(features), min(len(part.fitted) for part in ladder.parts))
    plain = [replace(base, pooling=p, view=v) for v in views_of(features) for p in features.poolings]
    scores = ladder.cross_fitted([*plain, *(replace(each, head=head) for each in plain for head in grid)])
    ladder.before = ladder.kept_scores = scores[base]
    rungs = [ladder.rung("", each, found) for each, found in scores.items()]
    best = max((rung for rung in rungs if rung.candidate.head is not None), key=proof)
    unheaded = max((rung for rung in rungs if rung.candidate.head is None), key=proof)
    rungs += [ladder.trained_head(each.candidate) for each in (best, unheaded)]
    for rung in rungs:
        embedder = fit(features, rung.candidate, train)
        points = _held_out(data, partial(features.embedded, embedder, rung.candidate))
        test = _metrics(data, points).as_dict()
        yield {
            "folder": folder.__dict__, "candidate": rung.candidate.as_dict(),
            "validation": {k: [v.mean, v.error] for k, v in rung.gains.items()},
            "test": {key: test[key] for key in HEADLINE},
        }  # fmt: skip


def views_of(features: Features) -> list[View]:
    """All that were tried."""
    side = features.base.view.image_size
    return [View(size, is_flipped) for size in (side, round(side * LARGER)) for is_flipped in (False, True)]


def proof(rung: Rung) -> float:
    """The gains over the pretrained backbone, each less its standard error."""
    return sum(gain.mean - gain.error for gain in rung.gains.values())


def backbone_width(features: Features) -> int:
    """F."""
    return features.backbone.head.num_features


def measure(options: argparse.Namespace) -> None:
    """Work up the ladder of each folder; judge the model by the images held out, and by many more of these classes."""
    tasks = folders(tuple(MEASURED[k] for k in options.only), options.protocols, options.seeds)
    every = Everything(options, tasks)
    deadline = time.time() + 60 * options.minutes
    for folder in tasks:
        if time.time() > deadline:
            break
        data, rows = data_of(every.images, folder)
        start = time.perf_counter()
        features = every.features(data, rows)
        config = RunConfig(seed=folder.seed, device=options.device)
        with TemporaryDirectory() as own:
            name = "-".join(map(str, folder.__dict__.values()))
            trainings = Path(own if options.trainings is None else options.trainings) / name
            found = climb(
                features.backbone,
                data,
                _fitting_field,
                effort=options.effort,
                seed=folder.seed,
                fine_tune=FineTuning(config, data.train, trainings, _fitting_field, Said()),
                monitor=Said(),
                features=features,
            )
        assert found.before is not None
        assert found.after is not None
        line = {
            "folder": folder.__dict__, "effort": options.effort, "seconds": time.perf_counter() - start,
            "kept": str(found.chosen.candidate), "rung": found.chosen.name,
            "rungs": [each.as_dict() for each in found.rungs],
            **judged(found.before, found.after), "commit": options.commit,
            "further": every.judged(data, found.embedder, found.chosen.candidate),
        }  # fmt: skip
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print_line(line)


def further(options: argparse.Namespace) -> None:
    """Fit what each stored line has kept once more, and add how it does on all further images of the test classes."""
    lines = [json.loads(text) for text in options.file.read_text(encoding="utf-8").splitlines()]
    every = Everything(options, [Folder(**line["folder"]) for line in lines if "further" not in line])
    for line in lines:
        folder = Folder(**line["folder"])
        settings = next(each["settings"] for each in line["rungs"] if each["candidate"] == line["kept"])
        if "further" in line or settings["is_fine_tuned"]:
            continue
        data, rows = data_of(every.images, folder)
        features, candidate = every.features(data, rows), Candidate.of(settings)

        def train(some: torch.Tensor, labels: torch.Tensor, start: LinearHead, seed: int = folder.seed) -> LinearHead:
            return train_head(some, labels, start, _fitting_field, seed=seed)

        embedder = fit(features, candidate, train)
        again = _metrics(data, _held_out(data, partial(features.embedded, embedder, candidate))).as_dict()
        line["further"] = every.judged(data, embedder, candidate)
        write_atomically(options.file, "".join(json.dumps(each) + "\n" for each in lines).encode())
        differences = ", ".join(f"{100 * (again[key] - line['after'][key]):+.2f}" for key in HEADLINE)
        print_line(
            line | line["further"] | {"kept": f"{line['kept']} (held out, against the stored line: {differences})"}
        )


class Everything:
    """All images of the classes of some folders, and their features."""

    def __init__(self, options: argparse.Namespace, tasks: list[Folder]) -> None:
        torch.set_num_threads(options.threads)
        self.images = load_data("cub", options.root).test
        labels = self.images.labels
        classes = torch.cat([labels[chosen_images(self.images, folder)] for folder in tasks]).unique()
        used = torch.isin(labels, classes).nonzero()[:, 0]
        self.position = torch.full((len(labels),), -1, dtype=torch.int64)
        self.position[used] = torch.arange(len(used))
        some = self.images.subset(used)
        backbone = create_embedder("efficientnet_lite0", weights=options.weights, embedding_dim=None).eval()
        backbone = backbone.to(resolve_device(options.device))
        self.whole = Features(backbone, RetrievalData("cub", some, some.of_classes([]), protocol="none"))
        pass_once(self.whole, [self.whole.base.view, *(each.view for each in self.whole.views())], options.features)

    def features(self, data: RetrievalData, rows: dict[str, torch.Tensor]) -> Features:
        """Those of a folder, whose images have these positions among all."""
        return features_of(self.whole, data, {role: self.position[own] for role, own in rows.items()})

    def judged(self, data: RetrievalData, embedder: Embedder, candidate: Candidate) -> dict[str, Any]:
        """The backbone and a candidate, tested by all images of the test classes that do not train."""
        trained = {str(path) for path in data.train.images}
        names = {name: k for k, name in enumerate(self.images.class_names)}
        test = self.images.of_classes([names[name] for name in data.test.class_names])
        test = test.subset([k for k, path in enumerate(test.images) if str(path) not in trained])
        more, where = data.with_parts({"test": test}), {str(path): k for k, path in enumerate(self.images.images)}
        rows = {role: torch.tensor([where[str(path)] for path in part.images]) for role, part in more.parts.items()}
        features = self.features(more, rows)
        return judged(
            *(
                _metrics(more, _held_out(more, partial(features.embedded, each, kind)))
                for each, kind in ((features.backbone, features.base), (embedder, candidate))
            )
        )


def judged(before: RetrievalMetrics, after: RetrievalMetrics) -> dict[str, Any]:
    """What a line says of the backbone and of the model."""
    scores = {
        name: {key: each.as_dict()[key] for key in HEADLINE} for name, each in (("before", before), ("after", after))
    }
    return {**scores, "queries": after.num_queries}


class Said(Monitor):
    """Prints what the ladder says."""

    def remark(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def pass_once(whole: Features, views: list[View], cache: Path | None) -> None:
    """Compute the features of all images in these views, or read them from a file that an earlier call has written."""
    images = whole.data.train.fingerprint()[:12]
    for view in dict.fromkeys(views):
        start, name = time.perf_counter(), f"{images} {view}.safetensors"
        file = None if cache is None else cache / name
        size, sides = view.image_size, (False, True) if view.flip_test else (False,)
        if file is not None and file.is_file():
            for key, points in load_file(file).items():
                mirrored, _, pooling = key.partition(" ")
                whole._passes.setdefault((size, mirrored == "mirrored", "train"), {})[pooling] = points
        whole.of(view)
        if file is not None and not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            found = {side: whole._passes[size, side, "train"] for side in sides}
            save_file(
                {
                    f"{'mirrored' if side else 'plain'} {pooling}": points.contiguous()
                    for side, poolings in found.items()
                    for pooling, points in poolings.items()
                },
                file,
            )
        print(view, f"{len(whole.data.train):,} images, {time.perf_counter() - start:.1f} s", flush=True)


def print_line(line: dict[str, Any]) -> None:
    """One line for people."""
    gains = ", ".join(f"{100 * (line['after'][k] - line['before'][k]):+.1f}" for k in HEADLINE)
    print(f"{Folder(**line['folder'])}: {line['kept']}: {gains}, {line['seconds']:.0f} s", flush=True)


def command(options: argparse.Namespace) -> None:
    """Run the command on each folder, several at a time."""
    every = load_data("cub", options.root).test
    done = set()
    if Path(options.out).is_file():
        lines = map(json.loads, Path(options.out).read_text(encoding="utf-8").splitlines())
        done = {(tuple(line["folder"].values()), line["effort"]) for line in lines}
    tasks = [
        each
        for each in folders(MEASURED, options.protocols, options.seeds)
        if (tuple(each.__dict__.values()), options.effort) not in done
    ]
    deadline = time.time() + 60 * options.minutes

    def one(folder: Folder) -> dict[str, Any] | None:
        if time.time() > deadline:
            return None
        work = Path(options.work) / "-".join(map(str, folder.__dict__.values()))
        shutil.rmtree(work, ignore_errors=True)
        for k in chosen_images(every, folder).tolist():
            target = work / "photos" / every.class_names[int(every.labels[k])] / every.images[k].name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(every.images[k], target) if options.link else shutil.copy(every.images[k], target)
        command = [
            sys.executable, "-m", "pfml", "train", "--data", str(work / "photos"), "--data.split", folder.protocol,
            "--data.split_seed", str(folder.seed), "--seed", str(folder.seed), "--effort", options.effort,
            "--device", options.device, "--out", str(work / "run"), "--json", "--quiet",
        ]  # fmt: skip
        command += (
            ["--data.noise.rate", str(folder.noise), "--data.noise.seed", str(folder.seed)] if folder.noise else []
        )
        command += (
            ["--model.backbone", "efficientnet_lite0", "--model.weights", options.weights]
            if options.weights != "package"
            else []
        )
        start = time.perf_counter()
        threads = {"OMP_NUM_THREADS": str(options.threads)}
        ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
        seconds = time.perf_counter() - start
        if ended.returncode:
            print("FAILED", folder, ended.stderr[-500:], flush=True)
            return None
        results = json.loads(ended.stdout)["results"]
        log = [json.loads(line) for line in (work / "run" / "log.jsonl").read_text().splitlines()]
        before = next(line["test"] for line in log if line["kind"] == "untrained")
        after = results["last"]["test"]
        shutil.rmtree(work)
        return {
            "folder": folder.__dict__, "effort": options.effort, "seconds": seconds,
            "kept": results["ladder"]["kept"]["candidate"], "rung": results["ladder"]["kept"]["name"],
            "before": {key: before[key] for key in HEADLINE}, "after": {key: after[key] for key in HEADLINE},
            "queries": after["num_queries"], "threads": options.threads, "commit": options.commit,
        }  # fmt: skip

    with ThreadPoolExecutor(options.jobs) as pool, open(options.out, "a", encoding="utf-8") as file:
        for line in pool.map(one, tasks):
            if line is not None:
                file.write(json.dumps(line) + "\n")
                file.flush()
                print_line(line)


def table(path: Path) -> str:
    """Means over seeds and the worst single run, as Markdown: by all further images, then by those held out."""
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    tables = []
    for effort in dict.fromkeys(line["effort"] for line in lines):
        own = [line for line in lines if line["effort"] == effort]
        further = [line | line["further"] for line in own if "further" in line]
        tables += [f"{effort}, all images of the test classes that do not train:", "\n".join(rows_of(further))]
        tables += [f"{effort}, the images held out of the folder:", "\n".join(rows_of(own))]
    return "\n\n".join(tables)


def rows_of(lines: list[dict[str, Any]]) -> list[str]:
    """The rows of one table."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        folder = Folder(**line["folder"])
        for name in (folder.name, "**all**"):
            groups.setdefault(("unseen" if folder.protocol == "classes" else "known", name), []).append(line)
    columns = ["classes", "folder", "runs", "queries"]
    columns += [f"{metric} {cell}" for metric in ("R@1", "MAP@R") for cell in ("before", "gain: mean", "worst")]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (classes, name), found in sorted(groups.items(), key=lambda item: (item[0][0] == "known", item[0][1])):
        counts = sorted(line["queries"] for line in found)
        ends = dict.fromkeys(f"{count:,}" for count in (counts[0], counts[-1]))
        cells = [classes, name, f"{len(found)}", " to ".join(ends)]
        for key in HEADLINE:
            gains = [100 * (line["after"][key] - line["before"][key]) for line in found]
            before = mean(line["before"][key] for line in found)
            cells += [f"{100 * before:.1f}", f"{mean(gains):+.1f}", f"{min(gains):+.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pilot", "measure", "further", "command", "table"))
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--weights", default="package")
    parser.add_argument("--out", default="results/folders.jsonl")
    parser.add_argument("--work", default="/tmp/folders", help="where folders are made")
    parser.add_argument(
        "--features", type=Path, help="folder where the features of all images are kept for later calls"
    )
    parser.add_argument("--trainings", type=Path, help="folder where trainings of the last rung resume")
    parser.add_argument("--link", action="store_true", help="link images instead of copying them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--effort", default="minutes")
    parser.add_argument("--protocols", nargs="+", default=["classes", "images"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", type=int, nargs="+", default=list(range(len(MEASURED))), help="some of MEASURED")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, default=0, help="classes of the pilot, to try it")
    parser.add_argument("--minutes", type=float, default=600.0, help="nothing is begun after these")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    if options.what == "table":
        print(table(options.file))
    else:
        {"pilot": pilot, "measure": measure, "further": further, "command": command}[options.what](options)


if __name__ == "__main__":
    main()
