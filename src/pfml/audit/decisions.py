"""Corrected labels from suspects and what a person decided about them; the original files are not changed."""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from pfml.audit.exchange import read_exported
from pfml.audit.suspects import Audit, Suspect
from pfml.data import RetrievalData
from pfml.data.corrections import Corrections
from pfml.search.edits import Edits
from pfml.search.index_folder import read_edits
from pfml.search.listing import plain_path
from pfml.storage.files import named_errors, write_csv
from pfml.typos import did_you_mean

__all__ = [
    "DECISIONS",
    "DECISION_COLUMNS",
    "POLICIES",
    "DecisionName",
    "corrections_of",
    "is_index",
    "parts_of_classes",
    "read_decisions",
    "write_suspects",
    "write_table",
]

Policy = Literal["relabel", "drop", "keep"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
#: What a person may decide about a suspect; see `read_decisions`.
DecisionName = Literal["accept", "reject", "relabel", "drop"]
DECISIONS: tuple[DecisionName, ...] = get_args(DecisionName)
DECISION_COLUMNS = ("path", "decision", "label")
SUSPECT_COLUMNS = (
    "path",
    "part",
    "given",
    "suggested",
    "score",
    "confidence",
    "listed",
    "given_share",
    "suggested_share",
    "neighbors",
)


def corrections_of(
    audit: Audit, *, policy: Policy = "relabel", precision: float = 0.95, decisions: Path | Sequence[Path] = ()
) -> Corrections:
    """The labels to change.

    Args:
        audit: The judged images.
        policy: For images that are surely mislabeled and have no decision: "relabel" gives the suggested label, "drop"
            leaves them out, "keep" changes nothing.
        precision: Of the list of these images, at the lower end of the estimate (`Audit.sure`).
        decisions: What a person decided, which overrides the policy, the last file first: tables (`read_decisions`),
            and folders of indexes, whose classes were renamed, merged or deleted, and whose images were left out or
            relabeled. An image of a class that the training set does not have is left out.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}{did_you_mean(policy, POLICIES)}")
    labels: dict[int, int | None] = {}
    if policy != "keep":
        for index in audit.sure(precision).tolist():
            labels[index] = None if policy == "drop" else int(audit.scores.suggested[index])
    classes: dict[str, str | None] = {}
    for file in (decisions,) if isinstance(decisions, Path) else decisions:
        if is_index(file):
            edits = read_edits(file)
            classes |= edits.changed(audit.images.class_names)
            labels |= _relabeled(edits, audit)
            labels |= dict.fromkeys(_positions_of(edits.left_out, audit))
        else:
            labels |= read_decisions(file, audit)
    given = audit.images.labels.tolist()
    return Corrections({index: label for index, label in labels.items() if label != given[index]}, classes)


def is_index(path: Path) -> bool:
    """Whether decisions are those of an index: a folder that `pfml index` made."""
    return (path / "index.json").is_file()


def _relabeled(edits: Edits, audit: Audit) -> dict[int, int | None]:
    """Position of a relabeled image -> the first label whose class has its name now, None if there is none."""
    names = edits.names(audit.images.class_names)
    label_of = {name: label for label, name in reversed([*enumerate(names.values())])}
    return {k: label_of.get(edits.relabeled[path]) for k, path in _positions_of(edits.relabeled, audit).items()}


def _positions_of(paths: Collection[str], audit: Audit) -> dict[int, str]:
    """Position -> path of the images among `paths`, which are those of an index."""
    if not paths or not isinstance(audit.images.images, tuple):
        return {}
    every = {k: str(plain_path(path)) for k, path in enumerate(audit.images.images)}
    return {k: path for k, path in every.items() if path in paths}


def read_decisions(path: Path, audit: Audit) -> dict[int, int | None]:
    """The decisions of a person: position -> label, None to leave the image out.

    The table has the columns path, decision and label. accept takes the suggested label, that in the column label if
    there is one (what the person saw; another audit may suggest another), reject keeps the given one, relabel takes the
    class in the column label, drop leaves the image out. The last line about an image counts. A file that ends in .json
    is an export of Label Studio or of FiftyOne (`pfml.audit.exchange`).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"the decisions must be a CSV file or an export of Label Studio or FiftyOne, got {path}"
        )
    index_of = _positions(audit)
    decided: dict[int, int | None] = {}
    for where, image, decision, label in _exported(path) if path.suffix == ".json" else _rows(path):
        name = image if image in index_of else str(plain_path(Path(image)))
        if name not in index_of:
            raise ValueError(f"{where} must name an image of the audit, got {image!r}")
        index = index_of[name]
        decided[index] = _decided(where, audit, index, decision, label)
    return decided


