"""The tiled backend as it computes where launches are costly, on a GPU: here on a CPU, against the dense reference."""

import math

import pytest
import torch
from test_backends import check_backend
from torch.utils._python_dispatch import TorchDispatchMode

from pfml.backends import BACKENDS, operator, sweep, tiled, whole_field
from pfml.backends import tile_groups as groups
from pfml.backends.sweep import Counts, sweep_block
from pfml.backends.tiled import centered_groups, group_of, pair_sums
from pfml.energy import potential_energy
from pfml.field import EquilibriumLaw, PowerLaw
from pfml.superposition import Anchors, Field, PairWeights
from states import FIELDS, WEIGHTS, State, energy_and_gradients, relative_error, tight_clusters

pytestmark = pytest.mark.usefixtures("as_on_a_gpu", "one_thread")


@pytest.fixture(params=["at once", "in tiles"])
def as_on_a_gpu(request, monkeypatch):
    """The choices of a GPU on a CPU: all pairs of a small field at once, or the tiles that larger ones take."""
    tables = [sweep.TILE_PAIRS, sweep.COSTLY_LAUNCHES, sweep.SPARSE, groups.CHUNK, tiled.AT_ONCE_PAIRS]
    for table in tables:
        monkeypatch.setitem(table, "cpu", table["cuda"])
    if request.param == "in tiles":
        monkeypatch.setitem(tiled.AT_ONCE_PAIRS, "cpu", 0)
    return request.param


@pytest.fixture
def tiles(monkeypatch):
    """The sizes of the blocks that are swept in tiles."""
    swept, real = [], sweep._tiles
    monkeypatch.setattr(sweep, "_tiles", lambda left, right: swept.append((len(left), len(right))) or real(left, right))
    return swept


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("spread", [1.0, 0.3, 0.05])
def test_every_field(field, spread):
    state = State(num_samples=40, num_classes=8, per_class=6, dim=24, spread=spread)
    check_backend("tiled", state, FIELDS[field], PairWeights())
    check_backend("tiled", state, FIELDS[field], PairWeights(), dtype=torch.float64)
    check_backend("tiled", state, FIELDS[field], PairWeights(), on_sphere=False)
    check_backend("tiled", state.drawn(13), FIELDS[field], PairWeights())


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("field", ["wide repulsion", "log", "anchor", "user's law, log"])
def test_every_kind_of_pair_counts_by_its_weight(weights, field):
    check_backend("tiled", State(spread=0.4), FIELDS[field], WEIGHTS[weights])
    check_backend("tiled", State(spread=0.4), FIELDS[field], WEIGHTS[weights], dtype=torch.float64)
    check_backend("tiled", State(spread=0.4).drawn(11), FIELDS[field], WEIGHTS[weights])


@pytest.mark.parametrize("few_positives", [0.0, 1.0])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_pairs_of_one_class_may_be_few_or_many(monkeypatch, few_positives, weights):
    monkeypatch.setattr(sweep, "FEW_POSITIVES", few_positives)
    monkeypatch.setattr(sweep, "FEW_AT_LEAST", 0)
    for field in ("pfml", "log", "anchor"):
        check_backend("tiled", State(spread=0.4), FIELDS[field], WEIGHTS[weights])


@pytest.mark.parametrize("tile_pairs", [16, 300, 2**20])
@pytest.mark.parametrize("few", [0.0, 1 / 1024, 1.0])
@pytest.mark.parametrize(("sparse", "mirrored"), [(0.0, 0.0), (0.0, 2.0), (1.0, 0.0)])
def test_the_result_does_not_depend_on_which_path_a_pair_takes(monkeypatch, tile_pairs, few, sparse, mirrored):
    monkeypatch.setitem(sweep.TILE_PAIRS, "cpu", tile_pairs)
    monkeypatch.setattr(sweep, "FEW", few)
    monkeypatch.setattr(sweep, "FEW_AT_LEAST", 0)
    monkeypatch.setattr(sweep, "FEW_POSITIVES", few)
    monkeypatch.setitem(sweep.SPARSE, "cpu", sparse)
    monkeypatch.setattr(sweep, "MIRRORED", mirrored)
    monkeypatch.setattr(whole_field, "STRIP_PAIRS", tile_pairs)
    for spread in (0.3, 0.02):
        state = State(num_samples=9, num_classes=3, per_class=3, dim=8, spread=spread)
        for field in ("pfml", "log", "anchor"):
            state.anchors = None
            check_backend("tiled", state, FIELDS[field], PairWeights())
            check_backend("tiled", state.drawn(5), FIELDS[field], PairWeights())


