"""The model card of a run: the README.md beside its weights, with front matter as model hubs read it.

Whoever gets the folder without the run must be able to tell what the model has learned from, how good it is and how
that was measured, and what it is not good for.
"""

from __future__ import annotations

import csv
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from pfml.data import RetrievalData
from pfml.evaluation.metrics import metric_label, metric_text, shown_metrics
from pfml.models.embedder import EMBEDDER
from pfml.models.model_card import escaped, model_table, usage
from pfml.runs.config import TrainConfig
from pfml.runs.config_files import plain
from pfml.runs.folder import RunFolder
from pfml.storage.files import write_atomically
from pfml.storage.manifest import read_manifest

__all__ = ["run_card", "write_run_cards"]

#: entry of results.json -> what it is called, and what the epoch was chosen on
CHOICES = {
    "last": ("last epoch", "nothing: training ended there"),
    "best_on_test": ("best on test", "the test classes that it reports, which is optimistic"),
    "validation_selected": ("validation-selected", "validation classes, which are neither trained nor tested on"),
}
PACKAGES = ("pfml", "torch", "torchvision", "timm", "numpy")
CLASSES_SHOWN = 20


def write_run_cards(folder: RunFolder, data: RetrievalData, config: TrainConfig, results: dict[str, Any]) -> None:
    """Write README.md beside the model of a run, and beside that of the last epoch if it is another one."""
    for place, choice in ((folder.model, results["model"]), (folder.last_model, "last")):
        if (place / "model.json").is_file() and results[choice] is not None:
            wrong = _wrong_labels(folder.noise)
            description = read_manifest(place / "model.json", EMBEDDER)
            card = run_card(description, data, config, results, choice=choice, wrong_labels=wrong)
            write_atomically(place / "README.md", card.encode(errors="replace"))


def run_card(
    description: dict[str, Any],
    data: RetrievalData,
    config: TrainConfig,
    results: dict[str, Any],
    *,
    choice: str = "last",
    wrong_labels: int | None = None,
) -> str:
    """A model card in Markdown.

    Args:
        description: What model.json says.
        data: What the run trained and was evaluated on.
        config: How it trained.
        results: As in results.json.
        choice: Which of `CHOICES` these weights are.
        wrong_labels: Training labels that were changed on purpose; None if none were.
    """
    entry, (name, chosen_on) = results[choice], CHOICES[choice]
    return f"""---
{_front_matter(data, config, entry, name)}---

# {escaped(_title(data, config))}

It turns an image into a point on the unit sphere; images of one class lie close to each other, also of classes that it
was not trained on. These are the weights of epoch {entry["epoch"]} ({name}; chosen on {chosen_on}).

{model_table(description)}

## Use

{usage("this folder")}
## Data

{_data(data, wrong_labels)}

## Numbers

Retrieval among images of classes that it was not trained on, in %; one run, seed {config.seed}.

{_numbers(results)}

## Limits

{_limits(description, data, wrong_labels)}

## Configuration

{_fenced(_configuration(config), "yaml")}

## Versions

{", ".join(_versions())}
"""


def _title(data: RetrievalData, config: TrainConfig) -> str:
    return f"An image embedder: {config.loss.name} on {_last_part(data.name)}"


def _front_matter(data: RetrievalData, config: TrainConfig, entry: dict[str, Any], name: str) -> str:
    """The head that model hubs read, as YAML."""
    import yaml

    metrics = [
        {"type": key, "name": f"{metric_label(key)}, {name}", "value": round(float(entry["test"][key]), 6)}
        for key in shown_metrics(entry["test"])
    ]
    dataset = _last_part(data.name)
    result = {
        "task": {"type": "image-feature-extraction", "name": "image retrieval, unseen classes"},
        "dataset": {"name": dataset, "type": dataset, "split": "test"},
        "metrics": metrics,
    }
    head = {
        "library_name": "pfml",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["metric-learning", "image-retrieval", "image-embeddings", config.loss.name],
        "model-index": [{"name": f"{dataset}-{config.loss.name}", "results": [result]}],
    }
    return yaml.safe_dump(head, sort_keys=False, allow_unicode=True)


