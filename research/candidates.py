"""What is tried on CUB: name -> (configuration in bases/, changes to it). Bad ideas stay, with their results."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pfml.experiments.tune import with_value
from pfml.methods import LossConfig
from pfml.runs.config import RunConfig
from pfml.runs.config_files import read_config
from pfml.runs.recipes import recipe_config

__all__ = ["CANDIDATES", "NOISY", "base_config", "candidate_config", "extras_of"]

#: What the rounds began from; the configurations of the package have moved on since.
BASES = Path(__file__).parent / "bases"
#: Beginning of changes that are none of the package's options, but of `cub.Quick.extend`.
EXTRA = "extra."
#: ... and a change that is a whole recipe of the package: the name of the method.
PUBLISHED = "published"
#: Methods that are compared by their own recipes; the longest come first, so that no process ends alone.
AS_PUBLISHED = (
    "proxy-nca++", "hist", "proxy-gml", "soft-triple", "proxy-anchor", "multi-similarity-miner", "hyp", "hier",
    "proxy-anchor-nir", "proxy-anchor-nivmf", "diva", "multi-similarity-das", "dcml-mdw", "drml-pa", "dfml-pa",
    "proxy-anchor-hse", "margin-hse", "htl", "clustering", "contextual", "s2sd", "proxy-anchor-metrix",
    "multi-similarity-metrix",
)  # fmt: skip
PROXY_ANCHOR, FIELD = "cub-resnet50_he-proxy_anchor", "cub-resnet50_he-pfml"
FOLDER = "cub-efficientnet_lite0-folder"
COSINE = {"schedule.name": "cosine"}
#: What helped the baseline in the first round.
PLUS = COSINE | {"optimizer.weight_decay": 1e-2, "augmentation.scale": (0.2, 1.0)}

#: ... and in the second; batches of one size, so that one compiled model serves all.
PLUS5 = PLUS | {"optimizer.lr": 5e-5, "batch.size": 100, "epochs": 10}
HEAD = {"optimizer.head_lr": 5e-4}

#: Eq. 6 without its pairs of proxies.
NO_PROXY_PAIRS = {
    "proxies_per_class": 15, "delta": 0.2, "alpha": 3.0, "proxy_attraction": False, "proxy_repulsion": False,
    "reduction": "points",
}  # fmt: skip


def _log(alpha: float, delta: float, delta_rep: float, proxies: int = 5, **more: Any) -> dict[str, Any]:
    """The logarithmic field."""
    options = {
        "normalization": "log", "alpha": alpha, "delta": delta, "delta_rep": delta_rep, "proxy_attraction": False,
        "proxies_per_class": proxies, "reduction": "points", **more,
    }  # fmt: skip
    return {"loss.name": "pfml", "loss.options": options}


def _anchor(alpha: float, delta: float, proxies: int = 5, **more: Any) -> dict[str, Any]:
    """The field normalized per anchor."""
    options = {
        "normalization": "anchor", "alpha": alpha, "delta": delta, "proxies_per_class": proxies, "reduction": "points",
        **more,
    }  # fmt: skip
    return {"loss.name": "pfml", "loss.options": options}


def _method(name: str, **options: Any) -> dict[str, Any]:
    """Another method with its own defaults, in batches with positives."""
    return {"loss.name": name, "loss.options": options, "batch.samples_per_class": 4}


def _steep(alpha: float, delta: float, delta_rep: float, proxies: int = 5, **more: Any) -> dict[str, Any]:
    """The logarithmic field in which pairs of samples count a fifth."""
    return PLUS5 | _log(alpha, delta, delta_rep, proxies, **{"sample_sample": 0.2, **more})


def _trial(**options: Any) -> dict[str, Any]:
    """A field of research/trial.py, in short runs."""
    return PLUS5 | {"epochs": 6, "loss.name": "trial", "loss.options": options}


EIGHT = PLUS5 | {"epochs": 8}
LITERAL = {"delta": 0.2, "alpha": 3.0, "reduction": "points"}


def _recipe(**options: Any) -> dict[str, Any]:
    """A field of research/trial.py that does not trust every label."""
    return EIGHT | {"loss.name": "trial", "loss.options": {"trust": 0.3, **options}}


WHITENED = {"head_start": "whitened"}
MILD = {"augmentation.scale": (0.4, 1.0)}


def _local(alpha: float, delta: float, delta_rep: float, **more: Any) -> dict[str, Any]:
    """A logarithmic field that starts near its data: a whitened head, and proxies among the samples."""
    return EIGHT | WHITENED | _log(alpha, delta, delta_rep, **{"sample_sample": 0.2, "proxy_init": "kmeans", **more})


def _field(**options: Any) -> dict[str, Any]:
    """The field of research/trial.py as round 5 left it, from a whitened head, all labels trusted."""
    return EIGHT | WHITENED | {"loss.name": "trial", "loss.options": {"mix": 2.0, "proxy_anchors": 0.0, **options}}


#: What the first seven rounds leave of the pipeline.
FINAL = EIGHT | WHITENED | MILD


def _recommended(**options: Any) -> dict[str, Any]:
    """What the seventh round chose, with other options."""
    chosen = _log(24.0, 1.0, 1.3, proxy_init="kmeans", trust=0.3)
    return FINAL | chosen | {"loss.options": chosen["loss.options"] | options}


AVERAGED = FINAL | {"average": 0.99}
AVERAGED_ON_TEST = FINAL | {"average": 0.995}
LONG_MIXED = {"epochs": 16, "average": 0.99, "extra.mixup": 0.5}
ROBUST_FOLDER = {"loss.name": "pfml-robust", "loss.options": {"proxy_init": "kmeans"}}


def _plain(**options: Any) -> dict[str, Any]:
    """The field of research/trial.py with the recipe's values; proxies start anywhere, and trust differs a little."""
    same = {"sample_attraction": 1.0, "sample_repulsion": 1.0, "trust": 0.3}
    return FINAL | {"loss.name": "trial", "loss.options": {**same, **options}}