def _exported(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Where it stands, image, decision and label of each decision of an export of another tool."""
    for number, row in enumerate(read_exported(path), 1):
        yield (f"{path}, decision {number}", *row)


def _rows(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Where it stands, image, decision and label of each line of a table."""
    with named_errors(path, "a CSV table in UTF-8"), path.open(encoding="utf-8-sig", newline="") as text:
        table = csv.DictReader(text)
        header = table.fieldnames or []
        missing = [column for column in DECISION_COLUMNS if column not in header]
        if missing:
            raise ValueError(
                f"{path} must have the columns path, decision and label, got {', '.join(header) or 'none'}"
            )
        for row in table:
            image, decision, label = ((row[column] or "").strip() for column in DECISION_COLUMNS)
            yield f"{path}, line {table.line_num}", image, decision, label


def _decided(where: str, audit: Audit, index: int, decision: str, label: str) -> int | None:
    names = audit.images.class_names
    match decision:
        case "accept" if not label:
            return int(audit.scores.suggested[index])
        case "reject":
            return int(audit.images.labels[index])
        case "drop":
            return None
        case "relabel" | "accept":
            if label not in names:
                raise ValueError(f"{where} must name a class of the audit, got {label!r}{did_you_mean(label, names)}")
            return names.index(label)
    known = ", ".join(DECISIONS)
    raise ValueError(f"{where} must decide one of {known}, got {decision!r}{did_you_mean(decision, DECISIONS)}")


def _positions(audit: Audit) -> dict[str, int]:
    """Position of each image by its whole name, its absolute path, its short name, and that among its part.

    An audit of a folder names images as the folder was typed, that of a run by absolute paths; RUN/noise.csv has names
    among the part.
    """
    images = audit.images
    of_part: dict[str, int] = {}
    for role in reversed(tuple(dict.fromkeys(audit.roles))):
        own = [k for k, other in enumerate(audit.roles) if other == role]
        of_part |= dict(zip(images.subset(own).short_names(), own, strict=True))
    short = {name: k for k, name in enumerate(images.short_names())}
    files = images.images if isinstance(images.images, tuple) else ()
    absolute = {str(plain_path(file)): k for k, file in enumerate(files)}
    return {**of_part, **short, **absolute, **{images.name_of(k): k for k in range(len(images))}}


def write_suspects(path: Path, suspects: list[Suspect], listed: Tensor) -> None:
    """Write a CSV table of suspects in their order; `listed` has the positions of those listed as mislabeled."""
    mislabeled = set(listed.tolist())
    rows: list[tuple[str, ...]] = [SUSPECT_COLUMNS]
    for one in suspects:
        near = "; ".join(f"{other.label} at {other.distance:.3f}" for other in one.neighbors)
        numbers = (f"{one.score:.4f}", f"{one.confidence:.4f}", "yes" if one.index in mislabeled else "no")
        shares = (f"{one.given_share:.4f}", f"{one.suggested_share:.4f}")
        rows.append((one.image, one.part, one.given, one.suggested, *numbers, *shares, near))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, rows)


def parts_of_classes(data: RetrievalData, classes: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Class after `classes` gave some another name -> the parts of `data` that it is in.

    They are those of the class that always had this name, else those of the first one that has it now: so training and
    held-out classes stay apart when one of each is merged.
    """
    parts_of: dict[str, list[str]] = {}
    for role, part in data.parts.items():
        for name in part.class_names:
            parts_of.setdefault(name, []).append(role)
    now = {name: classes.get(name, name) for name in parts_of}
    found: dict[str, list[str]] = {}
    for name, then in sorted(now.items(), key=lambda pair: pair[0] != pair[1]):
        if then is not None:
            found.setdefault(then, parts_of[name])
    return found


def write_table(path: Path, data: RetrievalData, corrections: Corrections) -> None:
    """Write all images of `data` with corrected labels as a table that `pfml train --data.name` takes.

    It has the columns path, label and, unless nothing is held out, split; paths are relative to its folder. Every image
    keeps its split, unless it is corrected to a class of another one: then it goes there, so that training and unseen
    classes are those of `data` (`parts_of_classes`).

    Args:
        path: The file.
        data: All images.
        corrections: By position in `RetrievalData.joined`.
    """
    images, roles = data.joined()
    if not isinstance(images.images, tuple):
        raise ValueError(
            f"a table needs images that are files, and {data.name} has none: train with the list of corrections "
            f"(--data.corrections) instead"
        )
    corrected = corrections.apply(images)
    kept = [roles[k] for k in corrections.kept(images)]
    parts = parts_of_classes(data, corrections.classes)
    path = Path(path)
    columns = 2 if data.protocol == "none" else 3
    rows = [("path", "label", "split")[:columns]]
    assert isinstance(corrected.images, tuple)
    for file, label, role in zip(corrected.images, corrected.labels.tolist(), kept, strict=True):
        name = corrected.class_names[label]
        split = role if role in parts[name] else parts[name][-1]
        relative = os.path.relpath(file.absolute(), path.absolute().parent)
        is_query = split == "test" and data.parts.get("gallery") is not None
        rows.append((Path(relative).as_posix(), name, "query" if is_query else split)[:columns])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(path, rows)
