"""One suite that every backend must pass: value and gradient against the dense reference in float64."""

import pytest
import torch

from oracle import forces as loop_forces
from pfml import PotentialFieldLoss
from pfml.backends import BACKENDS, choose_backend, operator, resolve_backend, sweep
from pfml.backends import tile_groups as groups
from pfml.field import PowerLaw
from pfml.superposition import Anchors, Charges, Field, PairWeights
from processes import CONTEXT
from states import EVERYWHERE, FIELDS, WEIGHTS, State, energy_and_gradients, relative_error, tight_clusters

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REFERENCE = BACKENDS["dense"]

#: Relative errors of the energy and of the gradients, by norms, that a backend may have. Gradients below the third
#: number are what is left where forces cancel, or point off the sphere: their errors are those of the forces.
TOLERANCE = {torch.float32: (1e-5, 1e-4, 1e-6), torch.float64: (1e-11, 1e-9, 1e-4)}


def check_backend(name, state, field, weights, *, dtype=torch.float32, device="cpu", on_sphere=True):
    """Compare a backend with the dense reference in float64, on the same float32 points."""
    expected = energy_and_gradients(REFERENCE, state, field, weights, dtype=torch.float64, on_sphere=on_sphere)
    got = energy_and_gradients(BACKENDS[name], state, field, weights, dtype=dtype, device=device, on_sphere=on_sphere)
    value_tolerance, gradient_tolerance, smallest = TOLERANCE[dtype]
    scale = max(abs(expected[0].item()), 1e-3 * state.num_samples)
    assert abs(got[0] - expected[0]).item() <= value_tolerance * scale
    for mine, reference in zip(got[1:], expected[1:], strict=True):
        assert torch.isfinite(mine).all()
        if reference.numel():
            largest = max(e.norm().item() for e in expected[1:])
            assert (mine - reference).norm().item() <= gradient_tolerance * max(largest, smallest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("spread", [1.0, 0.3, 0.05])
def test_every_field_in_every_backend(name, field, spread, device):
    state = State(num_samples=40, num_classes=8, per_class=6, dim=24, spread=spread)
    check_backend(name, state, FIELDS[field], PairWeights(), device=device)
    check_backend(name, state, FIELDS[field], PairWeights(), dtype=torch.float64, device=device)


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("field", ["wide repulsion", "log", "anchor"])
def test_every_kind_of_pair_counts_by_its_weight(name, weights, field):
    state = State(spread=0.4)
    check_backend(name, state, FIELDS[field], WEIGHTS[weights])
    if weights != "all":
        with_all = energy_and_gradients(BACKENDS[name], state, FIELDS[field], PairWeights())[0]
        without = energy_and_gradients(BACKENDS[name], state, FIELDS[field], WEIGHTS[weights])[0]
        if not (field == "anchor" and "proxy" in weights):  # proxies are no anchors there
            assert relative_error(without, with_all) > 1e-3


@pytest.mark.parametrize("field", ["wide repulsion", "log", "anchor"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_reference_with_anchors_is_the_formula(field, weights):
    """sum over anchors i of a_i E(sum over all j != i of w(j on i) pair(r_ij)), by loops."""
    field, weights = FIELDS[field], WEIGHTS[weights]
    state = State(num_samples=4, num_classes=3, per_class=2, dim=4, spread=0.4).drawn(3)
    points = torch.cat([state.samples, state.proxies]).double()
    labels = torch.cat([state.sample_labels, state.proxy_labels]).tolist()
    counts = [1.0] * 4 + [0.0] * 6
    for row, weight in zip(*state.anchors, strict=True):
        counts[4 + row] += weight.item() if field.rule.proxies_are_anchors else 0.0
    mixed_on = {False: 2.0, True: 0.0} if field.rule.linear else {False: 1.0, True: 1.0}  # by whether it is a proxy

    total = 0.0
    for i, count in enumerate(counts):
        sums = torch.zeros(2, dtype=torch.float64)
        for j in range(len(points)):
            if i == j or count == 0:
                continue
            if (i < 4) != (j < 4):
                pair_weights = [weight * mixed_on[i >= 4] for weight in weights.of_mixed()]
            else:
                pair_weights = weights.of_samples() if i < 4 else weights.of_proxies()
            channel = 0 if labels[i] == labels[j] else 1
            pair = (field.own_pair, field.other_pair)[channel]
            r = (points[i] - points[j]).norm()
            if pair.start <= r < pair.stop:
                sums[channel] += pair_weights[channel] * pair.potential(r)
        total += count * field.anchor_energies(*sums).item()
    got = energy_and_gradients(REFERENCE, state, field, weights, dtype=torch.float64)[0].item()
    assert got == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("spread", [1.0, 0.3, 0.05])
def test_every_field_with_drawn_anchors(name, field, spread, device):
    state = State(num_samples=20, num_classes=8, per_class=6, dim=24, spread=spread).drawn(13)
    check_backend(name, state, FIELDS[field], PairWeights(), device=device)
    check_backend(name, state, FIELDS[field], PairWeights(), dtype=torch.float64, device=device)


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("field", ["wide repulsion", "log", "anchor"])
def test_every_kind_of_pair_counts_by_its_weight_with_drawn_anchors(name, weights, field):
    for count in (0, 11, 30):
        check_backend(name, State(spread=0.4).drawn(count), FIELDS[field], WEIGHTS[weights])
    one_per_class = State(num_classes=40, per_class=1, spread=0.4).drawn(1)
    check_backend(name, one_per_class, FIELDS[field], WEIGHTS[weights])


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("field", ["wide repulsion", "log", "anchor"])
def test_all_proxies_as_anchors_that_count_once_change_nothing(name, field):
    state = State(spread=0.4)
    expected = energy_and_gradients(BACKENDS[name], state, FIELDS[field], PairWeights(), dtype=torch.float64)
    state.anchors = Anchors(torch.arange(30).flip(0), torch.ones(30).double())
    got = energy_and_gradients(BACKENDS[name], state, FIELDS[field], PairWeights(), dtype=torch.float64)
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("field", ["pfml", "log", "cpml"])
def test_coincident_points_are_finite_with_drawn_anchors(name, field):
    state = State(num_samples=10, num_classes=5, per_class=4, dim=12).drawn(7)
    state.samples[:] = state.samples[0]
    state.proxies[:] = state.samples[0]
    energy, *gradients = energy_and_gradients(BACKENDS[name], state, FIELDS[field], PairWeights())
    assert torch.isfinite(energy)
    assert all(gradient.abs().max() == 0 for gradient in gradients)
    state.proxies[::2] += 0.3
    check_backend(name, state, FIELDS[field], PairWeights(), on_sphere=False)


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("field", ["pfml", "log", "anchor", "cpml"])
def test_collapsed_and_coincident_points_are_finite(name, field):
    state = State(num_samples=30, num_classes=5, per_class=4, dim=12)
    state.samples[:] = state.samples[0]
    state.proxies[:] = state.samples[0]
    energy, *gradients = energy_and_gradients(BACKENDS[name], state, FIELDS[field], PairWeights())
    assert torch.isfinite(energy)
    for gradient in gradients:
        assert gradient.abs().max() == 0  # points that coincide have no direction to go in
    state.proxies[::2] += 0.3  # two heaps
    check_backend(name, state, FIELDS[field], PairWeights(), on_sphere=False)
    many = State(num_samples=60, num_classes=30, per_class=4, dim=12)  # more than a few in one place
    many.samples[:] = many.samples[0]
    many.proxies[:] = many.samples[0]
    many.proxies[::3] += 0.3
    check_backend(name, many, FIELDS[field], PairWeights(), on_sphere=False)


@pytest.mark.parametrize("tile_pairs", [16, 2**20])
@pytest.mark.parametrize("few", [0.0, 1 / 1024, 1.0])
@pytest.mark.parametrize("sparse", [0.0, 1.0])
def test_the_tiled_result_does_not_depend_on_which_path_a_pair_takes(monkeypatch, tile_pairs, few, sparse):
    """Tiny tiles, lists, matrices, differences and the climb to float64 all give the same field."""
    monkeypatch.setitem(sweep.TILE_PAIRS, "cpu", tile_pairs)
    monkeypatch.setattr(sweep, "FEW", few)
    monkeypatch.setattr(sweep, "FEW_AT_LEAST", 0)
    monkeypatch.setitem(sweep.SPARSE, "cpu", sparse)
    for spread in (0.3, 0.02):
        state = State(num_samples=9, num_classes=3, per_class=3, dim=8, spread=spread)
        for field in ("pfml", "log", "anchor"):
            state.anchors = None
            check_backend("tiled", state, FIELDS[field], PairWeights())
            check_backend("tiled", state.drawn(5), FIELDS[field], PairWeights())


@pytest.mark.parametrize("prepared_bytes", [0, 2**27])
@pytest.mark.parametrize("kept_bytes", [0, 2**28])
def test_large_sets_are_prepared_by_the_tile_and_swept_twice(monkeypatch, prepared_bytes, kept_bytes):
    monkeypatch.setattr(groups, "PREPARED_BYTES", prepared_bytes)
    monkeypatch.setitem(operator.KEPT_GRADIENT_BYTES, "cpu", kept_bytes)
    monkeypatch.setitem(sweep.TILE_PAIRS, "cpu", 256)
    for field in ("pfml", "log"):
        check_backend("tiled", State(spread=0.3), FIELDS[field], PairWeights())
        check_backend("tiled", State(spread=0.3).drawn(9), FIELDS[field], PairWeights())


@pytest.mark.parametrize("name", EVERYWHERE)
def test_forces_in_a_crowded_state_are_within_1e_4_of_float64(name):
    """Many pairs inside delta, at all distances from the core to the edge, in as many dimensions as real embeddings."""
    generator = torch.Generator().manual_seed(0)
    state = State(num_samples=60, num_classes=20, per_class=12, dim=256)
    for points in (state.samples, state.proxies):
        centers = torch.nn.functional.normalize(torch.randn(3, 256, generator=generator), dim=1)
        radius = torch.logspace(-2.3, -0.8, len(points))[:, None]
        noise = torch.nn.functional.normalize(torch.randn(len(points), 256, generator=generator), dim=1)
        points.copy_(centers[torch.arange(len(points)) % 3] + radius * noise)
    r = torch.cdist(state.proxies, state.proxies)
    assert (r < 0.2).float().mean() > 0.2
    check_backend(name, state, FIELDS["pfml"], PairWeights())


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [1, 2, 16])
@pytest.mark.parametrize("radius", [1e-8, 1e-5, 1e-3])
def test_forces_in_tight_clusters_are_those_of_the_loops(name, dtype, dim, radius):
    state = tight_clusters(radius, dim, dtype, num_samples=48, per_class=0, clusters=2)
    expected = -torch.tensor(loop_forces(state.samples.tolist(), state.sample_labels.tolist()), dtype=torch.float64)
    got = energy_and_gradients(BACKENDS[name], state, FIELDS["pfml"], PairWeights(), dtype=dtype)[1]
    assert relative_error(got, expected) < (1e-6 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("dim", [1, 2, 16])
@pytest.mark.parametrize("field", FIELDS)
def test_forces_in_tight_clusters_hold_down_to_where_positions_differ(monkeypatch, field, dim):
    """Many pairs of all classes in several places: neither a product nor one center has digits for them."""
    for radius in (1e-8, 1e-6, 1e-4, 1e-3):
        for dtype, crowd_pairs in ((torch.float32, 64), (torch.float64, 2**14)):
            monkeypatch.setattr(sweep, "CROWD_PAIRS", crowd_pairs)
            state = tight_clusters(radius, dim, dtype, num_samples=20, per_class=4)
            check_backend("tiled", state, FIELDS[field], PairWeights(), dtype=dtype, on_sphere=dim > 1)


@pytest.mark.parametrize("crowd_pairs", [64, 2**14])
@pytest.mark.parametrize("field", ["user's law", "user's law, log"])
@pytest.mark.parametrize("radius", [1e-7, 5e-3, 2e-2])
def test_far_forces_that_cancel_leave_those_of_close_pairs_exact(monkeypatch, field, radius, crowd_pairs):
    """A law that acts everywhere, also among drawn anchors: what is left of a sum has the digits of close pairs."""
    monkeypatch.setattr(sweep, "CROWD_PAIRS", crowd_pairs)
    state = tight_clusters(radius, 64, num_samples=60, per_class=10).drawn(40)
    check_backend("tiled", state, FIELDS[field], PairWeights(), on_sphere=False)
    state.anchors = None
    check_backend("tiled", state, FIELDS[field], PairWeights(), on_sphere=False)


def test_a_crowd_of_crowds_keeps_its_digits(monkeypatch):
    """Distances of all sizes from 1e-12 to 1 in one tile, so that crowds are found within crowds."""
    monkeypatch.setattr(sweep, "CROWD_PAIRS", 64)
    generator = torch.Generator().manual_seed(0)
    points = torch.zeros(1, 3, dtype=torch.float64)
    for size in (1.0, 1e-4, 1e-8, 1e-12):
        points = (points[:, None] + size * torch.randn(4, 3, generator=generator).double()).flatten(0, 1)
    state = State(num_samples=len(points), num_classes=7, per_class=0, dim=3)
    state.samples = points
    check_backend("tiled", state, FIELDS["pfml"], PairWeights(), dtype=torch.float64)


def test_many_pairs_at_the_very_edge_are_judged_exactly():
    """More pairs at r = delta, to the last digits, than are ever few: a product would misjudge half of them."""
    state = State(num_samples=48, num_classes=48, per_class=0, dim=48)
    state.samples = torch.eye(48, dtype=torch.float64) + 2.0
    state.sample_labels = torch.arange(48)
    for edge in (2**0.5, 2**0.5 * (1 + 4e-16)):  # all of them outside, all of them inside
        check_backend("tiled", state, Field(PowerLaw(delta=edge)), PairWeights(), dtype=torch.float64)


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("field", ["pfml", "log", "anchor", "user's law"])
def test_gradcheck_in_float64(name, field):
    state = State(num_samples=4, num_classes=2, per_class=2, dim=2, spread=0.5)
    samples, proxies = state.charges(dtype=torch.float64)

    def energy(sample_points, proxy_points):
        return BACKENDS[name](
            Charges(sample_points, samples.labels),
            Charges(proxy_points, proxies.labels, True),
            FIELDS[field],
            PairWeights(),
        )

    assert torch.autograd.gradcheck(energy, (samples.points, proxies.points), eps=1e-7, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("field", ["pfml", "log"])
def test_second_derivatives_are_right_or_refused_in_words(field):
    state = State(num_samples=4, num_classes=2, per_class=1, dim=3, spread=0.5)
    samples, proxies = state.charges(dtype=torch.float64)

    def energy(name, points):
        return BACKENDS[name](Charges(points, samples.labels), proxies, FIELDS[field], PairWeights())

    try:
        assert torch.autograd.gradgradcheck(lambda points: energy("dense", points), samples.points, rtol=1e-4)
    except NotImplementedError as error:  # torch's cdist before 2.15 or so
        assert "_cdist_backward" in str(error)
    (gradient,) = torch.autograd.grad(energy("tiled", samples.points), samples.points, create_graph=True)
    with pytest.raises(RuntimeError, match="once only; for second derivatives use backend='dense'"):
        torch.autograd.grad(gradient.square().sum(), samples.points)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_same_input_twice_gives_the_same_bits(name):
    state = State(num_samples=50, num_classes=10, per_class=8, dim=33, spread=0.3)
    first, second = (energy_and_gradients(BACKENDS[name], state, FIELDS["pfml"], PairWeights()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_products_stay_exact_whatever_the_precision_switch_and_autocast_say():
    state = State(num_samples=50, num_classes=10, per_class=8, dim=33, spread=0.3)
    expected = energy_and_gradients(BACKENDS["tiled"], state, FIELDS["pfml"], PairWeights())
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = energy_and_gradients(BACKENDS["tiled"], state, FIELDS["pfml"], PairWeights())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def step_with_tf32(answers):
    torch.backends.cuda.matmul.allow_tf32 = True
    loss = PotentialFieldLoss(10, 33, backend="tiled")
    loss(torch.randn(50, 33), torch.arange(50) % 10).backward()
    answers.put((torch.backends.cuda.matmul.allow_tf32, bool(loss.proxies.grad.isfinite().all())))


def test_the_switch_for_tf32_that_most_people_use_does_no_harm():
    # a process of its own: on some versions torch cannot tell its precision any more once this switch was set
    answers = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=step_with_tf32, args=(answers,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert answers.get() == (True, True)  # the switch is as it was, and there is a gradient


def test_inputs_are_left_as_they_were():
    for dtype in (torch.float32, torch.float64):
        for field in ("pfml", "log"):
            samples, proxies = State(spread=0.3).charges(dtype=dtype, on_sphere=True)
            before = samples.points.detach().clone(), proxies.points.detach().clone()
            BACKENDS["tiled"](samples, proxies, FIELDS[field], PairWeights()).backward()
            assert torch.equal(samples.points, before[0])
            assert torch.equal(proxies.points, before[1])


def test_a_gradient_can_be_asked_for_twice():
    samples, proxies = State(spread=0.3).charges()
    energy = BACKENDS["tiled"](samples, proxies, FIELDS["pfml"], PairWeights())
    (first,) = torch.autograd.grad(energy, samples.points, retain_graph=True)
    (second,) = torch.autograd.grad(3 * energy, samples.points)
    torch.testing.assert_close(second, 3 * first)


def test_gradients_accumulate_over_a_retained_graph_and_are_not_shared():
    samples, proxies = State(spread=0.3).charges()
    (expected,) = torch.autograd.grad(
        BACKENDS["tiled"](samples, proxies, FIELDS["pfml"], PairWeights()), proxies.points
    )
    energy = BACKENDS["tiled"](samples, proxies, FIELDS["pfml"], PairWeights())
    for times in (1, 2, 3):
        energy.backward(retain_graph=True)
        torch.testing.assert_close(proxies.points.grad, times * expected)
    proxies.points.grad.zero_()  # if this were what the graph keeps, the next would be zero
    (2 * energy + 3 * energy).backward()
    torch.testing.assert_close(proxies.points.grad, 5 * expected)
    with pytest.raises(RuntimeError, match="second time"):
        energy.backward()


def test_where_proxies_are_no_anchors_their_pairs_are_not_looked_at(monkeypatch):
    looked_at = []
    real = sweep._tiles
    monkeypatch.setattr(
        sweep, "_tiles", lambda left, right: looked_at.append((len(left), len(right))) or real(left, right)
    )
    energy_and_gradients(BACKENDS["tiled"], State(), FIELDS["anchor"], PairWeights())
    assert set(looked_at) == {(24, 24), (24, 30)}
    looked_at.clear()
    energy_and_gradients(BACKENDS["tiled"], State(), FIELDS["log"], PairWeights())
    assert set(looked_at) == {(24, 24), (24, 30), (30, 30)}


def test_auto_chooses_by_size_and_names_its_choice():
    assert choose_backend(10) == "dense"
    assert choose_backend(100_000) == "tiled"
    assert resolve_backend("auto", 100_000) == "tiled"
    assert resolve_backend("auto", 100_000, torch.empty(0, 8), Field(PowerLaw())) == "tiled"
    assert resolve_backend("dense", 100_000) == "dense"
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        resolve_backend("fast", 10)


def test_a_pair_at_the_edge_of_repulsion_is_judged_exactly():
    """Distances within float32 noise of delta: the force jumps there, so products alone would misjudge half of them."""
    n, dim = 400, 64
    generator = torch.Generator().manual_seed(1)
    center = torch.nn.functional.normalize(torch.randn(1, dim, generator=generator), dim=1)
    directions = torch.nn.functional.normalize(torch.randn(n, dim, generator=generator), dim=1)
    state = State(num_samples=1, num_classes=n, per_class=1, dim=dim)
    state.samples[:] = center
    state.proxies[:] = center + 0.2 * directions
    state.sample_labels[:] = 0
    check_backend("tiled", state, Field(PowerLaw()), PairWeights(proxy_repulsion=0.0), on_sphere=False)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_derivatives_that_it_does_not_have_are_refused_or_right(name):
    labels = torch.arange(8) % 3
    points = torch.randn(8, 4, dtype=torch.float64)

    def energy(positions):
        none = Charges(positions[:0].detach(), labels[:0])
        return BACKENDS[name](Charges(positions, labels), none, Field(PowerLaw(delta=2.0)), PairWeights())

    (expected,) = torch.autograd.grad(energy(moving := points.clone().requires_grad_()), moving)
    (batched,) = torch.autograd.grad(
        energy(moving := points.clone().requires_grad_()), moving, torch.ones(3).double(), is_grads_batched=True
    )
    torch.testing.assert_close(batched, expected.expand(3, -1, -1))
    if name != "dense":
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            torch.func.jvp(energy, (points,), (torch.ones_like(points),))