@pytest.mark.parametrize("clusters", [None, 20, 5])
@pytest.mark.parametrize("field", ["pfml", "log", "user's law"])
def test_forces_are_within_1e_4_of_float64_in_every_state(clusters, field):
    """No pair within reach, 5 % of all and 20 %: at all distances around the edge of repulsion."""
    state = State(num_samples=60, num_classes=120, per_class=4, dim=256)
    if clusters is not None:
        generator = torch.Generator().manual_seed(0)
        centers = torch.nn.functional.normalize(torch.randn(clusters, 256, generator=generator), dim=1)
        for points in (state.samples, state.proxies):
            noise = torch.nn.functional.normalize(torch.randn(len(points), 256, generator=generator), dim=1)
            radius = torch.linspace(0.01, 0.15, len(points))[:, None]
            points.copy_(centers[torch.arange(len(points)) % clusters] + radius * noise)
    check_backend("tiled", state, FIELDS[field], PairWeights())
    check_backend("tiled", state, FIELDS[field], PairWeights(), dtype=torch.float64)


@pytest.mark.parametrize("field", ["pfml", "log", "anchor", "cpml", "user's law"])
def test_coincident_points_are_finite(field):
    state = State(num_samples=60, num_classes=30, per_class=4, dim=12)
    state.samples[:] = state.samples[0]
    state.proxies[:] = state.samples[0]
    _, *gradients = energy_and_gradients(BACKENDS["tiled"], state, FIELDS[field], PairWeights())
    assert all(gradient.abs().max() == 0 for gradient in gradients)
    state.proxies[::3] += 0.3
    check_backend("tiled", state, FIELDS[field], PairWeights(), on_sphere=False)


@pytest.mark.parametrize("alpha", [3.0, 8.0, 12.0])
@pytest.mark.parametrize("point", ["zero", "axis"])
def test_charges_that_coincide_with_their_center_are_finite(alpha, point):
    """No rounding moves them apart, so that r is exactly 0."""
    state = State(num_samples=70, num_classes=70, per_class=0, dim=8)
    state.sample_labels = torch.arange(70) // 2
    state.samples[:] = 0
    state.samples[:, 0] = float(point == "axis")
    field = Field(PowerLaw(alpha=alpha))
    expected, *_ = energy_and_gradients(BACKENDS["dense"], state, field, PairWeights(), on_sphere=False)
    energy, *gradients = energy_and_gradients(BACKENDS["tiled"], state, field, PairWeights(), on_sphere=False)
    torch.testing.assert_close(energy, expected, rtol=1e-5, atol=0)
    assert all(gradient.numel() == 0 or gradient.abs().max() == 0 for gradient in gradients)


@pytest.mark.parametrize("others", [0, 40])
def test_the_literal_energy_of_coincident_charges_is_infinite(others):
    points = torch.cat([torch.eye(16)[:1].repeat(60, 1), torch.randn(others, 16)])
    energy = potential_energy(points, torch.arange(60 + others), form="literal", backend="tiled")
    assert energy.item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("radius", [1e-8, 1e-5, 1e-3, 2e-2])
@pytest.mark.parametrize("field", FIELDS)
def test_forces_in_tight_clusters_hold(monkeypatch, field, radius, dtype):
    monkeypatch.setattr(sweep, "CROWD_PAIRS", 64)
    for dim, at_least in ((1, 256), (2, 0), (16, 0)):
        monkeypatch.setattr(sweep, "FEW_AT_LEAST", at_least)
        state = tight_clusters(radius, dim, dtype, num_samples=20, per_class=4)
        check_backend("tiled", state, FIELDS[field], PairWeights(), dtype=dtype, on_sphere=dim > 1)


def test_many_pairs_at_the_very_edge_are_judged_exactly():
    state = State(num_samples=48, num_classes=48, per_class=0, dim=48)
    state.samples = torch.eye(48, dtype=torch.float64) + 2.0
    state.sample_labels = torch.arange(48)
    for edge in (2**0.5, 2**0.5 * (1 + 4e-16)):  # all of them outside, all of them inside
        check_backend("tiled", state, Field(PowerLaw(delta=edge)), PairWeights(), dtype=torch.float64)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("samples", "proxies"), [(0, 5), (7, 0), (1, 1), (0, 0)])
