"""Edits of an index by a person, which can be undone: of classes (rename, merge, delete) and of images (relabel, tag).

An edit changes no shard. The manifest of the index lists the edits, and reading applies them: a class that a source
gives, by a folder's name or a table's label, is called by the name that the edits give it, or left out. So an edit is
one atomic write, ids stay, the next update from the same folder respects it, and undoing it takes it out of the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

__all__ = ["EDIT_KINDS", "Edit", "EditKind", "Edits"]

EditKind = Literal["rename", "merge", "delete", "leave_out", "relabel", "tag", "untag"]
EDIT_KINDS: tuple[EditKind, ...] = get_args(EditKind)
#: Kind -> what it must be given.
NEEDED: dict[str, tuple[str, ...]] = {
    "rename": ("class_name", "into"),
    "merge": ("class_name", "into"),
    "delete": ("class_name",),
    "leave_out": ("paths",),
    "relabel": ("into", "paths"),
    "tag": ("paths", "tag"),
    "untag": ("paths", "tag"),
}


@dataclass(frozen=True)
class Edit:
    """One edit; made by a caller, and returned by `ImageIndex.edit` with its number.

    Args:
        kind: rename gives a class a new name; merge makes a class part of another one; delete leaves out a class;
            leave_out leaves out images; relabel gives images another class; tag and untag give and take a tag.
        class_name: The class, as it was called before the edit; "" for edits of images.
        into: Its new name, or the class that it or the images became part of; "" otherwise.
        paths: Of the images, for edits of images.
        images: How many images it concerned when it was made.
        number: Names it within its index forever; later edits have larger numbers.
        tag: For tag and untag.
    """

    kind: EditKind
    class_name: str = ""
    into: str = ""
    paths: tuple[str, ...] = ()
    images: int = 0
    number: int = 0
    tag: str = ""

    def __post_init__(self) -> None:
        if self.kind not in EDIT_KINDS:
            raise ValueError(f"an edit must be one of {', '.join(EDIT_KINDS)}, got {self.kind!r}")
        given = tuple(name for name in ("class_name", "into", "paths", "tag") if getattr(self, name))
        if given != NEEDED[self.kind]:
            raise ValueError(f"{self.kind} must be given {' and '.join(NEEDED[self.kind])} alone, got {self}")

    def __str__(self) -> str:
        images = f"{self.images:,} image{'' if self.images == 1 else 's'}"
        match self.kind:
            case "rename":
                return f"renamed {self.class_name} to {self.into}"
            case "merge":
                return f"merged {self.class_name} into {self.into} ({images})"
            case "delete":
                return f"deleted {self.class_name} ({images})"
            case "relabel":
                return f"relabeled {images} as {self.into}"
            case "tag":
                return f"tagged {images} {self.tag}"
            case "untag":
                return f"took the tag {self.tag} from {images}"
        return f"deleted {images}"

    @property
    def classes(self) -> frozenset[str]:
        """The names of classes that it is about."""
        return frozenset({self.class_name, self.into} - {""})


@dataclass(frozen=True)
class Edits:
    """All edits of an index.

    Args:
        steps: In the order in which they were made.
    """

    steps: tuple[Edit, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def left_out(self) -> frozenset[str]:
        """Paths of the images that were left out one by one."""
        return frozenset(path for edit in self.steps if edit.kind == "leave_out" for path in edit.paths)

    @cached_property
    def relabeled(self) -> dict[str, str | None]:
        """Path of an image that was relabeled -> its class now, None if that was deleted.

        Example:
            >>> Edits((Edit("relabel", into="gull", paths=("1.jpg",)), Edit("rename", "gull", "tern"))).relabeled
            {'1.jpg': 'tern'}
        """
        found: dict[str, str | None] = {}
        for edit in self.steps:
            if edit.kind == "relabel":
                found |= dict.fromkeys(edit.paths, edit.into)
            elif edit.class_name:
                found |= {path: edit.into or None for path, name in found.items() if name == edit.class_name}
        return found

    @cached_property
    def tags(self) -> dict[str, tuple[str, ...]]:
        """Path of an image -> its tags, in the order in which it got them; without images that have none."""
        found: dict[str, tuple[str, ...]] = {}
        for edit in self.steps:
            for path in edit.paths if edit.tag else ():
                others = tuple(tag for tag in found.get(path, ()) if tag != edit.tag)
                found[path] = (*others, edit.tag) if edit.kind == "tag" else others
        return {path: tags for path, tags in found.items() if tags}

    def classes_of(self, paths: Iterable[str], given: Sequence[str]) -> list[str | None]:
        """The class that each image has now, if a source gives it this one; None if it, or its class, was left out."""
        names = self.names(given)
        return [
            None if path in self.left_out else self.relabeled.get(path, names[name])
            for path, name in zip(paths, given, strict=True)
        ]

    def name(self, given: str) -> str | None:
        """What the class that a source calls `given` is called now; None if it was deleted."""
        return self.names((given,))[given]

    def names(self, given: Iterable[str]) -> dict[str, str | None]:
        """Class that a source gives -> its name now, None if it was deleted.

        Example:
            >>> edits = Edits((Edit("rename", "gul", "gull"), Edit("merge", "gull", "tern"), Edit("delete", "misc")))
            >>> edits.names(["gul", "tern", "misc", "auk"])
            {'gul': 'tern', 'tern': 'tern', 'misc': None, 'auk': 'auk'}
        """
        called = {name: [name] for name in given}
        now: dict[str, str | None] = dict.fromkeys(called)
        for edit in self.steps:
            members = called.pop(edit.class_name, []) if edit.class_name else []
            if members and edit.into:
                called[edit.into] = called.get(edit.into, []) + members
        return now | {one: name for name, members in called.items() for one in members}

    def changed(self, given: Iterable[str]) -> dict[str, str | None]:
        """Those of `names` that are called otherwise now."""
        return {name: now for name, now in self.names(given).items() if now != name}

    def added(self, edit: Edit) -> Edits:
        """These edits, and then one more."""
        return Edits((*self.steps, edit))

    def blocker(self, edit: Edit) -> Edit | None:
        """The last later edit that is about a class of this one and must be undone first; None if there is none."""
        later = self.steps[self.steps.index(edit) + 1 :]
        return next((other for other in reversed(later) if other.classes & edit.classes), None)

    def undone(self, number: int | None = None) -> tuple[Edits, Edit]:
        """These edits without one, by default the last, and that one.

        Raises:
            ValueError: If there is none of this number, or a later edit is about one of its classes.
        """
        found = next((one for one in reversed(self.steps) if number in (None, one.number)), None)
        if found is None:
            raise ValueError("there must be an edit to undo, but there is none, or it was undone already")
        if (later := self.blocker(found)) is not None:
            raise ValueError(f"what was done later must be undone first: {later}")
        return Edits(tuple(one for one in self.steps if one != found)), found

    def content(self) -> list[dict[str, Any]]:
        """The edits as JSON has them."""
        return [asdict(edit) for edit in self.steps]

    @classmethod
    def read(cls, content: Iterable[Mapping[str, Any]]) -> Edits:
        """What `content` returned; TypeError or ValueError for anything else."""
        steps = []
        for one in content:
            edit = Edit(**{**one, "paths": tuple(map(str, one["paths"]))})
            if not all(isinstance(text, str) for text in (edit.class_name, edit.into, edit.tag)):
                raise TypeError(f"names of classes and tags must be texts, got {one!r}")
            steps.append(edit)
        return cls(tuple(steps))
