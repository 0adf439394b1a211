"""Oracle: the definition in `pfml.data.windows`, in Python loops; then the two other executions of the same windows."""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pfml.data import fused_crops
from pfml.data.decoded_images import DecodedImages
from pfml.data.fused_crops import resample_fused, unavailable
from pfml.data.preprocessing import Augmentation, Preprocessing
from pfml.data.resampling import PixelBuffer, resample, resample_batch
from pfml.data.windows import Windows

pytest.importorskip("triton", reason="the kernels need the package triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")

INTERPOLATIONS = ["bilinear", "bicubic"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def oracle_weights(start: float, extent: float, lower: int, upper: int, k: int, size: int, interpolation: str) -> dict:
    center = start + (k + 0.5) * extent / size
    weights = {}
    for j in range(lower, upper):
        r = abs(j + 0.5 - center) / max(extent / size, 1.0)
        if interpolation == "bilinear":
            weights[j] = max(1 - r, 0.0)
        elif r < 1:
            weights[j] = 1.5 * r**3 - 2.5 * r**2 + 1
        else:
            weights[j] = -0.5 * r**3 + 2.5 * r**2 - 4 * r + 2 if r < 2 else 0.0
    total = sum(weights.values())
    return {j: weight / total for j, weight in weights.items()}


def oracle_crop(image: Tensor, windows: Windows, row: int) -> Tensor:
    size = windows.size
    crop = torch.empty(3, size, size, dtype=torch.float64)
    weights = [
        [
            oracle_weights(
                *(float(part[row, axis]) for part in (windows.start, windows.extent)),
                *(int(part[row, axis]) for part in (windows.lower, windows.upper)),
                k,
                size,
                windows.interpolation,
            )
            for k in range(size)
        ]
        for axis in (0, 1)
    ]
    for channel in range(3):
        values = image[channel].tolist()
        for y in range(size):
            for x in range(size):
                value = sum(
                    down * across * values[j][i]
                    for j, down in weights[0][y].items()
                    for i, across in weights[1][x].items()
                )
                crop[channel, y, x] = min(max(value / 255, 0.0), 1.0)
    return crop.flip(-1) if windows.flipped[row] else crop


def buffer_of(sizes: list[tuple[int, int]], *, before: int = 0, seed: int = 0) -> PixelBuffer:
    """Noise of the given sizes, the first image `before` bytes into the buffer."""
    lengths = torch.tensor([3 * height * width for height, width in sizes])
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (before + int(lengths.sum()),), generator=generator, dtype=torch.uint8)
    return PixelBuffer(data, before + lengths.cumsum(0) - lengths, torch.tensor(sizes))


def fused(pixels: PixelBuffer, windows: Windows, **options: int) -> Tensor:
    return resample_fused(pixels.to(DEVICE), windows, **options).cpu()


def assert_same(pixels: PixelBuffer, windows: Windows, crops: Tensor | None = None) -> None:
    crops = fused(pixels, windows) if crops is None else crops
    assert crops.dtype == torch.float32
    assert crops.min() >= 0
    assert crops.max() <= 1
    torch.testing.assert_close(crops, resample_batch(pixels, windows), rtol=0, atol=1e-6)
    # torch's own float32 interpolation has float32 positions, which are off by 1e-7 of the image's side
    atol = 1e-5 + 1e-7 * int(pixels.sizes.max())
    torch.testing.assert_close(crops, resample(pixels.image, windows), rtol=0, atol=atol)


