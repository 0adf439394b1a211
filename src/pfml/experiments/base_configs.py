"""How each data set is trained with each backbone: the shipped configurations, for every method."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from pfml.training.config_files import shipped_config
from pfml.training.methods import METHODS, LossConfig
from pfml.training.methods.recipes import recipe_config
from pfml.training.run import RunConfig

__all__ = ["BACKBONE_DIMS", "DATASET_BACKBONES", "base_config"]

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

    All methods share its trunk, batches, schedule and epochs (`pfml.training.methods.recipes`). Of the options of its
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
    """CUB's own configuration; for the other sets its network and optimiser on what the paper says of the set.

    All but Proxy Anchor, robust or not, have mates in their batches, as they were measured (docs/REPRODUCTION.md).
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
