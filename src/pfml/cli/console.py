"""What commands print: lines, tables of metrics, JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pfml.terminal import print_line, shell_words

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from pfml.evaluation.verification import Estimate, Verification

__all__ = [
    "create_console",
    "preferred_run",
    "print_json",
    "print_known",
    "print_model",
    "print_results",
    "print_scores",
    "print_validated",
    "print_verification",
]


def create_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """The console that commands print to: as wide as the terminal, 120 columns in a file.

    Args:
        stderr: Whether to stderr, since stdout is for JSON or YAML.
        quiet: Whether to print nothing.
    """
    from pfml.terminal import plain_console

    # Without a terminal rich assumes 80 columns, and would break the tables.
    console = plain_console(stderr=stderr)
    console = console if console.is_terminal else plain_console(width=120, stderr=stderr)
    console.quiet = quiet
    return console


def print_json(content: Any) -> None:
    """Print `content` as JSON, for programs."""
    print(json.dumps(content, indent=2, default=str))


def print_model(console: Console, run: Path) -> None:
    """Print which epoch the model of `run` is of, if its folder says it."""
    from pfml.models.embedder import learned_by

    trained_on = learned_by(run)
    if trained_on is not None and trained_on.moment:
        print_line(console, f"the model of {run}: {trained_on.moment}")


def preferred_run(console: Console, run: Path) -> Path:
    """The folder whose model a command uses, RUN/final if the run has a final model; prints a line if it is that."""
    from pfml.runs.final import final_classes, final_folder, preferred_folder

    chosen, classes = preferred_folder(run), final_classes(run)
    if chosen != run:
        learned = f", trained on all {classes:,} classes" if classes else ""
        print_line(console, f"using the final model of {run}{learned}")
    elif (final_folder(run) / "config.yaml").is_file():
        rest = f"pfml train --final {shell_words(str(run))} finishes it"
        print_line(console, f"using the model of {run}, since the final model is not trained to its end: {rest}")
    return chosen


def print_validated(console: Console, run: Path) -> None:
    """Print of a final model that nothing evaluates it, and the figures of the run that it belongs to."""
    from pfml.data.image_set import PROTOCOLS
    from pfml.runs.final import read_validated

    known = read_validated(run)
    if known is None:
        return
    part = f"{known.classes:,} classes" if known.classes else "a part of the images"
    about = f"the figures of {known.run}, trained with the same settings on {part}:"
    print_line(console, f"evaluated by nothing: this model has seen all images; {about}")
    if known.scores:
        row = f"{known.run}, epoch {known.epoch}" if known.steps else known.run  # a ladder has no epochs
        print_scores(console, PROTOCOLS[known.protocol], {row: known.scores})
    index = f"pfml index {shell_words(str(run.parent))} FOLDER"
    print_line(console, f"index, search, serve and export of {run.parent} use it; an index of its own: {index}")


def print_results(console: Console, results: dict[str, Any], *, before: dict[str, Any] | None = None) -> None:
    """Print the scores of a run, and how far its proxies are from their data.

    Args:
        console: Where to.
        results: Of the run.
        before: The scores of the pretrained backbone, for a run that worked up the ladder.
    """
    from pfml.data.image_set import PROTOCOLS

    names = {
        "last": "last epoch",
        "best_on_test": "best on test (chosen on what it reports)",
        "validation_selected": f"chosen by validation {results['selected_by']}",
    }
    scores = {
        f"{name}, epoch {entry['epoch']}{', the model' if key == results['model'] else ''}": entry["test"]
        for key, name in names.items()
        if (entry := results[key]) is not None and "test" in entry
    }
    if "ladder" in results and scores:  # which has no epochs
        first = {} if before is None else {"pretrained backbone": before}
        scores = {**first, f"the model ({results['ladder']['kept']['name']})": results["last"]["test"]}
    protocol = PROTOCOLS[results.get("protocol", "classes")]
    if scores:
        print_scores(console, protocol, scores)
    else:
        print_line(console, f"{protocol}: the model was evaluated on nothing")
    if "known" in results["last"]:
        print_known(console, results["last"]["known"])
    if "alignment" in results:
        alignment = results["alignment"]
        distances = f"{alignment['paper']:.3f} (the paper's form), {alignment['wasserstein2']:.3f} (true W2)"
        print_line(console, f"distance of proxies to their data: {distances}")


def print_known(console: Console, known: dict[str, Any]) -> None:
    """A table of how often images are taken for the right one of the known classes (`Classification.as_dict`)."""
    from rich.table import Table

    from pfml.evaluation.classification import predictor_label

    images = known["num_queries"] - known["num_without_class"]
    table = Table("class by", "accuracy", "95 % interval", title=f"known classes: accuracy on {images:,} images, in %")
    for name, one in known["accuracy"].items():
        low, high = one["interval"]
        table.add_row(predictor_label(name, known), f"{100 * one['value']:.1f}", f"{100 * low:.1f} to {100 * high:.1f}")
    console.print(table)
    if known["num_without_class"]:
        print_line(console, f"{known['num_without_class']:,} images are not counted: the gallery lacks their classes")


def print_verification(console: Console, pairs: Verification) -> None:
    """A table of the errors of telling same from different."""
    from rich.table import Table

    def shown(estimate: Estimate) -> str:
        if estimate.interval is None:
            return f"{100 * estimate.value:.2f}"
        low, high = (100 * end for end in estimate.interval)
        return f"{100 * estimate.value:.2f} ({low:.2f} to {high:.2f})"

    title = f"verification: {pairs.genuine:,} pairs of one class, {pairs.impostors:,} of two; % and 95 % interval"
    table = Table("", "error", "accepted up to distance", title=title)
    table.add_row("EER", shown(pairs.eer), "")
    for rate, estimate in pairs.fnmr_at.items():
        distance = pairs.threshold_at.get(rate)
        table.add_row(f"FNMR at FMR {rate:g}", shown(estimate), "" if distance is None else f"{distance:.3f}")
    console.print(table)


def print_scores(console: Console, title: str, rows: dict[str, dict[str, float]]) -> None:
    """A table of metrics in %, one row for each name."""
    from rich.table import Table
    from rich.text import Text

    from pfml.evaluation.metrics import metric_label, metric_text, shown_metrics

    shown = shown_metrics(next(iter(rows.values())))
    table = Table("", *map(metric_label, shown), title=title)
    for name, scores in rows.items():
        # a name may be a path with brackets, which rich would read as markup
        table.add_row(Text(name), *(metric_text(key, scores[key]) for key in shown))
    console.print(table)
