"""`pfml audit`: which training images of a run are probably mislabeled."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pfml.cli.console import create_console, print_json, print_model
from pfml.cli.parser import add_device_option, add_json_option, add_quiet_option
from pfml.terminal import print_line, readable, shell_words

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.console import Console

    from pfml.audit import Audit, Suspect
    from pfml.data import RetrievalData

__all__ = ["add_audit_arguments", "audit"]


def audit(
    run: Path,
    top: int = 20,
    threshold: float = 0.5,
    law: Literal["fitted", "run"] = "fitted",
    model: Path | None = None,
    compare: bool | None = None,
    k: int = 20,
    neighbors: int = 5,
    apply: bool = False,
    policy: Literal["relabel", "drop", "keep"] | None = None,
    decisions: Path | None = None,
    out: Path | None = None,
    unseen: bool = False,
    device: str = "auto",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Find images of a run that are probably mislabeled; write suspects, a page, corrected labels."""
    from pfml.audit import audit_run, write_suspects
    from pfml.data.image_set import PROTOCOLS
    from pfml.data.splits import described_test
    from pfml.pages.audit import about_unjudged, write_audit_page
    from pfml.runs.config_files import read_config
    from pfml.runs.data import load_checked
    from pfml.runs.folder import RunFolder
    from pfml.training.progress import ProgressMonitor

    if top < 1 or neighbors < 1:
        raise ValueError(f"--top and --neighbors must be at least 1, got {top} and {neighbors}")
    if not apply and (policy, decisions, out) != (None, None, None):
        raise ValueError("--policy, --decisions and --out say what --apply does: give --apply, too")
    if unseen and apply:
        raise ValueError("--apply corrects training labels: leave out --unseen, or --apply")
    if decisions is not None and not decisions.is_file():
        raise ValueError(f"--decisions must be a CSV file, got {decisions}, which is none")
    console = create_console(stderr=as_json, quiet=quiet)
    compared = [] if unseen else _compared(console, run, compare)
    part: Literal["train", "test"] = "test" if unseen else "train"
    if unseen and read_config(RunFolder(run).config).data.split == "none":
        raise ValueError(f"--unseen judges test images, and {run} held nothing out of training: leave it out")
    track = ProgressMonitor(console).track
    print_model(console, model or run)
    config = read_config(RunFolder(run).config)
    if model is None and config.teachers:
        print_line(console, f"its {len(config.teachers)} teachers judge with it; --model {run} for the student alone")
    loaded = load_checked(config.data, track)
    found, data = audit_run(
        run, part=part, model=model, law=law, compare=compared, k=k, device=device, track=track, loaded=loaded
    )
    listed = found.listed(threshold)
    shown = found.suspects(found.ranked(top), neighbors=neighbors)
    _print_suspects(console, found, shown, len(listed))
    if found.detections:
        _print_detections(console, found)
    folder = run / ("audit-unseen" if unseen else "audit")
    everyone = found.suspects(found.ranked(max(top, len(listed))), neighbors=neighbors)
    write_suspects(folder / "suspects.csv", everyone, listed)
    title = f"Audit of {run.name}{f', {PROTOCOLS[data.protocol]}' if unseen else ''}"
    write_audit_page(folder / "audit.html", found, shown, title=title, threshold=threshold)
    if len(found.unjudged):
        print_line(console, about_unjudged(found))
    suspects = min(len(found.suspicious(threshold)), len(everyone))
    more = f" and {len(everyone) - suspects:,} more images, in order" if len(everyone) > suspects else ""
    print_line(console, f"{folder / 'suspects.csv'}: {suspects:,} suspects{more}; {folder / 'audit.html'}: with images")
    if not unseen and not apply and len(data.test):
        print_line(console, f"{described_test(data)} were not judged: pfml audit {shell_words(str(run))} --unseen")
    if apply:
        _apply(console, run, found, data, loaded, threshold, policy, decisions, out)
    if as_json:
        names = ("image", "given", "suggested", "score", "confidence")
        ranked = [{name: getattr(one, name) for name in names} for one in shown]
        detections = {name: asdict(one) for name, one in found.detections.items()}
        counts = {"images": len(found.images), "listed": len(listed), "noise_rate": found.noise_rate}
        print_json({"run": str(run), **counts, "suspects": ranked, "detections": detections})


