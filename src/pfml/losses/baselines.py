"""The published losses that methods are compared with: what each is made of, and its published values.

Most come from pytorch-metric-learning, an extra of this package that is imported when one is created. Where that
library loses precision, memory or gradients, a few lines here take its place, and the docstring says so. All of them
see embeddings on the unit sphere (see `pfml.losses.wrapped`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.wrapped import Parts, wrapped
from pfml.packages import pip_install
from pfml.sphere import unit

__all__ = [
    "arcface",
    "circle",
    "contrastive",
    "cosface",
    "epshn",
    "fast_ap",
    "lifted_structure",
    "margin",
    "margin_per_class",
    "multi_similarity",
    "multi_similarity_miner",
    "n_pair",
    "normalized_softmax",
    "nt_xent",
    "proxy_nca",
    "proxy_nca_plus_plus",
    "semihard",
    "snr",
    "soft_triple",
    "triplet",
]


def library() -> ModuleType:
    """pytorch-metric-learning, with its losses and miners imported."""
    try:
        import pytorch_metric_learning
        from pytorch_metric_learning import distances, losses, miners, reducers, regularizers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"this method needs pytorch-metric-learning ({error}): {pip_install('methods')}") from error
    return pytorch_metric_learning


@wrapped
def contrastive(num_classes: int, embedding_dim: int, *, pos_margin: float = 0.0, neg_margin: float = 0.5) -> Parts:
    """Mean of the positive [r - pos_margin]+ over positives, plus that of [neg_margin - r]+ over negatives."""
    return Parts(library().losses.ContrastiveLoss(pos_margin=pos_margin, neg_margin=neg_margin))


@wrapped
def triplet(num_classes: int, embedding_dim: int, *, margin: float = 0.1) -> Parts:
    """Mean of the positive [r_ap - r_an + margin]+ over all triplets of the batch."""
    return Parts(library().losses.TripletMarginLoss(margin=margin))


@wrapped
def semihard(num_classes: int, embedding_dim: int, *, margin: float = 0.1) -> Parts:
    """`triplet` over the triplets with r_ap < r_an <= r_ap + margin."""
    miner = library().miners.TripletMarginMiner(margin=margin, type_of_triplets="semihard")
    return Parts(library().losses.TripletMarginLoss(margin=margin), miner)


@wrapped
def n_pair(num_classes: int, embedding_dim: int, *, temperature: float = 0.07) -> Parts:
    """Mean over classes of -log softmax over the classes' positives of s / temperature, at the own one.

    The first two samples of each class are its anchor and its positive. The paper's inner products are not of unit
    vectors, and an L2 term bounds them; on the sphere, the temperature does.
    """
    return Parts(_scaled(library().losses.NPairsLoss, temperature))


@wrapped
def nt_xent(num_classes: int, embedding_dim: int, *, temperature: float = 0.07) -> Parts:
    """Mean over positive pairs of -log softmax of s / temperature over the positive and all negatives."""
    return Parts(library().losses.NTXentLoss(temperature=temperature))


@wrapped
def lifted_structure(
    num_classes: int, embedding_dim: int, *, neg_margin: float = 1.0, pos_margin: float = 0.0
) -> Parts:
    """Mean over positive pairs of [log sum of exp(neg_margin - r) over negatives of both + r - pos_margin]+^2 / 2."""
    return Parts(library().losses.LiftedStructureLoss(neg_margin=neg_margin, pos_margin=pos_margin))


@wrapped
def proxy_nca(num_classes: int, embedding_dim: int, *, scale: float = 9.0, published_start: bool = False) -> Parts:
    """Mean of -log(exp(-scale r_y^2) / sum over the other classes of exp(-scale r_c^2)), r_c to the proxy of class c.

    Scale 9 is a length of 3 of both points and proxies. Ours, since the library counts the own class in the sum, and
    leaves out samples whose probability underflows, the hardest ones. With `published_start` proxies are normal numbers
    over 8.
    """
    loss = ProxyNCA(num_classes, embedding_dim, scale, counts_own=False)
    return Parts(loss, proxies=_rows, published_start=_normal(1 / 8) if published_start else None)


@wrapped
def proxy_nca_plus_plus(
    num_classes: int, embedding_dim: int, *, scale: float = 9.0, published_start: bool = False
) -> Parts:
    """`proxy_nca` with the own class in the sum: a probability. Temperature 1/9; ours for the same reason."""
    loss = ProxyNCA(num_classes, embedding_dim, scale, counts_own=True)
    return Parts(loss, proxies=_rows, published_start=_normal(1 / 8) if published_start else None)


@wrapped
def margin(
    num_classes: int,
    embedding_dim: int,
    *,
    margin: float = 0.2,
    beta: float = 1.2,
    nu: float = 0.0,
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float = 1.4,
) -> Parts:
    """[r_ap - beta + margin]+ + [beta - r_an + margin]+ over the number of both that are positive; beta is learned.

    Negatives are sampled against the density of distances on the sphere, from those with r < nonzero_loss_cutoff.
    """
    loss = library().losses.MarginLoss(margin=margin, beta=beta, nu=nu, learn_beta=True)
    return Parts(loss, library().miners.DistanceWeightedMiner(cutoff, nonzero_loss_cutoff))


@wrapped
def margin_per_class(
    num_classes: int,
    embedding_dim: int,
    *,
    margin: float = 0.2,
    beta: float = 1.2,
    nu: float = 0.0,
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float = 1.4,
) -> Parts:
    """`margin` with one beta for each class."""
    loss = library().losses.MarginLoss(margin=margin, beta=beta, nu=nu, learn_beta=True, num_classes=num_classes)
    return Parts(loss, library().miners.DistanceWeightedMiner(cutoff, nonzero_loss_cutoff))


@wrapped
def normalized_softmax(
    num_classes: int, embedding_dim: int, *, temperature: float = 0.05, published_start: bool = False
) -> Parts:
    """Mean of -log softmax over classes of s / temperature, s the cosines to the classes' weights.

    With `published_start` weights are uniform between -1 / sqrt(D) and 1 / sqrt(D), of a length of about 0.58.
    """
    loss = library().losses.NormalizedSoftmaxLoss(num_classes, embedding_dim, temperature=temperature)
    start = _uniform(1 / math.sqrt(embedding_dim)) if published_start else None
    return Parts(loss, proxies=_columns, published_start=start)


@wrapped
def cosface(
    num_classes: int,
    embedding_dim: int,
    *,
    margin: float = 0.35,
    scale: float = 64.0,
    published_start: bool = False,
) -> Parts:
    """Mean of -log softmax over classes of scale * s, where the own class has s - margin.

    With `published_start` weights are normal numbers, as MLRC's library draws them.
    """
    loss = library().losses.CosFaceLoss(num_classes, embedding_dim, margin=margin, scale=scale)
    return Parts(loss, proxies=_columns, published_start=_normal(1.0) if published_start else None)


@wrapped
def arcface(
    num_classes: int,
    embedding_dim: int,
    *,
    margin: float = 28.6,
    scale: float = 64.0,
    published_start: bool = False,
) -> Parts:
    """Mean of -log softmax over classes of scale * cos(angle), where the own class has angle + margin (degrees).

    Cosines are kept 1e-6 away from 1, where the slope of an angle has no bound. `published_start` as in `cosface`.
    """
    loss = library().losses.ArcFaceLoss(num_classes, embedding_dim, margin=margin, scale=scale)
    loss.get_angles = _angles
    return Parts(loss, proxies=_columns, published_start=_normal(1.0) if published_start else None)


@wrapped
def fast_ap(num_classes: int, embedding_dim: int, *, num_bins: int = 10) -> Parts:
    """1 - average precision of the batch, over a histogram of squared distances."""
    return Parts(library().losses.FastAPLoss(num_bins=num_bins))


@wrapped
def snr(
    num_classes: int,
    embedding_dim: int,
    *,
    pos_margin: float = 0.326,
    neg_margin: float = 0.845,
    zero_mean: float = 0.138,
) -> Parts:
    """`contrastive` with var(x - y) / var(x) for the distance, plus zero_mean * mean |sum of x|.

    Squared sums of deviations below 1e-8 count as 1e-8, where the library divides by zero. Values: MLRC's for CUB.
    """
    losses, regularizer = library().losses, library().regularizers.ZeroMeanRegularizer()
    loss = losses.SignalToNoiseRatioContrastiveLoss(
        pos_margin=pos_margin, neg_margin=neg_margin, embedding_regularizer=regularizer, embedding_reg_weight=zero_mean
    )
    loss.distance.compute_mat = _noise_to_signal
    return Parts(loss)


@wrapped
def multi_similarity(
    num_classes: int, embedding_dim: int, *, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5
) -> Parts:
    """Mean of log(1 + sum exp(-alpha (s - base))) / alpha over positives + log(1 + sum exp(beta (s - base))) / beta."""
    return Parts(library().losses.MultiSimilarityLoss(alpha=alpha, beta=beta, base=base))


@wrapped
def multi_similarity_miner(
    num_classes: int,
    embedding_dim: int,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float = 0.1,
) -> Parts:
    """`multi_similarity` over positives less similar than the nearest negative + epsilon, and negatives accordingly."""
    loss = library().losses.MultiSimilarityLoss(alpha=alpha, beta=beta, base=base)
    return Parts(loss, library().miners.MultiSimilarityMiner(epsilon=epsilon))


@wrapped
def soft_triple(
    num_classes: int,
    embedding_dim: int,
    *,
    centers_per_class: int = 10,
    scale: float = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    tau: float = 0.2,
    published_start: bool = False,
) -> Parts:
    """Mean of -log softmax over classes of scale * S, S the softmax(s / gamma)-weighted cosines to a class's centers.

    The own class has S - margin; plus tau times the mean distance of centers of a class, halved. That term is ours: the
    library's needs (C M)^2 bytes. With `published_start` centers are uniform between -1 / sqrt(C M) and 1 / sqrt(C M),
    of a length of about sqrt(D / (3 C M)).
    """
    loss = library().losses.SoftTripleLoss(
        num_classes, embedding_dim, centers_per_class=centers_per_class, la=scale, gamma=gamma, margin=margin
    )

    def centers(loss: Any) -> Tensor:
        return loss.fc.T.unflatten(0, (num_classes, centers_per_class))

    start = _uniform(1 / math.sqrt(num_classes * centers_per_class)) if published_start else None
    return Parts(loss, proxies=centers, regularizer=lambda points: tau * center_spread(points), published_start=start)


@wrapped
def circle(num_classes: int, embedding_dim: int, *, m: float = 0.4, gamma: float = 80.0) -> Parts:
    """Mean over anchors with both kinds of softplus(log sum exp over negatives + log sum exp over positives)."""
    return Parts(library().losses.CircleLoss(m=m, gamma=gamma))


@wrapped
def epshn(num_classes: int, embedding_dim: int, *, temperature: float = 0.1) -> Parts:
    """Mean of -log softmax([s_ap, s_an] / temperature): the nearest positive, the nearest negative beyond it.

    Pairs with s <= 0 and positives with s > 0.9999 do not count, as in the authors' code.
    """
    miner = library().miners.BatchEasyHardMiner(
        pos_strategy="easy",
        neg_strategy="semihard",
        allowed_pos_range=(0.0, 0.9999),
        allowed_neg_range=(0.0, 1.0),
        distance=library().distances.CosineSimilarity(),
    )
    return Parts(library().losses.NTXentLoss(temperature=temperature), miner)


class ProxyNCA(nn.Module):
    """A softmax over negative squared distances to one proxy per class.

    Args:
        num_classes: C.
        embedding_dim: D.
        scale: Of the squared distances.
        counts_own: Whether the own class is in the softmax's sum.
    """

    proxies: nn.Parameter  # (C, D)

    def __init__(self, num_classes: int, embedding_dim: int, scale: float, *, counts_own: bool) -> None:
        super().__init__()
        self.scale = scale
        self.counts_own = counts_own
        self.proxies = nn.Parameter(torch.empty(num_classes, embedding_dim))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        """The loss of points (batch, D) on the unit sphere."""
        logits = -self.scale * (2 - 2 * points @ unit(self.proxies).T)  # (batch, C)
        if self.counts_own:
            return F.cross_entropy(logits, labels)
        if len(self.proxies) == 1:
            return (logits * 0).sum()  # there is no other class
        own = F.one_hot(labels, len(self.proxies)).bool()
        return (logits.masked_fill(own, -math.inf).logsumexp(dim=1) - logits[own]).mean()


def center_spread(points: Tensor) -> Tensor:
    """Half the mean distance sqrt(2 + 1e-5 - 2 s) of pairs within a class; points (C, M, D) on the unit sphere."""
    num_classes, num_centers, _ = points.shape
    if num_centers == 1:
        return (points * 0).sum()
    rows, columns = torch.triu_indices(num_centers, num_centers, 1, device=points.device)
    cosines = (points @ points.mT)[:, rows, columns]  # (C, M (M - 1) / 2)
    distances = (2 + 1e-5 - 2 * cosines.clamp(max=1)).sqrt()
    return distances.sum() / (num_classes * num_centers * (num_centers - 1))


def _normal(scale: float) -> Callable[[Tensor], Tensor]:
    """Draws normal numbers of this standard deviation."""
    return lambda like: scale * torch.randn(like.shape)


def _uniform(bound: float) -> Callable[[Tensor], Tensor]:
    """Draws numbers between -bound and bound."""
    return lambda like: torch.empty(like.shape).uniform_(-bound, bound)


def _rows(loss: Any) -> Tensor:
    """(C, 1, D)."""
    return loss.proxies[:, None]


def _columns(loss: Any) -> Tensor:
    """(C, 1, D) out of weights (D, C)."""
    return loss.W.T[:, None]


def _angles(cosines: Tensor) -> Tensor:
    return torch.acos(cosines.clamp(-1 + 1e-6, 1 - 1e-6))


def _noise_to_signal(queries: Tensor, references: Tensor) -> Tensor:
    """var(x - y) / var(x), (n, m), without a tensor (n, m, D)."""
    anchors, others = (points - points.mean(dim=1, keepdim=True) for points in (queries, references))
    squares = torch.cdist(anchors, others, compute_mode="donot_use_mm_for_euclid_dist").square()
    return squares / anchors.square().sum(dim=1, keepdim=True).clamp(min=1e-8)


def _scaled(loss_class: Any, temperature: float) -> nn.Module:
    """A loss of the library that compares cosines, over a temperature that it does not have."""
    distance = library().distances.CosineSimilarity()
    cosines = distance.compute_mat
    distance.compute_mat = lambda queries, references: cosines(queries, references) / temperature
    return loss_class(distance=distance)
