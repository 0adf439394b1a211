"""Any model of timm as a backbone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pfml.data.preprocessing import Preprocessing
from pfml.models.backbone import Backbone

__all__ = ["ALIASES", "TimmBackbone", "is_cached"]

#: the field's names -> timm's, with the weights that the field means
ALIASES = {
    "resnet50": "resnet50.tv_in1k",  # torchvision's first weights, as in every paper of the field
    "vit_small": "vit_small_patch16_224",
    "dino_vits16": "vit_small_patch16_224.dino",
    "dinov2_small": "vit_small_patch14_dinov2.lvd142m",
    "dinov3_small": "vit_small_patch16_dinov3.lvd1689m",
}
#: What is seen of an image unless it is said, where the size that the weights were trained with at last is very large.
USUAL_SIZES = {"dinov2_small": 224, "dinov3_small": 224}


def is_cached(name: str) -> bool:
    """Whether the weights of a model whose name has their tag were downloaded before; the network is not asked."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(f"timm/{ALIASES.get(name, name)}", "model.safetensors"), str)


class TimmBackbone(Backbone):
    """A model of timm's without its pooling and classifier, randomly initialized.

    Args:
        name: As `timm.create_model` has it, or one of `ALIASES`.
        image_size: Height and width of the images, for models that are built for one size (vision transformers);
            None for the size that timm's weights were trained with.
    """

    def __init__(self, name: str, *, image_size: int | None = None) -> None:
        super().__init__()
        self.timm_name = ALIASES.get(name, name)
        self.image_size = USUAL_SIZES.get(name) if image_size is None else image_size
        network: Any = self.create(pretrained=False)
        self.network = network
        self.num_features = int(network.num_features)
        self.num_prefix_tokens = int(getattr(network, "num_prefix_tokens", 0))

    def create(self, *, pretrained: bool) -> nn.Module:
        """The bare model, with the weights of timm's hub if `pretrained`."""
        import timm

        options: dict[str, Any] = {}
        if self.image_size is not None and self._is_built_for_a_size():
            options["img_size"] = self.image_size
        return timm.create_model(self.timm_name, pretrained=pretrained, num_classes=0, global_pool="", **options)

    def takes(self, image_size: int) -> bool:
        if not super().takes(image_size):
            return False
        if not self._is_built_for_a_size():
            return True
        with torch.random.fork_rng([]):
            built = TimmBackbone(self.timm_name, image_size=image_size)
        return _shapes(built) == _shapes(self)  # or a model that is saved with this size could not be loaded

    def _is_built_for_a_size(self) -> bool:
        import timm

        published = timm.get_pretrained_cfg(self.timm_name)
        return published is not None and bool(published.fixed_input_size)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network.forward_features(images)
        channels_last = features.ndim == 4 and getattr(self.network, "output_fmt", "NCHW") == "NHWC"
        return features.permute(0, 3, 1, 2) if channels_last else features

    def weight_root(self) -> nn.Module:
        return self.network

    def patch_embedding(self) -> nn.Module | None:
        return getattr(self.network, "patch_embed", None)

    def parameter_layers(self) -> list[list[nn.Parameter]]:
        from timm.models import group_parameters

        matcher = getattr(self.network, "group_matcher", None)
        if matcher is None:
            return super().parameter_layers()
        parameters = dict(self.network.named_parameters())
        groups = group_parameters(self.network, matcher(coarse=False), reverse=False)
        found = ([parameters[name] for name in names if name in parameters] for _, names in sorted(groups.items()))
        return [group for group in found if group]

    def preprocessing(self) -> Preprocessing:
        """Mean, std and interpolation of timm's data configuration, resized to 1 / 0.875 of the crop.

        The field tests with Resize(256) and CenterCrop(224) whatever the crop ratio of the classifier was.
        """
        from timm.data.config import resolve_data_config

        data = resolve_data_config({}, model=self.network)
        crop = int(data["input_size"][-1])
        return Preprocessing(
            resize=round(crop / 0.875),
            crop=crop,
            interpolation="bicubic" if data["interpolation"] == "bicubic" else "bilinear",
            mean=tuple(data["mean"]),
            std=tuple(data["std"]),
        )


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}
