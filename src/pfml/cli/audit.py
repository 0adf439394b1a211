"""`pfml audit`: which images of a run or of a folder are probably mislabeled, and what else is wrong with them."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pfml.cli.console import create_console, print_json, print_model
from pfml.cli.parser import add_device_option, add_json_option, add_quiet_option
from pfml.packages import pip_install
from pfml.terminal import print_line, readable, shell_words

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Sequence

    from rich.console import Console

    from pfml.audit import Audit, Faults, Suspect
    from pfml.data import RetrievalData
    from pfml.data.corrections import Corrections
    from pfml.data.decoding import Track

__all__ = ["add_audit_arguments", "audit"]


def audit(
    run: Path,
    top: int = 20,
    part: Sequence[str] = (),
    threshold: float = 0.5,
    law: Literal["fitted", "run"] = "fitted",
    model: Path | None = None,
    compare: bool | None = None,
    k: int = 20,
    neighbors: int = 5,
    faults: bool = True,
    apply: bool = False,
    policy: Literal["relabel", "drop", "keep"] | None = None,
    precision: float = 0.95,
    decisions: Sequence[Path] = (),
    out: Path | None = None,
    out_dir: Path | None = None,
    to: Sequence[str] = (),
    device: str = "auto",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Find mislabeled images, duplicates, outliers and poor images of a run or of a folder; write corrected labels."""
    from pfml.audit import find_faults, is_index, write_faults, write_suspects
    from pfml.pages.audit import about_unjudged, write_audit_page
    from pfml.training.progress import ProgressMonitor

    if top < 1 or neighbors < 1:
        raise ValueError(f"--top and --neighbors must be at least 1, got {top} and {neighbors}")
    if not apply and (policy is not None or decisions or out is not None):
        raise ValueError("--policy, --decisions and --out say what --apply does: give --apply, too")
    for file in decisions:
        if not file.is_file() and not is_index(file):
            kinds = "a CSV file or an export of Label Studio or FiftyOne"
            raise ValueError(f"--decisions must be {kinds}, got {file}, which is none; or the folder of an index")
    is_run = _is_run(run)
    folder = out_dir or (run / "audit" if is_run else Path("out/audit") / run.absolute().stem)
    _require_outside(folder, run, is_run)
    console = create_console(stderr=as_json, quiet=quiet)
    compared = _compared(console, run if is_run else None, compare)
    track = ProgressMonitor(console).track
    options: dict[str, Any] = {"parts": part, "model": model, "compare": compared, "k": k, "device": device}
    found, data, loaded = _audited(console, run, track, law=law, **options)
    listed = found.listed(threshold)
    shown = found.suspects(found.ranked(top), neighbors=neighbors)
    _print_suspects(console, found, shown, len(listed), threshold)
    if found.detections:
        _print_detections(console, found)
    everyone = found.suspects(found.ranked(max(top, len(listed))), neighbors=neighbors)
    write_suspects(folder / "suspects.csv", everyone, listed)
    others = find_faults(found, track=track) if faults else None
    title = f"Audit of {run.absolute().name}"
    write_audit_page(folder / "audit.html", found, shown, title=title, threshold=threshold, faults=others)
    if len(found.unjudged):
        print_line(console, about_unjudged(found))
    suspects = min(len(found.suspicious(threshold)), len(everyone))
    more = f" and {_counted(len(everyone) - suspects, 'more image')}, in order" if len(everyone) > suspects else ""
    listing = f"{_counted(suspects, 'suspect')}{more}"
    is_all = len(shown) >= len(everyone)
    with_images = "with images" if is_all else f"the first {len(shown):,} with images (--top {len(everyone)} shows all)"
    print_line(console, f"{folder / 'suspects.csv'}: {listing}; {folder / 'audit.html'}: {with_images}")
    if others is not None:
        write_faults(folder, found, others)
        _print_faults(console, folder, found, others)
    _hand_over(console, folder, found, everyone, to)
    if apply:
        corrections, rest = _corrections(console, found, policy, precision, threshold, decisions)
        if is_run and not any(map(is_index, decisions)):
            _hint_at_edits(console, run / "index")
        _apply(console, run if is_run else None, folder, data, loaded, corrections, out)
        if rest and not decisions:
            print_line(console, _about_review(run, is_run, folder))
    if as_json:
        names = ("image", "part", "given", "suggested", "score", "confidence")
        ranked = [{name: getattr(one, name) for name in names} for one in shown]
        detections = {name: asdict(one) for name, one in found.detections.items()}
        counts = {"images": len(found.images), "listed": len(listed), "sure": len(found.sure(precision))}
        rate = {"noise_rate": found.noise_rate, "noise_interval": found.noise_interval}
        content = {"run": str(run), **counts, **rate, "suspects": ranked, "detections": detections}
        print_json(content | ({} if others is None else {"faults": asdict(others)}))


