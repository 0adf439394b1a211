"""EL-nivMF (Kirchhof, Roth et al., ECCV 2022): samples and proxies as distributions on the sphere, with Proxy Anchor.

The von Mises-Fisher distribution (vMF) with mean direction m and concentration k has the density C(k) exp(k m.x) on the
unit sphere. Only differences of log C matter here, and its slope is -A(k), with A the ratio of two Bessel functions. A
lies between bounds that have one form, of which this module takes the lower one (Ruiz-Antolin and Segura, 2016): exact
at k = 0 and to second order at infinity.

    A(k) = k / (q + sqrt(k^2 + h^2)),    q = (D - 1) / 2,    h = (D + 1) / 2
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.checks import check_batch, checked_sum
from pfml.losses.proxy_anchor import ProxyAnchorLoss
from pfml.losses.proxy_init import warn_of_classes_without_samples
from pfml.sphere import unit

__all__ = ["ProxyAnchorNivMFLoss", "log_normalizer", "vmf_samples"]

#: Candidates for a draw; each is taken with a probability above 0.6, so that all fail once in 10^7 draws.
TRIES = 16
#: As published: concentrations below it count as this one.
LEAST_CONCENTRATION = 0.1
#: Longer embeddings count as this long, so that no length overflows.
LARGEST_CONCENTRATION = 1e8


class ProxyAnchorNivMFLoss(ProxyAnchorLoss):
    """Proxy Anchor, and a cross entropy of the likelihoods of samples that are drawn around each embedding.

    An embedding z is a vMF distribution with direction z / |z| and concentration length_scale |z|: images that are hard
    to tell are short. A proxy has a direction m and a concentration for each dimension, K = (k_1, ..., k_D). With
    v = K m, and x_1 ... x_n drawn around z:

        log p(x | m, K) = log C(|v|) - log |v| + sum of log k_d + x.v
        s(z, c)         = log( mean over i of exp(log p(x_i | c) / temperature) )
        loss            = mean over z of -log( exp(s(z, y)) / sum over all classes c of exp(s(z, c)) )
                        + anchor_weight * Proxy Anchor, of the directions

    Gradients flow to embeddings through the draws (which of them are rejected has no gradient), to directions,
    concentrations and the temperature. Drawn with torch's global generator. Computed in float32 at least, whatever
    autocast says; checked as `PotentialFieldLoss` is.

    Published, in the authors' code: all of the above with 5 draws and temperature 0.003; with 512 dimensions
    concentration 18 and anchor_weight 5 on CUB, 22 and 0.1 on Cars. Adam; directions 0.05, concentrations 0.2,
    temperature 2e-3; weight decay on the network only. Proxies start at the means of their classes
    (`initialize_proxies`) with that length. The embedding layer starts 50 times (Cars: 10) as long as usual: here
    `length_scale`, and the layer has so many times less learning rate, which is the same to Adam.

    Ours: log C by its slope above, where the code has parabolas for 128 and 512 dimensions. The size of the temperature
    counts, and 1e-4 at least, where the code lets it become negative. Proxy Anchor's mean is over the classes of the
    batch, where the code's is over its samples; class means are those of unit embeddings.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D, at least 2.
        scale, margin: Of Proxy Anchor.
        anchor_weight: Weight of Proxy Anchor.
        num_samples: n.
        concentration: Of every dimension of a proxy at the start, and the length of its direction.
        length_scale: Concentration of an embedding of length 1.
        temperature: At the start.
        concentration_lr, temperature_lr: Learning rates, whatever that of the directions is; a schedule lowers all
            alike.

    Attributes:
        terms: "pull" and "push" of Proxy Anchor before `anchor_weight`, and "likelihood"; detached.
        proxies_ready: Whether the proxies are where `initialize_proxies` puts them; they may as well start anywhere.
    """

    needs_length = True
    concentrations: nn.Parameter  # (C, D)

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        scale: float = 32.0,
        margin: float = 0.1,
        anchor_weight: float = 5.0,
        num_samples: int = 5,
        concentration: float = 18.0,
        length_scale: float = 50.0,
        temperature: float = 0.003,
        concentration_lr: float = 0.2,
        temperature_lr: float = 2e-3,
    ) -> None:
        super().__init__(num_classes, embedding_dim, scale=scale, margin=margin)
        for name, size, least in (("embedding_dim", embedding_dim, 2), ("num_samples", num_samples, 1)):
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {size!r}")
        if not 0 <= anchor_weight < math.inf:
            raise ValueError(f"anchor_weight must be finite and not negative, got {anchor_weight}")
        positive = {"concentration": concentration, "length_scale": length_scale, "temperature": temperature}
        for name, value in {
            **positive,
            "concentration_lr": concentration_lr,
            "temperature_lr": temperature_lr,
        }.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        self.anchor_weight = anchor_weight
        self.num_samples = num_samples
        self.concentration = concentration
        self.length_scale = length_scale
        self.concentration_lr = concentration_lr
        self.temperature_lr = temperature_lr
        self.proxies_ready = False
        self.proxies = nn.Parameter(concentration * unit(torch.randn(num_classes, 1, embedding_dim)))
        self.concentrations = nn.Parameter(torch.full((num_classes, embedding_dim), float(concentration)))
        self.temperature = nn.Parameter(torch.tensor(float(temperature)))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any length and floating-point type, labels (batch,)."""
        labels = check_batch(embeddings, labels, self.proxies)
        labels = labels.clamp(0, self.num_classes - 1)  # where the check is deferred, a wrong index would kill the GPU
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, self.proxies.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            points = embeddings.to(wide)
            anchored = self._anchored(points, labels)
            if not len(labels):
                return anchored * self.anchor_weight + checked_sum(self, embeddings, differentiable=True).sum() * 0
            likelihood = F.cross_entropy(self.log_likelihoods(points), labels).to(wide)
            self.terms["likelihood"] = likelihood.detach()
            return likelihood + self.anchor_weight * anchored

    def log_likelihoods(self, embeddings: Tensor) -> Tensor:
        """s, (batch, C) in float64, of embeddings (batch, D); a constant of each row is left out."""
        lengths = torch.linalg.vector_norm(embeddings.double(), dim=1)
        concentrations = (self.length_scale * lengths).clamp(max=LARGEST_CONCENTRATION)
        drawn = vmf_samples(unit(embeddings), concentrations, self.num_samples)  # (n, batch, D)
        spread = self.concentrations.double().clamp(min=LEAST_CONCENTRATION)  # (C, D)
        vectors = spread * unit(self.proxies[:, 0]).double()  # v
        sizes = torch.linalg.vector_norm(vectors, dim=1)
        constants = log_normalizer(sizes, self.embedding_dim) - sizes.log() + spread.log().sum(dim=1)
        densities = (drawn @ vectors.to(drawn.dtype).T).double() + constants  # (n, batch, C)
        temperature = self.temperature.double().abs().clamp(min=1e-4)
        return (densities / temperature).logsumexp(dim=0) - math.log(self.num_samples)

    @torch.no_grad()
    def initialize_proxies(
        self, embeddings: Tensor, labels: Tensor, *, generator: torch.Generator | None = None
    ) -> None:
        """Put the proxies at the means of their classes, given embeddings of the training set.

        Proxies of a class without embeddings stay where they are, with a warning.
        """
        labels = check_batch(embeddings, labels, self.proxies)
        warn_of_classes_without_samples(labels, self.num_classes)
        own = F.one_hot(labels, self.num_classes).double()  # (N, C)
        means = unit(own.T @ unit(embeddings.double()))
        known = (own.sum(dim=0) > 0)[:, None]
        self.proxies[:, 0] = torch.where(known, self.concentration * means, self.proxies[:, 0].double()).to(
            self.proxies.dtype
        )
        self.proxies_ready = True

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Three groups: directions with `lr`, concentrations and the temperature with their own rates."""
        return [
            *super().param_groups(lr, weight_decay),
            {"params": [self.concentrations], "lr": self.concentration_lr, "weight_decay": weight_decay},
            {"params": [self.temperature], "lr": self.temperature_lr, "weight_decay": 0.0},
        ]

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, anchor_weight={self.anchor_weight}, num_samples={self.num_samples}, "
            f"concentration={self.concentration}, length_scale={self.length_scale}, "
            f"concentration_lr={self.concentration_lr}, temperature_lr={self.temperature_lr}"
        )


def log_normalizer(concentrations: Tensor, dim: int) -> Tensor:
    """log C(k) - log C(0) of vMF distributions in `dim` dimensions: the integral of -A(k), see above.

    Example:
        >>> log_normalizer(torch.tensor([0.0, 10.0]), 512)
        tensor([ 0.0000, -0.0976])
    """
    k = concentrations.double()
    q, h = (dim - 1) / 2, (dim + 1) / 2
    root = torch.sqrt(k.square() + h**2)
    return (h - root + q * torch.log((q + root) / dim)).to(concentrations.dtype)  # q + h is dim


def vmf_samples(directions: Tensor, concentrations: Tensor, count: int) -> Tensor:
    """Draws of vMF distributions (Wood, 1994), (count, n, D), with gradients of directions and concentrations.

    The cosine w with the direction comes from a Beta distribution by rejection, the rest is uniform. Of `TRIES`
    candidates the first that is not rejected counts, or the last. Drawn with torch's global generator, alike for all
    dtypes.

    Args:
        directions: Unit vectors (n, D), D at least 2.
        concentrations: (n,), not negative.
        count: Draws of each.
    """
    dim, k = directions.shape[1], concentrations.double()
    b = (dim - 1) / (2 * k + torch.sqrt(4 * k.square() + (dim - 1) ** 2))
    shape = torch.full((count, TRIES, len(k)), (dim - 1) / 2, dtype=torch.float64, device=k.device)
    with torch.no_grad():
        z = torch.distributions.Beta(shape, shape, validate_args=False).sample()
        below = 1 - (1 - b) * z
        gain = 2 * k * b * (1 / (1 + b) - z / below) + (dim - 1) * torch.log((1 + b) / (2 * below))
        accepted = gain >= torch.rand_like(z).log()
        accepted[:, -1] = True
        chosen = accepted.to(torch.uint8).argmax(dim=1, keepdim=True)  # the first
        z = z.gather(1, chosen)[:, 0]  # (count, n)
    missing = 2 * b * z / (1 - (1 - b) * z)  # 1 - w
    across = torch.sqrt((missing * (2 - missing)).clamp(min=1e-30))
    noise = torch.randn(count, *directions.shape, device=directions.device).to(directions.dtype)
    tangent = unit(noise - (noise * directions).sum(dim=-1, keepdim=True) * directions)
    w, across = ((one[..., None]).to(directions.dtype) for one in (1 - missing, across))
    return w * directions + across * tangent
