"""Heartbeats: every rank notices a rank that is gone, and names it.

A missing message says little: the other rank may be slow, or dead, or have ended because of a third one. So each rank
increments a counter in a store that all ranks reach, from a thread, and polls the counters of the others. A rank that
fails writes the reason there before it ends. The first reason that is written is the one that all ranks report.

torchrun's own monitoring restarts or ends the processes of a node when one of them exits. It neither notices a halted
process or a lost machine within seconds, nor tells the other ranks which rank failed and why; so this is by hand.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

__all__ = ["ARRIVAL", "Heartbeat", "Store"]

#: Seconds between heartbeats.
BEAT = 1.0
#: Seconds without a heartbeat after which a rank is lost ...
PATIENCE = 20.0
#: ... and if a message from or to a rank has failed already.
HASTE = 4.0
#: Seconds in which all ranks must have come.
ARRIVAL = 300.0
#: Seconds in which a rank that knows the reason must have ended; then it is ended.
GRACE = 15.0
REASON = "reason"


class Store(Protocol):
    """The methods of torch's stores that are used; they raise RuntimeError where no server answers."""

    def set(self, key: str, value: str) -> None:
        """Store a value under a key."""

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Store `desired` if the value is `expected`; returns the value that is stored then."""


class Heartbeat:
    """This rank's heartbeat, and a poll of the others'; a context manager around the work of all ranks.

    Args:
        store: A connection of its own to the store, since others may block theirs.
        rank: This rank.
        size: How many there are.
        holder: Who keeps the store, and is gone if it is: "rank 0" or torchrun.
        beat, patience, arrival, grace: Seconds, see the top of this module.
        clock: The seconds by which the silence of other ranks is measured.

    Attributes:
        reason: Why the work cannot continue, in words; None while it can.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        holder: str = "rank 0",
        beat: float = BEAT,
        patience: float = PATIENCE,
        arrival: float = ARRIVAL,
        grace: float = GRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.rank, self.size, self.holder = store, rank, size, holder
        self.beat, self.patience, self.arrival, self.grace = beat, patience, arrival, grace
        self.clock = clock
        self.reason: str | None = None
        self._others = [other for other in range(size) if other != rank]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._count = 0
        self._ended, self._found = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._beat()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(2 * self.beat)

    def report(self, reason: str) -> None:
        """Tell the others why this rank ends, unless another one was first."""
        self._settle(reason)
        self._let_others_read()

    def explanation(self) -> str | None:
        """Why a message did not arrive, after waiting for somebody to know; None if nobody does."""
        self.patience = min(self.patience, HASTE)
        self._found.wait(HASTE + 5 * self.beat)
        if self.reason is not None:
            self._let_others_read()
        return self.reason

    def _let_others_read(self) -> None:
        """Whoever holds the store must outlive the others' next poll."""
        if self.holder == f"rank {self.rank}":
            time.sleep(3 * self.beat)

    def _watch(self) -> None:
        while not self._ended.wait(self.beat) and self.reason is None:
            try:
                self._beat()
                self._poll()
            except RuntimeError as error:  # of the store: whoever holds it has ended
                if not self._ended.is_set():
                    said = str(error).split("\n")[0]
                    self._tell(f"{self.holder} no longer answers: the store of all ranks is gone ({said})")
        if self.reason is not None and not self._ended.wait(self.grace):
            # the rank waits for a message that will not come, where Python cannot interrupt it
            sys.stderr.write(f"rank {self.rank} ends: {self.reason}\n")
            sys.stderr.flush()
            os._exit(1)

    def _beat(self) -> None:
        self._count += 1
        self.store.set(_key(self.rank), str(self._count))

    def _poll(self) -> None:
        if self.store.check([REASON]):
            self._tell(self.store.get(REASON).decode())
            return
        now = self.clock()
        for other in self._others:
            key = _key(other)
            sign = self.store.get(key) if self.store.check([key]) else b""
            before, since = self._seen.get(other, (None, now))
            self._seen[other] = (sign, since if sign == before else now)
            silence = now - self._seen[other][1]
            if sign and silence > self.patience:
                self._settle(
                    f"rank {other} of {self.size} no longer answers, without a heartbeat for {silence:.0f} s: "
                    f"it was killed, or its machine is gone or halted"
                )
                return
            if not sign and silence > self.arrival:
                self._settle(f"rank {other} of {self.size} has not come within {silence:.0f} s: was it started?")
                return

    def _settle(self, reason: str) -> None:
        """Make `reason` that of all ranks, or take over the one that is there."""
        try:
            self._tell(self.store.compare_set(REASON, "", reason).decode())
        except RuntimeError:  # the store has gone, too
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
        self._found.set()


def _key(rank: int) -> str:
    return f"alive/{rank}"