def test_empty_groups(samples, proxies, weights):
    per_class = 2 if proxies > 1 else proxies
    state = State(num_samples=samples, num_classes=max(proxies, 1), per_class=per_class, spread=0.4)
    for field in ("pfml", "wide repulsion", "log"):
        check_backend("tiled", state, FIELDS[field], WEIGHTS[weights])


@pytest.mark.parametrize("weights", WEIGHTS)
def test_pairs_of_one_class_are_counted_before_they_are_listed(monkeypatch, weights):
    listed, real = [], sweep.Tile.positives
    monkeypatch.setattr(sweep.Tile, "positives", lambda tile: listed.append(real(tile)) or listed[-1])
    monkeypatch.setattr(sweep, "FEW_POSITIVES", 1.0)
    state = State(spread=0.4)
    for most in (2**23, 40):
        monkeypatch.setattr(sweep, "MOST_POSITIVES", most)
        listed.clear()
        check_backend("tiled", state, FIELDS["pfml"], WEIGHTS[weights])
        assert all(len(pairs) <= most for pairs in listed)
    labels = torch.randint(4, (30,), generator=torch.Generator().manual_seed(0))
    samples, proxies = (group_of(part, gradient=False) for part in state.charges(dtype=torch.float32, on_sphere=True))
    for left, right in ((samples, samples), (samples, proxies), (proxies, proxies)):
        for each in (left, right):
            each.labels = labels[: len(each)].clone()
        tile = sweep.Tile(left, right, slice(0, len(left)), slice(0, len(right)), left is right)
        assert tile.count_positives() == len(real(tile))


@pytest.mark.parametrize("field", ["wide repulsion", "log", "anchor"])
def test_all_proxies_as_anchors_that_count_once_change_nothing(field):
    state = State(spread=0.4)
    expected = energy_and_gradients(BACKENDS["tiled"], state, FIELDS[field], PairWeights(), dtype=torch.float64)
    state.anchors = Anchors(torch.arange(30).flip(0), torch.ones(30).double())
    got = energy_and_gradients(BACKENDS["tiled"], state, FIELDS[field], PairWeights(), dtype=torch.float64)
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)


def test_soft_charges_beside_proxies():
    state, field = State(spread=0.4), Field(EquilibriumLaw())
    shares = torch.rand(24, 24)
    results = []
    for name in ("dense", "tiled"):
        samples, proxies = state.charges(dtype=torch.float64, on_sphere=True)
        energy = BACKENDS[name](samples._replace(shares=(shares + shares.T) / 2), proxies, field, PairWeights())
        results.append((energy, *torch.autograd.grad(energy, (samples.points, proxies.points))))
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)


def test_blocks_of_a_group_made_elsewhere():
    field, state = FIELDS["wide repulsion"], State(spread=0.3)
    samples, proxies = (
        each._replace(points=each.points.detach()) for each in state.charges(dtype=torch.float64, on_sphere=True)
    )
    left, _ = centered_groups(samples, proxies, gradients=True)
    right = group_of(proxies, gradient=True)
    right.center = left.center
    right.prepare()
    sweep_block(left, right, field, Counts(1.0, 1.0), Counts(1.0, 1.0))
    only_mixed = PairWeights(sample_sample=0.0, proxy_attraction=0.0, proxy_repulsion=0.0)
    expected = pair_sums(samples, proxies, field, only_mixed)
    assert relative_error(torch.cat([left.sums, right.sums], dim=1), expected) < 1e-12


def test_inputs_are_left_as_they_were_and_gradients_share_no_memory():
    for field in ("pfml", "log"):
        samples, proxies = State(spread=0.3).charges(dtype=torch.float64, on_sphere=True)
        before = samples.points.detach().clone(), proxies.points.detach().clone()
        energy = BACKENDS["tiled"](samples, proxies, FIELDS[field], PairWeights())
        energy.backward(retain_graph=True)
        kept = proxies.points.grad.clone()
        samples.points.grad.zero_()
        assert torch.equal(proxies.points.grad, kept)
        energy.backward()
        torch.testing.assert_close(proxies.points.grad, 2 * kept)
        assert torch.equal(samples.points, before[0])
        assert torch.equal(proxies.points, before[1])