def odd_windows(interpolation: str) -> Windows:
    """Off every grid, larger and smaller than their crops, one flipped, one whose filter may read beyond it."""
    return Windows(
        indices=torch.tensor([1, 0, 1]),
        start=torch.tensor([[1.3, 0.7], [2.0, 1.25], [0.0, 3.0]], dtype=torch.float64),
        extent=torch.tensor([[7.2, 9.1], [3.7, 2.9], [9.0, 5.0]], dtype=torch.float64),
        lower=torch.tensor([[0, 0], [1, 1], [0, 3]]),
        upper=torch.tensor([[9, 11], [7, 5], [9, 8]]),
        flipped=torch.tensor([False, True, True]),
        size=5,
        interpolation=interpolation,
    )


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_crops_are_the_weighted_means_of_the_definition(interpolation: str) -> None:
    pixels, windows = buffer_of([(7, 6), (9, 11)], before=5), odd_windows(interpolation)
    expected = [oracle_crop(pixels.image(k), windows, row) for row, k in enumerate(windows.indices.tolist())]
    torch.testing.assert_close(fused(pixels, windows).double(), torch.stack(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_crops_are_those_of_the_two_other_executions(interpolation: str) -> None:
    pixels = buffer_of([(13, 9), (1, 7), (20, 31), (11, 11)], before=3)
    preprocessing = Preprocessing(resize=12, crop=11, interpolation=interpolation)
    indices = torch.tensor([2, 0, 3, 1])
    assert_same(pixels, preprocessing.windows(indices, pixels.sizes))
    windows = Augmentation().windows(indices, pixels.sizes, preprocessing, torch.Generator().manual_seed(5))
    assert windows.flipped.any()
    assert not windows.flipped.all()
    assert_same(pixels, windows)


@st.composite
def cases(draw: st.DrawFn) -> tuple[PixelBuffer, Windows]:
    side = st.integers(1, 20)
    sizes = draw(st.lists(st.tuples(side, side), min_size=1, max_size=3))
    size, rows = draw(st.integers(1, 9)), []
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(sizes) - 1))
        axes = []
        for length in sizes[index]:
            lower = draw(st.integers(0, length - 1))
            upper = draw(st.integers(lower + 1, length))
            # as in both geometries, the window lies within what the filter may read
            begin, end = sorted(draw(st.tuples(*[st.floats(0, 1, allow_subnormal=False)] * 2)))
            extent = max((end - begin) * (upper - lower), 1e-3)
            start = lower + begin * (upper - lower)
            axes.append((min(start, upper - extent), extent, lower, upper))
        rows.append((index, draw(st.booleans()), axes))
    start, extent, lower, upper = (
        torch.tensor([[axis[part] for axis in axes] for _, _, axes in rows], dtype=dtype)
        for part, dtype in enumerate([torch.float64] * 2 + [torch.int64] * 2)
    )
    windows = Windows(
        torch.tensor([row[0] for row in rows]),
        start,
        extent,
        lower,
        upper,
        torch.tensor([row[1] for row in rows]),
        size,
        draw(st.sampled_from(INTERPOLATIONS)),
    )
    return buffer_of(sizes, before=draw(st.integers(0, 9)), seed=draw(st.integers(0, 99))), windows


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(cases())
def test_crops_are_the_same_for_any_windows(case: tuple[PixelBuffer, Windows]) -> None:
    assert_same(*case)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_a_large_image_shrinks_to_a_few_pixels(interpolation: str) -> None:
    pixels = buffer_of([(37, 33), (5, 70)])
    preprocessing = Preprocessing(resize=3, crop=3, interpolation=interpolation)
    windows = preprocessing.windows(torch.arange(2), pixels.sizes)
    assert float(windows.extent.max()) / windows.size > 10
    assert_same(pixels, windows)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_crops_larger_than_a_block_are_put_together(interpolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_crops, "ACROSS", (16, 16))
    monkeypatch.setattr(fused_crops, "DOWN", (16, 16))
    pixels = buffer_of([(23, 30)])
    windows = Windows(
        indices=torch.tensor([0]),
        start=torch.tensor([[0.5, 2.0]], dtype=torch.float64),
        extent=torch.tensor([[21.0, 25.5]], dtype=torch.float64),
        lower=torch.tensor([[0, 1]]),
        upper=torch.tensor([[23, 30]]),
        flipped=torch.tensor([True]),
        size=18,
        interpolation=interpolation,
    )
    assert_same(pixels, windows)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_what_needs_no_interpolation_is_copied_exactly(interpolation: str) -> None:
    pixels = buffer_of([(6, 6), (9, 8)])
    windows = Windows(
        indices=torch.tensor([0, 1, 1]),
        start=torch.tensor([[0, 0], [3, 2], [1, 0]], dtype=torch.float64),
        extent=torch.full((3, 2), 6.0, dtype=torch.float64),
        lower=torch.zeros(3, 2, dtype=torch.int64),
        upper=pixels.sizes[[0, 1, 1]],
        flipped=torch.tensor([True, False, True]),
        size=6,
        interpolation=interpolation,
    )
    assert windows.is_copy
    assert torch.equal(fused(pixels, windows), resample_batch(pixels, windows))


def test_a_batch_that_exceeds_the_workspace_is_cut_without_a_difference() -> None:
    pixels, windows = buffer_of([(7, 6), (9, 11)]), odd_windows("bilinear")
    whole = fused(pixels, windows)
    for values in (1, 3 * 5 * 15, 3 * 5 * 16):
        assert torch.equal(fused(pixels, windows, workspace_values=values), whole)


def test_parts_hold_as_many_crops_as_fit_and_one_at_least() -> None:
    heights = torch.tensor([3, 4, 3, 11, 1, 1]).numpy()
    parts = [(part.start, part.stop) for part in fused_crops._parts(heights, 10)]
    assert parts == [(0, 3), (3, 4), (4, 6)]
    assert list(fused_crops._parts(heights[:0], 10)) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of Triton's interpreter
def test_an_output_pixel_whose_filter_reads_nothing_is_nan() -> None:
    windows = Windows(
        indices=torch.tensor([0]),
        start=torch.tensor([[-3.0, 0.0]], dtype=torch.float64),
        extent=torch.tensor([[8.0, 8.0]], dtype=torch.float64),
        lower=torch.zeros(1, 2, dtype=torch.int64),
        upper=torch.tensor([[8, 8]]),
        flipped=torch.tensor([False]),
        size=8,
    )
    pixels = buffer_of([(8, 8)])
    crops = fused(pixels, windows)
    assert crops[:, :, :3].isnan().all()
    torch.testing.assert_close(crops[0, :, 3:], pixels.image(0)[:, :5] / 255.0, rtol=0, atol=0)


