"""The model card of a run: the README.md beside its weights, with front matter as model hubs read it.

Whoever gets the folder without the run must be able to tell what the model has learned from, how good it is and how
that was measured, and what it is not good for.

By Jinja2, and not by huggingface_hub's ModelCard: that renders the same template, and loads 390 modules for it.
"""

from __future__ import annotations

import csv
import platform
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

from pfml.data import RetrievalData
from pfml.data.image_set import PROTOCOLS
from pfml.evaluation.classification import predictor_label
from pfml.evaluation.metrics import metric_label, metric_text, shown_metrics
from pfml.models.embedder import EMBEDDER
from pfml.runs.config import TrainConfig
from pfml.runs.config_files import plain, yaml_text
from pfml.runs.final import Validated, read_validated
from pfml.runs.folder import RunFolder
from pfml.storage.files import write_atomically
from pfml.storage.manifest import read_manifest
from pfml.templates import create_environment

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["run_card", "write_run_cards"]


class Choice(NamedTuple):
    """What an evaluation of results.json is called, and what its epoch was chosen on."""

    name: str
    chosen_on: str


#: Entry of results.json -> how its epoch was chosen.
CHOICES = {
    "last": Choice("last epoch", "nothing: training ended there"),
    "best_on_test": Choice("best on test", "the test images that it reports, which is optimistic"),
    "validation_selected": Choice("validation-selected", "validation classes, which are neither trained nor tested on"),
}
#: Protocol -> what the numbers are about.
SEARCHED = {
    "classes": "Retrieval among images of classes that it was not trained on",
    "images": "Held-out images of the classes that it was trained on, searched among its training images",
    "none": "",
}
#: What a rung of the ladder is chosen on.
CROSS_FITTED = "training images, by cross-fitting"
PACKAGES = ("pfml", "torch", "torchvision", "timm", "numpy")
CLASSES_SHOWN = 20


def write_run_cards(folder: RunFolder, data: RetrievalData, config: TrainConfig, results: dict[str, Any]) -> None:
    """Write README.md beside the model of a run, and beside that of the last epoch if it is another one."""
    for model, choice in ((folder.model, results["model"]), (folder.last_model, "last")):
        if (model / "model.json").is_file() and results[choice] is not None:
            noisy = _noisy_labels(folder.noise)
            description = read_manifest(model / "model.json", EMBEDDER)
            card = run_card(
                description,
                data,
                config,
                results,
                choice=choice,
                noisy_labels=noisy,
                validated=read_validated(folder.path),
            )
            write_atomically(model / "README.md", card.encode(errors="replace"))


def run_card(
    description: dict[str, Any],
    data: RetrievalData,
    config: TrainConfig,
    results: dict[str, Any],
    *,
    choice: str = "last",
    noisy_labels: int | None = None,
    validated: Validated | None = None,
) -> str:
    """A model card in Markdown.

    Args:
        description: What model.json says.
        data: What the run trained and was evaluated on.
        config: How it trained.
        results: As in results.json.
        choice: Which of `CHOICES` these weights are.
        noisy_labels: Training labels that label noise has changed on purpose; None without label noise.
        validated: The figures of the run whose final model this is; None for the model of any other run.
    """
    kept = results.get("ladder", {}).get("kept")
    method = config.loss.name if kept is None else "ladder"
    if kept is None:
        rows = [
            (f"{entry['epoch']}, {how.name}", entry.get("test", {}), how.chosen_on)
            for name, how in CHOICES.items()
            if (entry := results[name]) is not None
        ]
    else:  # which has no epochs
        rows = [(kept["name"], results["last"].get("test", {}), CROSS_FITTED)]
    return _template().render(
        description=description,
        data=data,
        dataset=_last_part(data.name),
        config=config,
        method=method,
        kept=kept,
        rows=rows,
        cross_fitted=CROSS_FITTED,
        results=results,
        metrics=shown_metrics(results["last"].get("test", {})),
        searched=SEARCHED[data.protocol],
        choice=choice,
        choices=CHOICES,
        noisy_labels=noisy_labels,
        validated=validated,
        searched_by=SEARCHED,
        validated_metrics=[] if validated is None else shown_metrics(validated.scores),
        classes_shown=CLASSES_SHOWN,
        front_matter=_front_matter(
            data, method, results[choice], CHOICES[choice].name if kept is None else "the model"
        ),
        configuration=_fenced(yaml_text(_without_folders(plain(config))), "yaml"),
        versions=_versions(),
    )


@cache
def _template() -> Template:
    environment = create_environment("pfml.runs", "pfml.models")
    environment.filters |= {
        "metric_label": metric_label,
        "metric_text": metric_text,
        "predictor_label": predictor_label,
    }
    return environment.get_template("run.md")


def _front_matter(data: RetrievalData, method: str, entry: dict[str, Any], name: str) -> str:
    """The head that model hubs read, as YAML."""
    scores = entry.get("test", {})
    metrics = [
        {"type": key, "name": f"{metric_label(key)}, {name}", "value": round(float(scores[key]), 6)}
        for key in shown_metrics(scores)
    ]
    dataset = _last_part(data.name)
    result = {
        "task": {"type": "image-feature-extraction", "name": f"image retrieval, {PROTOCOLS[data.protocol]}"},
        "dataset": {"name": dataset, "type": dataset, "split": "test"},
        "metrics": metrics,
    }
    head = {
        "library_name": "pfml",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["metric-learning", "image-retrieval", "image-embeddings", method],
        "model-index": [{"name": f"{dataset}-{method}", "results": [result] if metrics else []}],
    }
    return yaml_text(head)


def _without_folders(value: Any) -> Any:
    """`value` with the last part of each absolute path alone, since a card is for others to read."""
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


def _noisy_labels(noise: Path) -> int | None:
    """How many labels noise.csv says were changed; None if there is no such file."""
    if not noise.is_file():
        return None
    with open(noise, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return sum(row["true class"] != row["given class"] for row in csv.DictReader(file))


@cache
def _versions() -> tuple[str, ...]:
    """Python and the packages that are installed, each with its version."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):  # such as pfml in a checkout that is not installed
            found.append(f"{package} {version(package)}")
    return tuple(found)
