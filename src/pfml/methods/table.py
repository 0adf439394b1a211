"""The table of methods."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pfml.losses import HISTLoss, PotentialFieldLoss, ProxyAnchorLoss, ProxyGMLLoss, baselines, distillation
from pfml.methods import published
from pfml.methods.method import Method
from pfml.own_code import is_reference, load_reference
from pfml.typos import did_you_mean

__all__ = ["METHODS", "LossConfig", "create_loss", "is_untrained", "method_of"]

ROBUST = {
    "normalization": "log", "delta": 1.0, "delta_rep": 1.3, "alpha": 24.0, "proxy_attraction": False,
    "proxies_per_class": 5, "reduction": "points", "trust": 0.3,
}  # fmt: skip


METHODS: dict[str, Method] = {
    "pfml": Method(
        PotentialFieldLoss,
        "the paper's Eq. 6, 15 proxies per class; delta 0.2 and alpha 3, of its figures, in the ranges of its text",
        "Bhatnagar and Ahuja, CVPR 2025",
        learns="proxies (C, M, D)",
        recipes=published.PAPER,
    ),
    "pfml-log": Method(
        PotentialFieldLoss,
        "our preset: the logarithm of each anchor's potentials, repulsion reaching further than attraction",
        "this package",
        {"normalization": "log", "delta": 0.6, "delta_rep": 1.2, "alpha": 6.0, "proxy_attraction": False},
        learns="proxies (C, M, D)",
    ),
    "pfml-robust": Method(
        PotentialFieldLoss,
        "our recipe for photographs: pfml-log, steeper and farther out, that leaves out samples that do not fit",
        "this package",
        ROBUST,
        learns="proxies (C, M, D)",
        note="head, batches and schedule that belong to it: the configuration cub-resnet50_he-recipe",
    ),
    "cpml": Method(
        PotentialFieldLoss,
        "the paper's contrast: forces that grow with distance",
        "Bhatnagar and Ahuja, CVPR 2025",
        {"potential": "cpml"},
        learns="proxies (C, M, D)",
        recipes=published.PAPER,
        note="the paper does not define its repulsion; ours is [delta - r]+^2",
    ),
    "proxy-anchor": Method(
        ProxyAnchorLoss,
        "each proxy pulls its class and pushes the rest, the harder the worse they fit",
        "Kim et al., CVPR 2020",
        learns="proxies (C, 1, D)",
        recipes=published.PROXY_ANCHOR,
    ),
    "proxy-anchor-robust": Method(
        ProxyAnchorLoss,
        "proxy-anchor that leaves out samples that do not fit, by the field of its proxies",
        "Kim et al., CVPR 2020, and this package",
        {"trust": 0.3},
        learns="proxies (C, 1, D)",
        recipes=published.PROXY_ANCHOR,
    ),
    "proxy-nca": Method(
        baselines.proxy_nca,
        "squared distances to the proxies of all classes, against the others",
        "Movshovitz-Attias et al., ICCV 2017",
        learns="proxies (C, 1, D)",
        recipes=published.PROXY_NCA,
        note="lengths of (3, 3) of points and proxies as scale 9, of (1, 8) as scale 8",
    ),
    "proxy-nca++": Method(
        baselines.proxy_nca_plus_plus,
        "proxy-nca as a probability, temperature 1/9",
        "Teh et al., ECCV 2020",
        learns="proxies (C, 1, D)",
        recipes=published.PROXY_NCA_PLUS_PLUS,
    ),
    "normalized-softmax": Method(
        baselines.normalized_softmax,
        "classification by cosines over a temperature",
        "Zhai and Wu, BMVC 2019",
        learns="weights (C, 1, D)",
        recipes=published.NORMALIZED_SOFTMAX,
    ),
    "cosface": Method(
        baselines.cosface,
        "classification by cosines, the own one less a margin",
        "Wang et al., CVPR 2018",
        learns="weights (C, 1, D)",
        recipes=published.COSFACE,
    ),
    "arcface": Method(
        baselines.arcface,
        "classification by angles, the own one plus a margin in degrees",
        "Deng et al., CVPR 2019",
        learns="weights (C, 1, D)",
        recipes=published.ARCFACE,
    ),
    "soft-triple": Method(
        baselines.soft_triple,
        "classification by the nearest of 10 centers per class, which attract each other",
        "Qian et al., ICCV 2019",
        learns="centers (C, M, D)",
        recipes=published.SOFT_TRIPLE,
    ),
    "proxy-gml": Method(
        ProxyGMLLoss,
        "12 proxies per class; a sample is classified by those near it",
        "Zhu et al., NeurIPS 2020",
        learns="proxies (C, M, D)",
        recipes=published.PROXY_GML,
    ),
    "hist": Method(
        HISTLoss,
        "class Gaussians, and a hypergraph network over the batch",
        "Lim et al., CVPR 2022",
        learns="Gaussians (C, 1, D), a network",
        recipes=published.HIST,
        note="the network sees sqrt(D) times the point on the sphere",
    ),
    "contrastive": Method(
        baselines.contrastive,
        "positives together, negatives at least neg_margin apart",
        "Hadsell et al., CVPR 2006",
        needs_positives=True,
        recipes=published.REVISITING,
        note="first power of distances, the mean over those that act; margin 0.5 of Proxy Anchor's repository",
    ),
    "triplet": Method(
        baselines.triplet,
        "positives nearer than negatives by a margin, all triplets",
        "Weinberger and Saul, JMLR 2009",
        needs_positives=True,
        recipes=published.REVISITING,
        note="first power of distances, the mean over triplets that act",
    ),
    "semihard": Method(
        baselines.semihard,
        "triplet over semi-hard triplets",
        "Schroff et al., CVPR 2015",
        miner="all triplets with r_ap < r_an <= r_ap + margin",
        needs_positives=True,
        recipes=published.REVISITING,
        note="first power of distances; all such triplets, where the paper takes one negative for each positive pair",
    ),
    "lifted-structure": Method(
        baselines.lifted_structure,
        "each positive pair against all negatives of both",
        "Oh Song et al., CVPR 2016",
        needs_positives=True,
        recipes=published.REVISITING,
        note="distances on the unit sphere",
    ),
    "n-pair": Method(
        baselines.n_pair,
        "one positive pair per class, against those of the other classes",
        "Sohn, NeurIPS 2016",
        miner="the first two samples of each class",
        needs_positives=True,
        recipes=published.REVISITING,
        note="cosines over a temperature, for inner products with an L2 term; PFML's paper calls NT-Xent N-Pair",
    ),
    "nt-xent": Method(
        baselines.nt_xent,
        "each positive pair against all negatives of the anchor",
        "Chen et al., ICML 2020",
        needs_positives=True,
        recipes=published.NT_XENT,
    ),
    "epshn": Method(
        baselines.epshn,
        "the nearest positive against one negative",
        "Xuan et al., WACV 2020",
        miner="the nearest positive; the nearest negative that is farther than it",
        needs_positives=True,
        recipes=published.EPSHN,
    ),
    "margin": Method(
        baselines.margin,
        "positives within beta - margin, negatives beyond beta + margin, beta learned",
        "Wu et al., ICCV 2017",
        miner="negatives drawn against the density of distances",
        learns="beta (1,)",
        needs_positives=True,
        proxy_lr=5e-4,
        recipes=published.MARGIN,
        note="the draw weighs a whole batch at once: where one pair is very close, far anchors may get no negative",
    ),
    "margin-per-class": Method(
        baselines.margin_per_class,
        "margin with one beta per class",
        "Wu et al., ICCV 2017",
        miner="negatives drawn against the density of distances",
        learns="beta (C,)",
        needs_positives=True,
        proxy_lr=5e-4,
        recipes=published.MARGIN,
        note="as margin",
    ),
    "fast-ap": Method(
        baselines.fast_ap,
        "average precision over a histogram of distances",
        "Cakir et al., CVPR 2019",
        needs_positives=True,
        recipes=published.FAST_AP,
        note="without the paper's batches of pairs of categories",
    ),
    "snr": Method(
        baselines.snr,
        "contrastive with a ratio of noise to signal for the distance",
        "Yuan et al., CVPR 2019",
        needs_positives=True,
        recipes=published.SNR,
        note="on the unit sphere; margins and the weight of the zero-mean term as MLRC tuned them on CUB",
    ),
    "multi-similarity": Method(
        baselines.multi_similarity,
        "positives and negatives weighed by self and relative similarity",
        "Wang et al., CVPR 2019",
        needs_positives=True,
        recipes=published.MULTI_SIMILARITY,
        note="beta 50 of the paper, the code has 40; without the miner, which the code always uses",
    ),
    "multi-similarity-miner": Method(
        baselines.multi_similarity_miner,
        "multi-similarity with its miner",
        "Wang et al., CVPR 2019",
        miner="positives farther than the nearest negative less epsilon, and the reverse",
        needs_positives=True,
        recipes=published.MULTI_SIMILARITY,
        note="beta 50 of the paper, the code has 40",
    ),
    "circle": Method(
        baselines.circle,
        "positives and negatives weighed by how far they are from their optimum",
        "Sun et al., CVPR 2020",
        needs_positives=True,
        note="a sum for each anchor, and the mean of them",
    ),
    "relaxed-contrastive": Method(
        distillation.relaxed_contrastive,
        "a student of teachers: near pairs attract and far pairs repel, each by the share that the teachers see",
        "Kim et al., CVPR 2021",
        from_teachers=True,
        note="the student is on the unit sphere; several teachers by the mean of their squared distances",
    ),
    "relational-kl": Method(
        distillation.relational_kl,
        "a student of teachers: its neighborhoods as distributions, by their divergence from the teachers'",
        "relational distillation, in many forms",
        from_teachers=True,
    ),
    "soft-field": Method(
        distillation.soft_field,
        "a student of teachers: the logarithmic field in which pairs belong together by share",
        "this package",
        from_teachers=True,
    ),
    "equilibrium-field": Method(
        distillation.equilibrium_field,
        "a student of teachers: a field in which each pair rests at the teachers' distance",
        "this package",
        from_teachers=True,
    ),
    "zero-shot": Method(
        None,
        "the pretrained backbone without an embedding layer: evaluated, not trained",
        "the source of the backbone's weights",
    ),
}


@dataclass(frozen=True)
class LossConfig:
    """Which loss.

    Args:
        name: The method; `pfml methods` lists them: pfml, pfml-log, cpml, proxy-anchor, soft-triple, ...; or what makes
            a loss of one's own, "module:Class".
        options: Keyword arguments of the loss that differ from what the name stands for.
    """

    name: str = "pfml"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if is_reference(self.name):
            return  # what it takes is known once it is imported
        if self.name not in METHODS:
            known = ", ".join(METHODS)
            raise ValueError(f"loss.name must be one of {known}, got {self.name!r}{did_you_mean(self.name, METHODS)}")
        names = METHODS[self.name].option_names()
        for option in self.options:
            if option not in names:
                raise ValueError(
                    f"loss.options of {self.name} must be among {', '.join(names) or 'none'}, "
                    f"got {option!r}{did_you_mean(option, names)}"
                )

    @property
    def trains(self) -> bool:
        """Whether a run with this loss trains anything, or only evaluates the backbone."""
        return method_of(self.name).trains


def method_of(name: str) -> Method:
    """The row of `METHODS`, or one for a loss of one's own, which is not imported for that."""
    if not is_reference(name):
        return METHODS[name]

    def create(num_classes: int, embedding_dim: int, **options: Any) -> nn.Module:
        return _own_loss(name, num_classes, embedding_dim, options)

    return Method(create, "a loss of one's own", name.partition(":")[0])


