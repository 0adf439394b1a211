"""Images that stay in their files, decoded again for every crop by worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pfml.data.dataset_images import DatasetImages
from pfml.data.decoding import ImageError, read_rgb, shrink
from pfml.data.pinned_memory import to_device
from pfml.data.resampling import resample
from pfml.data.windows import Windows
from pfml.memory import keep_freed_memory

__all__ = ["FileImages"]

#: the tensors of a Windows, as they travel to the workers
ARRAYS = ("indices", "start", "extent", "lower", "upper", "flipped")


class FileImages:
    """An image source for sets that do not fit into memory; gives the same crops as `DecodedImages`.

    Args:
        images: The files, all of which have been checked (`pfml.data.check_images`), or a dataset, likewise.
        sizes: (N, 2) int64, heights and widths after shrinking.
        device: Where crops are delivered.
        workers: Processes, each of which makes whole batches; 0 to work in this process. They are kept from one plan
            to the next.
        short_side: See `pfml.data.decoding.shrink`.
        description: What is read from where, in words.
    """

    def __init__(
        self,
        images: tuple[Path, ...] | DatasetImages,
        sizes: Tensor,
        *,
        device: torch.device | str = "cpu",
        workers: int = 2,
        short_side: int | None = None,
        description: str = "",
    ) -> None:
        self.sizes = sizes
        self.device = torch.device(device)
        self.workers = workers
        self.description = description or f"{len(images):,} images read from files by {workers} workers"
        self._reader = _CropReader(images, sizes, short_side)
        self._plan = _PlanSampler()
        self._loader: DataLoader[Tensor] | None = None
        self._under_way = False

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return f"FileImages({self.description})"

    def crops(self, plan: Iterable[Windows]) -> Iterator[Tensor]:
        """(B, 3, size, size) float32 RGB in [0, 1] on the device, for each item of the plan, in its order.

        Workers run ahead, so the plan is asked for its items before they are delivered.
        """
        if self.workers == 0:
            yield from (to_device(self._reader.crops(_packed(windows)), self.device) for windows in plan)
            return
        if self._under_way:
            # the kept workers are busy with another plan, which continues after this one
            yield from self._delivered(self._new_loader(_PlanSampler(plan), keep=False))
            return
        if self._loader is None:
            self._loader = self._new_loader(self._plan, keep=True)
        self._under_way, self._plan.plan = True, plan
        try:
            yield from self._delivered(self._loader)
        finally:
            self._under_way, self._plan.plan = False, ()

    def _delivered(self, loader: DataLoader[Tensor]) -> Iterator[Tensor]:
        batches = iter(loader)
        batches._workers_done_event = _DoneEvent(batches._workers_done_event)  # type: ignore[attr-defined]
        try:
            for crops in batches:
                if isinstance(crops, tuple):
                    raise ImageError(*crops)
                yield crops.to(self.device, non_blocking=True)
        except (RuntimeError, ConnectionError, EOFError) as error:
            # ConnectionError and EOFError: the worker ended while its batch was being handed over
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            self._loader = None  # what is left of it cannot be used again
            with suppress(RuntimeError):  # torch's signal of a killed worker, which may come only now
                wait([worker.sentinel for worker in batches._workers], timeout=5)  # type: ignore[attr-defined]
                for worker in batches._workers:  # type: ignore[attr-defined]
                    worker.join(0.01)
            raise OSError(
                "a process that reads images was ended from outside, as the system does when memory runs out: lower "
                f"storage.workers (now {self.workers}) or batch.size"
            ) from None

    def _new_loader(self, plan: _PlanSampler, *, keep: bool) -> DataLoader[Tensor]:
        return DataLoader(
            self._reader,
            sampler=plan,
            batch_size=None,  # the reader makes whole batches
            collate_fn=_unchanged,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            persistent_workers=keep,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # else a loader would draw from the caller's random numbers
        )


class _DoneEvent:
    """Tells the workers of a DataLoader to end, without waiting for a lock that a killed worker took with it.

    Torch's own event, which this one sets, keeps its flag behind such a lock, and a loader would hang.
    """

    def __init__(self, event: Event | _DoneEvent) -> None:
        self._event: Event = event._event if isinstance(event, _DoneEvent) else event
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        lock = self._event._cond  # type: ignore[attr-defined]
        if lock.acquire(timeout=1):  # alive: nobody took it along
            lock.release()
            self._event.set()


class _PlanSampler(Sampler[Any]):
    """The items of a plan, which is exchanged between passes, as something that travels without shared memory."""

    def __init__(self, plan: Iterable[Windows] = ()) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(_packed, self.plan)


class _CropReader(Dataset[Any]):
    """Makes the crops of a batch from its files; runs in the workers.

    An item is the crops, or the path and the reason of an image that cannot be read: what a worker raises, a DataLoader
    makes a traceback of.
    """

    def __init__(self, images: tuple[Path, ...] | DatasetImages, sizes: Tensor, short_side: int | None) -> None:
        self.images = images if isinstance(images, DatasetImages) else [str(path) for path in images]
        self.sizes = sizes.numpy()  # tensors would take a file descriptor per worker
        self.short_side = short_side

    def __getitem__(self, packed: dict[str, Any]) -> Tensor | tuple[str, str]:
        try:
            return self.crops(packed)
        except ImageError as error:
            return str(error.path), error.reason

    def crops(self, packed: dict[str, Any]) -> Tensor:
        """(B, 3, size, size) float32 RGB in [0, 1]; ImageError for an image that cannot be read."""
        return resample(self._image, _unpacked(packed))

    def _image(self, index: int) -> Tensor:
        try:
            if isinstance(self.images, DatasetImages):
                image = shrink(self.images.read(index), self.short_side)
            else:
                image = read_rgb(self.images[index], self.short_side)
        except ImageError as error:
            reason = f"{error.reason}, but could be read when the images were checked: restore it, then resume"
            raise ImageError(error.path, reason) from None
        if tuple(image.shape[1:]) != tuple(self.sizes[index]):
            name = self.images.name_of(index) if isinstance(self.images, DatasetImages) else self.images[index]
            raise ImageError(name, "has another size than when the images were checked")
        return image


def _packed(windows: Windows) -> dict[str, Any]:
    arrays = {name: getattr(windows, name).numpy() for name in ARRAYS}
    return {**arrays, "size": windows.size, "interpolation": windows.interpolation}


def _unpacked(packed: dict[str, Any]) -> Windows:
    tensors = {name: torch.from_numpy(packed[name]) for name in ARRAYS}
    return Windows(**tensors, size=packed["size"], interpolation=packed["interpolation"])


def _start_worker(_: int) -> None:
    keep_freed_memory()  # which a worker that is forked has from the command line, but one that is spawned has not


def _unchanged(crops: Any) -> Any:
    return crops