def test_what_finds_no_room_at_once_is_left_to_the_tiles(monkeypatch, as_on_a_gpu, tiles):
    state = tight_clusters(1e-3, 16)
    check_backend("tiled", state, FIELDS["pfml"], PairWeights())
    assert bool(tiles) == (as_on_a_gpu == "in tiles")
    for room in ("DIFFERENCES", "POSITIVES"):
        tiles.clear()
        with monkeypatch.context() as patch:
            patch.setattr(whole_field, room, 4)
            patch.setattr(whole_field, "POSITIVES_PER_CHARGE", 1)
            check_backend("tiled", state, FIELDS["pfml"], PairWeights())
            check_backend("tiled", state, FIELDS["log"], PairWeights())
        assert tiles


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would launch, and those after which Python would wait for it."""

    VIEWS = frozenset(
        {"view", "slice", "select", "expand", "unsqueeze", "squeeze", "t", "transpose", "split", "detach"}
    )
    NONE = VIEWS | {"split_with_sizes", "alias", "as_strided", "permute", "empty", "new_empty", "empty_like"}
    WAITS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "equal"})

    def __init__(self):
        super().__init__()
        self.launches = self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        copied = name == "_to_copy" and (kwargs or {}).get("device") is not None
        of_mask = name.startswith("index") and any(
            isinstance(each, torch.Tensor) and each.dtype == torch.bool
            for given in args[1:]
            for each in (given if isinstance(given, list | tuple) else ())
        )
        repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        self.waits += name in self.WAITS or copied or of_mask or repeats
        self.launches += name not in self.NONE and name != "_local_scalar_dense"
        return function(*args, **(kwargs or {}))


def count_launches(monkeypatch, field, state):
    """Launches and waits of one forward and backward."""
    monkeypatch.setattr(operator, "is_traced", lambda: False)  # what counts would count as a tracer
    samples, proxies = state.charges(on_sphere=True)
    with Launches() as counted:
        BACKENDS["tiled"](samples, proxies, FIELDS[field], PairWeights()).backward()
    return counted.launches, counted.waits


#: Launches and waits at most, of one tile; "at once" they are one launch when they are recorded.
MOST = {
    ("at once", "pfml"): (290, 1),
    ("at once", "log"): (510, 2),
    ("in tiles", "pfml"): (250, 8),
    ("in tiles", "log"): (480, 16),
}


@pytest.mark.parametrize("field", ["pfml", "log"])
@pytest.mark.parametrize("spread", [1.0, 0.2])
def test_launches_and_synchronizations_are_few(monkeypatch, as_on_a_gpu, field, spread):
    state = State(num_samples=100, num_classes=100, per_class=15, dim=32, spread=spread)
    launches, waits = count_launches(monkeypatch, field, state)
    assert launches <= MOST[as_on_a_gpu, field][0]
    assert waits <= MOST[as_on_a_gpu, field][1]


def test_what_is_recorded_as_a_graph_waits_for_nothing(monkeypatch, as_on_a_gpu):
    """Beside it there are few operations: they decide the time of a small field."""
    if as_on_a_gpu != "at once":
        return
    inside = Launches()

    def counted(*args, **kwargs):
        with inside:
            return tiled._superpose_at_once(*args, **kwargs)

    monkeypatch.setattr(tiled, "_at_once", counted)
    for field in ("pfml", "log", "anchor"):
        inside.launches = 0
        total, waits = count_launches(monkeypatch, field, State(spread=0.2))
        assert inside.waits == 0
        assert waits <= 2
        assert total - inside.launches <= 40


@pytest.mark.gpu
@pytest.mark.parametrize("field", ["pfml", "log", "anchor", "user's law", "user's law, log"])
def test_a_recorded_field_is_right_in_every_step(field):
    """The first calls are computed, the later ones repeated as a graph; samples change, proxies move in place."""
    state = State(num_samples=40, num_classes=20, per_class=6, dim=64, spread=0.3)
    _, proxies = state.charges(device="cuda", on_sphere=True)
    for step in range(8):
        state.samples = State(num_samples=40, num_classes=20, per_class=6, dim=64, spread=0.3, seed=step).samples
        state.proxies += 0.01
        proxies.points.data.copy_(state.proxies)
        expected = energy_and_gradients(
            BACKENDS["dense"], state, FIELDS[field], PairWeights(), dtype=torch.float64, on_sphere=True
        )
        samples, _ = state.charges(device="cuda")
        energy = BACKENDS["tiled"](samples, proxies, FIELDS[field], PairWeights())
        got = energy, *torch.autograd.grad(energy, (samples.points, proxies.points))
        for mine, reference in zip(got, expected, strict=True):
            assert relative_error(mine.double().cpu(), reference) < 1e-4
