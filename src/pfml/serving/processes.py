"""Several processes behind one socket: started, watched, replaced and ended by the process that opened it.

Each process has its own model and opens the same index, whose files the system keeps in memory once. They share a
folder of the server's own: metrics, the buckets of the rate limit, and the embeddings of uploads. What a process writes
to the index, the others load at their next request (`Gallery.refresh`).

SIGTERM and SIGINT end all of them after their requests. SIGHUP replaces them one after the other, each when its
successor is ready, so that a new model is loaded without a refused connection. A process that dies is replaced.
"""

from __future__ import annotations

import logging
import logging.config
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from pfml.memory import keep_freed_memory
from pfml.serving.access_log import AccessLog
from pfml.serving.app import create_app
from pfml.serving.gallery import HOLD_BYTES, Gallery
from pfml.serving.metrics import FOLDER_VARIABLE, forget_process
from pfml.serving.middleware import Access
from pfml.serving.server import LOGGING, SHUTDOWN_SECONDS, announce, create_server, listening_socket
from pfml.serving.service import Limits, Service
from pfml.storage.lock import claim

__all__ = ["ServerSettings", "serve_processes"]

#: Seconds until another attempt when a replacement fails at its start, doubled each time up to the last.
RETRY_SECONDS = (1.0, 32.0)
#: Seconds between a request to end and the end by force; requests have `SHUTDOWN_SECONDS`.
KILL_SECONDS = SHUTDOWN_SECONDS + 10.0
PREFIX = "pfml-serve-"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSettings:
    """What a server is started with, by any of its processes.

    Args:
        run: Folder of the run.
        access: Who may send requests.
        index: Folder of the index; None for that of the run.
        device: Of the model.
        backend: How the index is searched.
        limits: Of requests.
        map_method: The projection of the map.
        map_points: Images on the map.
        add_to: The folder of images that requests add; None if none may be added.
        access_log: A file, "-" for stderr, None for no log.
        processes: How many.
        shared: The folder that they share; None for a single process.
    """

    run: Path
    access: Access
    index: Path | None = None
    device: str = "auto"
    backend: str = "auto"
    limits: Limits = field(default_factory=Limits)
    map_method: str = "auto"
    map_points: int | None = None
    add_to: Path | None = None
    access_log: str | None = None
    processes: int = 1
    shared: Path | None = None

    def service(self) -> Service:
        """The service, after loading model and index."""
        # what is not held is read from the memory of the system, which has it once
        held = HOLD_BYTES // self.processes
        gallery = Gallery.open(self.run, index=self.index, device=self.device, backend=self.backend, hold_bytes=held)
        return Service(
            gallery,
            limits=self.limits,
            map_method=self.map_method,
            map_points=self.map_points,
            add_to=self.add_to,
            uploads=None if self.shared is None else self.shared / "uploads",
        )

    def log(self) -> AccessLog | None:
        """The access log."""
        return None if self.access_log is None else AccessLog(self.access_log)


