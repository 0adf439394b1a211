"""Embedding on a cluster, through Ray Data: tasks read files and crop images, actors hold the model.

    batches of paths -> read (tasks, on all CPUs) -> embed (actors, one model each) -> this process, which writes

A batch is what one process would embed together. Ray starts a dead worker again and gives its batches to another; a
batch arrives here once.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pfml.data.decoding import ImageError, Track
from pfml.data.windows import Windows
from pfml.evaluation.model_evaluation import embed
from pfml.models.embedder import Embedder
from pfml.packages import require_packages
from pfml.search.embedding import EmbeddedFiles, OnePass, open_files
from pfml.storage.file_state import FileState

if TYPE_CHECKING:
    from pfml.data.preprocessing import Preprocessing

__all__ = ["RayEngine"]

#: Of a task that reads: it waits for files half of the time. Ray would run it within an actor of equal resources.
READER_CPUS = 0.5
#: Tasks into which Ray divides the batches.
MOST_TASKS = 10_000
#: In place of arrays that an error has prevented.
NOTHING = torch.empty(0).numpy()


@dataclass(frozen=True)
class RayEngine:
    """Embeds on a Ray cluster: that of `address`, of RAY_ADDRESS, or one of this machine that ends with the work.

    Args:
        actors: How many hold a copy of the model; None for one on each GPU, or on each CPU but one.
        gpus_per_actor: GPUs of an actor, which may share one, such as 0.5; None for 1 where there are GPUs, else 0.
        address: Of the cluster, such as "auto" or "host:6379"; None for RAY_ADDRESS.
    """

    actors: int | None = None
    gpus_per_actor: float | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.actors is not None and self.actors < 1:
            raise ValueError(f"actors must be at least 1, got {self.actors}")
        if self.gpus_per_actor is not None and not 0 <= self.gpus_per_actor < float("inf"):
            raise ValueError(f"gpus_per_actor must be at least 0, got {self.gpus_per_actor}")
        require_packages("ray", purpose="embedding on a cluster", install="pfml[ray]")

    def embed(
        self,
        embedder: Embedder,
        lists: Sequence[Sequence[str]],
        *,
        batch_size: int,
        workers: int,
        track: Track | None = None,
    ) -> Generator[tuple[int, EmbeddedFiles], None, None]:
        """The embeddings of each list of files as it is done; see `pfml.search.embedding.Engine`.

        Raises:
            OSError: If the cluster cannot be reached, or workers die over and over.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        unfinished = {number: _Parts(paths, batch_size) for number, paths in enumerate(lists)}
        items = [
            {"number": number, "batch": batch, "paths": json.dumps(paths)}
            for number, parts in unfinished.items()
            for batch, paths in enumerate(parts.batches)
        ]
        for number in [number for number, parts in unfinished.items() if not parts.batches]:
            yield number, EmbeddedFiles((), (), torch.empty(0, embedder.embedding_dim), ())
        if not items:
            return
        with self._cluster(), _named_errors(), closing(self._rows(deepcopy(embedder).cpu(), items, workers)) as rows:
            for row in rows if track is None else track(rows, "embedding", len(items)):
                if row["error"]:
                    raise OSError(f"a worker could not embed its images: {row['error']}")
                parts = unfinished[row["number"]]
                parts.by_batch[row["batch"]] = row
                if parts.are_complete:
                    yield row["number"], unfinished.pop(row["number"]).embedded()

    def _rows(
        self, embedder: Embedder, items: list[dict[str, Any]], workers: int
    ) -> Generator[dict[str, Any], None, None]:
        """What `_Network` returns for each batch, in any order."""
        import ray
        from ray.data import ActorPoolStrategy

        network: Any = _Network
        read_batch: Any = _read
        actors, gpus = self._resources()
        batches = ray.data.from_items(items, override_num_blocks=min(len(items), MOST_TASKS))
        read = batches.map(
            read_batch, fn_kwargs={"preprocessing": embedder.preprocessing, "workers": workers}, num_cpus=READER_CPUS
        )
        embedded = read.map(
            network,
            fn_constructor_args=(ray.put(embedder), "cuda" if gpus else "cpu"),
            compute=ActorPoolStrategy(size=min(actors, len(items))),
            num_cpus=0 if gpus else 1,
            num_gpus=gpus,
        )
        rows: Any = iter(embedded.iter_rows())
        try:
            yield from rows
        finally:
            rows.close()  # which ends what is still running

    def _resources(self) -> tuple[int, float]:
        """The number of actors and the GPUs of each, which the cluster must have."""
        import ray

        found = ray.cluster_resources()
        cpus, there = found.get("CPU", 0.0), found.get("GPU", 0.0)
        gpus = float(there > 0) if self.gpus_per_actor is None else self.gpus_per_actor
        actors = self.actors or max(1, int(there / gpus) if gpus else int(cpus) - 1)
        needed_cpus = READER_CPUS + (0 if gpus else actors)
        if actors * gpus > there or needed_cpus > cpus:
            raise ValueError(
                f"{actors} actors of {gpus:g} GPUs and their readers need {needed_cpus:g} CPUs and {actors * gpus:g} "
                f"GPUs, but the Ray cluster has {cpus:g} and {there:g}: ask for fewer with --actors"
            )
        return actors, gpus

    @contextmanager
    def _cluster(self) -> Iterator[None]:
        """Connect to a cluster or start one, without telemetry, dashboard and logs; an open connection stays."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # which the import has set
        ray.data.DataContext.get_current().enable_progress_bars = False
        is_ours = not ray.is_initialized()
        # Ray prints what became of workers to stdout, where --json prints
        with redirect_stdout(sys.stderr):
            if is_ours:
                self._connect()
            try:
                yield
            finally:
                if is_ours:
                    ray.shutdown()

    def _connect(self) -> None:
        import ray

        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        address = self.address or os.environ.get("RAY_ADDRESS")
        if not address or address == "local":
            cpus = max(os.cpu_count() or 1, 1 + (self.actors or 1))
            quiet |= {"address": "local", "include_dashboard": False, "num_cpus": cpus}
        else:
            quiet["address"] = address
        try:
            with warnings.catch_warnings(), _own_folders_for_workers():
                warnings.simplefilter("ignore", FutureWarning)
                ray.init(**quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).split("\n")[0]
            raise ConnectionError(
                f"the Ray cluster {address or 'of this machine'} must answer, got: {reason}"
            ) from None


@contextmanager
def _own_folders_for_workers() -> Iterator[None]:
    """Let processes that start within the block import what this one can, such as a network in the working folder."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def _named_errors() -> Iterator[None]:
    """Make the errors of Ray one sentence."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        reason = " ".join(str(error).split())[:300]
        raise OSError(f"Ray could not embed all images: run the same command again to resume; got: {reason}") from None


class _Parts:
    """The batches of a list of files, and what has arrived of them.

    Args:
        paths: The files. Workers get absolute paths: their working folder is another.
        batch_size: Files in a batch.
    """

    def __init__(self, paths: Sequence[str], batch_size: int) -> None:
        absolute = [os.path.abspath(path) for path in paths]
        self.given: dict[str, list[str]] = {}  # a file may be there twice
        for known, path in zip(absolute, paths, strict=True):
            self.given.setdefault(known, []).append(path)
        self.batches = [absolute[first : first + batch_size] for first in range(0, len(absolute), batch_size)]
        self.by_batch: dict[int, dict[str, Any]] = {}

    @property
    def are_complete(self) -> bool:
        return len(self.by_batch) == len(self.batches)

    def embedded(self) -> EmbeddedFiles:
        """The embeddings of all files, in the order of the list."""
        rows = [self.by_batch[batch] for batch in sorted(self.by_batch)]
        facts = [json.loads(row["facts"]) for row in rows]
        failed = [each for kind in ("failures", "undecoded") for one in facts for each in one[kind]]
        return EmbeddedFiles(
            tuple(self.given[path].pop(0) for one in facts for path in one["paths"]),
            tuple(FileState(*file) for one in facts for file in one["files"]),
            torch.cat([_tensor(row["vectors"]) for row in rows]),
            tuple(ImageError(self.given[path].pop(0), reason) for path, reason in failed),
        )


def _read(row: dict[str, Any], preprocessing: Preprocessing, workers: int) -> dict[str, Any]:
    """The crops of a batch of files, and what is known of the files as JSON, which carries any path.

    An error is part of the result: Ray would wrap it in its own, and log it.
    """
    try:
        opened = open_files(json.loads(row["paths"]), workers)
        images = OnePass(opened.paths, opened.sizes, device=torch.device("cpu"), workers=1)
        plan = [preprocessing.windows(torch.arange(len(images)), opened.sizes)] if len(images) else []
        crops = next(iter(images.crops(plan)), torch.empty(0, 3, preprocessing.crop, preprocessing.crop))
        facts = {
            "paths": opened.paths,
            "files": [(file.size, file.modified, file.sha256) for file in opened.files],
            "failures": [(str(each.path), each.reason) for each in opened.failures],
            "undecoded": {k: (str(each.path), each.reason) for k, each in sorted(images.failures.items())},
        }
    except Exception as error:
        return _result(row, error=_said(error), crops=NOTHING, sizes=NOTHING)
    return _result(row, facts=json.dumps(facts), crops=crops.numpy(), sizes=opened.sizes.numpy())


class _Network:
    """An actor: a model on a device.

    Args:
        embedder: An object of Ray that is an `Embedder`.
        device: "cuda" for the GPUs that Ray gives the actor.
    """

    def __init__(self, embedder: Any, device: str) -> None:
        self._reference = embedder
        self._device = device
        self._embedder: Embedder | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """The vectors of a batch that `_read` has read; images that could not be decoded are dropped here."""
        import ray

        if row["error"]:
            return _result(row, error=row["error"], vectors=NOTHING)
        try:
            if self._embedder is None:
                self._embedder = ray.get(self._reference).to(self._device)
            crops, sizes = _tensor(row["crops"]), _tensor(row["sizes"])
            vectors = embed(self._embedder, _Crops(crops, sizes), batch_size=max(1, len(crops))).cpu()
        except Exception as error:
            return _result(row, error=_said(error), vectors=NOTHING)
        facts = json.loads(row["facts"])
        undecoded = facts["undecoded"]
        good = [k for k in range(len(crops)) if str(k) not in undecoded]
        facts = {
            "paths": [facts["paths"][k] for k in good],
            "files": [facts["files"][k] for k in good],
            "failures": facts["failures"],
            "undecoded": list(undecoded.values()),
        }
        return _result(row, facts=json.dumps(facts), vectors=vectors[good].numpy())


class _Crops:
    """A batch that is cropped already, as an image source (`pfml.data.image_source.ImageSource`).

    Args:
        batch: (n, 3, size, size).
        sizes: (n, 2), heights and widths of the images.
    """

    def __init__(self, batch: Tensor, sizes: Tensor) -> None:
        self.batch = batch
        self.sizes = sizes
        self.device = batch.device
        self.description = f"{len(batch):,} images read by other processes"

    def __len__(self) -> int:
        return len(self.batch)

    def crops(self, plan: Iterable[Windows]) -> Iterator[Tensor]:
        for _ in plan:
            yield self.batch


def _result(row: dict[str, Any], *, error: str = "", facts: str = "", **arrays: Any) -> dict[str, Any]:
    return {"number": row["number"], "batch": row["batch"], "error": error, "facts": facts, **arrays}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _tensor(array: Any) -> Tensor:
    """A copy of an array, since Ray's own cannot be written to, which torch warns of."""
    return torch.from_numpy(array.copy())
