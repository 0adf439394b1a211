from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pfml.data.decoding import (
    ImageError,
    UnreadableImagesError,
    check_data,
    check_images,
    in_threads,
    read_rgb,
    read_size,
    shrink,
    shrunk_size,
)
from pfml.data.image_set import ImageSet, RetrievalData


def noise(height: int = 13, width: int = 17, channels: int = 3) -> np.ndarray:
    values = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return values[..., 0] if channels == 1 else values


def set_of(paths: list[Path]) -> ImageSet:
    return ImageSet(tuple(paths), torch.zeros(len(paths), dtype=torch.int64), ("only",))


def test_rgb_files_are_read_as_they_are(tmp_path: Path) -> None:
    values = noise()
    Image.fromarray(values).save(tmp_path / "a.png")
    image = read_rgb(tmp_path / "a.png")
    assert image.dtype == torch.uint8
    assert image.is_contiguous()
    assert torch.equal(image, torch.from_numpy(values).permute(2, 0, 1))
    assert read_size(tmp_path / "a.png") == (13, 17)


def test_grayscale_is_repeated_and_transparency_dropped(tmp_path: Path) -> None:
    gray, translucent = noise(channels=1), noise(channels=4)
    Image.fromarray(gray).save(tmp_path / "gray.png")
    Image.fromarray(translucent).save(tmp_path / "translucent.png")
    assert torch.equal(read_rgb(tmp_path / "gray.png"), torch.from_numpy(gray).expand(3, -1, -1))
    assert torch.equal(
        read_rgb(tmp_path / "translucent.png"), torch.from_numpy(translucent[..., :3].copy()).permute(2, 0, 1)
    )


def test_palette_bilevel_cmyk_and_gray_with_alpha_become_rgb(tmp_path: Path) -> None:
    original = Image.fromarray(noise())
    for mode, suffix in (("P", "png"), ("1", "png"), ("CMYK", "tiff"), ("LA", "png")):
        converted = original.convert(mode)
        converted.save(tmp_path / f"{mode}.{suffix}")
        expected = torch.from_numpy(np.array(converted.convert("RGB"))).permute(2, 0, 1)
        assert torch.equal(read_rgb(tmp_path / f"{mode}.{suffix}"), expected)


def test_sixteen_bit_grayscale_keeps_its_upper_eight_bits(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (9, 8), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    assert torch.equal(read_rgb(tmp_path / "deep.png")[1], torch.from_numpy((values >> 8).astype(np.uint8)))


def test_the_orientation_in_exif_is_not_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    Image.fromarray(noise()).save(tmp_path / "turned.jpg", exif=exif)
    assert read_rgb(tmp_path / "turned.jpg").shape == (3, 13, 17)
    assert read_size(tmp_path / "turned.jpg") == (13, 17)


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), dtype=np.float32)).save(tmp_path / "f.tiff")
    with pytest.raises(ImageError, match="do not say how bright white is"):
        read_rgb(tmp_path / "f.tiff")


def broken_files(folder: Path) -> dict[str, Path]:
    good = folder / "good.jpg"
    Image.fromarray(noise(200, 300)).save(good)
    Image.fromarray(noise(200, 300)).save(folder / "good.png")
    files = {name: folder / name for name in ("empty.jpg", "text.jpg", "cut.jpg", "cut.png", "folder.jpg", "none.jpg")}
    files["empty.jpg"].touch()
    files["text.jpg"].write_text("no image at all")
    files["cut.jpg"].write_bytes(good.read_bytes()[:5000])
    files["cut.png"].write_bytes((folder / "good.png").read_bytes()[:5000])
    files["folder.jpg"].mkdir()
    return files


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty.jpg", "is empty"),
        ("text.jpg", "is not an image of a known format"),
        ("cut.jpg", "truncated"),
        ("cut.png", ""),  # Pillow's words differ between versions
        ("folder.jpg", "is a folder"),
        ("none.jpg", "does not exist"),
    ],
)
def test_a_file_that_cannot_be_decoded_is_named_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    path = broken_files(tmp_path)[name]
    with pytest.raises(ImageError) as caught:
        read_rgb(path)
    assert str(path) in str(caught.value)
    assert reason in caught.value.reason
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # as when it comes from a worker


