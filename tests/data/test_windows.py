"""Oracle: torchvision's transforms on each image by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pfml.data.preprocessing import Augmentation, Preprocessing
from pfml.data.resampling import PixelBuffer, resample, resample_batch
from pfml.data.windows import Windows

SIZES = torch.tensor([[37, 50], [120, 61], [133, 200], [20, 180], [64, 64], [1, 7], [200, 90]])
INTERPOLATIONS = ["bilinear", "bicubic"]


def photographs(smooth: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = []
    for height, width in SIZES.tolist():
        if smooth:
            coarse = torch.rand(1, 3, 6, 6, generator=generator)
            image = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")[0]
            images.append((image.clamp(0, 1) * 255).round().to(torch.uint8))
        else:
            images.append(torch.randint(0, 256, (3, height, width), generator=generator, dtype=torch.uint8))
    return images


def buffer_of(images: list[Tensor]) -> PixelBuffer:
    lengths = torch.tensor([image.numel() for image in images])
    return PixelBuffer(torch.cat([image.flatten() for image in images]), lengths.cumsum(0) - lengths, SIZES)


def random_windows(preprocessing: Preprocessing, copies: int = 4) -> Windows:
    generator = torch.Generator().manual_seed(5)
    return Augmentation().windows(torch.arange(len(SIZES)).repeat(copies), SIZES, preprocessing, generator)


def by_torchvision(image: object, windows: Windows, row: int, resize: int | None) -> object:
    """RandomResizedCrop's box, or Resize(resize) + CenterCrop if `resize` is given; then the flip."""
    functional = pytest.importorskip("torchvision.transforms.v2.functional", reason="compared with torchvision")
    mode = pytest.importorskip("torchvision.transforms", reason="compared with torchvision").InterpolationMode(
        windows.interpolation
    )
    if resize is not None:
        resized = functional.resize(image, resize, interpolation=mode, antialias=True)
        crop = functional.center_crop(resized, windows.size)
    else:
        (top, left), (bottom, right) = windows.lower[row].tolist(), windows.upper[row].tolist()
        box = (top, left, bottom - top, right - left)
        crop = functional.resized_crop(image, *box, [windows.size] * 2, interpolation=mode, antialias=True)
    return functional.horizontal_flip(crop) if windows.flipped[row] else crop


