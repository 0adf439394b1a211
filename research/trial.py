"""A field with more knobs than the package has, dense and slow: what helps on CUB moves into the package.

Per anchor a, with x = log r and sums over the other charges s, weighted by kind:

    attraction  "log"         -log sum w (contact / max(r, contact))^att          as normalization="log"
                "saturating"  log(1 + 1 / sum w (knee_att / r)^att)               ends once the own field is strong
                "linear"      - mean w (contact / max(r, contact))^att            Eq. 6's, per positive
                "far"         log(1 + sum w (r / knee_att)^att)                   Proxy Anchor's: the farthest count
    repulsion   log(1 + sum w [(knee / r)^rep - (knee / reach)^rep]+)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfml.methods.method import Method
from pfml.methods.table import METHODS
from pfml.sphere import unit

__all__ = ["TrialField"]


class TrialField(nn.Module):
    """The energy per anchor; options as above, weights by kind of pair and of anchor."""

    proxy_labels: Tensor
    memory_points: Tensor
    memory_labels: Tensor

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        proxies_per_class: int = 5,
        att: float = 24.0,
        rep: float = 24.0,
        contact: float = 1.0,
        reach: float = 1.3,
        knee: float = 1.0,
        knee_att: float = 1.2,
        attraction: str = "log",
        sample_attraction: float = 0.2,
        sample_repulsion: float = 0.2,
        proxy_repulsion: float = 1.0,
        attraction_weight: float = 1.0,
        repulsion_weight: float = 1.0,
        sample_anchors: float = 1.0,
        proxy_anchors: float = 1.0,
        mix: float = 0.0,
        trust: float = 0.0,
        trust_after: int = 0,
        relabel: bool = False,
        memory: int = 0,
        memory_weight: float = 0.2,
        parts: int = 0,
        parts_weight: float = 1.0,
        first_exponent: float = 0.0,
        first_contact: float = 0.0,
        ramp: int = 0,
        largest_pair: float = 0.0,
        norm: float = 3.0,
    ) -> None:
        super().__init__()
        self.options = {k: v for k, v in locals().items() if k not in ("self", "__class__", "num_classes")}
        self.num_classes, self.proxies_per_class = num_classes, proxies_per_class
        points = unit(torch.randn(num_classes, proxies_per_class, embedding_dim)) * norm
        self.proxies = nn.Parameter(points)
        labels = torch.arange(num_classes).repeat_interleave(proxies_per_class)
        self.register_buffer("proxy_labels", labels, persistent=False)
        self.register_buffer("memory_points", torch.zeros(memory, embedding_dim), persistent=False)
        self.register_buffer("memory_labels", torch.full((memory,), -1), persistent=False)
        self.steps = 0
        self.final = dict(self.options)

    def proxy_points(self) -> Tensor:
        """On the sphere, (C, M, D)."""
        return unit(self.proxies.detach())

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The mean energy of an anchor."""
        o = self.options
        with torch.autocast(embeddings.device.type, enabled=False):
            samples, proxies = unit(embeddings.float()), unit(self.proxies.flatten(0, 1))
            labels = labels.to(samples.device)
            self.steps += self.training
            self.follow_schedule()
            if o["trust"] and self.training and self.steps > o["trust_after"]:
                keep, strongest = self.trusted(samples.detach(), labels)
                if o["relabel"]:
                    labels = torch.where(keep, labels, strongest)
                else:
                    samples, labels = samples[keep], labels[keep]
            total = self.total(samples, labels, proxies, self.memory_points)
            for k in range(o["parts"]):
                some = [unit(each[:, k :: o["parts"]]) for each in (samples, proxies, self.memory_points)]
                total = total + o["parts_weight"] / o["parts"] * self.total(some[0], labels, some[1], some[2])
            if self.training and len(self.memory_points):
                self.memory_points = torch.cat([samples.detach(), self.memory_points])[: o["memory"]]
                self.memory_labels = torch.cat([labels, self.memory_labels])[: o["memory"]]
        return total

    def follow_schedule(self) -> None:
        """Exponents and radii on a line from their first values to those of the options, over `ramp` steps."""
        o, share = self.final, min(self.steps / max(self.final["ramp"], 1), 1.0)
        for first, names in (("first_exponent", ("att", "rep")), ("first_contact", ("contact", "knee"))):
            for name in names if o[first] else ():
                self.options[name] = o[first] + share * (o[name] - o[first])

    def total(self, samples: Tensor, labels: Tensor, proxies: Tensor, memory: Tensor) -> Tensor:
        """The mean energy of an anchor, and of charges between samples."""
        o = self.options
        points, every = torch.cat([samples, proxies]), torch.cat([labels, self.proxy_labels])
        is_sample = torch.arange(len(points), device=points.device) < len(samples)
        energies = self.energies(points, every, points, every, is_sample, is_sample, memory)
        weights = torch.where(is_sample, o["sample_anchors"], o["proxy_anchors"])
        total = (weights * energies).sum() / len(points)
        if o["mix"] and self.training and len(samples) > 1:
            total = total + o["mix"] * self.mixed(samples, labels, proxies) * len(samples) / len(points)
        return total

    def energies(
        self,
        anchors: Tensor,
        of: Tensor,
        sources: Tensor,
        by: Tensor,
        a_sample: Tensor,
        s_sample: Tensor,
        memory: Tensor | None = None,
    ) -> Tensor:
        """Of each anchor, (n,); samples also feel those of earlier batches."""
        o = self.options
        x = torch.log((2 - 2 * anchors @ sources.T).clamp_min(1e-4)) / 2
        if o["largest_pair"] and x.requires_grad:  # of the energy's derivative by log r of one pair
            most = o["largest_pair"] / len(anchors)
            x.register_hook(lambda gradient: gradient.clamp(-most, most))
        own = of[:, None] == by[None, :]
        both_samples = a_sample[:, None] & s_sample[None, :]
        both_proxies = ~a_sample[:, None] & ~s_sample[None, :]
        itself = torch.eye(*x.shape, dtype=torch.bool, device=x.device) if anchors is sources else torch.zeros_like(own)
        w_own = torch.where(both_samples, o["sample_attraction"], 1.0) * (own & ~itself & ~both_proxies)
        w_other = torch.where(both_samples, o["sample_repulsion"], 1.0)
        w_other = torch.where(both_proxies, o["proxy_repulsion"], w_other) * ~own
        if memory is not None and len(memory):
            x = torch.cat([x, torch.log((2 - 2 * anchors @ memory.T).clamp_min(1e-4)) / 2], dim=1)
            felt = o["memory_weight"] * (a_sample[:, None] & (self.memory_labels >= 0)[None, :])
            own = of[:, None] == self.memory_labels[None, :]
            w_own, w_other = torch.cat([w_own, felt * own], dim=1), torch.cat([w_other, felt * ~own], dim=1)
        return o["attraction_weight"] * self.pull(x, w_own) + o["repulsion_weight"] * self.push(x, w_other)

    def pull(self, x: Tensor, weights: Tensor) -> Tensor:
        """Attraction's part."""
        o = self.options
        kind, att = o["attraction"], o["att"]
        log_w = torch.where(weights > 0, weights, 1.0).log().masked_fill(weights == 0, -1e9)
        has_positives = (weights > 0).any(dim=1)
        flat = x.clamp_min(torch.tensor(o["contact"]).log().item())
        if kind == "linear":
            inside = torch.exp(-att * (flat - torch.tensor(o["contact"]).log().item()))
            return -(weights * inside).sum(1) / weights.sum(1).clamp_min(1e-9) * has_positives
        knee = torch.tensor(o["knee_att"]).log().item()
        if kind == "far":
            far = torch.logsumexp(att * (x - knee) + log_w, dim=1)
            return nn.functional.softplus(far) * has_positives
        strength = torch.logsumexp(-att * flat + log_w, dim=1)
        strength = torch.where(has_positives, strength, 0.0)
        if kind == "saturating":
            return nn.functional.softplus(-(strength + att * knee)) * has_positives
        return -strength

    def push(self, x: Tensor, weights: Tensor) -> Tensor:
        """Repulsion's part."""
        o = self.options
        knee, reach = (torch.tensor(o[name]).log().item() for name in ("knee", "reach"))
        nearest = knee - min(1.5, 80 / o["rep"])  # steep fields would overflow
        size = (
            torch.exp(-o["rep"] * (x.clamp_min(nearest) - knee))
            - torch.exp(torch.tensor(-o["rep"] * (reach - knee))).item()
        )
        return torch.log1p((weights * size.clamp_min(0)).sum(1))

    def mixed(self, samples: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        """The mean energy of charges between two samples, which are of both classes, in the field of the proxies."""
        share = torch.distributions.Beta(2.0, 2.0).sample((len(samples),)).to(samples.device)
        other = torch.randperm(len(samples), device=samples.device)
        points = unit(share[:, None] * samples + (1 - share)[:, None] * samples[other])
        yes = torch.ones(len(points), dtype=torch.bool, device=points.device)
        no = torch.zeros(len(proxies), dtype=torch.bool, device=points.device)
        energies = [self.energies(points, of, proxies, self.proxy_labels, yes, no) for of in (labels, labels[other])]
        return (share * energies[0] + (1 - share) * energies[1]).mean()

    @torch.no_grad()
    def trusted(self, samples: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Nearly as `pfml.losses.sample_filter`, but strengths grow on inside contact; and the strongest other."""
        x = torch.log((2 - 2 * samples @ unit(self.proxies.detach().flatten(0, 1)).T).clamp_min(1e-4)) / 2
        by_class = torch.logsumexp((-self.options["att"] * x).view(len(x), self.num_classes, -1), dim=2)
        own = by_class.gather(1, labels[:, None])[:, 0]
        other, strongest = by_class.scatter(1, labels[:, None], -1e9).max(1)
        fits = own - other
        return fits >= torch.tensor(self.options["trust"]).log().item() + fits.median().clamp(max=0.0), strongest


METHODS["trial"] = Method(TrialField, "research/trial.py", "research", learns="proxies (C, M, D)")