def add_audit_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `audit`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run.")
    add("--top", type=int, default=20, help="Suspects to print and to show on the page.")
    add("--threshold", type=float, default=0.5, help="List images that are mislabeled with at least this probability.")
    add("--law", choices=("fitted", "run"), default="fitted", help="The field: fitted to the embeddings, or the run's.")
    add("--model", type=Path, help="Judge with another embedder: folder of a run or of a saved one.")
    add(
        "--compare",
        action=BooleanOptionalAction,
        help="Score by k-NN and cleanlab, too; by default if the label noise is known.",
    )
    add("--k", type=int, default=20, help="Neighbors of k-NN and cleanlab.")
    add("--neighbors", type=int, default=5, help="Neighbors to show as evidence.")
    add("--apply", action="store_true", help="Write corrected labels; the originals stay as they are.")
    add(
        "--policy",
        choices=("relabel", "drop", "keep"),
        help="For listed labels: relabel; keep if --decisions are given.",
    )
    add("--decisions", type=Path, help="A CSV of path, decision (accept, reject, relabel, drop) and label.")
    add("--unseen", action="store_true", help="Judge the test images instead, which the run has not seen.")
    add("--out", type=Path, help="Also write all images with corrected labels as a CSV that pfml train takes.")
    add_device_option(parser)
    add_json_option(parser)
    add_quiet_option(parser)


def _compared(console: Console, run: Path, compare: bool | None) -> list[str]:
    """The names of the other ways to score: as asked, or if the noise of the run is known, those that are installed."""
    from importlib.util import find_spec

    from pfml.audit.scores import CLEANLAB, SCORES
    from pfml.runs.config_files import read_config

    noise = read_config(run / "config.yaml").data.noise
    if compare is False or (compare is None and not noise.rate and noise.variant != "list"):
        return []
    if compare or find_spec("cleanlab") is not None:
        return list(SCORES)
    print_line(console, "cleanlab is not installed and not compared: pip install 'pfml[audit]'")
    return [name for name in SCORES if name != CLEANLAB]


def _apply(
    console: Console,
    run: Path,
    found: Audit,
    data: RetrievalData,
    loaded: RetrievalData,
    threshold: float,
    policy: Literal["relabel", "drop", "keep"] | None,
    decisions: Path | None,
    out: Path | None,
) -> None:
    from pfml.audit import corrections_of, write_corrections, write_table

    chosen = policy or ("relabel" if decisions is None else "keep")
    corrections = corrections_of(found, policy=chosen, threshold=threshold, decisions=decisions)
    corrections.apply(found.images)  # before anything is written: a class that would lose all its images is refused
    path = run / "audit" / "corrections.csv"
    if out is not None:
        write_table(out, data, corrections)
    write_corrections(run, path, corrections, loaded=loaded)
    relabeled = len(corrections) - corrections.dropped
    print_line(console, f"{path}: {relabeled:,} images relabeled, {corrections.dropped:,} left out")
    if len(corrections):
        config = shell_words(str(run / "config.yaml"))
        print_line(console, f"train again: pfml train --config {config} --data.corrections {shell_words(str(path))}")
    if out is not None:
        split = () if data.protocol == "classes" else ("--data.split", data.protocol)
        table = shell_words(str(out), *split)
        print_line(console, f"{out}: all images with their corrected labels, for pfml train --data.name {table}")


def _print_suspects(console: Console, found: Audit, shown: list[Suspect], listed: int) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"{listed:,} of {len(found.images):,} images are probably mislabeled (estimate {found.noise_rate:.1%})"
    if not found.noise_rate:
        title = f"the most suspicious of {len(found.images):,} images; the rate of label noise cannot be estimated"
    table = Table("image", "given", "suggested", "score", "confidence", "neighbors", title=title)
    table.columns[0].overflow = "fold"  # the end of a path tells more than its beginning
    names = found.images.short_names()
    for one in shown:
        labels = [other.label for other in one.neighbors]
        counted = ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels))
        confidence = f"{one.confidence:.2f}" if found.noise_rate else ""
        cells = (names[one.index], one.given, one.suggested, f"{one.score:.2f}", confidence, counted)
        table.add_row(
            *(Text(readable(cell)) for cell in cells)
        )  # names may hold brackets, which rich would read as markup
    console.print(table)
    if not found.noise_rate:
        pulled = int((found.scores.score > 0).sum())
        print_line(
            console,
            f"the scores form one component, so no image is listed as mislabeled; another class attracts {pulled:,} "
            f"images more strongly than their own: look at these, from the top, on the page",
        )


def _print_detections(console: Console, found: Audit) -> None:
    from rich.table import Table

    from pfml.audit import DETECTION_LABELS

    title = "against the label noise that was added, %"
    table = Table("", *DETECTION_LABELS.values(), title=title)
    for name, one in found.detections.items():
        table.add_row(name, *(f"{100 * getattr(one, field):.1f}" for field in DETECTION_LABELS))
    console.print(table)