def serve_processes(settings: ServerSettings, port: int) -> None:
    """Serve by several processes until SIGINT or SIGTERM; then let them answer what was sent, and return.

    Raises:
        ValueError: If the first processes cannot start, with the reason.
    """
    if os.name == "nt":
        raise ValueError("several processes need signals of Unix: give --processes 1")
    logging.config.dictConfig(LOGGING)
    with listening_socket(settings.access.host, port) as listening, _shared_folder() as shared:
        settings = replace(settings, shared=shared)
        Supervisor(settings, listening).run()


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """A new folder of this server alone, within the block; those that killed servers have left are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if left.stat().st_uid == os.getuid() and not left.is_symlink():
                with claim(left / "lock") as is_left:
                    if is_left:
                        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with claim(folder / "lock"):
            for name in ("metrics", "uploads"):
                (folder / name).mkdir()
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(eq=False)
class Worker:
    """A process of the server.

    Args:
        process: The process.
        messages: What it says of its start; it ends when this is closed.
        is_ready: Whether it answers requests.
        is_leaving: Whether it was told to end.
        successor: Who is to replace it; it is told to end when that one is ready.
    """

    process: Any
    messages: Connection
    is_ready: bool = False
    is_leaving: bool = False
    successor: Worker | None = None

    def leave(self, number: int = signal.SIGTERM) -> None:
        """Tell it to end."""
        self.is_leaving = True
        if self.process.is_alive():
            os.kill(self.process.pid, number)


class Supervisor:
    """Keeps the processes of a server running.

    Args:
        settings: Of the server; with a folder that is shared.
        listening: The socket.
    """

    def __init__(self, settings: ServerSettings, listening: socket.socket) -> None:
        self.settings = settings
        self.listening = listening
        self.context = _context()
        self.workers: list[Worker] = []
        self.outdated: list[Worker] = []  # those that SIGHUP is to replace
        self.has_served = False
        self._failures = 0
        self._retry_at = 0.0

    def run(self) -> None:
        """Run until a signal."""
        has_terminal = sys.stdin is not None and sys.stdin.isatty()
        with _signals() as received:
            try:
                for _ in range(self.settings.processes):
                    self._start()
                while True:
                    for number in self._events(received):
                        if number == signal.SIGHUP and not has_terminal:
                            self.outdated = [one for one in self.workers if not one.is_leaving]
                        else:
                            self._stop(received)
                            return
                    self._replace()
            finally:
                self._kill()

    def _start(self) -> Worker:
        ours, theirs = multiprocessing.Pipe()
        process = self.context.Process(target=_work, args=(self.settings, self.listening, theirs), name="pfml serve")
        process.start()
        theirs.close()
        worker = Worker(process, ours)
        self.workers.append(worker)
        return worker

    def _events(self, received: Connection, timeout: float = 1.0) -> list[int]:
        """Wait for what happens next; the signals among it."""
        by_event: dict[Any, Worker] = {}
        for worker in self.workers:
            by_event[worker.process.sentinel] = worker
            if not worker.is_ready:
                by_event[worker.messages] = worker
        signals: list[int] = []
        happened = wait([received, *by_event], timeout)
        for event in happened:
            if event is received:
                signals += received.recv_bytes()
            elif event is by_event[event].messages:
                self._heard(by_event[event])
        for event in happened:  # after the last message of each
            if isinstance(event, int):
                self._ended(by_event[event])
        return signals

    def _heard(self, worker: Worker) -> None:
        """Take the message of a worker: that it is ready, or why not."""
        with suppress(EOFError, OSError):
            problem = worker.messages.recv()
            if problem is not None:
                if not self.has_served:
                    raise ValueError(problem)
                log.warning("a process of the server cannot start: %s", problem)
                return
            worker.is_ready = True
            if not self.has_served:
                announce(self.settings.access.host, self.listening)
            self.has_served, self._failures = True, 0
            for one in self.workers:
                if one.successor is worker:
                    one.leave()

    def _ended(self, worker: Worker) -> None:
        """Forget a process that has ended; one that was neither told to nor could start is counted as a failure."""
        worker.process.join()
        worker.messages.close()
        self.workers.remove(worker)
        assert self.settings.shared is not None
        forget_process(self.settings.shared / "metrics", worker.process.pid)
        if worker.is_leaving:
            return
        how = f"process {worker.process.pid} of the server ended with status {worker.process.exitcode}"
        if not self.has_served:
            raise ValueError(f"{how} before it could serve: see its message above")
        log.warning("%s: it is replaced", how)
        if not worker.is_ready:
            first, last = RETRY_SECONDS
            self._retry_at = time.monotonic() + min(first * 2**self._failures, last)
            self._failures += 1
            for one in self.workers:
                if one.successor is worker:  # the one before stays
                    one.successor = None
                    self.outdated = []
                    log.warning("the processes stay as they were: the first new one cannot start")

    def _replace(self) -> None:
        """Start what is missing, and the next successor of a process that SIGHUP is to replace."""
        if time.monotonic() < self._retry_at:
            return
        staying = [one for one in self.workers if not one.is_leaving]
        successors = {one.successor for one in staying if one.successor is not None}
        for _ in range(self.settings.processes - len([one for one in staying if one not in successors])):
            self._start()
        self.outdated = [one for one in self.outdated if one in self.workers and not one.is_leaving]
        if self.outdated and not successors and all(one.is_ready for one in staying):
            self.outdated[0].successor = self._start()

    def _stop(self, received: Connection) -> None:
        """End all processes after their requests; a second signal ends them at once."""
        self.listening.close()  # the last process to close its own refuses further connections
        for worker in self.workers:
            worker.leave()
        until = time.monotonic() + KILL_SECONDS
        while self.workers and time.monotonic() < until:
            if self._events(received):
                for worker in self.workers:
                    worker.leave(signal.SIGINT)

    def _kill(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()


@contextmanager
def _signals() -> Iterator[Connection]:
    """A connection that delivers the numbers of signals, within the block."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda got, _: writer.send_bytes(bytes([got]))) for number in handled}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _context() -> Any:
    """How processes are started: on Linux forked from one that has imported all modules and started no thread."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _work(settings: ServerSettings, listening: socket.socket, messages: Connection) -> None:
    """A process of the server."""
    assert settings.shared is not None
    os.environ[FOLDER_VARIABLE] = str(settings.shared / "metrics")  # before prometheus-client is imported
    os.setpgrp()  # Ctrl-C is for the supervisor, who tells us
    signal.signal(signal.SIGTERM, _exit)
    signal.signal(signal.SIGINT, _exit)
    keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max((os.cpu_count() or 1) // settings.processes, 1))
    try:
        service = settings.service()
        app = create_app(service, settings.access, log=settings.log(), buckets=settings.shared / "buckets")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        messages.send(str(error))
        raise SystemExit(1) from None
    # one connection at a time is accepted, so that whoever is idle gets the next one
    server = create_server(app, on_start=lambda: messages.send(None), backlog=1)

    def watch() -> None:
        with suppress(EOFError, OSError):
            messages.recv()
        server.should_exit = True  # the supervisor is gone

    threading.Thread(target=watch, name="pfml supervisor", daemon=True).start()
    server.run(sockets=[SharedSocket(fileno=listening.detach())])


class SharedSocket(socket.socket):
    """A socket that other processes listen at, too: its queue stays as long as it is."""

    def listen(self, backlog: int = 0) -> None:
        """Do nothing: asyncio would shorten the queue to the connections that it accepts at a time."""


def _exit(*_: object) -> None:
    """End the process: before it serves, or after uvicorn has shut down and raised its signal again."""
    raise SystemExit(0)