def _data(data: RetrievalData, wrong_labels: int | None) -> str:
    """Counts of images and classes, and the noise."""
    parts = {"train": data.train, "validation": data.validation, "test": data.test, "gallery": data.gallery}
    rows = [
        f"| {role} | {len(images):,} | {images.num_classes:,} |" for role, images in parts.items() if images is not None
    ]
    noise = "none were changed on purpose; how many are wrong by themselves is not known"
    if wrong_labels is not None:
        share = f"{wrong_labels / max(len(data.train), 1):.1%}"
        noise = f"{wrong_labels:,} of {len(data.train):,} were made wrong on purpose ({share})"
    lines = [f"Data set: {escaped(_last_part(data.name))}. Training labels: {noise}.", ""]
    lines += ["| part | images | classes |", "|---|---:|---:|", *rows]
    if data.remarks:
        lines += ["", *(f"- {escaped(remark)}" for remark in data.remarks)]
    return "\n".join(lines)


def _numbers(results: dict[str, Any]) -> str:
    """Last, best and validation-selected, and what each was chosen on."""
    shown = shown_metrics(results["last"]["test"])
    lines = [
        "| epoch | " + " | ".join(map(metric_label, shown)) + " | chosen on |",
        "|---|" + "---:|" * len(shown) + "---|",
    ]
    for choice, (name, chosen_on) in CHOICES.items():
        if (entry := results[choice]) is not None:
            scores = " | ".join(metric_text(key, entry["test"][key]) for key in shown)
            lines.append(f"| {entry['epoch']}, {name} | {scores} | {chosen_on} |")
    return "\n".join(lines)


def _limits(description: dict[str, Any], data: RetrievalData, wrong_labels: int | None) -> str:
    learned = description["trained_on"]
    names = [] if learned is None else [escaped(name) for name in learned["class_names"]]
    more = f" and {len(names) - CLASSES_SHOWN:,} more, all in `model.json`" if len(names) > CLASSES_SHOWN else ""
    seen = f"{', '.join(names[:CLASSES_SHOWN])}{more}" if names else "none: the backbone was not trained here"
    lines = [
        f"Classes seen in training ({len(names):,}): {seen}. A number measured on these is no test.",
        "It has learned what tells these classes apart. It was not trained for images of another kind, for other "
        "notions of likeness, or to recognize people.",
        "It ranks by distance, and always finds a nearest image. Whether an image is of a class that the index lacks "
        "takes a threshold: `pfml calibrate`.",
        f"The numbers come from {len(data.test):,} images of {data.test.num_classes:,} classes, and one seed.",
        "Whether it may be used and passed on depends on the licenses of the backbone's weights and of the images.",
    ]
    if wrong_labels:
        lines.append("Label noise was added on purpose: it is an experiment, not the best that this data gives.")
    return "\n".join(f"- {line}" for line in lines)


def _configuration(config: TrainConfig) -> str:
    """The whole configuration as YAML, without the folders of the machine that it was run on."""
    import yaml

    return yaml.safe_dump(_without_folders(plain(config)), sort_keys=False, allow_unicode=True)


def _without_folders(value: Any) -> Any:
    """The same values; of an absolute path its last part, since a card is for others to read."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return _last_part(value) if isinstance(value, str) else value


def _last_part(text: str) -> str:
    for path in (PurePosixPath(text), PureWindowsPath(text)):
        if path.is_absolute():
            return path.name
    return text


def _fenced(text: str, language: str) -> str:
    """A block of code, with a fence that `text` cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _wrong_labels(noise: Path) -> int | None:
    """How many labels noise.csv says are wrong; None if there is none."""
    if not noise.is_file():
        return None
    with open(noise, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return sum(row["true class"] != row["given class"] for row in csv.DictReader(file))


def _versions() -> Iterator[str]:
    yield f"Python {platform.python_version()}"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:  # such as pfml in a checkout that is not installed
            continue
