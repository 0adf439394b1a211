"""Metrics for Prometheus: requests, latencies, queues, batches, the index, refused uploads and memory.

Labels are routes and statuses, never paths or names. With several processes (`pfml.serving.processes`) each writes its
numbers to files of one folder, and any of them answers for all (prometheus-client's multiprocess mode, which its
environment variable turns on before it is imported: hence the imports within functions).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from pfml.version import __version__

__all__ = ["FOLDER_VARIABLE", "Metrics", "forget_process", "resident_bytes"]

#: prometheus-client's variable: the folder of its multiprocess mode.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of a server; `text` is what Prometheus reads."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        one = self.registry
        self.requests = Counter("pfml_http_requests", "Answers.", ["method", "route", "status"], registry=one)
        self.seconds = Histogram(
            "pfml_http_request_seconds", "Time of an answer.", ["method", "route"], buckets=SECONDS, registry=one
        )
        self.rejected = Counter("pfml_uploads_rejected", "Uploads that were refused.", ["status"], registry=one)
        self.batches = Histogram(
            "pfml_embedding_batch_images", "Images in a batch of the model.", buckets=(1, 2, 4, 8, 16), registry=one
        )
        self.in_progress = Gauge(
            "pfml_http_requests_in_progress",
            "Requests that are being answered.",
            registry=one,
            multiprocess_mode="livesum",
        )
        self.waiting = Gauge(
            "pfml_queue_length", "Tasks that run or wait.", ["queue"], registry=one, multiprocess_mode="livesum"
        )
        self.memory = Gauge(
            "pfml_resident_memory_bytes", "Memory of a process.", registry=one, multiprocess_mode="liveall"
        )
        self.generation = Gauge(
            "pfml_index_generation",
            "Changes of the index; the least of all processes.",
            registry=one,
            multiprocess_mode="livemin",
        )
        self.images = Gauge(
            "pfml_index_images",
            "Images of the index; the least of all processes.",
            registry=one,
            multiprocess_mode="livemin",
        )
        self.version = Gauge("pfml_version", "1.", ["version"], registry=one, multiprocess_mode="livemax")
        self.version.labels(__version__).set(1)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.requests.labels(method, route, str(status)).inc()
        self.seconds.labels(method, route).observe(seconds)

    def read(self, queues: Mapping[str, int], generation: int, images: int) -> None:
        """Set the gauges: lengths of queues by name, and the state of the index."""
        for name, length in queues.items():
            self.waiting.labels(name).set(length)
        self.generation.set(generation)
        self.images.set(images)
        self.memory.set(resident_bytes())

    def text(self) -> tuple[bytes, str]:
        """All metrics of all processes in Prometheus's text format, and its media type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        if FOLDER_VARIABLE not in os.environ:
            return generate_latest(self.registry), CONTENT_TYPE_LATEST
        # a process that starts, or was killed as it started, has an empty file, which the library cannot read
        files = [str(file) for file in Path(os.environ[FOLDER_VARIABLE]).glob("*.db") if not _is_empty(file)]
        merged = MultiProcessCollector.merge(files)
        return generate_latest(SimpleNamespace(collect=lambda: merged)), CONTENT_TYPE_LATEST


def _is_empty(file: Path) -> bool:
    try:
        return file.stat().st_size == 0
    except FileNotFoundError:  # of a process that has just ended
        return True


def forget_process(folder: Path, pid: int) -> None:
    """Drop the gauges of a process that has ended; its counters stay."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid, str(folder))


def resident_bytes() -> int:
    """Bytes of memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
