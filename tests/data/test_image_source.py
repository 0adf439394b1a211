from __future__ import annotations

import json
import multiprocessing
import multiprocessing.synchronize
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from pfml.data import image_source, pixel_cache
from pfml.data.decoded_images import DecodedImages
from pfml.data.decoding import UnreadableImagesError, read_rgb, shrink
from pfml.data.file_images import FileImages
from pfml.data.image_set import ImageSet
from pfml.data.image_source import open_images
from pfml.data.preprocessing import Augmentation, Preprocessing
from pfml.data.resampling import resample
from pfml.data.seeding import generator_for
from pfml.data.windows import Windows
from processes import failures_of_several

PREPROCESSING = Preprocessing(resize=24, crop=21)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    paths = []
    for k in range(12):
        paths.append(folder / f"{k}.png")
        Image.fromarray(random.integers(0, 256, (30 + 3 * k, 60 - 2 * k, 3), dtype=np.uint8)).save(paths[-1])
    return ImageSet(tuple(paths), torch.arange(12) % 3, ("a", "b", "c"))


def plan(sizes: Tensor, batches: int = 5) -> Iterator[Windows]:
    for step in range(batches):
        generator = generator_for(0, "plan", step)
        indices = torch.randint(len(sizes), (7,), generator=generator)
        if step % 2:
            yield PREPROCESSING.windows(indices, sizes)
        else:
            yield Augmentation().windows(indices, sizes, PREPROCESSING, generator)


def test_decoded_images_give_the_crops_of_their_files_in_the_order_of_the_plan(images: ImageSet) -> None:
    source = open_images(images)
    assert isinstance(source, DecodedImages)
    crops = list(source.crops(plan(source.sizes)))
    assert len(crops) == 5
    for batch, windows in zip(crops, plan(source.sizes), strict=True):
        assert batch.dtype == torch.float32
        assert batch.shape == (7, 3, 21, 21)
        assert torch.equal(batch, resample(lambda index: read_rgb(images.images[index]), windows))


def test_sizes_are_heights_and_widths_of_the_files(images: ImageSet) -> None:
    for storage in ("memory", "files"):
        source = open_images(images, storage=storage)
        assert source.sizes.tolist() == [[30 + 3 * k, 60 - 2 * k] for k in range(12)]
        assert len(source) == 12


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("short_side", [None, 26])
def test_files_give_bit_for_bit_the_crops_of_decoded_images(
    images: ImageSet, workers: int, short_side: int | None
) -> None:
    decoded = open_images(images, storage="memory", workers=workers, short_side=short_side)
    files = open_images(images, storage="files", workers=workers, short_side=short_side)
    assert isinstance(files, FileImages)
    assert torch.equal(decoded.sizes, files.sizes)
    for _ in range(2):  # workers serve a second plan too
        for first, second in zip(decoded.crops(plan(decoded.sizes)), files.crops(plan(files.sizes)), strict=True):
            assert torch.equal(first, second)


def test_workers_are_kept_and_serve_abandoned_and_simultaneous_plans(images: ImageSet) -> None:
    source = open_images(images, storage="files", workers=1)
    expected = list(open_images(images).crops(plan(source.sizes)))
    first = source.crops(plan(source.sizes))
    assert torch.equal(next(first), expected[0])
    loader = source._loader
    # another plan while the first is under way
    assert all(torch.equal(a, b) for a, b in zip(source.crops(plan(source.sizes)), expected, strict=True))
    assert torch.equal(next(first), expected[1])
    first.close()  # abandoned with batches on their way
    assert all(torch.equal(a, b) for a, b in zip(source.crops(plan(source.sizes)), expected, strict=True))
    assert source._loader is loader is not None


def test_a_worker_that_is_killed_is_a_sentence_and_the_source_serves_again(images: ImageSet) -> None:
    source = open_images(images, storage="files", workers=1)
    assert isinstance(source, FileImages)
    plan = [PREPROCESSING.windows(torch.tensor([k % 12]), source.sizes) for k in range(60)]
    crops = source.crops(plan)
    first = next(crops)
    assert source._loader is not None
    iterator = source._loader._iterator
    (worker,) = iterator._workers  # type: ignore[union-attr]
    # a worker may die with this lock, for which torch would wait forever
    holder = threading.Thread(target=iterator._workers_done_event._event._cond.acquire, daemon=True)  # type: ignore[union-attr]
    holder.start()
    holder.join()
    os.kill(worker.pid, signal.SIGKILL)
    del iterator
    with pytest.raises(OSError, match=r"ended from outside.*lower storage.workers \(now 1\) or batch.size"):
        list(crops)
    assert torch.equal(next(source.crops(plan)), first)


