"""Edits of an index by a person: classes renamed, merged or deleted, images left out. Each can be undone.

An edit changes no shard. The manifest of the index lists the edits, and reading applies them: a class that a source
gives, by a folder's name or a table's label, is called by the name that the edits give it, or left out. So an edit is
one atomic write, ids stay, the next update from the same folder respects it, and undoing it takes it out of the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

__all__ = ["EDIT_KINDS", "Edit", "EditKind", "Edits"]

EditKind = Literal["rename", "merge", "delete", "leave_out"]
EDIT_KINDS: tuple[EditKind, ...] = get_args(EditKind)


@dataclass(frozen=True)
class Edit:
    """One edit; made by a caller, and returned by `ImageIndex.edit` with its number.

    Args:
        kind: rename gives a class a new name; merge makes a class part of another one; delete leaves out a class;
            leave_out leaves out images.
        class_name: The class, as it was called before the edit; "" for leave_out.
        into: Its new name, or the class that it became part of; "" for delete and leave_out.
        paths: Of the images, for leave_out.
        images: How many images it concerned when it was made.
        number: Names it within its index forever; later edits have larger numbers.
    """

    kind: EditKind
    class_name: str = ""
    into: str = ""
    paths: tuple[str, ...] = ()
    images: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        if self.kind not in EDIT_KINDS:
            raise ValueError(f"an edit must be one of {', '.join(EDIT_KINDS)}, got {self.kind!r}")
        has = bool(self.class_name), bool(self.into), bool(self.paths)
        needs = self.kind != "leave_out", self.kind in ("rename", "merge"), self.kind == "leave_out"
        if has != needs:
            wanted = [name for name, needed in zip(("class_name", "into", "paths"), needs, strict=True) if needed]
            raise ValueError(f"{self.kind} must be given {' and '.join(wanted)} alone, got {self}")

    def __str__(self) -> str:
        images = f"{self.images:,} image{'' if self.images == 1 else 's'}"
        match self.kind:
            case "rename":
                return f"renamed {self.class_name} to {self.into}"
            case "merge":
                return f"merged {self.class_name} into {self.into} ({images})"
            case "delete":
                return f"deleted {self.class_name} ({images})"
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
        return frozenset(path for edit in self.steps for path in edit.paths)

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
            members = called.pop(edit.class_name, []) if edit.kind != "leave_out" else []
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
            if not all(isinstance(text, str) for text in (edit.class_name, edit.into)):
                raise TypeError(f"class names must be texts, got {one!r}")
            steps.append(edit)
        return cls(tuple(steps))
