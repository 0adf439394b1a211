"""Oracle: torchvision's RandomResizedCrop.get_params, Resize and CenterCrop, and normalization by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pfml.data.preprocessing import Augmentation, Preprocessing
from pfml.data.seeding import generator_for


def boxes(size: tuple[int, int], count: int, augmentation: Augmentation, seed: int = 0) -> Tensor:
    """Drawn crops as rows of top, left, height, width."""
    generator = torch.Generator().manual_seed(seed)
    windows = augmentation.windows(
        torch.zeros(count, dtype=torch.int64), torch.tensor([size]), Preprocessing(), generator
    )
    return torch.cat([windows.lower, windows.upper - windows.lower], dim=1)


def torchvision_boxes(size: tuple[int, int], count: int, augmentation: Augmentation) -> Tensor:
    transform = pytest.importorskip("torchvision.transforms", reason="compared with torchvision").RandomResizedCrop
    torch.manual_seed(1)
    image = torch.empty(3, *size)
    scale, ratio = list(augmentation.scale), list(augmentation.ratio)
    return torch.tensor([transform.get_params(image, scale, ratio) for _ in range(count)])


def largest_difference_of_distributions(first: Tensor, second: Tensor) -> float:
    """The Kolmogorov-Smirnov statistic."""
    values = torch.cat([first, second]).unique()
    cumulative = [
        torch.searchsorted(sample.sort().values, values, right=True) / len(sample) for sample in (first, second)
    ]
    return float((cumulative[0] - cumulative[1]).abs().max())


@pytest.mark.parametrize(
    ("size", "augmentation"),
    [
        ((300, 400), Augmentation()),
        ((40, 200), Augmentation()),  # most large areas do not fit, and some draws take the fallback
        ((90, 90), Augmentation(scale=(0.2, 0.5), ratio=(0.5, 1.1))),
    ],
)
def test_random_crops_have_the_distribution_of_torchvision(size: tuple[int, int], augmentation: Augmentation) -> None:
    ours = boxes(size, 20_000, augmentation).double()
    theirs = torchvision_boxes(size, 6_000, augmentation).double()
    # 99.9 % of equal distributions differ by less than 1.95 sqrt(1/n + 1/m) = 0.029
    for name, column in (
        ("top", lambda box: box[:, 0]),
        ("left", lambda box: box[:, 1]),
        ("height", lambda box: box[:, 2]),
        ("width", lambda box: box[:, 3]),
        ("area", lambda box: box[:, 2] * box[:, 3]),
        ("ratio", lambda box: box[:, 3] / box[:, 2]),
        ("right", lambda box: box[:, 1] + box[:, 3]),
    ):
        assert largest_difference_of_distributions(column(ours), column(theirs)) < 0.029, name


def test_scale_and_ratio_move_the_distribution_of_crops() -> None:
    usual = boxes((300, 400), 2000, Augmentation()).double()
    large = boxes((300, 400), 2000, Augmentation(scale=(0.5, 1.0))).double()
    tall = boxes((300, 400), 2000, Augmentation(ratio=(0.5, 0.6))).double()
    assert (large[:, 2] * large[:, 3]).min() > 0.49 * 300 * 400 > (usual[:, 2] * usual[:, 3]).min()
    assert (tall[:, 3] / tall[:, 2]).max() < 0.65 < (usual[:, 3] / usual[:, 2]).min()


@pytest.mark.parametrize(
    ("size", "augmentation"),
    [
        ((10, 1000), Augmentation(scale=(0.9, 1.0))),  # too wide
        ((1000, 10), Augmentation(scale=(0.9, 1.0))),  # too tall
        ((7, 333), Augmentation(scale=(0.9, 1.0))),
        ((101, 100), Augmentation(scale=(1.0, 1.0), ratio=(0.5, 0.6))),
        ((1, 1), Augmentation(scale=(0.01, 0.02))),  # every try rounds to nothing
    ],
)
def test_when_no_try_fits_the_center_is_taken_exactly_as_torchvision_does(
    size: tuple[int, int], augmentation: Augmentation
) -> None:
    assert torch.equal(boxes(size, 5, augmentation), torchvision_boxes(size, 5, augmentation))


def test_a_crop_does_not_depend_on_whether_others_in_its_batch_find_a_try_that_fits() -> None:
    augmentation = Augmentation(scale=(0.5, 1.0))
    size = torch.tensor([[300, 400], [10, 1000], [375, 500], [1000, 10]])
    draws = torch.rand(4, 22, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = [augmentation._boxes(size[k : k + 1], draws[k : k + 1]) for k in range(4)]
    for together, apart in zip(augmentation._boxes(size, draws), zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.cat(apart))


def test_crops_lie_inside_their_images_and_come_in_one_draw_for_different_sizes() -> None:
    sizes = torch.tensor([[5, 9], [300, 200], [1, 1], [64, 640]])
    indices = torch.arange(4).repeat(500)
    windows = Augmentation().windows(indices, sizes, Preprocessing(), generator_for(0, "test", 0))
    assert (windows.lower >= 0).all()
    assert (windows.upper <= sizes[indices]).all()
    assert (windows.upper > windows.lower).all()
    assert torch.equal(windows.start, windows.lower.double())
    assert torch.equal(windows.extent, (windows.upper - windows.lower).double())
    # both ends are reached
    large = indices == 1
    assert (windows.lower[large] == 0).any(0).all()
    assert (windows.upper[large] == sizes[1]).any(0).all()


def test_random_windows_are_a_function_of_the_generators_seed() -> None:
    sizes = torch.tensor([[300, 200]])
    first, again, other = (
        Augmentation().windows(torch.zeros(8, dtype=torch.int64), sizes, Preprocessing(), generator_for(0, "crop", t))
        for t in (3, 3, 4)
    )
    assert torch.equal(first.start, again.start)
    assert torch.equal(first.flipped, again.flipped)
    assert not torch.equal(first.start, other.start)


@pytest.mark.parametrize("flip", [0.0, 0.3, 1.0])
def test_flip_is_the_share_of_mirrored_crops(flip: float) -> None:
    indices, sizes = torch.zeros(4000, dtype=torch.int64), torch.tensor([[32, 32]])
    windows = Augmentation(flip=flip).windows(indices, sizes, Preprocessing(), generator_for(0, "flip", 0))
    assert windows.flipped.double().mean() == pytest.approx(flip, abs=0.03 if 0 < flip < 1 else 0)


def test_without_random_crops_the_windows_are_those_of_the_preprocessing_with_flips() -> None:
    indices, sizes = torch.arange(3).repeat(10), torch.tensor([[300, 200], [64, 64], [90, 500]])
    preprocessing = Preprocessing(interpolation="bicubic")
    windows = Augmentation(random_crop=False).windows(indices, sizes, preprocessing, generator_for(0, "flip", 0))
    expected = preprocessing.windows(indices, sizes)
    for name in ("indices", "start", "extent", "lower", "upper"):
        assert torch.equal(getattr(windows, name), getattr(expected, name))
    assert (windows.size, windows.interpolation) == (224, "bicubic")
    assert windows.flipped.any()
    assert not expected.flipped.any()
    with_crops = Augmentation().windows(indices, sizes, preprocessing, generator_for(0, "flip", 0))
    assert torch.equal(windows.flipped, with_crops.flipped)
    assert (with_crops.size, with_crops.interpolation) == (224, "bicubic")


def test_the_center_crop_has_torchvisions_integers_for_all_sizes() -> None:
    sizes = torch.cartesian_prod(torch.arange(1, 120), torch.arange(1, 120))
    for resize, crop in ((48, 41), (48, 40), (33, 33)):
        windows = Preprocessing(resize=resize, crop=crop).windows(torch.arange(len(sizes)), sizes)
        for row, (height, width) in enumerate(sizes.tolist()):
            if row % 7:  # a seventh of the sizes is enough
                continue
            short, long = min(height, width), max(height, width)
            new = {short: resize, long: int(resize * long / short)} if short != long else {short: resize}
            for axis, length in enumerate((height, width)):
                offset = round((new[length] - crop) / 2.0)
                step = length / new[length]
                assert math.isclose(windows.start[row, axis], offset * step, abs_tol=1e-9)
                assert math.isclose(windows.extent[row, axis], crop * step, abs_tol=1e-9)
        assert torch.equal(windows.upper, sizes)
        assert not windows.lower.any()


def test_normalize_computes_mean_and_std_in_the_networks_order_and_scale() -> None:
    images = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    plain = Preprocessing().normalize(images)
    assert plain[1, 2, 3, 4] == pytest.approx((float(images[1, 2, 3, 4]) - 0.406) / 0.225, abs=1e-6)
    assert plain[0, 0, 1, 1] == pytest.approx((float(images[0, 0, 1, 1]) - 0.485) / 0.229, abs=1e-6)
    caffe = Preprocessing(mean=(104, 117, 128), std=(1, 1, 2), channel_order="bgr", value_scale=255).normalize(images)
    assert caffe[1, 0, 3, 4] == pytest.approx(255 * float(images[1, 2, 3, 4]) - 104, abs=1e-4)  # blue comes first
    assert caffe[1, 2, 3, 4] == pytest.approx((255 * float(images[1, 0, 3, 4]) - 128) / 2, abs=1e-4)


def test_normalize_takes_bytes_and_keeps_floating_point_types() -> None:
    pixels = torch.randint(0, 256, (2, 3, 4, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(Preprocessing().normalize(pixels), Preprocessing().normalize(pixels / 255.0))
    assert Preprocessing().normalize(pixels).dtype == torch.float32
    assert Preprocessing().normalize(torch.rand(1, 3, 2, 2).double()).dtype == torch.float64
    with pytest.raises(TypeError, match="floats in .0, 1. or uint8"):
        Preprocessing().normalize(pixels.to(torch.int32))
    with pytest.raises(ValueError, match=r"shape \(batch, 3, height, width\), got \(2, 4, 5\)"):
        Preprocessing().normalize(torch.rand(2, 4, 5))


def test_a_preprocessing_survives_json() -> None:
    preprocessing = Preprocessing(resize=36, crop=32, mean=(1, 2, 3), interpolation="bicubic", channel_order="bgr")
    again = Preprocessing.from_dict(json.loads(json.dumps(preprocessing.to_dict())))
    assert again == preprocessing
    assert Preprocessing.from_dict({}) == Preprocessing()
    with pytest.raises(ValueError, match="'resise' is no key of a Preprocessing; did you mean 'resize'"):
        Preprocessing.from_dict({"resise": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": 300}, "crop must not exceed resize, got crop=300 and resize=256"),
        ({"resize": 0}, "resize must be an integer >= 1"),
        ({"crop": 3.5}, "crop must be an integer >= 1"),
        ({"interpolation": "nearest"}, "interpolation must be one of"),
        ({"channel_order": "gbr"}, "channel_order must be one of"),
        ({"mean": (0.1, 0.2)}, "mean must be three finite numbers"),
        ({"mean": (0.1, 0.2, math.nan)}, "mean must be three finite numbers"),
        ({"std": (0.1, 0.2, 0.0)}, "std must be positive"),
        ({"value_scale": 0.0}, "value_scale must lie in"),
    ],
)
def test_an_impossible_preprocessing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Preprocessing(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0.5, 0.2)}, "scale must be two positive numbers, the smaller first"),
        ({"scale": (0.5, 1.2)}, "scale must not exceed 1"),
        ({"ratio": (0.0, 1.0)}, "ratio must be two positive numbers"),
        ({"flip": 1.5}, "flip must be a probability"),
    ],
)
def test_an_impossible_augmentation_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(Augmentation(), **options)
    with pytest.raises(TypeError, match="random_crop must be True or False"):
        Augmentation(random_crop=1)  # type: ignore[arg-type]


def test_indices_beyond_the_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"indices must lie in \[0, 2\), the images in sizes, got 0 to 5"):
        Preprocessing().windows(torch.tensor([0, 5]), torch.tensor([[3, 3], [4, 4]]))
    with pytest.raises(ValueError, match=r"sizes must be of shape \(images, 2\)"):
        Preprocessing().windows(torch.tensor([0]), torch.tensor([3, 3]))


def test_generators_differ_by_seed_purpose_and_count() -> None:
    draws = [
        tuple(torch.rand(4, generator=generator_for(*triple)).tolist())
        for triple in (
            (0, "crop", 1),
            (1, "crop", 0),
            (0, "crop", 0),
            (0, "noise", 0),
            (-1, "crop", 0),
            (2**70, "a", 1),
        )
    ]
    assert len(set(draws)) == len(draws)
    assert torch.equal(
        torch.rand(4, generator=generator_for(0, "crop", 1)), torch.tensor(draws[0], dtype=torch.float32)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"std": (1e-300, 1.0, 1.0)}, "at most 10000 .* std 1e-300"),
        ({"std": (1e-5, 1.0, 1.0)}, "at most 10000 .* std 1e-05"),
        ({"std": (0.2, 0.2, 1e300)}, "a contrast of at least 0.0001, .* std 1e\\+300"),
        ({"mean": (0.5, 1e30, 0.5)}, "at most 10000 .* mean 1e\\+30"),
        ({"value_scale": 1e300}, "value_scale must lie in"),
        ({"value_scale": 1e-300}, "value_scale must lie in"),
        ({"value_scale": math.nan}, "value_scale must lie in"),
        ({"resize": 10**9}, "resize must be at most 4096 pixels"),
    ],
)
def test_values_by_which_no_image_becomes_finite_different_numbers_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocessing(**values)


@pytest.mark.parametrize(
    "usual",
    [
        Preprocessing(mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255)),
        Preprocessing(mean=(104.0, 117.0, 128.0), std=(1.0, 1.0, 1.0), channel_order="bgr", value_scale=255.0),
        Preprocessing(mean=(123.7, 116.3, 103.5), std=(58.4, 57.1, 57.4), value_scale=255.0),
        Preprocessing(resize=1024, crop=1024, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    ],
)
def test_what_published_networks_have_is_taken_and_stays_finite_in_half_precision(usual: Preprocessing) -> None:
    images = torch.stack([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)])
    assert torch.isfinite(usual.normalize(images).half()).all()
    assert Preprocessing.from_dict(usual.to_dict()) == usual
