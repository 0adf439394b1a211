"""Progress of a run, as a person sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pfml.evaluation.metrics import HEADLINE, summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["Monitor", "Monitors", "ProgressMonitor"]

T = TypeVar("T")


class Monitor:
    """Receives the events of a run while it trains. This one ignores them; override the methods that you need.

    Methods are called in the process of the first rank, between steps, and what they raise ends the run, whose state is
    that of its last checkpoint. On a GPU, `step` is called one step late.

    Example:
        >>> class StopEarly(Monitor):
        ...     def evaluated(self, entry):
        ...         if entry["test"]["recall_at_1"] > 0.9:
        ...             raise KeyboardInterrupt
    """

    def remark(self, text: str) -> None:
        """A sentence for the user."""

    def track(self, items: Iterable[T], description: str, total: int) -> Iterable[T]:
        """The items, with progress shown while they are taken."""
        return items

    def start(self, epochs: int, steps_per_epoch: int, steps_done: int) -> None:
        """Training starts or resumes."""

    def step(self, epoch: int, loss: float, images_per_second: float) -> None:
        """A step is done."""

    def evaluated(self, entry: dict[str, Any]) -> None:
        """An evaluation is done; `entry` is a line of the history."""

    def stop(self) -> None:
        """Training ended."""


class Monitors(Monitor):
    """Several monitors; progress of items is shown by the first.

    Args:
        parts: In the order in which they are called.
    """

    def __init__(self, parts: Sequence[Monitor]) -> None:
        self.parts = tuple(parts)

    def remark(self, text: str) -> None:
        for part in self.parts:
            part.remark(text)

    def track(self, items: Iterable[T], description: str, total: int) -> Iterable[T]:
        return self.parts[0].track(items, description, total) if self.parts else items

    def start(self, epochs: int, steps_per_epoch: int, steps_done: int) -> None:
        for part in self.parts:
            part.start(epochs, steps_per_epoch, steps_done)

    def step(self, epoch: int, loss: float, images_per_second: float) -> None:
        for part in self.parts:
            part.step(epoch, loss, images_per_second)

    def evaluated(self, entry: dict[str, Any]) -> None:
        for part in self.parts:
            part.evaluated(entry)

    def stop(self) -> None:
        for part in self.parts:
            part.stop()


class ProgressMonitor(Monitor):
    """A progress bar: epoch, loss, images/s, last R@1, time left; without a terminal, a line per evaluation.

    Args:
        console: Where to; by default a new one.
        lines: Whether each evaluation is a line, too.
        said: Remarks that the user has read already.
    """

    def __init__(self, console: Console | None = None, *, lines: bool = True, said: Collection[str] = ()) -> None:
        from pfml.terminal import plain_console

        self.console = console or plain_console()
        self.lines = lines
        self.said = frozenset(said)
        self._progress: Progress | None = None
        self._epochs = 0
        self._recall = ""

    def remark(self, text: str) -> None:
        if text in self.said:
            return
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def track(self, items: Iterable[T], description: str, total: int) -> Iterator[T]:
        if self._progress is not None or not self.console.is_terminal:
            yield from items
            return
        from rich.progress import track

        yield from track(items, description, total, console=self.console, transient=True)

    def start(self, epochs: int, steps_per_epoch: int, steps_done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._epochs = epochs
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]:,.0f} images/s{task.fields[recall]}  left"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        fields: dict[str, Any] = {"loss": "-", "speed": 0.0, "recall": ""}
        self._bar = self._progress.add_task("starting", total=epochs * steps_per_epoch, completed=steps_done, **fields)
        self._progress.start()

    def step(self, epoch: int, loss: float, images_per_second: float) -> None:
        assert self._progress is not None
        description = f"epoch {epoch + 1}/{self._epochs}"
        fields: dict[str, Any] = {"loss": f"{loss:.4g}", "speed": images_per_second, "recall": self._recall}
        self._progress.update(self._bar, advance=1, description=description, **fields)

    def evaluated(self, entry: dict[str, Any]) -> None:
        parts = [f"epoch {entry['epoch']:>3}/{self._epochs}", f"loss {entry['loss']:.4g}"]
        for role in ("validation", "test"):
            if role in entry:
                parts.append(f"{role} {summary(entry[role])}")
        parts.append(f"{entry['images_per_second']:,.0f} images/s")
        self._recall = f"  {summary(entry['test'], HEADLINE[:1])}" if "test" in entry else ""
        if self.lines:
            self.remark("  ".join(parts))

    def stop(self) -> None:
        if self._progress is not None and self.console.is_terminal:  # rich 13 and 14 end a bar that is off by a line
            self._progress.stop()
        self._progress = None
