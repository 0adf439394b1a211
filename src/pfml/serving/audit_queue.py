"""Suspects and copies of `pfml audit`, and decisions about them in a table for `pfml audit --apply`."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pfml.audit.decisions import DECISION_COLUMNS, DECISIONS, DecisionName
from pfml.storage.files import write_atomically
from pfml.typos import did_you_mean

__all__ = ["AuditFileError", "AuditQueue", "Copies", "Copy", "Decision", "QueuedSuspect", "key_of"]

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)


class AuditFileError(OSError):
    """A table of the audit cannot be read or written; `is_full` if the disk is full."""

    def __init__(self, path: Path, verb: Literal["read", "write"], error: OSError) -> None:
        self.is_full = error.errno in FULL
        name = f"{path.parent.name}/{path.name}"
        reason = error.strerror or type(error).__name__
        advice = "free space on the disk" if self.is_full else f"let the user that runs pfml serve {verb} it"
        outcome = "nothing was saved" if verb == "write" else "the queue cannot be shown"
        may = "may not" if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else "cannot"
        super().__init__(
            f"{outcome}: pfml serve {may} {verb} {name} in the folder of the run, got {reason!r}; {advice}, "
            f"then try again"
        )


@dataclass(frozen=True)
class QueuedSuspect:
    """A row of suspects.csv.

    Args:
        key: Its id in requests, a digest of the path.
        path: The file of the image.
        given: The class by its label.
        suggested: The class that it may belong to.
        score: How suspicious it is.
        confidence: The probability that the label is noise.
        listed: Whether the audit lists the label as noise.
        neighbors: Its neighbors as the audit described them.
    """

    key: str
    path: str
    given: str
    suggested: str
    score: float
    confidence: float
    listed: bool
    neighbors: str


@dataclass(frozen=True)
class Copy:
    """An image that others are copies of.

    Args:
        key: Its id in requests, a digest of the path.
        path: The file of the image.
        part: Where it is used, such as train; empty if that is not known.
        given: The class by its label.
    """

    key: str
    path: str
    part: str
    given: str


@dataclass(frozen=True)
class Copies:
    """A group of duplicates.csv.

    Args:
        is_exact: Whether all files have the same content.
        is_across_classes: Whether they have different labels.
        is_across_parts: Whether some are trained on and some are held out.
        images: Two or more.
    """

    is_exact: bool
    is_across_classes: bool
    is_across_parts: bool
    images: tuple[Copy, ...]


@dataclass(frozen=True)
class Decision:
    """A decision about an image; `label` is its class from then on, "" if the image is left out."""

    decision: DecisionName
    label: str


class AuditQueue:
    """RUN/audit: suspects.csv and duplicates.csv are read, decisions.csv is rewritten atomically at each decision.

    Args:
        run: Folder of the run.
        class_names: Tells the classes of the run and its index, which images may be relabeled as.
    """

    def __init__(self, run: Path, class_names: Callable[[], Sequence[str]]) -> None:
        self.suspects_file = run / "audit" / "suspects.csv"
        self.copies_file = run / "audit" / "duplicates.csv"
        self.decisions_file = run / "audit" / "decisions.csv"
        self._class_names = class_names
        self._lock = threading.Lock()
        self._read: tuple[tuple[int, int], dict[str, QueuedSuspect]] | None = None

    def suspects(self) -> dict[str, QueuedSuspect]:
        """Key -> suspect, most suspicious first; empty before `pfml audit`. A new audit is read again."""
        try:
            found = self.suspects_file.stat()
        except FileNotFoundError:
            return {}
        version = found.st_mtime_ns, found.st_size
        with self._lock:
            if self._read is None or self._read[0] != version:
                self._read = version, {one.key: one for one in map(_suspect, _rows(self.suspects_file))}
            return self._read[1]

    def copies(self) -> list[Copies]:
        """Groups of copies, those in several classes first; empty before `pfml audit`."""
        groups: dict[str, list[dict[str, str]]] = {}
        for row in _rows(self.copies_file) if self.copies_file.is_file() else ():
            groups.setdefault(row.get("group", ""), []).append(row)
        return [_copies(rows) for rows in groups.values()]

    def class_names(self) -> list[str]:
        """The classes that an image may be relabeled as, those of the audit among them."""
        of_suspects = {name for one in self.suspects().values() for name in (one.given, one.suggested)}
        return sorted({*self._class_names(), *of_suspects})

    def decisions(self) -> dict[str, Decision]:
        """Path -> decision, in the order of the decisions."""
        if not self.decisions_file.is_file():
            return {}
        return {row["path"]: _decision(self.decisions_file, row) for row in _rows(self.decisions_file)}

    def decide(self, key: str, decision: DecisionName, label: str = "") -> Decision:
        """Decide about a suspect or a copy, replacing an earlier decision; on disk before this returns.

        Args:
            key: Of the image; KeyError if there is none.
            decision: accept takes the suggested class, reject keeps the given one, relabel takes `label`, drop leaves
                the image out.
            label: One of `class_names`, for relabel.
        """
        path, given, suggested = self._judged(key)
        if decision == "relabel" and label not in (known := self.class_names()):
            hint = did_you_mean(label, known)
            raise ValueError(f"relabel needs a class of the run or its index, got {label!r}{hint}")
        labels = {"accept": suggested, "reject": given, "relabel": label, "drop": ""}
        decided = Decision(decision, labels[decision])
        self._write(path, decided)
        return decided

    def withdraw(self, key: str) -> None:
        """Withdraw the decision about a suspect or a copy; KeyError if there is no such image."""
        self._write(self._judged(key)[0], None)

    def has(self, key: str) -> bool:
        """Whether a suspect or a copy has this key."""
        return key in self.suspects() or any(image.key == key for group in self.copies() for image in group.images)

    def _judged(self, key: str) -> tuple[str, str, str]:
        """Path, given and suggested class of a suspect or a copy."""
        if key in (found := self.suspects()):
            return found[key].path, found[key].given, found[key].suggested
        copies = {image.key: image for group in self.copies() for image in group.images}
        return copies[key].path, copies[key].given, copies[key].given

    def _write(self, path: str, decision: Decision | None) -> None:
        with self._lock:
            decided = self.decisions()
            decided.pop(path, None)  # so that the newest is the last row
            if decision is not None:
                decided[path] = decision
            text = io.StringIO()
            table = csv.writer(text, lineterminator="\n")
            table.writerow(DECISION_COLUMNS)
            table.writerows((name, one.decision, one.label) for name, one in decided.items())
            try:
                self.decisions_file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.decisions_file, text.getvalue().encode(errors="surrogateescape"))
            except OSError as error:
                raise AuditFileError(self.decisions_file, "write", error) from error


def key_of(path: str) -> str:
    """The id in requests of the suspect with this path."""
    return hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:16]


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            return list(csv.DictReader(text))
    except OSError as error:
        raise AuditFileError(path, "read", error) from error


def _suspect(row: dict[str, str]) -> QueuedSuspect:
    try:
        path = row["path"]
        numbers = float(row["score"]), float(row["confidence"])
        return QueuedSuspect(
            key_of(path),
            path,
            row["given"],
            row["suggested"],
            *numbers,
            row["listed"] == "yes",
            row["neighbors"] or "",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"suspects.csv must be as pfml audit writes it, got {error!r}: run pfml audit again") from None


def _copies(rows: list[dict[str, str]]) -> Copies:
    try:
        return Copies(
            rows[0]["copy"] == "exact",
            rows[0]["across_classes"] == "yes",
            rows[0]["across_parts"] == "yes",
            tuple(Copy(key_of(row["path"]), row["path"], row["part"], row["class"]) for row in rows),
        )
    except (KeyError, AttributeError) as error:
        again = "run pfml audit again"
        raise ValueError(f"duplicates.csv must be as pfml audit writes it, got {error!r}: {again}") from None


def _decision(path: Path, row: dict[str, str]) -> Decision:
    decision = next((one for one in DECISIONS if one == row.get("decision")), None)
    if decision is None or not row.get("path"):
        raise ValueError(f"{path} must have path, decision and label on each line, got {row}: correct it by hand")
    return Decision(decision, row.get("label") or "")
