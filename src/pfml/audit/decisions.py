"""Corrected labels from suspects and what a person decided about them; the original files are not changed."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from pfml.audit.suspects import Audit, Suspect
from pfml.data import ImageSet, RetrievalData
from pfml.data.corrections import Corrections
from pfml.storage.files import named_errors, write_atomically
from pfml.typos import did_you_mean

__all__ = [
    "DECISIONS",
    "DECISION_COLUMNS",
    "POLICIES",
    "DecisionName",
    "corrections_of",
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
    audit: Audit, *, policy: Policy = "relabel", threshold: float = 0.5, decisions: Path | None = None
) -> Corrections:
    """The labels to change.

    Args:
        audit: The judged images.
        policy: For listed images without a decision: "relabel" gives the suggested label, "drop"
            leaves them out, "keep" changes nothing.
        threshold: The probability from which on an image is listed.
        decisions: A CSV table of what a person decided, which overrides the policy; see `read_decisions`.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}{did_you_mean(policy, POLICIES)}")
    labels: dict[int, int | None] = {}
    if policy != "keep":
        for index in audit.listed(threshold).tolist():
            labels[index] = None if policy == "drop" else int(audit.scores.suggested[index])
    for index, label in (read_decisions(decisions, audit) if decisions is not None else {}).items():
        labels[index] = label
    given = audit.images.labels.tolist()
    return Corrections({index: label for index, label in labels.items() if label != given[index]})


def read_decisions(path: Path, audit: Audit) -> dict[int, int | None]:
    """The decisions of a person: position -> label, None to leave the image out.

    The table has the columns path, decision and label. accept takes the suggested label, that in the column label if
    there is one (what the person saw; another audit may suggest another), reject keeps the given one, relabel takes the
    class in the column label, drop leaves the image out. The last line about an image counts.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"the decisions must be a CSV file, got {path}, which is none")
    index_of = _positions(audit.images)
    decided: dict[int, int | None] = {}
    with named_errors(path, "a CSV table in UTF-8"), path.open(encoding="utf-8-sig", newline="") as text:
        table = csv.DictReader(text)
        header = table.fieldnames or []
        missing = [column for column in DECISION_COLUMNS if column not in header]
        if missing:
            raise ValueError(
                f"{path} must have the columns path, decision and label, got {', '.join(header) or 'none'}"
            )
        for row in table:
            where = f"{path}, line {table.line_num}"
            image = (row["path"] or "").strip()
            if image not in index_of:
                raise ValueError(f"{where} must name a training image, got {image!r}")
            index = index_of[image]
            decided[index] = _decided(
                where, audit, index, (row["decision"] or "").strip(), (row["label"] or "").strip()
            )
    return decided


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
                raise ValueError(f"{where} must name a training class, got {label!r}{did_you_mean(label, names)}")
            return names.index(label)
    known = ", ".join(DECISIONS)
    raise ValueError(f"{where} must decide one of {known}, got {decision!r}{did_you_mean(decision, DECISIONS)}")


def _positions(images: ImageSet) -> dict[str, int]:
    """Position of each image by its whole name and by its short one."""
    short = {name: k for k, name in enumerate(images.short_names())}
    return {**short, **{images.name_of(k): k for k in range(len(images))}}


def write_suspects(path: Path, suspects: list[Suspect], listed: Tensor) -> None:
    """Write a CSV table of suspects in their order; `listed` has the positions of those listed as mislabeled."""
    mislabeled = set(listed.tolist())
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(SUSPECT_COLUMNS)
    for one in suspects:
        near = "; ".join(f"{other.label} at {other.distance:.3f}" for other in one.neighbors)
        numbers = (f"{one.score:.4f}", f"{one.confidence:.4f}", "yes" if one.index in mislabeled else "no")
        shares = (f"{one.given_share:.4f}", f"{one.suggested_share:.4f}")
        table.writerow((one.image, one.given, one.suggested, *numbers, *shares, near))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode(errors="surrogateescape"))


def write_table(path: Path, data: RetrievalData, corrections: Corrections) -> None:
    """Write all images of `data`, the training images corrected, as a table that `pfml train --data.name` takes.

    It has the columns path, label and split; paths are relative to its folder. Every image keeps its split, so
    that training and unseen classes are those of `data`.
    """
    parts = data.parts | {"train": corrections.apply(data.train)}
    if "gallery" in parts:
        parts["query"] = parts.pop("test")
    path = Path(path)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("path", "label", "split"))
    for split, images in parts.items():
        if not isinstance(images.images, tuple):
            raise ValueError(
                f"a table needs images that are files, and {data.name} has none: train with the list of corrections "
                f"(--data.corrections) instead"
            )
        for file, label in zip(images.images, images.labels.tolist(), strict=True):
            relative = os.path.relpath(file.absolute(), path.absolute().parent)
            table.writerow((Path(relative).as_posix(), images.class_names[label], split))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode(errors="surrogateescape"))