def _as_proxy_anchor(**options: Any) -> dict[str, Any]:
    """A field with Proxy Anchor's margins (cosines of 0.1 and -0.1) and steepness (32 per cosine) at its distances."""
    same = {"attraction": "far", "att": 57.0, "rep": 70.0, "knee_att": 1.34, "knee": 1.48, "reach": 2.0}
    return _plain(**same, proxies_per_class=1, sample_anchors=0.0, proxy_repulsion=0.0, **options)


#: The paper's pipeline as its supplement has it: the pooled features through one layer, 200 epochs; of schedule and
#: sampler it says nothing.
PAPER = {
    "model.pooling": "avg", "model.layer_norm": "none", "optimizer.name": "adam", "optimizer.weight_decay": 5e-4,
    "schedule.name": "constant", "epochs": 200,
}  # fmt: skip
#: Eq. 6 as it is written: the sum.
SUM = {"loss.options": {"delta": 0.2, "alpha": 3.0}}

#: Eq. 6 without pairs of proxies, which gains from a lower learning rate and more time.
SLOW = PLUS5 | {"schedule.name": "cosine", "loss.options": NO_PROXY_PAIRS}

CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {
    # the baseline, and what it is made of
    "pa": (PROXY_ANCHOR, {}),
    "pa cosine": (PROXY_ANCHOR, COSINE),
    "pa 4 per class": (PROXY_ANCHOR, COSINE | {"batch.samples_per_class": 4}),
    "pa lr 5e-5": (PROXY_ANCHOR, COSINE | {"optimizer.lr": 5e-5}),
    "pa lr 2e-4": (PROXY_ANCHOR, COSINE | {"optimizer.lr": 2e-4}),
    "pa avg": (PROXY_ANCHOR, COSINE | {"model.pooling": "avg"}),
    "pa no LayerNorm": (PROXY_ANCHOR, COSINE | {"model.layer_norm": "none"}),
    "pa LayerNorm on embedding": (PROXY_ANCHOR, COSINE | {"model.layer_norm": "embedding"}),
    "pa crops from .2": (PROXY_ANCHOR, COSINE | {"augmentation.scale": (0.2, 1.0)}),
    "pa weight decay 1e-2": (PROXY_ANCHOR, COSINE | {"optimizer.weight_decay": 1e-2}),
    "pa batch 64": (PROXY_ANCHOR, COSINE | {"batch.size": 64}),
    "pa batch 180": (PROXY_ANCHOR, COSINE | {"batch.size": 180}),
    # Eq. 6
    "literal": (FIELD, {"loss.options": {"delta": 0.2, "alpha": 3.0}}),
    "no proxy pairs": (FIELD, {}),
    "no proxy pairs, cosine": (FIELD, COSINE),
    # the logarithmic field: how steep, how far
    "log 6, .6, 1.2": (FIELD, COSINE | _log(6, 0.6, 1.2)),
    "log 6, 1, 1.3": (FIELD, COSINE | _log(6, 1.0, 1.3)),
    "log 12, 1, 1.3": (FIELD, COSINE | _log(12, 1.0, 1.3)),
    "log 24, 1, 1.3": (FIELD, COSINE | _log(24, 1.0, 1.3)),
    "log 32, 1, 1.4": (FIELD, COSINE | _log(32, 1.0, 1.4)),
    "log 16, .8, 1.4": (FIELD, COSINE | _log(16, 0.8, 1.4)),
    "log 32, .8, 1.4": (FIELD, COSINE | _log(32, 0.8, 1.4)),
    "log 32, .9, 1.2": (FIELD, COSINE | _log(32, 0.9, 1.2)),
    "log 64, 1, 1.4": (FIELD, COSINE | _log(64, 1.0, 1.4)),
    "log 32, 1.1, 1.3": (FIELD, COSINE | _log(32, 1.1, 1.3)),
    "log 32, 1, 1.4, M 1": (FIELD, COSINE | _log(32, 1.0, 1.4, 1)),
    "log 32, 1, 1.4, M 15": (FIELD, COSINE | _log(32, 1.0, 1.4, 15)),
    "log 32, 1, 1.4, no samples": (FIELD, COSINE | _log(32, 1.0, 1.4, sample_sample=False)),
    # the field normalized per anchor
    "anchor 16, .5": (FIELD, COSINE | _anchor(16, 0.5)),
    "anchor 32, .5": (FIELD, COSINE | _anchor(32, 0.5)),
    "anchor 32, .9": (FIELD, COSINE | _anchor(32, 0.9)),
    "anchor 48, .9": (FIELD, COSINE | _anchor(48, 0.9)),
    # second round
    "2 pa": (PROXY_ANCHOR, PLUS),
    "2 pa lr 5e-5": (PROXY_ANCHOR, PLUS | {"optimizer.lr": 5e-5}),
    "2 no proxy pairs": (FIELD, PLUS),
    "2 no proxy pairs, rep .5": (FIELD, PLUS | {"loss.options": NO_PROXY_PAIRS | {"delta_rep": 0.5}}),
    "2 no proxy pairs, rep .8": (FIELD, PLUS | {"loss.options": NO_PROXY_PAIRS | {"delta_rep": 0.8}}),
    "2 no proxy pairs, rep 1.1": (FIELD, PLUS | {"loss.options": NO_PROXY_PAIRS | {"delta_rep": 1.1}}),
    "2 no proxy pairs, alpha 6, rep .8": (
        FIELD,
        PLUS | {"loss.options": NO_PROXY_PAIRS | {"alpha": 6.0, "delta_rep": 0.8}},
    ),
    "2 log 12, 1, 1.3": (FIELD, PLUS | _log(12, 1.0, 1.3)),
    "2 log 12, 1, 1.3, lr 5e-5": (FIELD, PLUS | {"optimizer.lr": 5e-5} | _log(12, 1.0, 1.3)),
    "2 log 12, 1, 1.3, M 15": (FIELD, PLUS | _log(12, 1.0, 1.3, 15)),
    "2 log 12, 1, 1.3, M 1": (FIELD, PLUS | _log(12, 1.0, 1.3, 1)),
    "2 log 12, 1, 1.3, 2 per class": (FIELD, PLUS | {"batch.samples_per_class": 2} | _log(12, 1.0, 1.3)),
    "2 log 12, 1, 1.3, 10 per class": (FIELD, PLUS | {"batch.samples_per_class": 10} | _log(12, 1.0, 1.3)),
    "2 log 12, 1, 1.3, no samples": (FIELD, PLUS | _log(12, 1.0, 1.3, sample_sample=False)),
    "2 log 12, 1, 1.3, samples .2": (FIELD, PLUS | _log(12, 1.0, 1.3, sample_sample=0.2)),
    "2 log 12, 1, 1.3, M 1, no samples": (FIELD, PLUS | _log(12, 1.0, 1.3, 1, sample_sample=False)),
    "2 log 12, 1, 1.3, proxies from samples": (FIELD, PLUS | _log(12, 1.0, 1.3, proxy_init="samples")),
    "2 log 12, 1, 1.4": (FIELD, PLUS | _log(12, 1.0, 1.4)),
    "2 log 12, 1.1, 1.3": (FIELD, PLUS | _log(12, 1.1, 1.3)),
    "2 log 12, .9, 1.2": (FIELD, PLUS | _log(12, 0.9, 1.2)),
    "2 log 18, 1, 1.3": (FIELD, PLUS | _log(18, 1.0, 1.3)),
    "2 log 24, 1, 1.3": (FIELD, PLUS | _log(24, 1.0, 1.3)),
    "2 log 32, 1, 1.4": (FIELD, PLUS | _log(32, 1.0, 1.4)),
    "2 anchor 24, .7": (FIELD, PLUS | _anchor(24, 0.7)),
    "2 anchor 32, .7, M 1": (FIELD, PLUS | _anchor(32, 0.7, 1)),
    # third round, noise too: steeper, farther out, and samples that are not trusted
    "3 pa": (PROXY_ANCHOR, PLUS5),
    "3 pa, head 5e-4": (PROXY_ANCHOR, PLUS5 | HEAD),
    "3 pa, 20 epochs": (PROXY_ANCHOR, PLUS5 | {"epochs": 20}),
    "3 multi-similarity": (PROXY_ANCHOR, PLUS5 | _method("multi-similarity")),
    "3 proxy-nca++": (PROXY_ANCHOR, PLUS5 | _method("proxy-nca++")),
    "3 soft-triple": (PROXY_ANCHOR, PLUS5 | _method("soft-triple")),
    "3 hist": (PROXY_ANCHOR, PLUS5 | _method("hist")),
    "3 log 24, 1, 1.3": (FIELD, _steep(24, 1.0, 1.3)),
    "3 log 32, 1, 1.3": (FIELD, _steep(32, 1.0, 1.3)),
    "3 log 48, 1, 1.3": (FIELD, _steep(48, 1.0, 1.3)),
    "3 log 32, 1.1, 1.4": (FIELD, _steep(32, 1.1, 1.4)),
    "3 log 24, 1.2, 1.4": (FIELD, _steep(24, 1.2, 1.4)),
    "3 log 32, 1.2, 1.4": (FIELD, _steep(32, 1.2, 1.4)),
    "3 log 48, 1.2, 1.5": (FIELD, _steep(48, 1.2, 1.5)),
    "3 log 32, 1.2, 2": (FIELD, _steep(32, 1.2, 2.0)),
    "3 log 32, 1.3, 1.6": (FIELD, _steep(32, 1.3, 1.6)),
    "3 log 48, 1.3, 1.6": (FIELD, _steep(48, 1.3, 1.6)),
    "3 log 56, 1.34, 2": (FIELD, _steep(56, 1.34, 2.0)),
    "3 log 32, 1.2, 1.4, samples 0": (FIELD, _steep(32, 1.2, 1.4, sample_sample=0.0)),
    "3 log 32, 1.2, 1.4, samples 1": (FIELD, _steep(32, 1.2, 1.4, sample_sample=1.0)),
    "3 log 32, 1.2, 1.4, M 1": (FIELD, _steep(32, 1.2, 1.4, 1)),
    "3 log 32, 1.2, 1.4, head 5e-4": (FIELD, _steep(32, 1.2, 1.4) | HEAD),
    "3 log 32, 1.2, 1.4, 20 epochs": (FIELD, _steep(32, 1.2, 1.4) | {"epochs": 20}),
    "3 log 32, 1.2, 1.4, trust .3": (FIELD, _steep(32, 1.2, 1.4, trust=0.3)),
    "3 log 32, 1.2, 1.4, trust .03": (FIELD, _steep(32, 1.2, 1.4, trust=0.03)),
    "3 log 24, 1, 1.3, trust .1": (FIELD, _steep(24, 1.0, 1.3, trust=0.1)),
    "3 anchor 32, 1.2, samples .2": (FIELD, PLUS5 | _anchor(32, 1.2, sample_sample=0.2)),
    "3 anchor 32, .8, samples .2": (FIELD, PLUS5 | _anchor(32, 0.8, sample_sample=0.2)),
    "3 no proxy pairs": (FIELD, PLUS5 | {"schedule.name": "step"}),
    # fourth round: short runs of the trial field, each with one knob turned
    "4 pa": (PROXY_ANCHOR, PLUS5 | {"epochs": 6}),
    "4 trial": (FIELD, _trial()),
    "4 samples 0, 0": (FIELD, _trial(sample_attraction=0.0, sample_repulsion=0.0)),
    "4 samples .2, 0": (FIELD, _trial(sample_repulsion=0.0)),
    "4 samples 1, 0": (FIELD, _trial(sample_attraction=1.0, sample_repulsion=0.0)),
    "4 samples 0, .2": (FIELD, _trial(sample_attraction=0.0)),
    "4 knee .9": (FIELD, _trial(knee=0.9)),
    "4 knee 1.1": (FIELD, _trial(knee=1.1)),
    "4 contact 1.2": (FIELD, _trial(contact=1.2)),
    "4 contact .8": (FIELD, _trial(contact=0.8)),
    "4 saturating 1.1": (FIELD, _trial(attraction="saturating", contact=0.5, knee_att=1.1)),
    "4 saturating 1.3": (FIELD, _trial(attraction="saturating", contact=0.5, knee_att=1.3)),
    "4 far 1.3": (FIELD, _trial(attraction="far", knee_att=1.3)),
    "4 repulsion x .5": (FIELD, _trial(repulsion_weight=0.5)),
    "4 repulsion x 2": (FIELD, _trial(repulsion_weight=2.0)),
    "4 attraction 8": (FIELD, _trial(att=8.0, attraction_weight=3.0)),
    "4 repulsion 48": (FIELD, _trial(rep=48.0, repulsion_weight=0.5)),
    "4 repulsion 12": (FIELD, _trial(rep=12.0, repulsion_weight=2.0)),
    "4 samples as anchors": (FIELD, _trial(proxy_anchors=0.0)),
    "4 proxies as anchors": (FIELD, _trial(sample_anchors=0.0)),
    "4 mix .5": (FIELD, _trial(mix=0.5)),
    "4 mix 2": (FIELD, _trial(mix=2.0)),
    "4 linear": (FIELD, _trial(attraction="linear", att=3.0, contact=0.2, attraction_weight=100.0)),
    "4 linear x .1": (FIELD, _trial(attraction="linear", att=3.0, contact=0.2, attraction_weight=10.0)),
    "4 reach 1.2": (FIELD, _trial(reach=1.2)),
    "4 M 1": (FIELD, _trial(proxies_per_class=1)),
    "4 M 1, samples 0, 0": (FIELD, _trial(proxies_per_class=1, sample_attraction=0.0, sample_repulsion=0.0)),
    "4 lr 3e-5": (FIELD, _trial() | {"optimizer.lr": 3e-5}),
    "4 lr 3e-5, head 2e-4": (FIELD, _trial() | {"optimizer.lr": 3e-5, "optimizer.head_lr": 2e-4}),
    "4 proxy lr 3e-2": (FIELD, _trial() | {"optimizer.proxy_lr": 3e-2}),
    "4 proxy lr 3e-3": (FIELD, _trial() | {"optimizer.proxy_lr": 3e-3}),
    "4 no proxy pairs, 20 epochs": (FIELD, SLOW | {"epochs": 20}),
    "4 no proxy pairs, 40 epochs": (FIELD, SLOW | {"epochs": 40}),
    "4 no proxy pairs, alpha 6, 20 epochs": (
        FIELD,
        SLOW | {"epochs": 20, "loss.options": NO_PROXY_PAIRS | {"alpha": 6.0}},
    ),
    # fifth round, clean and with label noise, three seeds: what may become the recipe
    "5 pa": (PROXY_ANCHOR, EIGHT),
    "5 trust": (FIELD, _recipe()),
    "5 mix": (FIELD, _recipe(mix=2.0)),
    "5 mix, samples as anchors": (FIELD, _recipe(mix=2.0, proxy_anchors=0.0)),
    "5 mix, slow proxies": (FIELD, _recipe(mix=2.0) | {"optimizer.proxy_lr": 3e-3}),
    "5 mix, samples as anchors, slow proxies": (
        FIELD,
        _recipe(mix=2.0, proxy_anchors=0.0) | {"optimizer.proxy_lr": 3e-3},
    ),
    "5 mix, lr 3e-5, head 2e-4": (FIELD, _recipe(mix=2.0) | {"optimizer.lr": 3e-5, "optimizer.head_lr": 2e-4}),
    "5 mix, trust .1": (FIELD, _recipe(mix=2.0, trust=0.1)),
    "5 mix, relabel": (FIELD, _recipe(mix=2.0, relabel=True)),
    # sixth round: heads that start from features (the lead of the linear probes)
    "6 pa": (PROXY_ANCHOR, EIGHT),
    "6 pa, whitened": (PROXY_ANCHOR, EIGHT | WHITENED),
    "6 pa, whitened, no warm-up": (PROXY_ANCHOR, EIGHT | WHITENED | {"warm_up_epochs": 0}),
    "6 pa, whitened, lr 3e-5": (PROXY_ANCHOR, EIGHT | WHITENED | {"optimizer.lr": 3e-5}),
    "6 pa, whitened, head 2e-4": (PROXY_ANCHOR, EIGHT | WHITENED | {"optimizer.head_lr": 2e-4}),
    "6 pa, whitened, early lr .2": (PROXY_ANCHOR, EIGHT | WHITENED | {"extra.early_lr": 0.2}),
    "6 pa, whitened, mixup .5": (PROXY_ANCHOR, EIGHT | WHITENED | {"extra.mixup": 0.5}),
    "6 pa, whitened, crops from .4": (PROXY_ANCHOR, EIGHT | WHITENED | {"augmentation.scale": (0.4, 1.0)}),
    "6 log 24, 1, 1.3, whitened": (FIELD, _local(24, 1.0, 1.3)),
    "6 log 24, 1, 1.3, whitened, trust .3": (FIELD, _local(24, 1.0, 1.3, trust=0.3)),
    "6 trial, whitened": (FIELD, _field()),
    "6 trial, random": (FIELD, _field() | {"head_start": "random"}),
    "6 trial, memory 2000": (FIELD, _field(memory=2000)),
    "6 trial, memory 2000 x .03": (FIELD, _field(memory=2000, memory_weight=0.03)),
    "6 trial, 4 parts": (FIELD, _field(parts=4)),
    "6 trial, 2 parts": (FIELD, _field(parts=2)),
    "6 trial, mixup .5": (FIELD, _field() | {"extra.mixup": 0.5}),
    "6 trial, early lr .2": (FIELD, _field() | {"extra.early_lr": 0.2}),
    "6 trial, trust .3": (FIELD, _field(trust=0.3)),
    "6 trial, trust .3 late": (FIELD, _field(trust=0.3, trust_after=90)),
    "6 trial, trust .05 late": (FIELD, _field(trust=0.05, trust_after=90)),
    "6 multi-similarity, whitened": (PROXY_ANCHOR, EIGHT | WHITENED | _method("multi-similarity")),
    "6 proxy-nca, whitened": (PROXY_ANCHOR, EIGHT | WHITENED | _method("proxy-nca")),
    # seventh round: milder crops, which helped the baseline; the package's own logarithmic field
    "7 pa": (PROXY_ANCHOR, EIGHT | WHITENED | MILD),
    "7 pa, crops from .6": (PROXY_ANCHOR, EIGHT | WHITENED | {"augmentation.scale": (0.6, 1.0)}),
    "7 pa, max": (PROXY_ANCHOR, EIGHT | WHITENED | MILD | {"model.pooling": "max"}),
    "7 log": (FIELD, _local(24, 1.0, 1.3) | MILD),
    "7 log, trust .3": (FIELD, _local(24, 1.0, 1.3, trust=0.3) | MILD),
    "7 log, trust 1": (FIELD, _local(24, 1.0, 1.3, trust=1.0) | MILD),
    "7 log, trust .3, head 2e-4": (FIELD, _local(24, 1.0, 1.3, trust=0.3) | MILD | {"optimizer.head_lr": 2e-4}),
    "7 log, trust .3, samples 1": (FIELD, _local(24, 1.0, 1.3, trust=0.3, sample_sample=1.0) | MILD),
    "7 log, random batches": (FIELD, _local(24, 1.0, 1.3) | MILD | {"batch.samples_per_class": 0}),
    "7 log, normal proxies": (FIELD, _local(24, 1.0, 1.3, proxy_init="normal") | MILD),
    "7 log, max": (FIELD, _local(24, 1.0, 1.3) | MILD | {"model.pooling": "max"}),
    "7 log 32": (FIELD, _local(32, 1.0, 1.3) | MILD),
    "7 memory, trust .3": (FIELD, _field(memory=2000, memory_weight=0.03, trust=0.3) | MILD),
    "7 memory, 2 parts, trust .3": (FIELD, _field(memory=2000, memory_weight=0.03, parts=2, trust=0.3) | MILD),
    "7 multi-similarity": (PROXY_ANCHOR, EIGHT | WHITENED | MILD | _method("multi-similarity")),
    # eighth round: averaged weights, long runs, and what the list of ideas still had
    **{f"8 pa, average {share}": (PROXY_ANCHOR, FINAL | {"average": share}) for share in (0.0, 0.98, 0.99)},
    **{f"8 recipe, average {share}": (FIELD, _recommended() | {"average": share}) for share in (0.0, 0.98, 0.99)},
    "8 pa, 16 epochs, average 0.99": (PROXY_ANCHOR, FINAL | {"epochs": 16, "average": 0.99}),
    "8 recipe, 16 epochs, average 0.99": (FIELD, _recommended() | {"epochs": 16, "average": 0.99}),
    "8 pa, mixed, 16 epochs, average 0.99": (PROXY_ANCHOR, FINAL | LONG_MIXED),
    "8 recipe, mixed, 16 epochs, average 0.99": (FIELD, _recommended() | LONG_MIXED),
    "8 recipe, 100 epochs": (FIELD, _recommended() | {"epochs": 100}),
    "8 plain": (FIELD, _plain()),
    "8 alpha from 6": (FIELD, _plain(first_exponent=6.0, ramp=120)),
    "8 alpha from 48": (FIELD, _plain(first_exponent=48.0, ramp=120)),
    "8 delta from 1.2": (FIELD, _plain(first_contact=1.2, ramp=120)),
    "8 delta from .8": (FIELD, _plain(first_contact=0.8, ramp=120)),
    "8 pairs up to 6": (FIELD, _plain(largest_pair=6.0)),
    "8 pairs up to 1.5": (FIELD, _plain(largest_pair=1.5)),
    "8 as proxy anchor": (FIELD, _as_proxy_anchor(trust=0.0)),
    "8 as proxy anchor, trust .3": (FIELD, _as_proxy_anchor()),
    "8 as proxy anchor, trust .1": (FIELD, _as_proxy_anchor(trust=0.1)),
    # ninth round: what a bare `pfml train --data FOLDER` should suggest
    "9 suggested": (FOLDER, {}),
    "9 trust .3": (FOLDER, {"loss.options.trust": 0.3}),
    "9 trust .3, alpha 24": (
        FOLDER,
        {"loss.options.trust": 0.3, "loss.options.alpha": 24.0, "loss.options.delta": 0.9},
    ),
    "9 robust": (FOLDER, ROBUST_FOLDER),
    "9 robust, crops from .4": (FOLDER, ROBUST_FOLDER | MILD),
    "9 robust, crops from .4, lr 5e-5, weight decay 1e-2": (
        FOLDER,
        ROBUST_FOLDER | MILD | {"optimizer.lr": 5e-5, "optimizer.weight_decay": 1e-2},
    ),
    "9 pa, crops from .4": (FOLDER, {"loss.name": "proxy-anchor", "loss.options": {}} | MILD),
    # tenth round, averaged weights: less time, since more of it did harm; a field beside Proxy Anchor's; the model as
    # it was before training as a teacher of who is near whom
    "10 pa, 6 epochs": (PROXY_ANCHOR, AVERAGED | {"epochs": 6}),
    "10 recipe, 6 epochs": (FIELD, _recommended() | AVERAGED | {"epochs": 6}),
    "10 as proxy anchor, trust .3": (FIELD, _as_proxy_anchor() | AVERAGED),
    "10 recipe and pa": (FIELD, _recommended() | AVERAGED | {"extra.anchor": 1.0}),
    "10 recipe and half pa": (FIELD, _recommended() | AVERAGED | {"extra.anchor": 0.5}),
    "10 pa, teacher .3": (PROXY_ANCHOR, AVERAGED | {"extra.teacher": 0.3}),
    "10 pa, teacher 1": (PROXY_ANCHOR, AVERAGED | {"extra.teacher": 1.0}),
    "10 recipe, teacher .3": (FIELD, _recommended() | AVERAGED | {"extra.teacher": 0.3}),
    "10 recipe, teacher 1": (FIELD, _recommended() | AVERAGED | {"extra.teacher": 1.0}),
    # eleventh round, averaged: trust for other losses; heads that stay where they start, since on frozen features
    # training them does harm; two views of each image, which find each other
    "11 pa, trust .3": (PROXY_ANCHOR, AVERAGED | {"extra.trust": 0.3}),
    "11 proxy-nca": (PROXY_ANCHOR, AVERAGED | _method("proxy-nca")),
    "11 proxy-nca, trust .3": (PROXY_ANCHOR, AVERAGED | _method("proxy-nca") | {"extra.trust": 0.3}),
    "11 pa, head stays": (PROXY_ANCHOR, AVERAGED | {"optimizer.head_lr": 1e-9}),
    "11 recipe, head stays": (FIELD, _recommended() | AVERAGED | {"optimizer.head_lr": 1e-9}),
    "11 recipe, head 1e-5": (FIELD, _recommended() | AVERAGED | {"optimizer.head_lr": 1e-5}),
    **{
        f"11 {name}, views {share}": (base, changes | {"batch.samples_per_class": 4, "extra.instances": share})
        for name, base, changes in (("pa", PROXY_ANCHOR, AVERAGED), ("recipe", FIELD, _recommended() | AVERAGED))
        for share in (0.0, 0.3)
    },
    # on the test classes, beside what the fifth round chose
    "t pa": (PROXY_ANCHOR, EIGHT),
    "t literal": (FIELD, EIGHT | {"loss.options": LITERAL}),
    "t no proxy pairs": (FIELD, EIGHT | {"schedule.name": "step"}),
    "t multi-similarity": (PROXY_ANCHOR, EIGHT | _method("multi-similarity")),
    "t triplet": (PROXY_ANCHOR, EIGHT | _method("triplet")),
    "t proxy-nca": (PROXY_ANCHOR, EIGHT | _method("proxy-nca")),
    "t hist": (PROXY_ANCHOR, EIGHT | _method("hist")),
    "t soft-triple": (PROXY_ANCHOR, EIGHT | _method("soft-triple")),
    # on the test classes, once more: heads that start whitened and milder crops, for all methods
    "f pa": (PROXY_ANCHOR, FINAL),
    "f recipe": (FIELD, _recommended()),
    "f no proxy pairs": (FIELD, FINAL | {"schedule.name": "step"}),
    "f proxy-nca": (PROXY_ANCHOR, FINAL | _method("proxy-nca")),
    "f multi-similarity": (PROXY_ANCHOR, FINAL | _method("multi-similarity")),
    "f soft-triple": (PROXY_ANCHOR, FINAL | _method("soft-triple")),
    "f triplet": (PROXY_ANCHOR, FINAL | _method("triplet")),
    "f hist": (PROXY_ANCHOR, FINAL | _method("hist")),
    # ... and with averaged weights: on twice as many steps, so that the mean reaches over the same share of them
    "g pa": (PROXY_ANCHOR, AVERAGED_ON_TEST),
    "g recipe": (FIELD, _recommended() | AVERAGED_ON_TEST),
    "g proxy-nca": (PROXY_ANCHOR, AVERAGED_ON_TEST | _method("proxy-nca")),
    "g literal": (FIELD, AVERAGED_ON_TEST | {"loss.options": LITERAL}),
    "g multi-similarity": (PROXY_ANCHOR, AVERAGED_ON_TEST | _method("multi-similarity")),
    "g soft-triple": (PROXY_ANCHOR, AVERAGED_ON_TEST | _method("soft-triple")),
    "g no proxy pairs": (FIELD, AVERAGED_ON_TEST | {"schedule.name": "step"}),
    "g triplet": (PROXY_ANCHOR, AVERAGED_ON_TEST | _method("triplet")),
    "g hist": (PROXY_ANCHOR, AVERAGED_ON_TEST | _method("hist")),
    # ... and what the eleventh round asks of others
    "g pa, trust .3": (PROXY_ANCHOR, AVERAGED_ON_TEST | {"extra.trust": 0.3}),
    "g as proxy anchor, trust .3": (FIELD, _as_proxy_anchor() | AVERAGED_ON_TEST),
    # as the paper trains; its text has another learning rate than its supplement
    "p literal": (FIELD, PAPER | SUM),
    "p literal, 5e-4": (FIELD, PAPER | SUM | {"optimizer.lr": 5e-4, "optimizer.proxy_lr": 5e-2}),
    "p no proxy pairs": (FIELD, PAPER | {"loss.options": NO_PROXY_PAIRS | {"reduction": "sum"}}),
    # other methods as their authors train them, with our network and in bfloat16
    **{f"q {method}": (PROXY_ANCHOR, {PUBLISHED: method}) for method in AS_PUBLISHED},
    # ... two of them as their recipes were read at first
    "q hyp, summed, constant rates": (
        PROXY_ANCHOR,
        {PUBLISHED: "hyp", "loss.options": {"reduction": "sum", "riemannian": False}, "schedule.name": "constant"},
    ),
    "q drml-pa, BatchNorm learns": (PROXY_ANCHOR, {PUBLISHED: "drml-pa", "batch_norm": "freeze"}),
    # ... those that are far below what was published, with one value changed, 20 epochs
    "q proxy-anchor-nir, log-likelihood": (
        PROXY_ANCHOR,
        {PUBLISHED: "proxy-anchor-nir", "loss.options": {"exponential": False}, "epochs": 20},
    ),
    "q contextual, avg+max": (PROXY_ANCHOR, {PUBLISHED: "contextual", "model.pooling": "avg+max", "epochs": 20}),
    "q proxy-anchor-metrix, weight .1": (
        PROXY_ANCHOR,
        {PUBLISHED: "proxy-anchor-metrix", "loss.options": {"mix_weight": 0.1}, "epochs": 20},
    ),
    "q drml-pa, scale 32, margin .1": (
        PROXY_ANCHOR,
        {PUBLISHED: "drml-pa", "loss.options": {"scale": 32.0, "margin": 0.1}, "epochs": 20},
    ),
    # the recipe with one of its values changed
    "a recipe": (FIELD, _recommended()),
    **{f"a M {proxies}": (FIELD, _recommended(proxies_per_class=proxies)) for proxies in (1, 2, 15)},
    **{f"a delta {delta}": (FIELD, _recommended(delta=delta)) for delta in (0.9, 1.1, 1.2)},
    **{f"a alpha {alpha}": (FIELD, _recommended(alpha=float(alpha))) for alpha in (6, 12, 32)},
    **{f"a delta_rep {radius}": (FIELD, _recommended(delta_rep=radius)) for radius in (1.1, 1.5, 1.8)},
    **{f"a trust {trust}": (FIELD, _recommended(trust=trust)) for trust in (0.0, 0.1, 1.0)},
}