@pytest.mark.parametrize("cut_off", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_that_is_killed_while_it_hands_a_batch_over_is_the_same_sentence(
    images: ImageSet, monkeypatch: pytest.MonkeyPatch, cut_off: Exception
) -> None:
    source = open_images(images, storage="files", workers=1)
    assert isinstance(source, FileImages)

    gone = multiprocessing.get_context("fork").Process(target=int)
    gone.start()

    class CutOff:
        _workers = (gone,)
        _workers_done_event = multiprocessing.Event()

        def __iter__(self) -> CutOff:
            return self

        def __next__(self) -> Tensor:
            raise cut_off

    monkeypatch.setattr(source, "_new_loader", lambda *_, **__: CutOff())
    with pytest.raises(OSError, match="ended from outside"):
        list(source.crops(plan(source.sizes)))
    assert source._loader is None


def test_worker_processes_leave_the_callers_random_numbers_alone(images: ImageSet) -> None:
    source = open_images(images, storage="files", workers=1)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    list(source.crops(plan(source.sizes, batches=1)))
    assert torch.equal(torch.rand(3), expected)


def test_a_file_that_changes_after_the_check_is_named(images: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(images.images[0].read_bytes())
    source = open_images(ImageSet((path,), torch.zeros(1, dtype=torch.int64), ("a",)), storage="files", workers=0)
    path.write_bytes(images.images[1].read_bytes())
    with pytest.raises(ValueError, match="a.png: has another size than when the images were checked"):
        list(source.crops([PREPROCESSING.windows(torch.tensor([0]), source.sizes)]))


def test_pixels_are_used_as_they_are() -> None:
    pixels = torch.randint(0, 256, (6, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    source = open_images(ImageSet(pixels, torch.zeros(6, dtype=torch.int64), ("a",)))
    indices = torch.tensor([5, 0, 2])
    (crops,) = source.crops([Preprocessing(resize=32, crop=32).windows(indices, source.sizes)])
    assert torch.equal(crops, pixels[indices] / 255.0)
    assert source.pixels.data.data_ptr() == pixels.data_ptr()
    assert source.description.startswith("6 images held in memory, ")
    with pytest.raises(ValueError, match="these images are pixels, not files"):
        open_images(ImageSet(pixels, torch.zeros(6, dtype=torch.int64), ("a",)), storage="files")


def test_short_side_shrinks_pixels_and_files_at_decoding(images: ImageSet) -> None:
    source = open_images(images, short_side=26)
    assert source.sizes.amin(1).tolist() == [26] * 12
    assert torch.equal(source.pixels.image(7), shrink(read_rgb(images.images[7]), 26))
    pixels = torch.stack([read_rgb(images.images[3])] * 2)
    small = open_images(ImageSet(pixels, torch.zeros(2, dtype=torch.int64), ("a",)), short_side=26)
    assert torch.equal(small.pixels.image(1), source.pixels.image(3))


def decoded_gib(images: ImageSet) -> float:
    return sum(read_rgb(path).numel() for path in images.images) / 2**30


def test_auto_stays_with_the_files_when_the_budget_is_too_small_and_says_so(images: ImageSet) -> None:
    needed = decoded_gib(images)
    assert isinstance(open_images(images, budget_gib=needed * 1.001), DecodedImages)
    source = open_images(images, budget_gib=needed * 0.999)
    assert isinstance(source, FileImages)
    assert "12 images read from files by 2 worker processes, since they take" in source.description
    assert "more than budget_gib=" in source.description
    assert isinstance(open_images(images, budget_gib=needed * 0.999, short_side=26), DecodedImages)


def test_memory_beyond_the_budget_is_an_error_with_the_options(images: ImageSet) -> None:
    with pytest.raises(ValueError, match=r"GiB decoded, more than budget_gib=1e-05; raise budget_gib, shrink them"):
        open_images(images, storage="memory", budget_gib=0.00001)


def test_the_description_tells_number_storage_and_size(images: ImageSet) -> None:
    assert open_images(images).description == f"12 images decoded into memory, {decoded_gib(images):.3g} GiB"


@pytest.mark.parametrize("storage", ["memory", "files"])
def test_all_bad_files_are_listed_before_anything_else_happens(images: ImageSet, tmp_path: Path, storage: str) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)).save(tmp_path / "x.jpg")
    cut = tmp_path / "cut.jpg"
    cut.write_bytes((tmp_path / "x.jpg").read_bytes()[:6000])  # its header is fine
    again = tmp_path / "again.jpg"
    again.write_bytes(cut.read_bytes())
    broken = ImageSet((images.images[0], cut, images.images[1], again), torch.zeros(4, dtype=torch.int64), ("a",))
    with pytest.raises(UnreadableImagesError, match="(?s)2 of 4 images cannot be read.*cut.jpg.*again.jpg"):
        open_images(broken, storage=storage, cache=tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))  # nor is half a set cached


def test_progress_is_shown_while_decoding(images: ImageSet) -> None:
    shown = []

    def track(items, description, total):
        shown.append((description, total))
        return items

    open_images(images, track=track)
    assert shown == [("reading image sizes", 12), ("decoding images", 12)]
    shown.clear()
    open_images(images, storage="files", track=track)
    assert shown == [("reading image sizes", 12), ("checking images", 12)]


def test_a_cache_spares_the_next_run_the_decoding(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_images(images, cache=tmp_path, short_side=26)
    assert first.description.startswith("12 images decoded into memory")

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is left to decode")

    monkeypatch.setattr(image_source, "decode", refuse)
    monkeypatch.setattr(image_source, "read_size", refuse)
    second = open_images(images, cache=tmp_path, short_side=26)
    assert second.description.startswith("12 images read from a cache into memory")
    assert torch.equal(first.pixels.data, second.pixels.data)
    assert torch.equal(first.pixels.offsets, second.pixels.offsets)
    assert torch.equal(first.sizes, second.sizes)
    with pytest.raises(AssertionError):  # another short_side is another cache
        open_images(images, cache=tmp_path, short_side=25)


def copied(images: ImageSet, folder: Path) -> ImageSet:
    folder.mkdir()
    paths = tuple(folder / path.name for path in images.images)
    for old, new in zip(images.images, paths, strict=True):
        new.write_bytes(old.read_bytes())
    return ImageSet(paths, images.labels, images.class_names)


@pytest.mark.parametrize("damage", ["file", "pixels", "cut", "manifest"])
def test_a_cache_that_does_not_match_is_rebuilt_with_a_warning(images: ImageSet, tmp_path: Path, damage: str) -> None:
    images = copied(images, tmp_path / "images")
    cache = tmp_path / "cache"
    open_images(images, cache=cache)
    (folder,) = cache.iterdir()
    data = folder / "pixels.bin"
    if damage == "file":
        Image.fromarray(np.zeros((30, 60, 3), dtype=np.uint8)).save(images.images[0])
        os.utime(images.images[0], ns=(1, 1))
    elif damage == "pixels":
        content = bytearray(data.read_bytes())
        content[1234] ^= 1
        data.write_bytes(bytes(content))
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    else:
        (folder / "manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="the cache .* is rebuilt: "):
        source = open_images(images, cache=cache)
    for index, path in enumerate(images.images):
        assert torch.equal(source.pixels.image(index), read_rgb(path))
    assert open_images(images, cache=cache).description.startswith("12 images read from a cache")
    assert [path.name for path in cache.iterdir()] == [folder.name]  # nothing temporary is left


def test_two_runs_may_store_the_same_cache_at_once(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, others = Path.rename, []

    def another_run_is_first(self: Path, target: Path) -> Path:
        if not others and self.name.startswith("."):
            others.append(target)
            open_images(images, cache=tmp_path)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", another_run_is_first)
    mine = open_images(images, cache=tmp_path)
    assert others
    again = open_images(images, cache=tmp_path)
    assert again.description.startswith("12 images read from a cache")
    assert torch.equal(mine.pixels.data, again.pixels.data)
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_goes_on_with_its_own_pixels_if_another_cache_has_come_first(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def half_a_cache_comes_first(self: Path, target: Path) -> Path:
        if self.name.startswith("."):
            target.mkdir()
            (target / "pixels.bin").write_bytes(b"")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", half_a_cache_comes_first)
    mine = open_images(images, cache=tmp_path)
    assert torch.equal(mine.pixels.image(0), read_rgb(images.images[0]))
    assert hidden(tmp_path) == []
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="is rebuilt: its manifest cannot be read"):
        open_images(images, cache=tmp_path)


@pytest.mark.parametrize("moment", ["before its sizes are read", "before its pixels are read"])
def test_a_cache_that_vanishes_while_it_is_being_read_is_rebuilt(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    open_images(images, cache=tmp_path)
    name = "sizes" if "sizes" in moment else "load"
    ordinary = getattr(pixel_cache.PixelCache, name)

    def late(self: pixel_cache.PixelCache) -> object:
        shutil.rmtree(self.folder, ignore_errors=True)
        return ordinary(self)

    monkeypatch.setattr(pixel_cache.PixelCache, name, late)
    with pytest.warns(UserWarning, match="damaged or just replaced"):
        source = open_images(images, cache=tmp_path)
    assert source.description.startswith("12 images decoded")
    monkeypatch.undo()
    assert open_images(images, cache=tmp_path).description.startswith("12 images read from a cache")


def open_often(images: ImageSet, folder: Path, number: int, together: Barrier, failures: SimpleQueue[str]) -> None:
    """Store and load caches at the same moments as other processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a cache may be replaced while it is being read
    for turn in range(8):
        together.wait(60)
        try:
            for _ in range(2):
                open_images(images, cache=folder / str(turn), workers=0)
        except Exception as error:
            failures.put(f"{number}, turn {turn}: {error!r}")


def test_processes_that_decode_the_same_images_at_once_do_not_disturb_each_other(
    images: ImageSet, tmp_path: Path
) -> None:
    assert failures_of_several(4, open_often, images, tmp_path) == []
    for turn in tmp_path.iterdir():
        assert hidden(turn) == []
        assert open_images(images, cache=turn).description.startswith("12 images read from a cache")


def store_and_stop(images: ImageSet, folder: Path, writing: multiprocessing.synchronize.Event) -> None:
    """Store a cache, and stop when its pixels are on disk."""

    def stop(stream: object) -> None:
        writing.set()
        time.sleep(600)

    torch.set_num_threads(1)
    pixel_cache._to_disk = stop
    open_images(images, cache=folder)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot lock folders")
def test_what_a_killed_process_left_of_a_cache_is_removed_and_what_a_living_one_writes_is_not(
    images: ImageSet, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    writing = context.Event()
    writer = context.Process(target=store_and_stop, args=(images, tmp_path, writing))
    writer.start()
    assert writing.wait(60)
    (left,) = hidden(tmp_path)
    long_ago = time.time() - 2 * pixel_cache.YOUNG
    os.utime(tmp_path / left, (long_ago, long_ago))
    open_images(images, cache=tmp_path)
    assert hidden(tmp_path) == [left], "its process is still writing it"
    writer.kill()
    writer.join()
    os.utime(tmp_path / left)
    open_images(images, cache=tmp_path)
    assert hidden(tmp_path) == [left], "whoever made it may not hold it yet"
    os.utime(tmp_path / left, (long_ago, long_ago))
    again = open_images(images, cache=tmp_path)
    assert hidden(tmp_path) == []
    assert again.description.startswith("12 images read from a cache")


def test_a_cache_is_plain_data(images: ImageSet, tmp_path: Path) -> None:
    source = open_images(images, cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "pixels.bin"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["sizes"] == source.sizes.tolist()
    pixels = np.memmap(folder / "pixels.bin", dtype=np.uint8, mode="r")
    assert np.array_equal(pixels, source.pixels.data.numpy())


def test_the_cache_is_not_used_for_files_and_that_is_said(images: ImageSet, tmp_path: Path) -> None:
    assert open_images(images, storage="files", cache=tmp_path).description.endswith("; the cache is not used")


def test_a_missing_file_is_reported_with_a_cache_too(images: ImageSet, tmp_path: Path) -> None:
    images = copied(images, tmp_path / "images")
    open_images(images, cache=tmp_path / "cache")
    images.images[4].unlink()
    with (
        pytest.warns(UserWarning, match="4.png has changed"),
        pytest.raises(UnreadableImagesError, match="4.png: does not exist"),
    ):
        open_images(images, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "disk"}, "storage must be one of"),
        ({"storage": "device"}, "storage='device' needs a CUDA device, got cpu"),
        ({"budget_gib": -1.0}, "budget_gib must not be negative"),
        ({"workers": -1}, "workers must not be negative"),
        ({"short_side": 0}, "short_side must be at least 1"),
    ],
)
def test_impossible_options_are_refused(images: ImageSet, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_images(images, **options)


def test_auto_prefers_the_gpu_if_half_of_its_free_memory_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2000, 4000))
    assert image_source._resolved_storage("auto", 1000, cuda, 1.0, may_stay_files=True)[0] == "device"
    storage, reason = image_source._resolved_storage("auto", 1001, cuda, 1.0, may_stay_files=True)
    assert storage == "memory"
    assert "half of the free memory of cuda is less" in reason
    assert image_source._resolved_storage("auto", 1000, cuda, 1e-7, may_stay_files=True)[0] == "files"
    assert image_source._resolved_storage("device", 1001, cuda, 0.0, may_stay_files=True)[0] == "device"
    with pytest.raises(ValueError, match="are free on cuda"):
        image_source._resolved_storage("device", 2001, cuda, 1.0, may_stay_files=True)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["device", "memory", "files"])
def test_every_storage_delivers_the_same_crops_to_the_gpu(images: ImageSet, storage: str) -> None:
    source = open_images(images, storage=storage, device="cuda")
    expected = open_images(images).crops(plan(source.sizes))
    for crops, reference in zip(source.crops(plan(source.sizes)), expected, strict=True):
        assert crops.device.type == "cuda"
        torch.testing.assert_close(crops.cpu(), reference, rtol=0, atol=1e-5)
