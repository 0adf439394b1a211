"""LoRA: small matrices beside the linear layers of a frozen transformer, by the package peft.

Low-rank adaptation (Hu et al., ICLR 2022) trains W + s B A, with A and B of a small rank, in place of W. Adapters exist
while a run trains. What is saved is the sum: an ordinary model, which needs no peft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pfml.models.backbone import Backbone
from pfml.packages import require_packages

__all__ = ["add_adapters", "merge_adapters", "merged_state"]

#: s is this over the rank, so that rates need not change with the rank.
SCALE = 2


def add_adapters(backbone: Backbone, rank: int) -> list[nn.Parameter]:
    """Put adapters beside all linear layers of `backbone`, in place; their parameters. They change nothing yet.

    Args:
        backbone: A vision transformer.
        rank: Of the adapters.
    """
    require_packages("peft", purpose="lora", install="pfml[lora]")
    from peft import LoraConfig, inject_adapter_in_model

    network = backbone.weight_root()
    merge_adapters(network)  # of a run that was interrupted
    # torch's own attention takes the weights of its layers itself, past any adapter
    hidden = {
        part for layer in network.modules() if isinstance(layer, nn.MultiheadAttention) for part in layer.modules()
    }
    linear = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    targets = [name for name, layer in linear.items() if layer not in hidden]
    if not targets:
        raise ValueError(
            f"lora needs a backbone with linear layers, such as vit_small or dino_vits16, got {type(network).__name__}"
        )
    before = set(network.parameters())
    config = LoraConfig(r=rank, lora_alpha=SCALE * rank, lora_dropout=0.0, target_modules=targets, bias="none")
    inject_adapter_in_model(config, network)
    return [parameter for parameter in network.parameters() if parameter not in before]


@torch.no_grad()
def merge_adapters(module: nn.Module) -> None:
    """Add all adapters in `module` to their layers and take them off."""
    for name, layer in list(_adapted(module)):
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, layer.get_base_layer())
    for part in module.modules():
        vars(part).pop("peft_config", None)  # by which peft would warn of adapters that are gone


@torch.no_grad()
def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """The state_dict that `module` will have after `merge_adapters`; it stays as it is."""
    state = module.state_dict()
    for name, layer in _adapted(module):
        own = {key: state.pop(key) for key in list(state) if key.startswith(f"{name}.")}
        base = {key.removeprefix(f"{name}.base_layer."): value for key, value in own.items() if ".base_layer." in key}
        base["weight"] = base["weight"] + layer.get_delta_weight("default").to(base["weight"].dtype)
        state |= {f"{name}.{key}": value for key, value in base.items()}
    return state


def _adapted(module: nn.Module) -> list[tuple[str, Any]]:
    """The layers with an adapter, by name."""
    return [(name, layer) for name, layer in module.named_modules() if hasattr(layer, "lora_A")]
