"""Backbones by name."""

from __future__ import annotations

import pytest
import torch

from pfml.data.preprocessing import Preprocessing
from pfml.models.backbone_table import BACKBONES, create_backbone, default_weights
from pfml.models.timm_backbone import ALIASES, TimmBackbone
from pfml.suggest.suggestion import LARGER

HALF = (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [
        ("convnet", 32, (2, 96, 8, 8)),
        ("bn_inception", 64, (2, 1024, 2, 2)),
        ("resnet50_he", 64, (2, 2048, 2, 2)),
        ("efficientnet_lite0", 64, (2, 1280, 2, 2)),
        ("resnet10t", 64, (2, 512, 2, 2)),
    ],
)
def test_a_convolutional_backbone_gives_a_map_of_num_features_channels(
    name: str, size: int, shape: tuple[int, ...]
) -> None:
    backbone, _ = create_backbone(name)
    with torch.no_grad():
        assert backbone.eval()(torch.rand(2, 3, size, size)).shape == shape
    assert backbone.num_features == shape[1]
    assert backbone.num_prefix_tokens == 0
    assert backbone.patch_embedding() is None


def test_a_vision_transformer_gives_tokens_the_first_of_which_is_its_prefix() -> None:
    backbone, preprocessing = create_backbone("vit_tiny_patch16_224", image_size=48)
    with torch.no_grad():
        assert backbone(torch.rand(2, 3, 48, 48)).shape == (2, 1 + 9, 192)
    assert (backbone.num_features, backbone.num_prefix_tokens) == (192, 1)
    assert isinstance(backbone.patch_embedding(), torch.nn.Module)
    assert (preprocessing.resize, preprocessing.crop) == (55, 48)


def test_a_map_with_channels_last_is_turned() -> None:
    backbone, _ = create_backbone("swin_tiny_patch4_window7_224", image_size=64)
    with torch.no_grad():
        assert backbone(torch.rand(1, 3, 64, 64)).shape == (1, 768, 2, 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("convnet", Preprocessing(resize=32, crop=32, mean=HALF, std=HALF)),
        ("resnet50_he", Preprocessing()),
        ("efficientnet_lite0", Preprocessing(interpolation="bicubic", mean=HALF, std=HALF)),
        (
            "bn_inception",
            Preprocessing(mean=(104.0, 117.0, 128.0), std=(1.0, 1.0, 1.0), channel_order="bgr", value_scale=255.0),
        ),
    ],
)
def test_special_backbones_have_the_preprocessing_of_their_weights(name: str, expected: Preprocessing) -> None:
    assert BACKBONES[name].preprocessing == expected


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("resnet50", Preprocessing()),
        ("vit_small", Preprocessing(interpolation="bicubic", mean=HALF, std=HALF)),
        ("dino_vits16", Preprocessing(interpolation="bicubic")),
    ],
)
def test_an_alias_has_the_preprocessing_of_the_field(alias: str, expected: Preprocessing) -> None:
    _, preprocessing = create_backbone(alias)
    assert preprocessing == expected


def test_aliases_name_the_weights_that_the_field_means() -> None:
    import timm

    published = {alias: timm.get_pretrained_cfg(name) for alias, name in ALIASES.items()}
    assert published["resnet50"].tag == "tv_in1k"
    assert published["dino_vits16"].tag == "dino"
    assert published["vit_small"].architecture == "vit_small_patch16_224"


def test_timm_weights_for_another_input_are_resized_by_the_same_ratio() -> None:
    preprocessing = TimmBackbone("resnet10t").preprocessing()  # trained at 176
    assert (preprocessing.resize, preprocessing.crop) == (201, 176)


def test_the_short_side_before_the_crop_may_be_another() -> None:
    preprocessing = create_backbone("resnet50_he", image_size=227, resize=256)[1]
    assert (preprocessing.resize, preprocessing.crop) == (256, 227)
    assert create_backbone("resnet50_he", resize=288)[1].resize == 288


def test_image_size_keeps_the_ratio_of_crop_to_resize() -> None:
    assert create_backbone("convnet", image_size=28)[1].resize == 28
    resized = create_backbone("resnet50_he", image_size=112)[1]
    assert (resized.resize, resized.crop) == (128, 112)


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ValueError, match=r"got 'resnet5O'; nearest: .*resnet50"):
        create_backbone("resnet5O")
    with pytest.raises(ValueError, match=r"got 'bn-inception'; nearest: bn_inception"):
        create_backbone("bn-inception")
    with pytest.raises(ValueError, match=r"one of convnet, .*, a model name of timm's, or module:function, got '\?'$"):
        create_backbone("?")


def test_default_weights_are_what_is_usual_for_the_backbone() -> None:
    names = ("convnet", "efficientnet_lite0", "bn_inception", "resnet50_he", "resnet50", "resnet18")
    assert [default_weights(name) for name in names] == ["none", "package", "file", "file", "hub", "hub"]


def test_weights_lie_in_the_cache_under_the_name_that_timm_has_for_them() -> None:
    import timm

    for name in LARGER:  # those that are looked for there
        assert timm.get_pretrained_cfg(ALIASES[name]).hf_hub_id == f"timm/{ALIASES[name]}"