def test_an_image_beyond_pillows_limit_is_an_error_and_not_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    Image.fromarray(noise(20, 30)).save(tmp_path / "large.png")
    for limit in (400, 100):  # Pillow warns of the first and raises for the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(ImageError, match="large.png"):
            read_rgb(tmp_path / "large.png")
        with pytest.raises(ImageError, match="large.png"):
            read_size(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert read_rgb(tmp_path / "large.png").shape == (3, 20, 30)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_checking_gives_the_sizes_of_all_images(tmp_path: Path, workers: int) -> None:
    paths = []
    for k in range(30):
        paths.append(tmp_path / f"{k}.png")
        Image.fromarray(noise(5 + k, 40 - k)).save(paths[-1])
    assert check_images(set_of(paths), workers).tolist() == [[5 + k, 40 - k] for k in range(30)]


def test_a_jpeg_is_checked_to_its_last_byte_though_not_at_its_full_size(tmp_path: Path) -> None:
    path = tmp_path / "photograph.jpg"
    for progressive in (False, True):
        Image.fromarray(noise(90, 200)).save(path, progressive=progressive)
        assert check_images(set_of([path])).tolist() == [[90, 200]]
        whole = path.read_bytes()
        for kept in (0.5, 0.97):
            path.write_bytes(whole[: int(kept * len(whole))])
            with pytest.raises(UnreadableImagesError, match="1 of 1 images"):
                check_images(set_of([path]))


def test_all_parts_of_the_data_are_checked_together_and_each_file_once(tmp_path: Path) -> None:
    paths = [tmp_path / f"{k}.png" for k in range(8)]
    for path in paths:
        Image.fromarray(noise(4, 4)).save(path)
    train, test, gallery, validation = (
        ImageSet(tuple(paths[k : k + 2]), torch.tensor([0, 0]), (name,))
        for k, name in zip((0, 2, 4, 6), "abcd", strict=True)
    )
    data = RetrievalData("csv", train, test, replace(gallery, class_names=test.class_names), validation)
    checked: list[int] = []

    def track(items: Iterable[Any], _: str, total: int) -> Iterable[Any]:
        checked.append(total)
        return items

    check_data(data, track=track)
    check_data(replace(data, gallery=test), track=track)
    assert checked == [8, 6]
    for path in paths[::2]:
        path.write_bytes(b"")
    with pytest.raises(UnreadableImagesError, match="4 of 8 images") as caught:
        check_data(data)
    assert [failure.path for failure in caught.value.failures] == [paths[k] for k in (0, 6, 2, 4)]


def test_checking_lists_all_bad_files_in_one_error(tmp_path: Path) -> None:
    bad = list(broken_files(tmp_path).values())
    good = [tmp_path / "good.jpg", tmp_path / "good.png"]
    with pytest.raises(UnreadableImagesError) as caught:
        check_images(set_of([bad[0], good[0], *bad[1:], good[1]]), workers=2)
    message = str(caught.value)
    assert message.startswith("6 of 8 images cannot be read; restore these files")
    assert all(f"  {path}: " in message for path in bad)
    assert not any(str(path) in message for path in good)


def test_a_long_list_of_bad_files_is_cut_and_counted(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImagesError) as caught:
        check_images(set_of([tmp_path / f"{k}.png" for k in range(33)]))
    assert len(str(caught.value).splitlines()) == 22
    assert str(caught.value).startswith("33 of 33 images")
    assert "... and 13 more" in str(caught.value)
    assert len(caught.value.failures) == 33


def test_checking_shows_its_progress(tmp_path: Path) -> None:
    Image.fromarray(noise()).save(tmp_path / "a.png")
    shown = []

    def track(items, description, total):
        for item in items:
            shown.append((description, total))
            yield item

    check_images(set_of([tmp_path / "a.png"] * 3), track=track)
    assert shown == [("checking images", 3)] * 3


def test_pixels_need_no_check_but_have_sizes() -> None:
    images = ImageSet(torch.zeros(4, 3, 5, 6, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), ("only",))
    assert check_images(images).tolist() == [[5, 6]] * 4


@pytest.mark.parametrize("size", [(40, 30), (30, 41), (29, 29), (500, 333)])
def test_shrinking_brings_the_short_side_down_and_never_up(size: tuple[int, int]) -> None:
    image = torch.from_numpy(noise(*size)).permute(2, 0, 1).contiguous()
    short = min(size)
    for short_side in (20, short, short + 5, None):
        shrunk = shrink(image, short_side)
        assert tuple(shrunk.shape[1:]) == shrunk_size(size, short_side)
        assert min(shrunk.shape[1:]) == (20 if short_side == 20 else short)
        assert (shrunk is image) == (short_side != 20)
    assert max(shrink(image, 20).shape[1:]) == int(20 * max(size) / short)


def test_shrinking_is_an_antialiased_resize() -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional", reason="compared with torchvision")
    image = torch.from_numpy(noise(90, 61)).permute(2, 0, 1).contiguous()
    expected = functional.resize(image.double() / 255, 20, antialias=True)
    assert (shrink(image, 20) / 255 - expected).abs().max() < 1.3 / 255


def test_shrinking_while_reading_is_shrinking_after_it(tmp_path: Path) -> None:
    Image.fromarray(noise(90, 61)).save(tmp_path / "a.png")
    assert torch.equal(read_rgb(tmp_path / "a.png", 20), shrink(read_rgb(tmp_path / "a.png"), 20))


def test_threads_keep_the_order_and_do_not_run_far_ahead() -> None:
    taken = []

    def numbers() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    results = in_threads(lambda item: item * item, numbers(), 2)
    assert next(results) == 0
    assert len(taken) == 8, "four a worker: what waits for the consumer takes memory"
    assert next(results) == 1
    assert len(taken) == 9
    assert list(results) == [k * k for k in range(2, 1000)]
