"""Proposition 1 and Corollary 1 on random points, where they hold, and where they need more than they say."""

import functools
import itertools
import json
import math
import sys
from dataclasses import asdict

import pytest
import torch

from pfml.cli import main
from pfml.theory.check import (
    LAWS,
    MARGIN,
    SLACK,
    TheoryConfig,
    ball_minimizers,
    descent,
    field_and_gradient,
    has_radial_minimum,
    in_their_span,
    largest_delta,
    proxies_at_rest,
    theory_outcomes,
    theory_table,
)
from pfml.theory.figures import Window

PFML, CPML = LAWS["PFML"](3.0), LAWS["CPML"](3.0)
LOW, HIGH = (2, 3, 4), (8, 32)
FEW = TheoryConfig(dims=(2, 3), num_points=8, num_proxies=2, trials=2)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle_potential(where, data, name):
    """Eq. 4 and the supplement's CPML for one class, literally, with delta = 1 and alpha = 3."""
    total = 0.0
    for datum in data:
        r = math.dist(where, datum)
        if name == "PFML":
            total += -1.0 if r < 1 else -1 / r**3
        else:
            total += 1.0 if r < 1 else r**2
    return total


def random_data(dims, *, trials=3, size=32, seed=0, alpha=3.0):
    """Normal points in units of a delta for which the proof of Prop. 1 holds, (trials, size, dims)."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(trials, size, dims, generator=generator, dtype=torch.float64)
    return data / (MARGIN * largest_delta(data, alpha=alpha)[:, None, None])


def random_directions(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(shape, generator=generator, dtype=torch.float64), dim=-1)


@functools.cache
def outcomes_of(config):
    return [outcome for group in theory_outcomes(config) for outcome in group]


def outcomes_in_few_dimensions(name):
    config = TheoryConfig(dims=(2, 4), num_points=32, num_proxies=6, trials=4)
    return [outcome for outcome in outcomes_of(config) if outcome.law == name]


# ---------------------------------------------------------------------------------------------------------------- field


@pytest.mark.parametrize("name", LAWS)
def test_the_field_and_its_gradient_are_those_of_the_definition(name):
    data, law = random_data(3, trials=2, size=6), LAWS[name](3.0)
    positions = data[:, :4] + torch.tensor([0.5, 2.0, 1.0])
    potential, gradient = field_and_gradient(positions, data, law)
    step = 1e-5
    for trial, k in itertools.product(range(2), range(4)):
        where, charges = positions[trial, k], data[trial].tolist()
        assert potential[trial, k].item() == pytest.approx(oracle_potential(where.tolist(), charges, name), rel=1e-12)
        for axis in range(3):
            shift = torch.zeros(3, dtype=torch.float64)
            shift[axis] = step
            up, down = (oracle_potential((where + sign * shift).tolist(), charges, name) for sign in (1, -1))
            assert gradient[trial, k, axis].item() == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8)


def test_a_descent_only_ever_goes_down():
    data = random_data(2)
    start = data.mean(dim=1, keepdim=True) + 3 * random_directions((3, 5, 2))
    heights = [
        field_and_gradient(position, data, PFML)[0] for position in descent(start, data, PFML, longest=1.0, steps=60)
    ]
    assert all((after <= before).all() for before, after in itertools.pairwise(heights))
    assert (heights[-1] < heights[0]).all()


def test_coordinates_in_the_span_keep_all_distances():
    points = torch.randn(2, 9, 40, dtype=torch.float64)
    reduced = in_their_span(points)
    assert reduced.shape == (2, 9, 9)
    torch.testing.assert_close(torch.cdist(reduced, reduced), torch.cdist(points, points))


# -------------------------------------------------------------------------------------------------------- Proposition 1


@pytest.mark.parametrize(("dims", "seed"), [*itertools.product(LOW, (0, 1)), *itertools.product(HIGH, (0,))])
def test_pfml_has_a_minimum_within_delta_of_every_datum(dims, seed):
    data = random_data(dims, seed=seed)
    assert has_radial_minimum(data, ball_minimizers(data, PFML), PFML).all()


@pytest.mark.parametrize(("dims", "seed"), [*itertools.product(LOW, (0, 1)), *itertools.product(HIGH, (0,))])
def test_cpml_has_a_minimum_within_delta_of_at_most_one_datum(dims, seed):
    data = random_data(dims, seed=seed)
    assert (has_radial_minimum(data, ball_minimizers(data, CPML), CPML).sum(dim=1) <= 1).all()


def test_a_datum_at_the_center_is_the_one_where_cpml_has_a_minimum():
    data = random_data(3)
    data = torch.cat([data, data.mean(dim=1, keepdim=True)], dim=1)
    data = data / largest_delta(data, alpha=3.0)[:, None, None]
    found = has_radial_minimum(data, ball_minimizers(data, CPML), CPML)
    assert found[:, -1].all()
    assert found.sum().item() == len(data)


@pytest.mark.parametrize("name", LAWS)
def test_nowhere_in_the_ball_is_the_field_lower_than_at_its_minimizer(name):
    data, law = random_data(2, size=12), LAWS[name](3.0)
    lowest = field_and_gradient(ball_minimizers(data, law), data, law)[0]
    angles = torch.linspace(0, 2 * math.pi, 90, dtype=torch.float64)
    ring = torch.stack([angles.cos(), angles.sin()], dim=1)  # (90, 2)
    disc = torch.cat([radius * ring for radius in torch.linspace(0, 0.999999, 12)])  # (1080, 2)
    for k in range(data.shape[1]):
        heights = field_and_gradient(data[:, k, None] + disc, data, law)[0]
        assert (heights >= lowest[:, k, None] - 1e-9 * lowest[:, k, None].abs()).all()


def test_below_the_largest_delta_every_way_out_of_the_ball_leads_up():
    data = random_data(3)
    for seed in range(20):
        ways = random_directions(data.shape, seed)
        slopes = (field_and_gradient(data + 1.000001 * ways, data, PFML)[1] * ways).sum(dim=-1)
        assert (slopes > 0).all()  # so the lowest point of the ball is a minimum in R^D, not only along a line


def test_the_bound_in_the_proposition_alone_is_not_enough_in_many_dimensions():
    data = torch.randn(2, 64, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    closest = torch.stack([torch.pdist(points).min() for points in data])
    delta = 0.99 * closest / (2 * (1 + 1 / 64))
    assert (delta > largest_delta(data, alpha=3.0)).all()
    data = in_their_span(data / delta[:, None, None])
    assert not has_radial_minimum(data, ball_minimizers(data, PFML), PFML).any()


def test_on_a_line_across_the_pull_cpml_has_a_minimum_at_every_datum():
    # The supplement says "a radial line". It must mean the one through the lowest point of the ball.
    data = random_data(2)
    pull = field_and_gradient(data, data, CPML)[1]
    across = torch.nn.functional.normalize(torch.stack([-pull[..., 1], pull[..., 0]], dim=-1), dim=-1)
    for distance in (-0.5, 0.5):
        slope = (field_and_gradient(data + distance * across, data, CPML)[1] * across).sum(dim=-1)
        assert (slope.sign() == math.copysign(1, distance)).all()


# ---------------------------------------------------------------------------------------------------------- Corollary 1


def test_in_few_dimensions_every_pfml_proxy_ends_within_delta():
    for outcome in outcomes_in_few_dimensions("PFML"):
        assert outcome.within == outcome.num_proxies
        assert outcome.farthest <= 1 + SLACK


def test_w2_of_pfml_is_at_most_delta_exactly_if_no_two_proxies_share_a_datum():
    outcomes = outcomes_in_few_dimensions("PFML")
    assert {outcome.one_to_one for outcome in outcomes} == {True, False}  # the assumption fails often enough to matter
    for outcome in outcomes:
        assert (outcome.paper_w2 <= 1 + SLACK) == outcome.one_to_one
        assert (outcome.true_w2 <= 1 + SLACK) == outcome.one_to_one


def test_w2_of_cpml_is_above_delta():
    for outcome in outcomes_in_few_dimensions("CPML"):
        assert outcome.paper_w2 > 1
        assert (outcome.unsettled, outcome.one_to_one) == (0, False)


def test_all_cpml_proxies_end_at_one_point():
    data = random_data(3)
    ends = proxies_at_rest(30 * random_directions((3, 4, 3)), data, CPML)
    torch.testing.assert_close(ends, ends[:, :1].expand_as(ends), atol=1e-3, rtol=0)


def hessian_of_the_field(where, points, step=1e-5):
    """Differences of gradients, (D, D): torch's cdist has a second derivative only since lately."""
    shifts = step * torch.eye(len(where), dtype=where.dtype)
    ahead, behind = (field_and_gradient((where + s)[None], points[None], PFML)[1][0] for s in (shifts, -shifts))
    return (ahead - behind) / (2 * step)