#: Those of some rounds that are also tried with label noise.
NOISY = (
    "3 pa", "3 multi-similarity", "3 log 24, 1, 1.3", "3 log 32, 1.2, 1.4", "3 log 48, 1.3, 1.6",
    "3 log 32, 1.2, 1.4, trust .3", "3 log 32, 1.2, 1.4, trust .03", "3 log 24, 1, 1.3, trust .1",
    "3 anchor 32, 1.2, samples .2", "3 no proxy pairs",
    "6 pa, whitened", "6 trial, whitened", "6 trial, trust .3", "6 trial, trust .3 late", "6 trial, trust .05 late",
    "6 log 24, 1, 1.3, whitened, trust .3", "6 proxy-nca, whitened",
    "7 pa", "7 log", "7 log, trust .3", "7 log, trust 1", "7 log, trust .3, head 2e-4", "7 log, trust .3, samples 1",
    "7 memory, trust .3", "7 memory, 2 parts, trust .3",
    "8 pa, average 0.0", "8 pa, average 0.99", "8 recipe, average 0.0", "8 recipe, average 0.99",
    "8 as proxy anchor", "8 as proxy anchor, trust .3", "8 as proxy anchor, trust .1",
    "9 suggested", "9 trust .3", "9 trust .3, alpha 24", "9 robust", "9 robust, crops from .4",
    "9 robust, crops from .4, lr 5e-5, weight decay 1e-2", "9 pa, crops from .4",
    "a recipe", "a trust 0.0", "a trust 0.1", "a trust 1.0",
)  # fmt: skip


@cache
def base_config(name: str) -> RunConfig:
    """The configuration `name` of bases/."""
    return read_config(BASES / f"{name}.yaml")


def candidate_config(name: str) -> RunConfig:
    """The configuration of a candidate, without the paths of data and weights."""
    if name not in CANDIDATES:
        raise ValueError(f"there is no candidate {name!r}: see research/candidates.py")
    base, changes = CANDIDATES[name]
    config = base_config(base)
    if PUBLISHED in changes:
        method, options = changes[PUBLISHED], changes.get("loss.options", {})
        config = recipe_config(method, replace(config, loss=LossConfig(method, options)), published=True)
        changes = {path: value for path, value in changes.items() if path not in (PUBLISHED, "loss.options")}
    if "loss.name" in changes:
        config = replace(config, loss=LossConfig(changes["loss.name"], changes["loss.options"]))
    for path, value in changes.items():
        if path.startswith(EXTRA):
            continue
        config = with_value(config, path, value)
    return config


def extras_of(name: str) -> dict[str, float]:
    """What a candidate has that the package has not."""
    return {path.removeprefix(EXTRA): value for path, value in CANDIDATES[name][1].items() if path.startswith(EXTRA)}
