"""The error that a command ends with: what all ranks of torchrun say is said once, what one says with its number."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from pfml.distributed.torchrun import Launch
from pfml.terminal import visible

__all__ = ["end", "say_once"]

#: Seconds that a rank which fails waits for the others, to learn whether they fail alike.
PATIENCE = 5.0
#: Seconds between two looks.
PAUSE = 0.05


def end(name: str, error: object, *, status: int = 1, hint: str = "") -> NoReturn:
    """End the program by an error of the user; under torchrun, ranks that end by the same one say it once.

    Args:
        name: The command.
        error: What is wrong, in one sentence.
        status: Of the process.
        hint: A line below the error.
    """
    launch = _launch()
    if launch.size == 1 and status == 1:
        sys.exit(_line(name, error, hint))
    if launch.size == 1:
        sys.stderr.write(f"{_line(name, error, hint)}\n")
    else:
        say_once(str(error), launch, _store(launch), lambda text: sys.stderr.write(f"{_line(name, text, hint)}\n"))
    sys.exit(status)


def say_once(text: str, launch: Launch, store: Any, say: Callable[[str], object]) -> None:
    """Say `text` on the lowest of the ranks that have it, with its number if not all have.

    Ranks must not end before it is said: torchrun ends all others as soon as one has ended.

    Args:
        text: The same on ranks that fail alike.
        launch: Which rank this is.
        store: What the ranks have in common; None if they have nothing, and each speaks for itself.
        say: Writes a text.
    """
    from pfml.training.shutdown import catch_shutdown_requests

    def words(rank: int) -> str | None:
        return _kept(store, f"words of {rank}")

    def is_heard(rank: int) -> bool:
        return words(rank) is not None

    ranks = range(launch.size)
    _keep(store, f"words of {launch.rank}", text)
    with catch_shutdown_requests(
        echo_seconds=float("inf")
    ) as request:  # torchrun asks to stop where others have ended without a word
        _wait(lambda: request.received or store is None or all(map(is_heard, ranks)))
        alike = sorted({launch.rank, *(rank for rank in ranks if words(rank) == text)})
        if alike[0] == launch.rank:
            say(_named(text, alike, launch.size))
            sys.stderr.flush()
            _keep(store, f"{launch.rank} has spoken", "yes")
        else:
            _wait(lambda: request.received or _kept(store, f"{alike[0]} has spoken") is not None)


def _named(text: str, alike: list[int], size: int) -> str:
    """The text with the ranks that have it, unless all have or it names a rank itself."""
    if len(alike) == size or text.startswith("rank "):
        return text
    more = f" (and {len(alike) - 1} more of {size} ranks)" if len(alike) > 1 else ""
    return f"rank {alike[0]}: {text}{more}"


def _line(name: str, error: object, hint: str) -> str:
    return visible(f"{name}: error: {error}" + (f"\n{hint}" if hint else ""))


def _launch() -> Launch:
    try:
        return Launch.of_process()
    except ValueError:  # what it was told about itself is the error that it ends with
        return Launch()


def _store(launch: Launch) -> Any:
    """What ranks have in common beyond the end of any of them: torchrun's own store, or nothing."""
    from torch.distributed.distributed_c10d import PrefixStore

    from pfml.distributed.launch import rendezvous_store

    if not launch.by_agent:
        return None
    return PrefixStore(f"last words of start {launch.restarts}", rendezvous_store(launch))


def _keep(store: Any, key: str, text: str) -> None:
    try:
        if store is not None:
            store.set(key, text)
    except RuntimeError:  # torchrun has ended: everyone speaks for itself
        return


def _kept(store: Any, key: str) -> str | None:
    try:
        return str(store.get(key).decode()) if store is not None and store.check([key]) else None
    except RuntimeError:
        return None


def _wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_done() and time.monotonic() < deadline:
        time.sleep(PAUSE)
