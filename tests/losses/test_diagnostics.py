import math

import pytest
import torch

from pfml import CollapseWarning, PotentialFieldLoss
from pfml.sphere import unit
from states import State, Yukawa


def loops(points, labels, delta, reach):
    """Count by looking at each pair."""
    repelling = different = inside = same = 0
    for i in range(len(points)):
        for j in range(i):
            r = math.dist(points[i], points[j])
            if labels[i] == labels[j]:
                same += 1
                inside += r < delta
            else:
                different += 1
                repelling += r < reach
    return repelling, repelling / different, inside / same


def test_diagnostics_count_what_the_loops_count():
    state = State(num_samples=20, num_classes=4, per_class=3, dim=6, spread=0.5)
    loss = PotentialFieldLoss(4, 6, proxies_per_class=3, delta=0.5, delta_rep=0.7)
    with torch.no_grad():
        loss.proxies.copy_(state.proxies.view(4, 3, 6))
    report = loss.diagnostics(state.samples, state.sample_labels)
    points = torch.cat([state.samples, unit(state.proxies)]).tolist()
    labels = torch.cat([state.sample_labels, state.proxy_labels]).tolist()
    repelling, share, inside = loops(points, labels, 0.5, 0.7)
    assert report.active_repulsions == repelling
    assert report.active_repulsion_share == pytest.approx(share)
    assert report.same_class_inside_delta == pytest.approx(inside)
    assert repelling > 0
    assert 0 < inside < 1
    distances = [math.dist(p, q) for c in state.proxies.view(4, 3, 6).tolist() for p in c for q in c if p is not q]
    assert report.proxy_spread == pytest.approx(sum(distances) / len(distances), rel=1e-5)
    assert not report.collapsed


def test_the_largest_force_is_the_largest_gradient_at_a_position():
    state = State(num_samples=10, num_classes=3, per_class=2, dim=6, spread=0.3)
    loss = PotentialFieldLoss(3, 6, proxies_per_class=2, proxy_space="free", normalize_embeddings=False)
    with torch.no_grad():
        loss.proxies.copy_(state.proxies.view(3, 2, 6))
    samples = state.samples.requires_grad_()
    loss(samples, state.sample_labels).backward()
    largest = max(samples.grad.norm(dim=1).max(), loss.proxies.grad.norm(dim=-1).max())
    assert loss.diagnostics(samples, state.sample_labels).largest_force == pytest.approx(largest.item(), rel=1e-5)


def test_without_a_batch_the_proxies_alone_are_measured():
    report = PotentialFieldLoss(4, 6, proxies_per_class=3).diagnostics()
    assert math.isnan(report.sample_spread)
    assert report.proxy_spread > 0.5
    assert PotentialFieldLoss(4, 6, proxies_per_class=0).diagnostics().active_repulsions == 0


def test_a_collapse_of_samples_or_of_proxies_is_warned_of():
    loss = PotentialFieldLoss(4, 6, proxies_per_class=3)
    samples = torch.randn(1, 6).expand(8, 6) + 1e-6 * torch.randn(8, 6)
    with pytest.warns(CollapseWarning, match="the field has collapsed"):
        assert loss.diagnostics(samples, torch.arange(8) % 4).collapsed
    with torch.no_grad():
        loss.proxies.copy_(loss.proxies[:, :1].clone().expand(4, 3, 6))
    with pytest.warns(CollapseWarning, match="switch proxy_attraction off"):
        assert loss.diagnostics().collapsed


def test_pairs_that_are_switched_off_are_not_counted():
    loss = PotentialFieldLoss(4, 6, proxies_per_class=3, delta=1.9, proxy_repulsion=False)
    report = loss.diagnostics()
    assert report.active_repulsions == 0
    assert math.isnan(report.active_repulsion_share)
    assert PotentialFieldLoss(4, 6, proxies_per_class=3, delta=1.9).diagnostics().active_repulsions > 0


def test_a_law_without_a_contact_radius_has_no_pair_inside_it():
    assert PotentialFieldLoss(4, 6, proxies_per_class=3, potential=Yukawa()).diagnostics().same_class_inside_delta == 0


def test_embeddings_without_labels_are_refused():
    with pytest.raises(ValueError, match="needs embeddings and labels, or neither"):
        PotentialFieldLoss(4, 6).diagnostics(torch.randn(3, 6))
