"""Seeded arrangements of charges that tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pfml.field import ContrastiveLaw, DecayLaw, LogarithmicLaw, PowerLaw
from pfml.superposition import Anchors, Charges, Field, PairWeights


@dataclass(frozen=True)
class Yukawa(DecayLaw):
    """The ten-line law of `pfml.field`'s docstring: what a user would write."""

    length: float = 0.5

    def attraction(self, r):
        return -torch.exp(-r / self.length)

    def attraction_slope(self, r):
        return torch.exp(-r / self.length) / self.length

    def repulsion(self, r):
        return torch.exp(-r / self.length)

    def repulsion_slope(self, r):
        return -torch.exp(-r / self.length) / self.length


FIELDS = {
    "pfml": Field(PowerLaw()),
    "wide repulsion": Field(PowerLaw(delta=0.3, delta_rep=0.9, alpha=6.0)),
    "narrow repulsion": Field(PowerLaw(delta=0.3, delta_rep=0.1, alpha=1.0)),
    "logarithmic law": Field(LogarithmicLaw()),
    "cpml": Field(ContrastiveLaw()),
    "cpml mirrored": Field(ContrastiveLaw(bounded=False)),
    "user's law": Field(Yukawa()),
    "log": Field(PowerLaw(delta=0.6, delta_rep=1.2, alpha=6.0), "log"),
    "anchor": Field(PowerLaw(alpha=16.0), "anchor"),
    "user's law, log": Field(Yukawa(), "log"),
}

WEIGHTS = {
    "all": PairWeights(),
    "no proxy attraction": PairWeights(proxy_attraction=0.0),
    "no proxy repulsion": PairWeights(proxy_repulsion=0.0),
    "no proxy pairs": PairWeights(proxy_attraction=0.0, proxy_repulsion=0.0),
    "no sample pairs": PairWeights(sample_sample=0.0),
    "uneven": PairWeights(0.5, 2.0, 0.3, 1.7),
}


#: Backends that run on every machine; `test_fused` has the suite of the other one.
EVERYWHERE = ("dense", "tiled")


@dataclass
class State:
    """Samples and proxies with labels; `spread` shrinks them toward one point of the sphere."""

    num_samples: int = 24
    num_classes: int = 6
    per_class: int = 5
    dim: int = 16
    spread: float = 1.0
    seed: int = 0
    samples: Tensor = field(init=False)
    sample_labels: Tensor = field(init=False)
    proxies: Tensor = field(init=False)
    proxy_labels: Tensor = field(init=False)
    anchors: Anchors | None = None  # of the proxies

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        center = torch.randn(self.dim, generator=g, dtype=torch.float64)
        center = center / center.norm() * (1 - self.spread)

        def draw(n):
            z = torch.randn(n, self.dim, generator=g, dtype=torch.float64)
            z = center + self.spread * z / z.norm(dim=1, keepdim=True)
            return (z / z.norm(dim=1, keepdim=True).clamp_min(1e-9)).float()  # in one dimension z may be zero

        self.samples = draw(self.num_samples)
        self.sample_labels = torch.randint(0, self.num_classes, (self.num_samples,), generator=g)
        self.proxies = draw(self.num_classes * self.per_class)
        self.proxy_labels = torch.arange(self.num_classes).repeat_interleave(self.per_class)

    def drawn(self, count):
        """This state with `count` proxies as anchors of uneven weights, and slots of weight 0 that repeat some rows."""
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = torch.randperm(len(self.proxies), generator=g)[:count]
        weights = 0.5 + 3 * torch.rand(len(rows), generator=g, dtype=torch.float64)
        unused = torch.cat([rows[::2], torch.arange(len(self.proxies))[:3]])
        self.anchors = Anchors(torch.cat([unused, rows]), torch.cat([torch.zeros(len(unused)).double(), weights]))
        return self

    def charges(self, dtype=torch.float32, device="cpu", on_sphere=False):
        """Samples and proxies with fresh leaves to differentiate."""
        samples = self.samples.to(device, dtype, copy=True).requires_grad_()
        proxies = self.proxies.to(device, dtype, copy=True).requires_grad_()
        return (
            Charges(samples, self.sample_labels.to(device)),
            Charges(proxies, self.proxy_labels.to(device), on_sphere, self.anchors and self._anchors_on(device)),
        )

    def _anchors_on(self, device):
        return Anchors(*(part.to(device) for part in self.anchors))


def tight_clusters(radius, dim, dtype=torch.float32, *, num_samples=40, num_classes=8, per_class=10, clusters=5):
    """A state in a few far-apart clusters of that radius, each of points of all classes."""
    state = State(num_samples=num_samples, num_classes=num_classes, per_class=per_class, dim=dim)
    g = torch.Generator().manual_seed(3)
    centers = torch.randn(clusters, dim, generator=g, dtype=torch.float64)
    centers = torch.linspace(-2, 2, clusters).double()[:, None] if dim == 1 else centers / centers.norm(dim=1)[:, None]

    def draw(n):
        noise = torch.randn(n, dim, generator=g, dtype=torch.float64) / dim**0.5
        return (centers[torch.arange(n) % clusters] + radius * noise).to(dtype)

    state.samples, state.proxies = draw(len(state.samples)), draw(len(state.proxies))
    return state


def energy_and_gradients(backend, state, field, weights, **kwargs):
    """Energy and the gradients of samples and proxies, in float64."""
    samples, proxies = state.charges(**kwargs)
    energy = backend(samples, proxies, field, weights)
    gradients = torch.autograd.grad(energy, (samples.points, proxies.points))
    return energy.double().cpu(), *(g.double().cpu() for g in gradients)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, by norms; absolute if nothing is expected."""
    scale = expected.norm().item()
    return (got - expected).norm().item() / (scale if scale > 0 else 1.0)