def test_an_empty_batch_gives_no_crops() -> None:
    pixels = buffer_of([(7, 6)])
    windows = Preprocessing(resize=5, crop=4).windows(torch.arange(0), pixels.sizes)
    assert fused(pixels, windows).shape == (0, 3, 4, 4)


@pytest.mark.parametrize(("lower", "upper"), [([0, -1], [7, 6]), ([0, 0], [8, 6])])
def test_windows_beyond_their_image_are_refused(lower: list[int], upper: list[int]) -> None:
    inside = Preprocessing(resize=5, crop=4).windows(torch.tensor([0, 0]), torch.tensor([[7, 6]]))
    windows = Windows(
        inside.indices,
        inside.start,
        inside.extent,
        torch.tensor([[0, 0], lower]),
        torch.tensor([[7, 6], upper]),
        inside.flipped,
        inside.size,
    )
    with pytest.raises(ValueError, match=r"windows must lie in their images, .* at index 1"):
        fused(buffer_of([(7, 6)]), windows)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_crops, "INTERPRETED", False)
    assert unavailable(torch.device("cuda")) is None
    pixels = buffer_of([(7, 6)])
    with pytest.raises(ValueError, match="need pixels on a CUDA device, got cpu"):
        resample_fused(pixels, Preprocessing(resize=5, crop=4).windows(torch.arange(1), pixels.sizes))
    monkeypatch.setattr(fused_crops, "INSTALLED", False)
    assert "pip install triton" in str(unavailable(torch.device("cuda")))


def test_a_source_tells_how_it_makes_crops(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = buffer_of([(7, 6)])
    assert DecodedImages(pixels).execution == "image by image"
    elsewhere = DecodedImages(PixelBuffer(pixels.data.to("meta"), pixels.offsets, pixels.sizes), device="meta")
    monkeypatch.setattr(fused_crops, "INTERPRETED", True)
    assert elsewhere.execution == "fused"
    monkeypatch.setattr(fused_crops, "INSTALLED", False)
    assert elsewhere.execution == "batched"


def test_sources_do_not_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "triton.language", "pfml.data.crop_kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("image_source", "decoded_images", "fused_crops"):
        spec = importlib.util.find_spec(f"pfml.data.{name}")
        assert spec is not None
        assert spec.loader is not None
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
    assert "pip install triton" in again.unavailable(torch.device("cuda"))


def photographs(count: int = 100) -> PixelBuffer:
    generator = torch.Generator().manual_seed(1)
    return buffer_of([tuple(side) for side in torch.randint(300, 501, (count, 2), generator=generator).tolist()])


@pytest.mark.gpu
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_batches_of_photographs_agree_without_a_wait_for_the_device(interpolation: str) -> None:
    pixels, preprocessing = photographs(), Preprocessing(interpolation=interpolation)
    on_device = pixels.to("cuda")
    indices = torch.arange(len(pixels))
    random = Augmentation().windows(indices, pixels.sizes, preprocessing, torch.Generator().manual_seed(5))
    for windows in (random, preprocessing.windows(indices, pixels.sizes)):
        resample_fused(on_device, windows)  # compiles
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("error")
            crops = resample_fused(on_device, windows)
        finally:
            torch.cuda.set_sync_debug_mode(before)
        assert torch.equal(crops, resample_fused(on_device, windows))
        assert_same(pixels, windows, crops.cpu())
        assert torch.equal(next(iter(DecodedImages(on_device, device="cuda").crops([windows]))), crops)


@pytest.mark.gpu
def test_batches_of_other_sizes_are_not_compiled_for_again() -> None:
    from pfml.data import crop_kernels

    def variants() -> int:
        kernels = (crop_kernels.across, crop_kernels.down)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    pixels, seen = photographs(64), []
    for count in (1, 16, 33, 64):
        generator = torch.Generator().manual_seed(count)
        windows = Augmentation().windows(torch.arange(count), pixels.sizes, Preprocessing(), generator)
        resample_fused(pixels.to("cuda"), windows)
        seen.append(variants())
    assert len(set(seen)) == 1


@pytest.mark.gpu
def test_images_may_lie_beyond_two_gigabytes() -> None:
    pixels = photographs(4)
    data = torch.zeros(2**31 + 2**20 + len(pixels.data), dtype=torch.uint8, device="cuda")
    data[-len(pixels.data) :] = pixels.data.cuda()
    far = PixelBuffer(data, pixels.offsets + 2**31 + 2**20, pixels.sizes)
    windows = Preprocessing().windows(torch.arange(4), pixels.sizes)
    assert torch.equal(resample_fused(far, windows), resample_fused(pixels.to("cuda"), windows))


@pytest.mark.gpu
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_images_of_megapixels_agree(interpolation: str) -> None:
    pixels = buffer_of([(3000, 4000), (333, 2500), (500, 375)])
    windows = Preprocessing(interpolation=interpolation).windows(torch.arange(3), pixels.sizes)
    assert float(windows.extent.max()) / windows.size > 10
    assert math.isfinite(float(fused(pixels, windows).sum()))
    assert_same(pixels, windows)