@pytest.mark.parametrize("dims", [2, 5, 8])
def test_the_laplacian_of_the_field_has_the_sign_of_dims_minus_alpha_minus_two(dims):
    data, alpha = random_data(dims, trials=1, size=10)[0], 3.0
    where = data[0] + 1.5 * random_directions((dims,))
    hessian = hessian_of_the_field(where, data)
    expected = alpha * (dims - alpha - 2) * torch.cdist(where[None], data).pow(-alpha - 2).sum()
    assert hessian.trace().item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)


def test_in_128_dimensions_pfml_has_a_minimum_far_from_all_data():
    # What Corollary 1 does not say: for D > alpha + 2 a proxy may come to rest in the middle of the data.
    data = random_data(128, size=64, trials=2)
    end = proxies_at_rest(data.mean(dim=1, keepdim=True), data, PFML)
    assert (torch.cdist(end, data).amin(dim=-1) > 2).all()
    for position, points in zip(end, data, strict=True):
        hessian = hessian_of_the_field(position[0], points)
        (gradient,) = field_and_gradient(position[None], points[None], PFML)[1]
        curvatures = torch.linalg.eigvalsh(hessian)
        assert curvatures.min() > 0
        assert torch.linalg.solve(hessian, gradient[0]).norm() < 1e-3  # what is left to the minimum, in units of delta