def _own_loss(name: str, num_classes: int, embedding_dim: int, options: dict[str, Any]) -> nn.Module:
    """The loss that `name` makes of those of the two sizes that it takes, and of `options`."""
    make = load_reference(name)
    sizes = {"num_classes": num_classes, "embedding_dim": embedding_dim}
    taken = inspect.signature(make).parameters
    loss = make(**{size: value for size, value in sizes.items() if size in taken}, **options)
    if not isinstance(loss, nn.Module):
        raise TypeError(f"{name} must make a torch.nn.Module, got {type(loss).__name__}")
    return loss


def is_untrained(method: str | None) -> bool:
    """Whether a record or a table row of this method has no training, and so no epochs; no name counts as trained."""
    return method in METHODS and not METHODS[method].trains


def create_loss(config: LossConfig, num_classes: int, embedding_dim: int) -> nn.Module:
    """The loss that `config` describes, its proxies drawn with torch's global generator."""
    method = method_of(config.name)
    if method.loss is None:
        raise ValueError(
            f"{config.name} trains nothing and has no loss: evaluate the backbone with "
            f"`pfml train --loss.name {config.name}` or pfml.training.run(config, out)"
        )
    try:
        return method.loss(num_classes, embedding_dim, **{**method.values, **config.options})
    except TypeError as error:  # a value of the wrong kind, which only the loss can tell
        raise ValueError(f"loss.options {config.options} do not fit {config.name}: {error}") from None