def add_audit_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `audit`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or images: a folder of class folders, or a CSV of path and label.")
    add("--top", type=int, default=20, help="Suspects to print and to show on the page.")
    parts = ("train", "validation", "test", "gallery")
    add("--part", nargs="+", default=(), choices=parts, help="Judge these images only; by default all.")
    add("--threshold", type=float, default=0.5, help="List images that are mislabeled with at least this probability.")
    add("--law", choices=("fitted", "run"), default="fitted", help="The field: fitted to the embeddings, or the run's.")
    add("--model", type=Path, help="Judge with this embedder alone: folder of a run or of a saved one.")
    add(
        "--compare",
        action=BooleanOptionalAction,
        help="Score by k-NN and cleanlab, too; by default if the label noise is known.",
    )
    add("--k", type=int, default=20, help="Neighbors of k-NN and cleanlab.")
    add("--neighbors", type=int, default=5, help="Neighbors to show as evidence.")
    add(
        "--faults",
        action=BooleanOptionalAction,
        default=True,
        help="Also find duplicates, outliers, classes to merge or split, and poor images.",
    )
    add("--apply", action="store_true", help="Write corrected labels; the originals stay as they are.")
    add(
        "--policy",
        choices=("relabel", "drop", "keep"),
        help="For labels that are surely noise: relabel; keep if --decisions are given.",
    )
    add("--precision", type=float, default=0.95, help="How sure --apply must be: least precision of its list.")
    add(
        "--decisions",
        type=Path,
        nargs="+",
        default=(),
        help="A CSV of path, decision (accept, reject, relabel, drop) and label, a JSON export of Label Studio or "
        "FiftyOne, or the folder of an index, whose classes were renamed, merged or deleted.",
    )
    add("--out", type=Path, help="Also write all images with corrected labels as a CSV that pfml train takes.")
    add("--out-dir", type=Path, help="Where tables and page go: RUN/audit, or out/audit/NAME of a folder NAME.")
    add(
        "--to", nargs="+", default=(), choices=("label-studio", "fiftyone"), help="Also write suspects for these tools."
    )
    add_device_option(parser)
    add_json_option(parser)
    add_quiet_option(parser)


def _is_run(path: Path) -> bool:
    """Whether a path is meant as a run: it has a configuration or a model, or it does not exist."""
    has_model = any((path / name).is_file() for name in ("config.yaml", "model.json", "model/model.json"))
    return has_model or not path.exists()


def _require_outside(folder: Path, images: Path, is_run: bool) -> None:
    """Raise ValueError if tables and page would go into a folder of images."""
    if not is_run and images.is_dir() and folder.absolute().resolve().is_relative_to(images.resolve()):
        raise ValueError(f"--out-dir must lie outside of {images}, whose folders are classes, got {folder}")


