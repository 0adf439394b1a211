"""The paper's experiments: one table, and the configurations that each makes of a method's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pfml.data import LabelNoise
from pfml.data.preprocessing import Augmentation
from pfml.experiments.run_key import all_options
from pfml.methods import METHODS, LossConfig
from pfml.runs.config import BatchConfig, RunConfig, ScheduleConfig
from pfml.runs.config_files import shipped_config
from pfml.runs.recipes import recipe_config

__all__ = ["BACKBONE_DIMS", "DATASET_BACKBONES", "EXPERIMENTS", "THEORY", "Experiment", "Variant", "base_config"]

#: The experiment without runs: random points, no images (`pfml.theory.check`).
THEORY = "theory"
NOISE_RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
#: Figure 3's values, read off its axes; the gap is delta_rep - delta_att.
PAPER_SWEEPS: dict[str, tuple[float, ...]] = {
    "proxies_per_class": (0, 5, 10, 15, 20, 25, 30),
    "delta": (0.1, 0.15, 0.2, 0.25, 0.3, 0.35),
    "alpha": (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
    "delta_rep_minus_delta_att": (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25),
}
#: The same questions to our preset, around its own values.
LOG_SWEEPS: dict[str, tuple[float, ...]] = {
    "proxies_per_class": (0, 1, 5, 10, 15, 20),
    "delta": (0.2, 0.4, 0.6, 0.8, 1.0),
    "alpha": (1.0, 3.0, 6.0, 9.0, 12.0),
    "delta_rep_minus_delta_att": (0.0, 0.2, 0.4, 0.6, 0.8),
}
#: ... and to our recipe.
ROBUST_SWEEPS: dict[str, tuple[float, ...]] = {
    "proxies_per_class": (1, 2, 5, 15),
    "delta": (0.9, 1.0, 1.1, 1.2),
    "alpha": (6.0, 12.0, 24.0, 32.0),
    "delta_rep_minus_delta_att": (0.1, 0.3, 0.5, 0.8),
}
SWEEPS = {"pfml": PAPER_SWEEPS, "pfml-log": LOG_SWEEPS, "pfml-robust": ROBUST_SWEEPS}
# The methods of the paper's tables, in their order, and our preset.
RETRIEVAL_METHODS = (
    "zero-shot", "epshn", "normalized-softmax", "htl", "multi-similarity-miner", "soft-triple", "circle", "diva",
    "proxy-nca++", "proxy-gml", "proxy-anchor", "dcml-mdw", "drml-pa", "multi-similarity-das", "hist", "hyp", "hier",
    "dfml-pa", "proxy-anchor-hse", "margin-hse", "proxy-anchor-nivmf", "cpml", "pfml", "pfml-log",
)  # fmt: skip
SMALL_METHODS = (
    "multi-similarity-miner", "semihard", "lifted-structure", "n-pair", "proxy-nca", "soft-triple", "clustering",
    "proxy-anchor", "proxy-gml", "hist", "pfml", "pfml-log",
)  # fmt: skip
MLRC_METHODS = (
    "contrastive", "triplet", "nt-xent", "proxy-nca", "margin", "margin-per-class", "normalized-softmax", "cosface",
    "arcface", "fast-ap", "snr", "multi-similarity", "multi-similarity-miner", "soft-triple", "proxy-anchor", "hist",
    "pfml", "pfml-log",
)  # fmt: skip
#: The supplement's table of times, and 15, which the other tables have.
TIMED_PROXIES = (5, 15, 20, 30)
MLRC_DIM, MLRC_FOLDS = 128, 4
#: 1/8 of the usual dimensions: the supplement's 64 of 512, and 8 of the 64 of the glyphs
SMALL_DIMS = {"convnet": 8}


@dataclass(frozen=True)
class Variant:
    """A configuration that an experiment makes of the base configuration of a method."""

    settings: dict[str, Any]
    config: RunConfig
    task: str = "train"
    needs_previous: bool = False


@dataclass(frozen=True)
class Experiment:
    """A row of `EXPERIMENTS`.

    Args:
        description: What is measured.
        answers: Table or figure of the paper.
        variants: From the base configuration of a method, data set and backbone to the runs.
        methods: By default.
        datasets, backbones, seeds: Likewise; backbones that a data set does not have are left out for it.
        epochs: None for those of the configurations.
        alone: Whether other runs beside it on the same device would spoil it.
    """

    description: str
    answers: str
    variants: Callable[[RunConfig], Iterable[Variant]]
    methods: tuple[str, ...]
    datasets: tuple[str, ...] = ("glyphs", "cub", "cars")
    backbones: tuple[str, ...] = ("convnet", "resnet50")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    epochs: int | None = None
    alone: bool = False

    @property
    def is_about_training(self) -> bool:
        """Whether it leaves out methods that train nothing."""
        return self.variants is not _as_it_is


def _as_it_is(config: RunConfig) -> Iterator[Variant]:
    yield Variant({}, config, task="train" if config.loss.trains else "untrained")


def _small(config: RunConfig) -> Iterator[Variant]:
    yield Variant({}, _with_dim(config, SMALL_DIMS.get(config.model.backbone, 64)))


def _noisy(config: RunConfig) -> Iterator[Variant]:
    for rate in NOISE_RATES:
        noise = LabelNoise(rate, seed=config.seed) if rate else LabelNoise()
        yield Variant({"noise": rate}, replace(config, data=replace(config.data, noise=noise)))


def _swept(config: RunConfig) -> Iterator[Variant]:
    if config.loss.name not in SWEEPS:
        raise ValueError(f"the ablation has values for {', '.join(SWEEPS)}, got the method {config.loss.name!r}")
    for name, values in SWEEPS[config.loss.name].items():
        for value in values:
            yield Variant({name: value}, replace(config, loss=_with_swept(config.loss, name, value)))


def _with_swept(loss: LossConfig, name: str, value: float) -> LossConfig:
    """The loss with one of the four values changed; a change of delta keeps the gap to delta_rep."""
    given = all_options(loss)
    delta = given["delta"]
    gap = 0.0 if given["delta_rep"] is None else given["delta_rep"] - delta
    changes: dict[str, Any] = {name: value}
    if name == "delta":
        changes["delta_rep"] = round(value + gap, 6) if gap else None
    elif name == "delta_rep_minus_delta_att":
        changes = {"delta_rep": round(delta + value, 6) if value else None}
    return replace(loss, options={**loss.options, **changes})


def _folds(config: RunConfig) -> Iterator[Variant]:
    """Four runs of the MLRC protocol, each with another quarter of the training classes for validation, then all."""
    config = replace(
        _with_dim(config, MLRC_DIM),
        batch=BatchConfig(size=32, samples_per_class=4),
        schedule=ScheduleConfig("constant"),
        select_by="map_at_r",
        evaluate_every=2,
    )
    if config.model.backbone != "convnet":
        augmentation = Augmentation(scale=(0.16, 1.0))
        config = replace(
            config, batch_norm="freeze", augmentation=augmentation, model=replace(config.model, pooling="avg")
        )
    for fold in range(MLRC_FOLDS):
        data = replace(config.data, validation=f"fold-{fold}")
        yield Variant({"fold": fold}, replace(config, data=data))
    together = _with_dim(config, MLRC_DIM * MLRC_FOLDS)
    yield Variant({"fold": "concatenated"}, together, task="concatenate", needs_previous=True)


def _timed(config: RunConfig) -> Iterator[Variant]:
    config = replace(config, evaluate_every=config.epochs)
    if config.loss.name not in SWEEPS:
        yield Variant({}, config, task="time")
        return
    for number in TIMED_PROXIES:
        loss = replace(config.loss, options={**config.loss.options, "proxies_per_class": number})
        yield Variant({"proxies_per_class": number}, replace(config, loss=loss), task="time")


def _figures(config: RunConfig) -> Iterator[Variant]:
    yield Variant({}, config, task="figures")


def _with_dim(config: RunConfig, dim: int) -> RunConfig:
    return replace(config, model=replace(config.model, embedding_dim=dim))


EXPERIMENTS: dict[str, Experiment] = {
    "retrieval": Experiment(
        "Recall@K on unseen classes",
        "Table 1",
        _as_it_is,
        methods=RETRIEVAL_METHODS,
        datasets=("glyphs", "cub", "cars", "sop"),
        backbones=("convnet", "resnet50", "bn_inception", "vit_small", "dino_small"),
    ),
    "small-embedding": Experiment(
        "Recall@K with 64 dimensions (glyphs: 8)",
        "supplement, small embeddings",
        _small,
        methods=SMALL_METHODS,
        datasets=("glyphs", "cub", "cars", "sop"),
    ),
    "noise": Experiment(
        "Recall@K with label noise of 0 to 50 %; the paper's table has 20 %",
        "Table 2",
        _noisy,
        methods=("triplet", "multi-similarity-miner", "proxy-nca", "proxy-anchor", "hist", "pfml", "pfml-log"),
    ),
    "alignment": Experiment(
        "W2 between proxies and training data",
        "Table 3",
        _as_it_is,
        methods=("soft-triple", "proxy-nca", "proxy-anchor", "cpml", "pfml", "pfml-log"),
        datasets=("glyphs", "cub"),
    ),
    "ablation": Experiment(
        "Recall@1 against M, delta, alpha, delta_rep - delta_att",
        "Figure 3",
        _swept,
        methods=("pfml",),
    ),
    "mlrc": Experiment(
        "P@1, RP and MAP@R with 4-fold cross validation; 128 dimensions separated, 4 x 128 concatenated",
        "supplement, MLRC protocol",
        _folds,
        methods=MLRC_METHODS,
        backbones=("convnet", "bn_inception"),
    ),
    "timing": Experiment(
        "Seconds per epoch against M and method",
        "supplement, computational complexity",
        _timed,
        methods=("proxy-nca", "proxy-anchor", "pfml"),
        datasets=("glyphs", "cars"),
        seeds=(0,),
        epochs=20,
        alone=True,
    ),
    "figures": Experiment(
        "Plots: field, pipeline, retrieval examples, t-SNE",
        "Figures 1 and 2; supplement, visual results",
        _figures,
        methods=("pfml-log",),
        datasets=("glyphs", "cub", "cars", "sop"),
        seeds=(0,),
    ),
}


#: D of the paper's main table (convnet: of the glyphs)
BACKBONE_DIMS = {
    "convnet": 64,
    "resnet50": 512,
    "bn_inception": 512,
    "vit_small": 384,
    "dino_small": 384,
    "resnet50_he": 512,
}
PHOTO_BACKBONES = ("resnet50", "bn_inception", "vit_small", "dino_small", "resnet50_he")
DATASET_BACKBONES = {
    "glyphs": ("convnet",),
    "cub": PHOTO_BACKBONES,
    "cars": PHOTO_BACKBONES,
    "sop": PHOTO_BACKBONES,
}
#: Field -> the configuration of CUB with resnet50_he that was made for it; all others share Proxy Anchor's.
RESNET50_HE = {"pfml": "pfml", "pfml-log": "pfml", "cpml": "pfml", "pfml-robust": "recipe"}
#: What methods call the number of their proxies, so that all that have several have the same number.
PROXY_COUNTS = ("proxies_per_class", "centers_per_class")


def base_config(dataset: str, backbone: str, method: str) -> RunConfig:
    """The configuration of `method`: that which is shipped for the data set, with the method's own loss.

    All methods share its backbone, batches, schedule and epochs (`pfml.runs.recipes`). Of the options of its
    loss, another method takes over the number of proxies, if it has several, and no other.
    """
    if dataset == "glyphs":
        config = _shipped("glyphs")
    elif backbone == "resnet50_he":
        config = _resnet50_he(dataset, method)
    else:
        config = _shipped(f"{dataset}-{backbone}-{BACKBONE_DIMS[backbone]}")
    if config.loss.name == method:
        return config
    options = {}
    proxies = config.loss.options.get("proxies_per_class")
    if proxies is not None:
        options = {name: proxies for name in PROXY_COUNTS if name in METHODS[method].option_names()}
    return recipe_config(method, replace(config, loss=LossConfig(method, options)))


@cache
def _shipped(name: str) -> RunConfig:
    return shipped_config(name)


def _resnet50_he(dataset: str, method: str) -> RunConfig:
    """CUB's own configuration; for the other sets its backbone and optimizer on what the paper says of the set.

    All but Proxy Anchor, robust or not, have positives in their batches, as they were measured (docs/REPRODUCTION.md).
    """
    cub = _shipped(f"cub-resnet50_he-{RESNET50_HE.get(method, 'proxy_anchor')}")
    if method not in ("proxy-anchor", "proxy-anchor-robust"):
        cub = replace(cub, batch=replace(cub.batch, samples_per_class=4))
    if dataset == "cub":
        return cub
    paper = _shipped(f"{dataset}-resnet50-512")
    options = {**cub.loss.options}
    if "proxies_per_class" in options:
        options["proxies_per_class"] = paper.loss.options["proxies_per_class"]
    warm_up, batch_norm = paper.warm_up_epochs, paper.batch_norm
    loss = replace(cub.loss, options=options)
    return replace(cub, data=paper.data, loss=loss, warm_up_epochs=warm_up, batch_norm=batch_norm)
