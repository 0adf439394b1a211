"""Losses of students, against their equations in Python loops."""

import math

import pytest
import torch

from pfml.field import EquilibriumLaw, PowerLaw
from pfml.losses.distillation import (
    RelationalKLLoss,
    RelaxedContrastiveLoss,
    SoftFieldLoss,
    combined,
    pair_shares,
)

LOSSES = {
    "relaxed contrastive": RelaxedContrastiveLoss(),
    "relational KL": RelationalKLLoss(),
    "equilibrium": SoftFieldLoss(),
    "soft log field": SoftFieldLoss(law=PowerLaw(delta=0.6, delta_rep=1.2), sigma=1.0, normalization="log"),
}


def relaxed_contrastive(points, taught, sigma, margin):
    """Kim et al., Eqs. 4 to 6, pair by pair."""
    n, total = len(points), 0.0
    distance = [
        [(a - b).norm() if i != j else points.new_zeros(()) for j, b in enumerate(points)] for i, a in enumerate(points)
    ]
    for i in range(n):
        mean = sum(distance[i]) / n
        for j in range(n):
            if i != j:
                share = math.exp(-(taught[i] - taught[j]).square().sum().item() / sigma)
                d = distance[i][j] / mean
                total = total + share * d**2 + (1 - share) * max(margin - d, 0.0) ** 2
    return total / n


def relational_kl(points, taught, temperature):
    """The divergence of each row, term by term."""
    total = 0.0
    for i in range(len(points)):
        rows = []
        for each in (taught, points):
            others = [-(each[i] - each[j]).square().sum() / (2 * temperature) for j in range(len(points)) if j != i]
            rows.append(torch.stack(others).log_softmax(0))
        total = total + (rows[0].exp() * (rows[0] - rows[1])).sum()
    return total / len(points)


def batch(n=9, dims=5, wide=12, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(n, dims, generator=generator, dtype=dtype).requires_grad_()
    taught = torch.nn.functional.normalize(torch.randn(n, wide, generator=generator, dtype=dtype))
    return points, taught


@pytest.mark.parametrize(("sigma", "margin"), [(1.0, 1.0), (0.5, 1.2)])
def test_relaxed_contrastive_is_its_equation(sigma, margin):
    points, taught = batch()
    wanted = relaxed_contrastive(torch.nn.functional.normalize(points), taught, sigma, margin)
    got = RelaxedContrastiveLoss(sigma=sigma, margin=margin)(points, taught)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(each, points)[0] for each in (got, wanted)))


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_relational_kl_is_its_equation(temperature):
    points, taught = batch()
    wanted = relational_kl(torch.nn.functional.normalize(points), taught, temperature)
    got = RelationalKLLoss(temperature=temperature)(points, taught)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(each, points)[0] for each in (got, wanted)))


def test_the_soft_field_is_the_energy_of_pairs_by_share_per_charge():
    points, taught = batch()
    law = EquilibriumLaw(alpha=1.0, beta=3.0)
    on_sphere = torch.nn.functional.normalize(points)
    energies = []
    for i in range(9):
        for j in range(9):
            if i != j:
                share = law.share_at((taught[i] - taught[j]).norm())
                r = (on_sphere[i] - on_sphere[j]).norm()
                energies.append(share * law.attraction(r) + (1 - share) * law.repulsion(r))
    (wanted,) = torch.autograd.grad(sum(energies) / 9, points)
    (got,) = torch.autograd.grad(SoftFieldLoss(law=law)(points, taught), points)
    torch.testing.assert_close(got, wanted)


def test_teachers_side_by_side_have_the_mean_of_their_squared_distances():
    generator = torch.Generator().manual_seed(2)
    teachers = [torch.nn.functional.normalize(torch.randn(6, dims, generator=generator)) for dims in (3, 8, 5)]
    together = combined(teachers)
    squares = torch.stack([torch.cdist(each, each) ** 2 for each in teachers]).mean(0)
    torch.testing.assert_close(torch.cdist(together, together) ** 2, squares, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pair_shares(together, sigma=0.7), torch.exp(-squares / 0.7), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_a_student_that_follows_its_loss_finds_the_neighbors_of_its_teachers(name):
    points, taught = batch(n=24, dims=16, wide=16, dtype=torch.float32)
    student = points.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([student], lr=0.03)
    for _ in range(100):
        optimizer.zero_grad()
        LOSSES[name](student, taught).backward()
        optimizer.step()
    apart = ~torch.eye(24, dtype=torch.bool)
    on_sphere = torch.nn.functional.normalize(student.detach())
    pairs = torch.stack([torch.cdist(each, each)[apart] for each in (on_sphere, taught)])
    before = torch.nn.functional.normalize(points.detach())
    begun = torch.stack([torch.cdist(each, each)[apart] for each in (before, taught)])
    assert torch.corrcoef(begun)[0, 1] < 0.3
    # the logarithmic field goes by shares of the whole field, and follows distances more loosely
    assert torch.corrcoef(pairs)[0, 1] > (0.5 if name == "soft log field" else 0.85)


@pytest.mark.parametrize("name", LOSSES)
def test_low_precision_gets_its_gradient_in_its_own_type_and_autocast_changes_nothing(name):
    points, taught = batch(dtype=torch.float32)
    wanted = LOSSES[name](points, taught)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(LOSSES[name](points, taught), wanted)
    half = points.detach().bfloat16().requires_grad_()
    LOSSES[name](half, taught.bfloat16()).backward()
    assert half.grad.dtype == torch.bfloat16
    assert half.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [0, 1, 2])
def test_tiny_batches_have_a_finite_loss_and_gradient(name, n):
    points, taught = batch(n=3, dtype=torch.float32)
    points = points.detach()[:n].requires_grad_()
    loss = LOSSES[name](points, taught[:n])
    loss.backward()
    assert loss.isfinite()
    assert points.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_two_images_at_one_place_have_a_finite_gradient(name):
    points, taught = batch(dtype=torch.float32)
    points = points.detach()
    points[1] = points[0]
    points.requires_grad_()
    LOSSES[name](points, taught).backward()
    assert points.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_bad_input_is_refused_in_words(name):
    loss, (points, taught) = LOSSES[name], batch(dtype=torch.float32)
    with pytest.raises(ValueError, match="same images, got 9 and 5 rows"):
        loss(points, taught[:5])
    with pytest.raises(TypeError, match="`combined` makes one of several"):
        loss(points, [taught, taught])
    with pytest.raises(ValueError, match=r"floating-point and \(n, D\)"):
        loss(points, torch.zeros(9, dtype=torch.int64))
    broken = taught.clone()
    broken[3, 0] = math.nan
    with pytest.raises(ValueError, match="NaN or Inf in 1 rows: 3"):
        loss(points, broken)


def test_no_teacher_and_no_width_are_refused():
    with pytest.raises(ValueError, match="at least one tensor"):
        combined([])
    with pytest.raises(ValueError, match="sigma must be a positive number"):
        RelaxedContrastiveLoss(sigma=0.0)
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        RelationalKLLoss(temperature=-1.0)
    with pytest.raises(ValueError, match="sigma must be given, since PowerLaw"):
        SoftFieldLoss(law=PowerLaw())
    with pytest.raises(ValueError, match="backend must be"):
        SoftFieldLoss(backend="densest")


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_step_is_one_graph(name):
    points, taught = batch(dtype=torch.float32)
    compiled = torch.compile(LOSSES[name], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(points, taught), LOSSES[name](points, taught))