def _audited(
    console: Console, path: Path, track: Track, *, law: Literal["fitted", "run"], model: Path | None, **options: Any
) -> tuple[Audit, RetrievalData, RetrievalData]:
    """The audit, the judged data, and what `load_checked` returned for them."""
    from pfml.audit import audit_folder, audit_run
    from pfml.audit.run_audit import has_untrained
    from pfml.runs.config_files import read_config
    from pfml.runs.data import load_checked
    from pfml.runs.folder import RunFolder

    if not _is_run(path):
        if law == "run":
            raise ValueError(f"--law run is that of a run, and {path} is none: leave it out")
        found, data = audit_folder(path, model=model, track=track, **options)
        for remark in data.remarks:
            print_line(console, remark)
        return found, data, data
    config = read_config(RunFolder(path).config)
    is_untrained = model is None and has_untrained(config)
    if is_untrained:
        alone = f"--model {shell_words(str(path))} judges by the trained model"
        print_line(console, f"{config.model.backbone} judges as it was before it learned these labels; {alone}")
    else:
        print_model(console, model or path)
    if model is None and config.teachers and not is_untrained:
        print_line(console, f"its {len(config.teachers)} teachers judge with it; --model {path} for the student alone")
    loaded = load_checked(config.data, track)
    found, data = audit_run(path, model=model, law=law, track=track, loaded=loaded, **options)
    return found, data, loaded


def _compared(console: Console, run: Path | None, compare: bool | None) -> list[str]:
    """The names of the other ways to score: as asked, or if the noise of the run is known, those that are installed."""
    from importlib.util import find_spec

    from pfml.audit.scores import CLEANLAB, SCORES
    from pfml.runs.config_files import read_config

    noise = None if run is None else read_config(run / "config.yaml").data.noise
    is_known = noise is not None and (bool(noise.rate) or noise.variant == "list")
    if compare is False or (compare is None and not is_known):
        return []
    if compare or find_spec("cleanlab") is not None:
        return list(SCORES)
    print_line(console, f"cleanlab is not installed and not compared: {pip_install('audit')}")
    return [name for name in SCORES if name != CLEANLAB]


def _hand_over(console: Console, folder: Path, found: Audit, suspects: list[Suspect], to: Sequence[str]) -> None:
    """Write the suspects for other tools, and print how these read them."""
    from pfml.audit.exchange import write_fiftyone, write_label_studio

    if "label-studio" in to:
        tasks, images = write_label_studio(folder, found, suspects)
        print_line(
            console,
            f"{tasks}: tasks for Label Studio, with the interface {tasks.with_suffix('.xml')}; start it with "
            f"LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT="
            f"{shell_words(str(images.parent))}, and give the project a source storage of local files, {images}, or it "
            f"shows no images; its JSON export is for --apply --decisions",
        )
    if "fiftyone" in to:
        place = write_fiftyone(folder, found, suspects)
        call = f"fiftyone.Dataset.from_dir({str(place)!r}, dataset_type=fiftyone.types.LegacyFiftyOneDataset)"
        back = "export(FOLDER, dataset_type=fiftyone.types.LegacyFiftyOneDataset, export_media=False)"
        print_line(
            console,
            f"{place}: a data set of FiftyOne; {call} reads it; change ground_truth, or tag samples accept, reject or "
            f"drop; the samples.json that {back} writes is for --apply --decisions",
        )


def _corrections(
    console: Console,
    found: Audit,
    policy: Literal["relabel", "drop", "keep"] | None,
    precision: float,
    threshold: float,
    decisions: Sequence[Path],
) -> tuple[Corrections, int]:
    """The corrections to apply, and how many suspects are left for review; prints a line on both."""
    from pfml.audit import corrections_of

    chosen = policy or ("keep" if decisions else "relabel")
    corrections = corrections_of(found, policy=chosen, precision=precision, decisions=decisions)
    corrections.apply(found.images)  # before anything is written: a class that would lose all its images is refused
    rest: list[int] = []
    if chosen != "keep":
        sure = {*found.sure(precision).tolist()}
        rest = [index for index in found.suspicious(threshold).tolist() if index not in sure]
        print_line(
            console,
            f"surely noise, with a precision of at least {precision:.0%} by the lower end of the estimate: "
            f"{_counted(len(sure), 'label')}; left for review: {_counted(len(rest), 'suspect')}",
        )
    return corrections, len(rest)


