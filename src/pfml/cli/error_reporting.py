"""The error that a command ends with: one that all ranks of torchrun share is printed once, others name their rank.

By hand, since torchelastic's `@record` writes an error file for each rank, and torchrun prints the first of them with a
traceback: it neither merges equal errors nor ends with one sentence.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from pfml.distributed.torchrun import Launch
from pfml.terminal import visible

__all__ = ["current_launch", "exit_with_error", "report_once"]

#: Seconds that a failing rank waits for the others, to learn whether they fail with the same error.
WAIT_SECONDS = 5.0
#: Seconds between two polls of the store.
POLL_SECONDS = 0.05


def exit_with_error(name: str, error: object, *, status: int = 1, hint: str = "") -> NoReturn:
    """End the program by an error of the user; under torchrun, an error that several ranks share is printed once.

    Args:
        name: The command.
        error: What is wrong, in one sentence.
        status: Of the process.
        hint: A line below the error.
    """
    launch = current_launch()
    if launch.size == 1 and status == 1:
        sys.exit(_line(name, error, hint))
    if launch.size == 1:
        sys.stderr.write(f"{_line(name, error, hint)}\n")
    else:
        report_once(str(error), launch, _store(launch), lambda text: sys.stderr.write(f"{_line(name, text, hint)}\n"))
    sys.exit(status)


def report_once(text: str, launch: Launch, store: Any, write: Callable[[str], object]) -> None:
    """Write an error on the lowest of the ranks that share it, with its number unless all ranks share it.

    Ranks must not end before it is written: torchrun ends all others as soon as one has ended.

    Args:
        text: Equal on ranks that share the error.
        launch: Which rank this is.
        store: The key-value store of all ranks; None if there is none, and each rank reports for itself.
        write: Writes a text.
    """
    from pfml.training.shutdown import catch_shutdown_requests

    def error_of(rank: int) -> str | None:
        return _get(store, f"error of rank {rank}")

    def has_failed(rank: int) -> bool:
        return error_of(rank) is not None

    ranks = range(launch.size)
    _set(store, f"error of rank {launch.rank}", text)
    # torchrun requests a shutdown where other ranks have ended without an error of ours
    with catch_shutdown_requests(echo_seconds=float("inf")) as request:
        _wait(lambda: request.received or store is None or all(map(has_failed, ranks)))
        sharing = sorted({launch.rank, *(rank for rank in ranks if error_of(rank) == text)})
        if sharing[0] == launch.rank:
            write(_with_ranks(text, sharing, launch.size))
            sys.stderr.flush()
            _set(store, f"rank {launch.rank} has reported", "yes")
        else:
            _wait(lambda: request.received or _get(store, f"rank {sharing[0]} has reported") is not None)


def _with_ranks(text: str, sharing: list[int], size: int) -> str:
    """The error with the ranks that share it, unless all do or it names a rank itself."""
    if len(sharing) == size or text.startswith("rank "):
        return text
    more = f" (and {len(sharing) - 1} more of {size} ranks)" if len(sharing) > 1 else ""
    return f"rank {sharing[0]}: {text}{more}"


def _line(name: str, error: object, hint: str) -> str:
    return visible(f"{name}: error: {error}" + (f"\n{hint}" if hint else ""))


def current_launch() -> Launch:
    """What torchrun tells this process about itself; a process alone where its variables are wrong."""
    try:
        return Launch.of_process()
    except ValueError:  # torchrun's variables are wrong, which is the error to report
        return Launch()


def _store(launch: Launch) -> Any:
    """torchrun's own store, which outlives each rank; None without torchrun's agent."""
    from torch.distributed.distributed_c10d import PrefixStore

    from pfml.distributed.launch import rendezvous_store

    if not launch.by_agent:
        return None
    return PrefixStore(f"errors of start {launch.restarts}", rendezvous_store(launch))


def _set(store: Any, key: str, text: str) -> None:
    try:
        if store is not None:
            store.set(key, text)
    except RuntimeError:  # torchrun has ended: each rank reports for itself
        return


def _get(store: Any, key: str) -> str | None:
    try:
        return str(store.get(key).decode()) if store is not None and store.check([key]) else None
    except RuntimeError:
        return None


def _wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_done() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
