"""Findings of `pfml audit`, by the names of the index, and decisions about them in a table for `pfml audit --apply`.

The tables have the classes that the run was audited with. What the index calls them now is shown (`pfml.search.edits`);
decisions are written with the classes of the audit, so that they hold whatever is renamed later.
"""

from __future__ import annotations

import csv
import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pfml.audit.decisions import DECISION_COLUMNS, DECISIONS, DecisionName
from pfml.serving.gallery import Gallery, RunFileError
from pfml.storage.files import write_csv
from pfml.storage.lock import locked_folder
from pfml.typos import did_you_mean

__all__ = ["AuditQueue", "Copies", "Copy", "Decision", "QueuedSuspect", "SimilarClasses", "key_of"]

#: Between the two classes or images of a cell of classes.csv.
SEPARATOR = "; "
#: Seconds that a decision waits for another process of the server, which takes milliseconds.
LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class QueuedSuspect:
    """A row of suspects.csv.

    Args:
        key: Its id in requests, a digest of the path.
        path: The file of the image.
        given: The class by its label.
        suggested: The class that it may belong to; "" if that was deleted.
        score: How suspicious it is.
        confidence: The probability that the label is noise.
        listed: Whether the audit lists the label as noise.
        neighbors: Its neighbors as the audit described them.
        labels: The given and the suggested class as the audit calls them.
    """

    key: str
    path: str
    given: str
    suggested: str
    score: float
    confidence: float
    listed: bool
    neighbors: str
    labels: tuple[str, str]


@dataclass(frozen=True)
class Copy:
    """An image that others are copies of.

    Args:
        key: Its id in requests, a digest of the path.
        path: The file of the image.
        part: Where it is used, such as train; empty if that is not known.
        given: The class by its label; "" if that was deleted.
        label: The same as the audit calls it.
    """

    key: str
    path: str
    part: str
    given: str
    label: str


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
class SimilarClasses:
    """Two classes that may be one, a row of classes.csv.

    Args:
        names: Of both.
        images: How many images the audit had of each.
        share: How much their images are mixed, over what chance would do to a single class.
        examples: A file of each.
    """

    names: tuple[str, str]
    images: tuple[int, int]
    share: float
    examples: tuple[str, str]


@dataclass(frozen=True)
class Decision:
    """A decision about an image; `label` is its class from then on, "" if the image is left out."""

    decision: DecisionName
    label: str