def _about_review(run: Path, is_run: bool, folder: Path) -> str:
    """How a person decides on the suspects that are left, and applies it."""
    if is_run:  # the page writes there, wherever the audit goes
        on, table = f"pfml serve {shell_words(str(run))}, view Audit", run / "audit" / "decisions.csv"
    else:
        page = folder / "audit.html"
        on, table = f"by {page} write the columns path, decision and label to a CSV", Path("FILE.csv")
    return f"review these: {on}; then pfml audit {shell_words(str(run), '--apply', '--decisions', str(table))}"


def _hint_at_edits(console: Console, index: Path) -> None:
    """Say that classes of an index were edited, which is not applied."""
    from pfml.search.index_folder import read_edits

    edits = read_edits(index)
    if len(edits):
        print_line(
            console,
            f"{index}: {_counted(len(edits), 'change')} of classes and images made in the index, such as "
            f"{readable(str(edits.steps[-1]))}: add {shell_words(str(index))} to --decisions to apply them",
        )


def _apply(
    console: Console,
    run: Path | None,
    folder: Path,
    data: RetrievalData,
    loaded: RetrievalData,
    corrections: Corrections,
    out: Path | None,
) -> None:
    """Write the corrections: the list for training images of a run, the table for all images."""
    from pfml.audit import of_training, write_corrections, write_table

    out = folder / "corrected.csv" if out is None and run is None else out
    if out is not None:
        write_table(out, data, corrections)
    if run is not None:
        path = folder / "corrections.csv"
        write_corrections(run, path, corrections, loaded=loaded)
        training = of_training(corrections, data)
        elsewhere = training.dropped - sum(
            now is None for index, now in corrections.labels.items() if index < len(data.train)
        )
        why = f" ({elsewhere:,} of a held-out class)" if elsewhere else ""
        print_line(console, f"{path}: {_described(training)}{why}")
        if len(training) or training.classes:
            config = shell_words(str(run / "config.yaml"))
            print_line(
                console, f"train again: pfml train --config {config} --data.corrections {shell_words(str(path))}"
            )
        held_out = len(corrections) - len(training)
        if held_out and out is None:
            are = "label of a held-out image is" if held_out == 1 else "labels of held-out images are"
            print_line(console, f"{held_out:,} {are} corrected only in a table of all images: give --out corrected.csv")
        others = len({*corrections.classes} - {*data.train.class_names})
        if others and out is None:
            are = "held-out class is" if others == 1 else "held-out classes are"
            print_line(console, f"{others:,} {are} changed only in a table of all images: give --out corrected.csv")
    if out is not None:
        split = () if data.protocol == "classes" else ("--data.split", data.protocol)
        split = () if run is None and data.protocol == "none" else split
        table = shell_words(str(out), *split)
        changed = _described(corrections).replace("images ", "").replace("image ", "")
        print_line(
            console, f"{out}: all images with their corrected labels, {changed}, for pfml train --data.name {table}"
        )


def _described(corrections: Corrections) -> str:
    """Such as "7 images relabeled, 0 left out, 2 classes renamed or merged"."""
    relabeled, dropped = len(corrections) - corrections.dropped, corrections.dropped
    deleted = sum(now is None for now in corrections.classes.values())
    named = len(corrections.classes) - deleted
    text = f"{_counted(relabeled, 'image')} relabeled, {dropped:,} left out"
    text += f", {named:,} class{'' if named == 1 else 'es'} renamed or merged" if named else ""
    return text + (f", {deleted:,} class{'' if deleted == 1 else 'es'} left out" if deleted else "")