def test_in_3_dimensions_the_same_start_leads_to_a_datum():
    data = random_data(3, size=64)
    end = proxies_at_rest(data.mean(dim=1, keepdim=True), data, PFML)
    assert (torch.cdist(end, data).amin(dim=-1) <= 1 + SLACK).all()


def test_in_128_dimensions_no_random_proxy_ends_within_delta():
    outcomes = outcomes_of(TheoryConfig(dims=(128,), trials=3))
    for outcome in outcomes:
        assert (outcome.within, outcome.unsettled, outcome.one_to_one) == (0, 0, False)
    # Prop. 1 holds: the minima are there, the proxies just do not get to them.
    assert {(outcome.law, outcome.minima) for outcome in outcomes} == {("PFML", 64), ("CPML", 0)}


# --------------------------------------------------------------------------------------------------- settings and table


def test_the_same_settings_give_the_same_outcomes_and_another_seed_gives_others():
    first, again, other = (
        next(theory_outcomes(TheoryConfig(dims=(2,), num_points=8, num_proxies=2, trials=1, seed=seed)))
        for seed in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dims": ()}, r"dims must be integers >= 2, got \(\)"),
        ({"dims": (3, 1)}, r"dims must be integers >= 2, got \(3, 1\)"),
        ({"num_proxies": 1}, "num_proxies must lie in .* got 1 proxies and 64 points"),
        ({"num_points": 3}, "num_proxies must lie in .* got 4 proxies and 3 points"),
        ({"alpha": 0.0}, "alpha must be a positive number, got 0.0"),
        ({"trials": 0}, "trials must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TheoryConfig(**settings)


def test_the_table_has_a_row_for_each_dimension_and_law():
    table = theory_table(outcomes_of(FEW))
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["2", "2", "3", "3"]
    assert columns[1] == ["PFML", "CPML", "PFML", "CPML"]
    assert columns[2][0] == columns[2][2] == "8 of 8"
    assert columns[3][0] == columns[3][2] == "100%"
    assert columns[-1][0].endswith(" of 2")
    assert columns[-1][1] == ""
    with pytest.raises(ValueError, match="outcomes must not be empty"):
        theory_table([])


# --------------------------------------------------------------------------------------------------------- command line

SMALL = ["theory", "--dims=2", "--points=8", "--proxies=3", "--alpha=2", "--trials=2"]


def test_pfml_theory_prints_the_table_and_writes_the_figure(tmp_path, capsys, monkeypatch):
    grid = Window.grid
    monkeypatch.setattr("pfml.theory.figures.DPI", 40)
    monkeypatch.setattr("pfml.theory.figures.Window.grid", lambda self, across: grid(self, across // 4))
    main([*SMALL, f"--out={tmp_path / '[new]'}"])
    printed = capsys.readouterr().out
    assert "8 data, 3 proxies, alpha = 2;" in printed
    assert "2 │ PFML │" in printed
    assert "3 │ PFML │" not in printed
    assert "of 2 │" in printed
    assert str(tmp_path / "[new]" / "theory.png") in printed
    assert (tmp_path / "[new]" / "theory.png").stat().st_size > 5_000


def test_every_option_of_pfml_theory_reaches_the_check_and_json_has_its_outcomes(tmp_path, monkeypatch, capsys):
    asked, few = [], outcomes_of(FEW)
    monkeypatch.setattr("pfml.theory.figures.plot_theory", lambda path: None)
    monkeypatch.setattr("pfml.theory.figures.plot_field", lambda path: None)
    monkeypatch.setattr("pfml.theory.check.theory_outcomes", lambda config: asked.append(config) or [few])
    main([*SMALL, f"--out={tmp_path}", "--seed=7"])
    assert asked == [TheoryConfig(dims=(2,), num_points=8, num_proxies=3, alpha=2.0, trials=2, seed=7)]
    assert "PFML" in capsys.readouterr().out
    main([*SMALL, f"--out={tmp_path}", "--json", "--quiet"])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == [asdict(outcome) for outcome in few]
    assert printed.err == ""


@pytest.mark.slow
def test_pfml_theory_prints_the_table_and_writes_two_figures_with_two_panels_each(tmp_path, capsys):
    from matplotlib.image import imread

    pyplot_was_there = "matplotlib.pyplot" in sys.modules
    main(["theory", f"--out={tmp_path}", "--dims", "2", "512", "--trials=2"])
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_was_there  # drawing leaves global state alone
    printed = capsys.readouterr().out
    assert "512 │ CPML │" in printed
    for name in ("field.png", "theory.png"):
        assert str(tmp_path / name) in printed
        pixels = torch.from_numpy(imread(tmp_path / name)[..., :3].copy())
        height, width, _ = pixels.shape
        assert min(height, width) > 500
        left, right = pixels[:, : width // 2], pixels[:, -(width // 2) :]
        assert min(left.std().item(), right.std().item()) > 0.1
        assert (left - right).abs().mean() > 0.05


def test_an_unknown_option_is_an_error_that_names_it(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["theory", "--sead=1"])
    assert caught.value.code == 2
    assert "--sead" in capsys.readouterr().err


def test_a_bad_value_is_an_error_without_a_traceback():
    with pytest.raises(SystemExit, match="error: trials must be at least 1, got 0"):
        main(["theory", "--trials=0"])


def test_pfml_version_is_that_of_the_package(capsys):
    from pfml import __version__

    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert __version__ in capsys.readouterr().out