class AuditQueue:
    """RUN/audit: the tables of findings are read, decisions.csv is rewritten atomically at each decision.

    Args:
        gallery: The run and its index, which has the names of classes.
    """

    def __init__(self, gallery: Gallery) -> None:
        folder = gallery.run / "audit"
        self.suspects_file = folder / "suspects.csv"
        self.copies_file = folder / "duplicates.csv"
        self.classes_file = folder / "classes.csv"
        self.decisions_file = folder / "decisions.csv"
        self._gallery = gallery
        self._lock = threading.Lock()
        self._read: tuple[tuple[int, int], dict[str, QueuedSuspect]] | None = None

    def suspects(self) -> dict[str, QueuedSuspect]:
        """Key -> suspect, most suspicious first; empty before `pfml audit`. A new audit is read again.

        Edits of the index settle some: the image was left out or relabeled, its class was deleted, or is now the
        suggested one.
        """
        found, edits = self._read_suspects(), self._gallery.index.edits
        if not len(edits):
            return found
        names = edits.names({name for one in found.values() for name in one.labels})
        now = (
            replace(one, given=names[one.given] or "", suggested=names[one.suggested] or "") for one in found.values()
        )
        return {
            one.key: one
            for one in now
            if one.given not in ("", one.suggested)
            and str(Path(one.path).absolute()) not in edits.left_out | edits.relabeled.keys()
        }

    def _read_suspects(self) -> dict[str, QueuedSuspect]:
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
        found = [_copies(rows) for rows in groups.values()]
        names = self._gallery.index.edits.names({image.label for group in found for image in group.images})
        return [
            replace(group, images=tuple(replace(one, given=names[one.label] or "") for one in group.images))
            for group in found
        ]

    def similar_classes(self) -> list[SimilarClasses]:
        """Pairs of classes that may be one, most mixed first; without those that were merged or deleted since."""
        rows = _rows(self.classes_file) if self.classes_file.is_file() else []
        given = [*self._gallery.index.given_classes, *self._gallery.trained_as]
        found = [_similar(row, given) for row in rows if row.get("advice") == "merge"]
        names = self._gallery.index.edits.names({name for one in found for name in one.names})
        now = (replace(one, names=(names[one.names[0]] or "", names[one.names[1]] or "")) for one in found)
        return [one for one in now if all(one.names) and one.names[0] != one.names[1]]

    def class_names(self) -> list[str]:
        """The classes that an image may be relabeled as, those of the audit among them."""
        of_suspects = {name for one in self.suspects().values() for name in (one.given, one.suggested)}
        return sorted({*self._gallery.contents().class_names, *of_suspects} - {""})

    def decisions(self) -> dict[str, Decision]:
        """Path -> decision, in the order of the decisions."""
        found = self._read_decisions()
        names = self._gallery.index.edits.names({one.label for one in found.values()})
        return {path: replace(one, label=names[one.label] or "") for path, one in found.items()}

    def _read_decisions(self) -> dict[str, Decision]:
        """Path -> decision, with the class names of the audit."""
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
        edits = self._gallery.index.edits
        if decision == "accept" and edits.name(suggested) is None:
            raise ValueError(f"the suggested class must be there, but {suggested!r} was deleted: relabel or leave out")
        labels = {"accept": suggested, "reject": given, "relabel": self._gallery.given_class(label), "drop": ""}
        self._write(path, Decision(decision, labels[decision]))
        return Decision(decision, edits.name(labels[decision]) or "")

    def withdraw(self, key: str) -> None:
        """Withdraw the decision about a suspect or a copy; KeyError if there is no such image."""
        self._write(self._judged(key)[0], None)

    def has(self, key: str) -> bool:
        """Whether a suspect or a copy has this key."""
        return key in self.suspects() or any(image.key == key for group in self.copies() for image in group.images)

    def _judged(self, key: str) -> tuple[str, str, str]:
        """Path of a suspect or a copy, its given and its suggested class as the audit calls them."""
        if key in (found := self.suspects()):
            return found[key].path, *found[key].labels
        copies = {image.key: image for group in self.copies() for image in group.images}
        return copies[key].path, copies[key].label, copies[key].label

    def _write(self, path: str, decision: Decision | None) -> None:
        with self._lock, self._locked_file():
            decided = self._read_decisions()
            decided.pop(path, None)  # so that the newest is the last row
            if decision is not None:
                decided[path] = decision
            rows = ((name, one.decision, one.label) for name, one in decided.items())
            write_csv(self.decisions_file, [DECISION_COLUMNS, *rows])

    @contextmanager
    def _locked_file(self) -> Iterator[None]:
        """Write the decisions within the block, one process of the server at a time."""
        try:
            self.decisions_file.parent.mkdir(parents=True, exist_ok=True)
            with locked_folder(self.decisions_file.parent, wait=LOCK_SECONDS):
                yield
        except RunFileError:
            raise
        except OSError as error:
            raise RunFileError(self.decisions_file, "write", error) from error


def key_of(path: str) -> str:
    """The id in requests of the suspect with this path."""
    return hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:16]


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            return list(csv.DictReader(text))
    except OSError as error:
        raise RunFileError(path, "read", error) from error


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
            (row["given"], row["suggested"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"suspects.csv must be as pfml audit writes it, got {error!r}: run pfml audit again") from None


def _copies(rows: list[dict[str, str]]) -> Copies:
    try:
        return Copies(
            rows[0]["copy"] == "exact",
            rows[0]["across_classes"] == "yes",
            rows[0]["across_parts"] == "yes",
            tuple(Copy(key_of(row["path"]), row["path"], row["part"], row["class"], row["class"]) for row in rows),
        )
    except (KeyError, AttributeError) as error:
        again = "run pfml audit again"
        raise ValueError(f"duplicates.csv must be as pfml audit writes it, got {error!r}: {again}") from None


def _similar(row: dict[str, str], given: Iterable[str]) -> SimilarClasses:
    try:
        first, second = row["images"].split(SEPARATOR)
        names = _pair(row["classes"], set(given))
        return SimilarClasses(names, (int(first), int(second)), float(row["share"]), _pair(row["examples"]))
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"classes.csv must be as pfml audit writes it, got {error!r}: run pfml audit again") from None


def _pair(text: str, known: Iterable[str] = ()) -> tuple[str, str]:
    """The two names in a cell; where a name has the separator itself, both must be `known`."""
    parts = text.split(SEPARATOR)
    cuts = [(SEPARATOR.join(parts[:k]), SEPARATOR.join(parts[k:])) for k in range(1, len(parts))]
    return next((cut for cut in cuts if {*cut} <= {*known}), cuts[len(cuts) // 2])


def _decision(path: Path, row: dict[str, str]) -> Decision:
    decision = next((one for one in DECISIONS if one == row.get("decision")), None)
    if decision is None or not row.get("path"):
        raise ValueError(f"{path} must have path, decision and label on each line, got {row}: correct it by hand")
    return Decision(decision, row.get("label") or "")
