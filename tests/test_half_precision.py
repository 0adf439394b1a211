"""Float16 embeddings whose gradients float16 cannot hold."""

import warnings

import pytest
import torch

from pfml import PotentialFieldLoss, forces
from pfml.backends.fused import INSTALLED
from pfml.losses import GradientOverflowWarning

LABELS = torch.tensor([0, 1])


def pair(apart, dtype=torch.float16, device="cpu"):
    """Two unit vectors at that distance."""
    return torch.tensor([[1.0, 0.0], [1.0, apart]], dtype=dtype, device=device, requires_grad=True)


def backward(loss, points, scale=1.0):
    (scale * loss(points, LABELS.to(points.device))).backward()
    return points.grad


@pytest.mark.parametrize("backend", ["dense", "tiled"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_gradient_that_float16_cannot_hold_is_named_with_what_to_do(backend, normalize):
    loss = PotentialFieldLoss(2, 2, proxies_per_class=0, backend=backend, normalize_embeddings=normalize)
    points = pair(0.05)
    with pytest.warns(GradientOverflowWarning, match="use bfloat16, or .* reduction='points' or .*GradScaler"):
        gradient = backward(loss, points)
    assert torch.isinf(gradient).any()


def test_what_the_warning_advises_helps():
    loss = PotentialFieldLoss(2, 2, proxies_per_class=0)
    assert torch.isfinite(backward(loss, pair(0.05, torch.bfloat16))).all()
    assert torch.isfinite(backward(loss, pair(0.05), scale=2.0**-8)).all()
    some = PotentialFieldLoss(2, 2, reduction="pairs")
    assert torch.isfinite(backward(some, pair(0.05))).all()
    assert torch.isfinite(backward(loss, pair(0.15))).all()  # far enough apart


def test_a_scaler_that_has_not_found_its_scale_yet_is_left_alone():
    check_scaler(PotentialFieldLoss(2, 2, proxies_per_class=0))


def check_scaler(step):
    assert torch.isinf(backward(step, pair(0.15), scale=65536.0)).any()
    with pytest.warns(GradientOverflowWarning):  # which needs a scale below 1
        backward(step, pair(0.05), scale=65536.0)


def test_python_shows_the_warning_once():
    loss = PotentialFieldLoss(2, 2, proxies_per_class=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for apart in (0.05, 0.04, 0.03):
            backward(loss, pair(apart))
    assert [warning.category for warning in caught] == [GradientOverflowWarning]


def test_proxies_in_float16_and_the_forces_of_points_are_looked_at_too():
    loss = PotentialFieldLoss(2, 2, proxies_per_class=1).half()
    with torch.no_grad():
        loss.proxies.copy_(torch.tensor([[[1.0, 0.0]], [[1.0, 0.05]]]))
    with pytest.warns(GradientOverflowWarning):
        loss(torch.eye(2), LABELS).backward()
    with pytest.warns(GradientOverflowWarning):
        forces(pair(0.05).detach(), LABELS)


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_torch_compile_keeps_one_graph_and_warns(backend):
    loss = PotentialFieldLoss(2, 2, proxies_per_class=0, backend=backend)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected, points = backward(loss, pair(0.3)), pair(0.3)
    torch.testing.assert_close(backward(compiled, points), expected)
    with pytest.warns(GradientOverflowWarning):
        assert torch.isinf(backward(compiled, pair(0.05))).any()
    check_scaler(compiled)


def test_batched_gradients_and_no_gradients_are_left_alone():
    loss = PotentialFieldLoss(2, 2, proxies_per_class=0)
    points = pair(0.05)
    with torch.no_grad():
        loss(points, LABELS)
    (batched,) = torch.autograd.grad(loss(points, LABELS), points, torch.ones(3), is_grads_batched=True)
    assert batched.shape == (3, 2, 2)
    nothing = torch.zeros(0, 2, dtype=torch.float16, requires_grad=True)
    loss(nothing, LABELS[:0]).backward()
    assert nothing.grad.shape == (0, 2)


def test_a_flag_from_a_gpu_is_read_when_it_has_arrived_and_not_before():
    from pfml import half_precision

    class Copied:
        done = False

        def query(self):
            return self.done

    copied = Copied()
    half_precision._under_way.append((copied, torch.tensor(True)))
    loss = PotentialFieldLoss(2, 2, proxies_per_class=0)
    loss(pair(0.3), LABELS)  # says nothing, and does not wait
    copied.done = True
    with pytest.warns(GradientOverflowWarning):
        loss(pair(0.3), LABELS)
    assert not half_precision._under_way


@pytest.mark.gpu
@pytest.mark.skipif(not INSTALLED, reason="needs the package triton")
@pytest.mark.parametrize("backend", ["auto", "tiled"])
def test_a_gpu_is_not_waited_for_and_tells_one_step_later(backend):
    loss = PotentialFieldLoss(2, 2, proxies_per_class=0, backend=backend).cuda()
    backward(loss, pair(0.3, device="cuda"))  # compiles
    energy = loss(pair(0.05, device="cuda"), LABELS.cuda())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        energy.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with pytest.warns(GradientOverflowWarning):
        loss(pair(0.3, device="cuda"), LABELS.cuda())