def _print_suspects(console: Console, found: Audit, shown: list[Suspect], listed: int, threshold: float) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"{listed:,} of {len(found.images):,} images are probably mislabeled ({described_rate(found)})"
    if not listed:
        title = f"the most suspicious of {len(found.images):,} images ({described_rate(found)})"
    has_parts = len({*found.roles}) > 1
    columns = ("image", *(("part",) if has_parts else ()), "given", "suggested", "score", "confidence", "neighbors")
    less = f"below the line: mislabeled with less than {threshold:.0%} probability" if 0 < listed < len(shown) else None
    table = Table(*columns, title=title, caption=less)
    table.columns[0].overflow = "fold"  # the end of a path tells more than its beginning
    names = found.images.short_names()
    for rank, one in enumerate(shown, 1):
        counts = Counter(other.label for other in one.neighbors).most_common()
        counted = ", ".join(f"{count} {label}" for label, count in counts)
        numbers = f"{one.score:.2f}", f"{one.confidence:.2f}"
        cells = (names[one.index], *((one.part,) if has_parts else ()), one.given, one.suggested, *numbers, counted)
        # names may hold brackets, which rich would read as markup
        table.add_row(*(Text(readable(cell)) for cell in cells), end_section=rank == listed)
    console.print(table)
    if not listed:
        pulled = int((found.scores.score > 0).sum())
        print_line(
            console,
            f"no image is listed as mislabeled; another class attracts {pulled:,} images more strongly than their own: "
            f"look at these, from the top, on the page",
        )


def described_rate(found: Audit) -> str:
    """The estimated rate of label noise with its interval, in words."""
    low, high = found.noise_interval
    return f"estimated label noise {found.noise_rate:.1%}, 90 % interval {low:.1%} to {high:.1%}"


def _counted(number: int, what: str) -> str:
    """Such as "1 suspect" or "1,204 suspects"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _print_faults(console: Console, folder: Path, found: Audit, faults: Faults) -> None:
    """A line for each kind of fault that was found."""
    groups = faults.duplicates
    exact = sum(one.is_exact for one in groups)
    classes, parts = (sum(getattr(one, name) for one in groups) for name in ("is_across_classes", "is_across_parts"))
    if groups:
        across = f"; across classes {classes:,}" + (f"; across training and held-out images {parts:,}" if parts else "")
        counted = f"{_counted(len(groups), 'group')} of copies ({exact:,} exact, {len(groups) - exact:,} near{across})"
        print_line(console, f"{folder / 'duplicates.csv'}: {counted}")
    if faults.outliers:
        are = "image is" if len(faults.outliers) == 1 else "images are"
        print_line(console, f"{folder / 'outliers.csv'}: {len(faults.outliers):,} {are} far from all others")
    names = found.images.class_names
    for fault in faults.classes[:5]:
        who = " and ".join(readable(names[label]) for label in fault.classes)
        advice = f"{who} may be one class" if fault.kind == "merge" else f"{who} may be two classes"
        print_line(console, f"{folder / 'classes.csv'}: {advice}")
    kinds = [one.kind for one in faults.quality]
    if kinds:
        counted = ", ".join(f"{kinds.count(kind):,} {kind}" for kind in dict.fromkeys(kinds))
        print_line(console, f"{folder / 'quality.csv'}: {counted}")
    if not (groups or faults.outliers or faults.classes or kinds):
        print_line(console, "no duplicates, outliers, classes to merge or split, or images of poor quality")


def _print_detections(console: Console, found: Audit) -> None:
    from rich.table import Table

    from pfml.audit import DETECTION_LABELS

    title = "against the label noise that was added, %"
    table = Table("", *DETECTION_LABELS.values(), title=title)
    for name, one in found.detections.items():
        table.add_row(name, *(f"{100 * getattr(one, field):.1f}" for field in DETECTION_LABELS))
    console.print(table)