def both_geometries(interpolation: str) -> list[tuple[Windows, int | None]]:
    preprocessing = Preprocessing(resize=48, crop=41, interpolation=interpolation)
    return [(preprocessing.windows(torch.arange(len(SIZES)), SIZES), 48), (random_windows(preprocessing), None)]


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_both_executions_agree_with_torchvisions_transforms_of_float_tensors(interpolation: str) -> None:
    images = photographs()
    for windows, resize in both_geometries(interpolation):
        assert resize or (windows.flipped.any() and not windows.flipped.all())
        expected = [
            by_torchvision(images[index].double() / 255, windows, row, resize).clamp(0, 1)
            for row, index in enumerate(windows.indices.tolist())
        ]
        torch.testing.assert_close(
            resample_batch(buffer_of(images), windows).double(), torch.stack(expected), rtol=0, atol=1e-6
        )
        # torch's own float32 interpolation has float32 positions, which are off by 1e-7 of the image's side
        torch.testing.assert_close(
            resample(images.__getitem__, windows).double(), torch.stack(expected), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_crops_agree_with_torchvisions_transforms_of_pil_images_within_rounding(interpolation: str) -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional", reason="compared with torchvision")
    images = photographs(smooth=True)
    for windows, resize in both_geometries(interpolation):
        crops = resample(images.__getitem__, windows)
        for row, index in enumerate(windows.indices.tolist()):
            expected = by_torchvision(functional.to_pil_image(images[index]), windows, row, resize)
            difference = (functional.pil_to_tensor(expected).float() / 255 - crops[row]).abs()
            assert difference.max() < 1.3 / 255


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_the_chunks_of_a_batch_do_not_change_its_crops(interpolation: str) -> None:
    windows = random_windows(Preprocessing(resize=48, crop=41, interpolation=interpolation))
    pixels = buffer_of(photographs())
    torch.testing.assert_close(
        resample_batch(pixels, windows, chunk_values=30_000), resample_batch(pixels, windows), rtol=0, atol=1e-6
    )


def test_a_chunk_gathers_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    from pfml.data import resampling

    gathered = []
    original = resampling._products

    def counted(sources: Tensor, *rest: object) -> Tensor:
        gathered.append(tuple(sources.shape))
        return original(sources, *rest)

    monkeypatch.setattr(resampling, "_products", counted)
    windows = random_windows(Preprocessing(resize=48, crop=41))
    resample_batch(buffer_of(photographs()), windows, chunk_values=30_000)
    assert sum(shape[0] for shape in gathered) == len(windows)
    assert all(shape[0] == 1 or torch.Size(shape).numel() <= 30_000 for shape in gathered)
    assert 1 < len(gathered) < len(windows)


def test_a_pool_of_threads_does_not_change_the_crops() -> None:
    from concurrent.futures import ThreadPoolExecutor

    images, windows = photographs(), random_windows(Preprocessing(resize=48, crop=41))
    with ThreadPoolExecutor(2) as pool:
        assert torch.equal(resample(images.__getitem__, windows, pool=pool), resample(images.__getitem__, windows))


def test_windows_off_every_pixel_grid_are_resampled_alike_by_both_executions() -> None:
    windows = Windows(
        indices=torch.tensor([0, 6]),
        start=torch.tensor([[3.3, 1.7], [20.25, 0.1]], dtype=torch.float64),
        extent=torch.tensor([[21.2, 33.1], [100.7, 15.9]], dtype=torch.float64),
        lower=torch.tensor([[0, 0], [10, 0]]),
        upper=torch.tensor([[37, 50], [190, 80]]),
        flipped=torch.tensor([False, True]),
        size=16,
    )
    images = photographs()
    crops = resample(images.__getitem__, windows)
    torch.testing.assert_close(crops, resample_batch(buffer_of(images), windows), rtol=0, atol=1e-6)
    # by hand, one value: output pixel (2, 5) of the first crop
    weights = []
    for axis, k in ((0, 2), (1, 5)):
        step = float(windows.extent[0, axis]) / 16
        center = float(windows.start[0, axis]) + (k + 0.5) * step
        source = torch.arange(int(SIZES[0, axis])) + 0.5
        weight = (1 - (source - center).abs() / max(step, 1)).clamp(min=0)
        weights.append(weight / weight.sum())
    expected = torch.einsum("y,cyx,x->c", weights[0], images[0].float() / 255, weights[1])
    torch.testing.assert_close(crops[0, :, 2, 5], expected, rtol=0, atol=1e-5)


def test_images_of_the_right_size_are_copied_exactly_and_flipped() -> None:
    pixels = torch.randint(0, 256, (9, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    buffer = PixelBuffer.of_pixels(pixels)
    indices = torch.tensor([8, 0, 3, 3])
    generator = torch.Generator().manual_seed(1)
    preprocessing = Preprocessing(resize=32, crop=32)
    augmentation = Augmentation(random_crop=False)
    windows = augmentation.windows(indices, buffer.sizes, preprocessing, generator)
    assert windows.is_copy
    assert windows.flipped.any()
    assert not windows.flipped.all()
    expected = torch.stack(
        [pixels[k].flip(-1) if flip else pixels[k] for k, flip in zip(indices, windows.flipped, strict=True)]
    )
    assert torch.equal(resample_batch(buffer, windows), expected / 255.0)
    assert torch.equal(resample(buffer.image, windows), expected / 255.0)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_crops_without_a_resize_are_copied_exactly_out_of_larger_images(interpolation: str) -> None:
    images = photographs()
    generator = torch.Generator().manual_seed(2)
    windows = Windows(
        indices=torch.tensor([0, 2, 4, 6]),
        start=torch.tensor([[0, 0], [11, 7], [3, 40], [180, 70]], dtype=torch.float64),
        extent=torch.full((4, 2), 20.0, dtype=torch.float64),
        lower=torch.zeros(4, 2, dtype=torch.int64),
        upper=SIZES[[0, 2, 4, 6]],
        flipped=torch.rand(4, generator=generator) < 0.5,
        size=20,
        interpolation=interpolation,
    )
    assert windows.is_copy
    for row, index in enumerate(windows.indices.tolist()):
        y, x = windows.start[row].long().tolist()
        expected = images[index][:, y : y + 20, x : x + 20] / 255.0
        expected = expected.flip(-1) if windows.flipped[row] else expected
        assert torch.equal(resample_batch(buffer_of(images), windows)[row], expected)
        assert torch.equal(resample(images.__getitem__, windows)[row], expected)


def test_a_window_beyond_what_the_filter_may_read_is_not_a_copy() -> None:
    windows = Windows(
        indices=torch.tensor([0]),
        start=torch.tensor([[-2.0, 0.0]], dtype=torch.float64),
        extent=torch.full((1, 2), 20.0, dtype=torch.float64),
        lower=torch.zeros(1, 2, dtype=torch.int64),
        upper=SIZES[:1],
        flipped=torch.tensor([False]),
        size=20,
    )
    assert not windows.is_copy


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("offset", [-1, 0, 7, 20, 21])
def test_a_window_that_leaves_what_the_filter_may_read_is_the_same_by_both_executions(offset: int, axis: int) -> None:
    image = torch.randint(0, 256, (3, 60, 60), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    start = torch.tensor([[14.0, 14.0]], dtype=torch.float64)
    start[0, axis] = 2.0 * offset
    windows = Windows(
        indices=torch.tensor([0]),
        start=start,
        extent=torch.full((1, 2), 20.0, dtype=torch.float64),
        lower=torch.zeros(1, 2, dtype=torch.int64),
        upper=torch.full((1, 2), 60),
        flipped=torch.tensor([False]),
        size=10,
    )
    expected = resample_batch(PixelBuffer.of_pixels(image[None]), windows)
    torch.testing.assert_close(resample(lambda _: image, windows), expected, rtol=0, atol=1e-6)


def test_images_of_the_right_size_are_neither_gathered_nor_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    from pfml.data import resampling

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a copy needs no filter")

    monkeypatch.setattr(resampling, "_products", refuse)
    monkeypatch.setattr(resampling.F, "embedding_bag", refuse)
    buffer = PixelBuffer.of_pixels(torch.zeros(10, 3, 32, 32, dtype=torch.uint8))
    windows = Preprocessing(resize=32, crop=32).windows(torch.arange(10), buffer.sizes)
    assert resample_batch(buffer, windows).shape == (10, 3, 32, 32)
    assert resample(buffer.image, windows).shape == (10, 3, 32, 32)
    with pytest.raises(AssertionError, match="a copy needs no filter"):
        resample_batch(buffer, Preprocessing(resize=33, crop=32).windows(torch.arange(10), buffer.sizes))


def test_the_precision_switch_for_products_is_neither_obeyed_nor_changed() -> None:
    pixels, windows = buffer_of(photographs()), random_windows(Preprocessing(resize=48, crop=41))
    expected = resample_batch(pixels, windows)
    outside = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(resample_batch(pixels, windows), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(outside)


def test_an_empty_batch_gives_no_crops() -> None:
    windows = Preprocessing(resize=48, crop=41).windows(torch.arange(0), SIZES)
    assert resample_batch(buffer_of(photographs()), windows).shape == (0, 3, 41, 41)
    assert resample(photographs().__getitem__, windows).shape == (0, 3, 41, 41)


def test_rows_are_chosen_in_order() -> None:
    windows = random_windows(Preprocessing(resize=48, crop=41))
    chosen = windows.rows(torch.tensor([5, 2]))
    assert chosen.indices.tolist() == [5, 2]
    assert torch.equal(chosen.start, windows.start[[5, 2]])
    assert len(windows.rows(slice(1, 4))) == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("interpolation", "nearest", "interpolation must be one of"),
        ("size", 0, "size must be at least 1"),
        ("start", torch.zeros(7, 2), "start must be torch.float64 of shape"),
        ("lower", torch.zeros(3, 2, dtype=torch.int64), "lower must be torch.int64 of shape"),
    ],
)
def test_malformed_windows_are_refused(name: str, value: object, message: str) -> None:
    from dataclasses import replace

    windows = Preprocessing().windows(torch.arange(7), SIZES)
    with pytest.raises(ValueError, match=message):
        replace(windows, **{name: value})


@pytest.mark.gpu
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_crops_on_the_gpu_are_those_on_the_cpu(interpolation: str) -> None:
    pixels = buffer_of(photographs())
    for windows, _ in both_geometries(interpolation):
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            crops = resample_batch(pixels.to("cuda"), windows)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        torch.testing.assert_close(crops.cpu(), resample_batch(pixels, windows), rtol=0, atol=2e-6)
