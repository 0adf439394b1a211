"""Backbones by name: a table of the special ones, timm's, and networks of one's own."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace

from pfml.data.preprocessing import Preprocessing
from pfml.models.backbone import Backbone
from pfml.models.bn_inception import BNInception
from pfml.models.efficientnet_lite0 import EfficientNetLite0
from pfml.models.own_network import OwnNetwork, create_own_network
from pfml.models.resnet_he import ResNet50He
from pfml.models.small_convnet import SmallConvNet
from pfml.models.timm_backbone import ALIASES, TimmBackbone
from pfml.own_code import is_reference

__all__ = ["BACKBONES", "SpecialBackbone", "create_backbone", "default_weights"]

HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class SpecialBackbone:
    """A backbone that is not simply a model of timm's hub.

    Args:
        build: Makes the backbone for images of a size, randomly initialized.
        preprocessing: What its published weights were trained with.
        default_weights: What "default" stands for: see `pfml.models.weights.load_weights`; "file" if none come with
            the package, so that the user must name a file.
    """

    build: Callable[[int | None], Backbone]
    preprocessing: Preprocessing
    default_weights: str


BACKBONES: dict[str, SpecialBackbone] = {
    "convnet": SpecialBackbone(
        lambda image_size: SmallConvNet(),
        Preprocessing(resize=32, crop=32, mean=HALF, std=HALF),
        default_weights="none",
    ),
    "bn_inception": SpecialBackbone(
        lambda image_size: BNInception(),
        Preprocessing(mean=(104.0, 117.0, 128.0), std=(1.0, 1.0, 1.0), channel_order="bgr", value_scale=255.0),
        default_weights="file",
    ),
    "resnet50_he": SpecialBackbone(
        lambda image_size: ResNet50He(),
        Preprocessing(),
        default_weights="file",
    ),
    "efficientnet_lite0": SpecialBackbone(
        lambda image_size: EfficientNetLite0(),
        Preprocessing(interpolation="bicubic", mean=HALF, std=HALF),
        default_weights="package",
    ),
}


def create_backbone(
    name: str, *, image_size: int | None = None, resize: int | None = None
) -> tuple[Backbone, Preprocessing]:
    """A randomly initialized backbone and the preprocessing that its published weights expect.

    Args:
        name: A key of `BACKBONES`, an alias ("resnet50", "vit_small", "dino_vits16", ...), any model name of timm's, or
            what makes a network of one's own, "module:function" (see `pfml.own_code`).
        image_size: Another height and width of the crop that the backbone sees; the short side is resized to
            1 / 0.875 of it (256 for 224, the protocol of the field), or to the size itself for the small convnet.
        resize: Another length of the short side before that crop.
    """
    if name in BACKBONES:
        special = BACKBONES[name]
        return special.build(image_size), with_image_size(special.preprocessing, image_size, resize)
    if is_reference(name):
        network, preprocessing = create_own_network(name)
        preprocessing = with_image_size(preprocessing, image_size, resize)
        return OwnNetwork(network, preprocessing), preprocessing
    refuse_unknown(name)
    backbone = TimmBackbone(name, image_size=image_size)
    return backbone, with_image_size(backbone.preprocessing(), backbone.image_size, resize)


def default_weights(name: str) -> str:
    """What weights="default" stands for with this backbone."""
    if is_reference(name):
        return "own"
    return BACKBONES[name].default_weights if name in BACKBONES else "hub"


def refuse_unknown(name: str) -> None:
    """Raise ValueError with the nearest names if there is no such backbone."""
    import timm

    own = (*BACKBONES, *ALIASES)
    if name in own or timm.is_model(name):
        return
    near = difflib.get_close_matches(name, [*own, *timm.list_models()], n=4, cutoff=0.5)
    raise ValueError(
        f"backbone must be one of {', '.join(own)}, a model name of timm's, or module:function, got {name!r}"
        + (f"; nearest: {', '.join(near)}" if near else "")
    )


def with_image_size(preprocessing: Preprocessing, image_size: int | None, resize: int | None = None) -> Preprocessing:
    """The same preprocessing for crops of another size, at the same ratio of crop to resize unless that is given."""
    crop = preprocessing.crop if image_size is None else image_size
    usual = round(crop * preprocessing.resize / preprocessing.crop)
    return replace(preprocessing, resize=usual if resize is None else resize, crop=crop)
