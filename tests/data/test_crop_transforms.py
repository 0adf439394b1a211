"""Transforms of finished crops: what each does, and that chance is a function of seed, step and position."""

import pytest
import torch

from pfml.data.crop_transforms import transform_crops
from pfml.data.preprocessing import Augmentation
from pfml.training import train
from small_data import InterruptAt, few_glyphs, small_config, small_embedder

ALL = Augmentation(
    color_jitter=(0.4, 0.4, 0.4, 0.1), grayscale=0.2, rotation=15, rand_augment=2, rand_augment_magnitude=5, erasing=0.5
)


def crops(count=6):
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def test_by_default_crops_stay_as_they_are():
    given = crops()
    assert transform_crops(given, Augmentation(), 0, 0) is given


def test_chance_depends_on_seed_step_and_position_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = transform_crops(crops(), ALL, 7, 3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(transform_crops(crops(), ALL, 7, 3), first)
    for other in ((8, 3), (7, 4)):
        assert not torch.equal(transform_crops(crops(), ALL, *other), first)
    halves = [transform_crops(crops()[rows], ALL, 7, 3, rows.start) for rows in (slice(0, 2), slice(2, 6))]
    assert torch.equal(torch.cat(halves), first)
    same = crops(1).expand(6, -1, -1, -1).clone()
    assert len({tuple(crop.flatten().tolist()) for crop in transform_crops(same, ALL, 7, 3)}) == 6


def test_values_stay_in_range():
    for step in range(20):
        values = transform_crops(crops(), ALL, 0, step)
        assert values.min() >= 0
        assert values.max() <= 1


def test_gray_crops_have_no_color():
    gray = transform_crops(crops(), Augmentation(grayscale=1.0), 0, 0)
    assert torch.allclose(gray, gray[:, :1].expand(-1, 3, -1, -1))


def test_erasing_turns_a_rectangle_gray():
    erased = transform_crops(crops(), Augmentation(erasing=1.0), 0, 0)
    changed = (erased != crops()).any(1)
    share = changed.float().mean((1, 2))
    assert ((share > 0.01) & (share < 0.5)).all()
    for crop, where in zip(erased, changed, strict=True):
        rows, columns = where.nonzero().unbind(1)
        box = crop[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert (box == 0.5).all()


def test_rotation_turns_and_fills_the_corners():
    white = torch.ones(4, 3, 33, 33)
    turned = transform_crops(white, Augmentation(rotation=45), 0, 0)
    assert (turned[:, :, 16, 16] > 0.99).all()
    assert turned[:, :, 0, 0].min() < 0.9


def test_jitter_changes_brightness_and_hue():
    red = torch.zeros(8, 3, 4, 4)
    red[:, 0] = 0.5
    brighter = transform_crops(red.clone(), Augmentation(color_jitter=(0.5, 0, 0, 0)), 0, 0)
    assert brighter[:, 1:].abs().max() == 0
    assert 0.25 <= brighter[:, 0].min() < brighter[:, 0].max() <= 0.75
    assert transform_crops(red.clone(), Augmentation(color_jitter=(0, 0, 0, 0.5)), 0, 0)[:, 1:].max() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"color_jitter": (0.1, 0.1, 0.1)}, "brightness, contrast, saturation, hue"),
        ({"color_jitter": (0, 0, 0, 0.6)}, "hue at most 0.5"),
        ({"grayscale": 1.1}, "grayscale must be a probability"),
        ({"erasing": -0.1}, "erasing must be a probability"),
        ({"rotation": 200}, "rotation must lie in"),
        ({"rand_augment": 2.0}, "rand_augment must be an integer from 0 to 14"),
        ({"rand_augment_magnitude": 31}, "rand_augment_magnitude must be an integer from 0 to 30"),
    ],
)
def test_values_without_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**options)


def test_a_run_with_all_transforms_resumes_to_the_bit(tmp_path):
    config = small_config(augmentation=ALL, checkpoint_every=1)

    def run(out, **more):
        embedder = small_embedder()
        results = train(few_glyphs(), embedder, config, out=tmp_path / out, **more)
        return results["last"]["loss"], embedder.state_dict()

    torch.manual_seed(0)
    loss, weights = run("whole")
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        run("parts", monitor=InterruptAt(3))
    again, resumed = run("parts", resume=True)
    assert again == loss
    assert all(torch.equal(resumed[name], value) for name, value in weights.items())
    torch.manual_seed(0)
    embedder = small_embedder()
    plain = train(few_glyphs(), embedder, small_config(), out=tmp_path / "plain")
    assert plain["last"]["loss"] != loss
