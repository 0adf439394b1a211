import pytest
import torch

from pfml.data.mixed_crops import MIXINGS, mix_crops
from pfml.data.seeding import generator_for

LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0])


def crops(size=16):
    """Crop k is k everywhere."""
    return torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 3, size, size + 4).clone()


def mixed(mixing, step=0, size=16):
    return mix_crops(crops(size), LABELS, mixing, generator_for(0, "mixing", step))


@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_mixed_crop_has_the_share_of_both_crops_that_it_says(mixing):
    for step in range(20):
        got = mixed(mixing, step)
        own, other = torch.arange(8.0), got.partners.float()
        expected = got.shares * own + (1 - got.shares) * other
        torch.testing.assert_close(got.crops.mean(dim=(1, 2, 3)), expected)
        assert (LABELS[got.partners] != LABELS).all()


def test_cutmix_replaces_one_box_and_a_grid_many_squares():
    boxes = mixed("cutmix", step=1).crops[:, 0]
    for k, crop in enumerate(boxes):
        replaced = crop != k
        if not replaced.any():
            continue
        rows, columns = replaced.any(dim=1), replaced.any(dim=0)
        assert torch.equal(replaced, rows[:, None] & columns)
        assert all(line.int().diff().abs().sum() <= 2 for line in (rows, columns))
    squares = mixed("grid", size=64).crops[:, 0]
    for k, crop in enumerate(squares):
        replaced = crop != k
        assert replaced.any(dim=1).int().diff().abs().sum() >= 3
        assert set(crop.unique().tolist()) == {float(k), float(mixed("grid", size=64).partners[k])}


def test_mixup_blends_every_pixel():
    got = mixed("mixup")
    assert (got.crops.flatten(1).std(dim=1) < 1e-5).all()
    assert ((got.shares > 0) & (got.shares < 1)).all()
    assert got.shares.std() > 0.1


def test_shares_of_cutmix_and_mixup_spread_over_their_range():
    for mixing in ("cutmix", "mixup"):
        shares = torch.cat([mixed(mixing, step).shares for step in range(40)])
        assert shares.min() < 0.15
        assert shares.max() > 0.9


def test_any_draws_each_kind_and_the_generator_decides():
    kinds = set()
    for step in range(12):
        first, again = mixed("any", step), mixed("any", step)
        assert torch.equal(first.crops, again.crops)
        for mixing in MIXINGS:
            generator = generator_for(0, "mixing", step)
            torch.randint(3, (), generator=generator)
            if torch.equal(first.crops, mix_crops(crops(), LABELS, mixing, generator).crops):
                kinds.add(mixing)
    assert kinds == set(MIXINGS)


def test_every_crop_of_another_class_may_be_the_partner():
    partners = torch.stack([mixed("mixup", step).partners for step in range(100)])
    for k in range(8):
        assert set(partners[:, k].tolist()) == {j for j in range(8) if LABELS[j] != LABELS[k]}


def test_with_one_class_a_crop_is_mixed_with_itself():
    got = mix_crops(crops(), torch.zeros(8), "cutmix", generator_for(0, "mixing", 0))
    assert got.partners.tolist() == list(range(8))
    assert torch.equal(got.crops, crops())


def test_features_cannot_be_mixed():
    with pytest.raises(ValueError, match="only images can be mixed"):
        mix_crops(torch.zeros(8, 5), LABELS, "mixup", generator_for(0, "mixing", 0))
