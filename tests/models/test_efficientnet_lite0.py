"""EfficientNet-Lite0 against timm's."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

from pfml.models.backbone_table import create_backbone
from pfml.models.timm_backbone import TimmBackbone


@pytest.fixture(scope="module")
def timm_backbone() -> TimmBackbone:
    torch.manual_seed(0)
    return TimmBackbone("tf_efficientnet_lite0")


def test_random_weights_and_their_names_are_those_of_timm(timm_backbone: TimmBackbone) -> None:
    own = create_backbone("efficientnet_lite0")[0].state_dict()
    theirs = timm_backbone.state_dict()
    assert own.keys() == theirs.keys()
    for name, tensor in own.items():
        assert tensor.shape == theirs[name].shape, name
        if tensor.numel() > 5_000:
            assert tensor.std().item() == pytest.approx(theirs[name].std().item(), rel=0.05), name


@pytest.mark.parametrize("size", [64, 75])
@pytest.mark.parametrize("training", [False, True])
def test_features_and_gradients_are_those_of_timm_to_the_bit(
    timm_backbone: TimmBackbone, size: int, training: bool
) -> None:
    own, theirs = create_backbone("efficientnet_lite0")[0], copy.deepcopy(timm_backbone)
    own.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, size, size)
    for backbone in (own, theirs):
        backbone.train(training)
        backbone(images).square().mean().backward()
    for (name, mine), (_, other) in zip(own.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad), name
    for (name, mine), (_, other) in zip(own.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(mine, other), name


def test_its_layers_are_those_of_timm(timm_backbone: TimmBackbone) -> None:
    own = create_backbone("efficientnet_lite0")[0]

    def named(backbone: torch.nn.Module) -> list[set[str]]:
        names = {parameter: name for name, parameter in backbone.named_parameters()}
        return [{names[parameter] for parameter in layer} for layer in backbone.parameter_layers()]

    assert named(own) == named(timm_backbone)


def test_a_model_is_loaded_without_timm(tmp_path) -> None:
    from pfml.models import create_embedder

    create_embedder("efficientnet_lite0", weights="none").save(tmp_path)
    code = (
        f"import sys, pfml; pfml.load_embedder({str(tmp_path)!r}); print({{'timm', 'torchvision'}} & {{*sys.modules}})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"
