"""The screen of the triton backend, against all distances in float64: it may flag too many tiles, never too few."""

import pytest
import torch
from test_backends import check_backend

from pfml.backends import fused, split_precision
from pfml.backends.fused import _Between
from pfml.backends.split_precision import BLOCK, LONGEST, ChargeSet
from pfml.field import PowerLaw
from pfml.superposition import Charges, Field, PairWeights, source_weights
from states import FIELDS, WEIGHTS, State

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.skipif(not fused.INSTALLED, reason="needs the package triton"),
    pytest.mark.skipif(
        DEVICE == "cpu" and not split_precision.INTERPRETED, reason="needs a CUDA device or TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning"),  # the interpreter's NumPy, in branches not taken
    pytest.mark.usefixtures("quick_interpreter"),
]


def tiles_within(points, labels, reach, num_rows=None):
    """Which tiles hold a pair of different classes within reach, (row blocks, column blocks), by float64."""
    rows = points[:num_rows].double()
    r = torch.cdist(rows, points.double(), compute_mode="donot_use_mm_for_euclid_dist")
    near = (r < reach) & (labels[:num_rows, None] != labels[None, :])
    padded = torch.zeros(*(-(-size // BLOCK) * BLOCK for size in near.shape), dtype=torch.bool)
    padded[: len(near), : near.shape[1]] = near
    return padded.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK).any(-1).any(-1)


def charges_at(points, labels, on_sphere=False):
    none = Charges(points[:0].to(DEVICE), labels[:0].to(DEVICE))
    return ChargeSet(Charges(points.to(DEVICE), labels.to(DEVICE), on_sphere), none, None)


def flagged_tiles(points, labels, reach, num_rows=None, *, on_sphere=False, without_errors=False):
    """Which tiles the screen flags; symmetric unless only the first `num_rows` rows are screened."""
    charges = charges_at(points, labels, on_sphere)
    columns = charges.split()
    rows = columns if num_rows is None else charges.split(torch.arange(num_rows, device=DEVICE))
    if without_errors:
        columns.errors.zero_()
    field = Field(PowerLaw(delta=reach))
    assert field.other_pair.stop == reach
    between = _Between(charges, field, source_weights(field, PairWeights(), False)[1], False)
    listed = between._list_tiles(rows, columns, rows.blocks * columns.blocks)
    slots, size = listed.slots.cpu(), int(listed.size)
    upper = torch.ones_like(slots, dtype=torch.bool).triu() if rows is columns else slots >= -1
    assert sorted(slots[upper & (slots >= 0)].tolist()) == list(range(size))
    assert all(slots.flatten()[listed.listed[:size].cpu().long()] == torch.arange(size))
    if rows is columns:
        assert torch.equal(slots, slots.T)
    return slots >= 0


def awkward_rows(dims, generator):
    """Rows of many kinds: random, of one huge component, tiny, zero, long, of equal components, and already rounded."""

    def noise(count):
        return torch.randn(count, dims, generator=generator)

    spiky = noise(4) * 1e-3
    spiky[:, dims // 2] += 1
    rounded = torch.randint(-127, 128, (2, dims), generator=generator).float()
    plain = noise(8) * torch.tensor([1, 1, 1e-20, 1e-42, 0, 40, 40, 1])[:, None]
    return torch.cat([plain, torch.ones(1, dims), spiky, rounded])


def mixed_labels(count):
    return torch.arange(count) % 3


@pytest.mark.parametrize("dims", [1, 2, 3, 17, 64, 65, 127, 256, 384, 512, 520])
@pytest.mark.parametrize("on_sphere", [False, True])
def test_quantized_positions_are_as_close_as_they_say(dims, on_sphere):
    generator = torch.Generator().manual_seed(dims)
    for factor in (1.0, 1e-30, 1e25):
        points = awkward_rows(dims, generator) * factor
        rows = charges_at(points, mixed_labels(len(points)), on_sphere).split()
        num = len(points)
        exact = points.double()
        if on_sphere:
            norms = exact.norm(dim=1, keepdim=True)
            exact = exact / torch.where(norms > 0, norms, 1.0)
        exact = torch.cat([exact * rows.scale.cpu().double(), torch.zeros(len(rows.high) - num, dims).double()])
        assert exact.norm(dim=1).max() < LONGEST * (1 + 1e-6)

        quantized = rows.quantized.cpu().double()
        assert quantized.abs().max() <= 127
        assert not quantized[:, dims:].any()
        rounded = rows.steps.cpu().double()[:, None] * quantized
        distance = (exact - rounded[:, :dims]).norm(dim=1)
        bound = rows.errors.cpu().double()
        assert (distance <= bound).all()
        assert (bound < 1.00001 * distance + 1e-5).all()  # and not just anything larger
        assert bound.max() < 23  # or numbers of the screen are larger than it takes them to be
        squares = rows.quantized_squares.cpu().double()
        torch.testing.assert_close(squares, rounded.square().sum(1), rtol=1e-7, atol=1e-30)
        # what products of high parts being exact needs
        assert rows.high.cpu().double().norm(dim=1).max() < 128


def pairs_at_reach(dims, reach, count, generator, kind):
    """2 * count points; point i and point i + count are at reach, or one float32 step of a component from it."""
    points = torch.randn(count, dims, generator=generator, dtype=torch.float64)
    points = points / points.norm(dim=1, keepdim=True)
    if kind == "spiky":
        points *= 1e-2
        points[torch.arange(count), torch.randint(dims, (count,), generator=generator)] += 1
    if kind == "lengths":
        points *= torch.logspace(-3, 0, count, dtype=torch.float64)[:, None]
    points = points.float().double()
    # away along what rounding moves a point by: then rounding moves the two farther apart
    step = points.abs().amax(dim=1, keepdim=True) / 127
    away = points - step * (points / step).round()
    away = torch.where(away.norm(dim=1, keepdim=True) > 0, away, torch.ones_like(away))
    partners = (points + reach * away / away.norm(dim=1, keepdim=True)).float()
    largest = partners.abs().argmax(dim=1, keepdim=True)
    value = partners.gather(1, largest)
    moved = torch.stack([torch.nextafter(value, value * 2), value, torch.nextafter(value, value * 0)])
    partners.scatter_(1, largest, moved.gather(0, (torch.arange(count) % 3)[None, :, None])[0])
    return torch.cat([points.float(), partners])


@pytest.mark.parametrize("kind", ["sphere", "spiky", "lengths"])
@pytest.mark.parametrize(("dims", "reach"), [(2, 1e-3), (3, 0.05), (17, 0.2), (64, 0.02), (64, 1.3), (130, 0.2)])
@pytest.mark.parametrize("num_rows", [None, 21])
def test_no_pair_within_reach_is_missed(dims, reach, kind, num_rows):
    generator = torch.Generator().manual_seed(dims)
    blocks = 3 if DEVICE == "cpu" else 5
    points = pairs_at_reach(dims, reach, blocks * BLOCK + 3, generator, kind)
    labels = torch.arange(len(points))
    needed = tiles_within(points, labels, reach, num_rows)
    assert needed.any()
    flagged = flagged_tiles(points, labels, reach, num_rows)
    assert not (needed & ~flagged).any()


def test_without_its_bound_of_errors_the_screen_would_miss_pairs():
    generator = torch.Generator().manual_seed(1)
    missed = 0
    for dims, reach in ((17, 0.05), (64, 0.1)):
        points = pairs_at_reach(dims, reach, 2 * BLOCK + 3, generator, "sphere")
        labels = torch.arange(len(points))
        flagged = flagged_tiles(points, labels, reach, without_errors=True)
        missed += (tiles_within(points, labels, reach) & ~flagged).sum().item()
    assert missed > 0


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 6])
def test_every_tile_is_screened_once(blocks):
    """Whatever wraps around: with everything within reach all tiles are flagged, and those of one class are not."""
    generator = torch.Generator().manual_seed(blocks)
    points = torch.randn(blocks * BLOCK - 1, 5, generator=generator)
    labels = torch.arange(len(points))
    assert flagged_tiles(points, labels, 1e3).all()
    assert flagged_tiles(points, labels, 1e3, num_rows=BLOCK + 1 if blocks > 1 else 2).all()
    by_block = labels // BLOCK % 2
    assert torch.equal(flagged_tiles(points, by_block, 1e3), tiles_within(points, by_block, 1e3))
    assert not flagged_tiles(points, labels * 0, 1e3).any()


def test_blocks_without_a_sample_end_early_where_pairs_of_proxies_do_not_count():
    state = State(num_samples=5, num_classes=3, per_class=9, dim=6, spread=0.4).drawn(20)
    check_backend("triton", state, FIELDS["wide repulsion"], WEIGHTS["no proxy pairs"], device=DEVICE)


def test_what_is_far_is_not_flagged():
    generator = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(6 * BLOCK, 512, generator=generator), dim=1)
    labels = torch.arange(len(points))
    for reach in (0.2, 1.2):
        assert not flagged_tiles(points, labels, reach, on_sphere=True).any()
    # at the reach of the nearest tenth of all tiles: none that is farther than 2 % of the sphere's radius is flagged
    r = torch.cdist(points, points).fill_diagonal_(9).unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK).amin((-1, -2))
    reach = r.flatten().quantile(0.1).item()
    flagged = flagged_tiles(points, labels, reach, on_sphere=True)
    assert not (tiles_within(points, labels, reach) & ~flagged).any()
    assert not (flagged & ~tiles_within(points, labels, reach + 0.02)).any()
