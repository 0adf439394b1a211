"""Any torch module as a backbone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pfml.data.preprocessing import Preprocessing
from pfml.models.backbone import Backbone
from pfml.own_code import load_reference, reference_to

__all__ = ["OwnNetwork", "create_own_network", "require_storable"]


class OwnNetwork(Backbone):
    """A network of one's own.

    It maps normalized images (B, 3, H, W) to vectors (B, F), a feature map (B, C, h, w) or tokens (B, T, C).

    Args:
        network: Any module with such a forward.
        preprocessing: What its images look like; one of them passes through it once, to see what comes out.
    """

    def __init__(self, network: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be a torch.nn.Module, got {type(network).__name__}")
        self.network = network
        self.num_features = _num_features(network, preprocessing.crop)
        require_storable(network, "network")

    def weight_root(self) -> nn.Module:
        return self.network

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(images)
        return features[:, :, None, None] if features.ndim == 2 else features


def create_own_network(name: str) -> tuple[nn.Module, Preprocessing]:
    """The network that the function or class `name` returns, and its preprocessing if it returns that too.

    Args:
        name: As in `pfml.own_code`, "my_networks:create"; called without arguments.
    """
    create: Callable[[], Any] = load_reference(name)
    try:
        made = create()
    except TypeError as error:
        raise ValueError(
            f"{name} must make the network when it is called without arguments, got {error}: name a function that "
            f"does, or give the network itself (load_embedder(folder, network=...) in Python)"
        ) from None
    network, preprocessing = made if isinstance(made, tuple) and len(made) == 2 else (made, Preprocessing())
    if not isinstance(network, nn.Module) or not isinstance(preprocessing, Preprocessing):
        raise TypeError(
            f"{name} must return a torch.nn.Module, or one and its pfml.Preprocessing, got {type(made).__name__}"
        )
    return network, preprocessing


def require_storable(module: nn.Module, role: str) -> None:
    """Refuse a module that a file of tensors cannot restore, before any time is spent on it.

    Args:
        module: Of one's own.
        role: What to call it: "network", "loss".
    """
    name = f"the {role} {reference_to(module)}"
    lazy = [key for key, value in module.named_parameters() if isinstance(value, nn.UninitializedParameter)]
    if lazy:
        raise ValueError(f"{name} must know the size of its parameters, but {lazy[0]} is lazy: call it once before")
    state = module.state_dict()
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} cannot be saved: its state_dict has {key!r}, which is {type(value).__name__} and no tensor; "
                f"keep it in a buffer (register_buffer), or make it an argument of the class"
            )
        if value.is_meta or value.is_quantized or value.layout is not torch.strided:
            kind = "on the device meta" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
            raise ValueError(f"{name} cannot be saved: its tensor {key!r} is {kind}; it must be dense, with values")
    left_out = [key for key, _ in module.named_parameters() if key not in state]
    if left_out:
        raise ValueError(f"{name} cannot be saved: its state_dict leaves out the parameter {left_out[0]!r}")


@torch.no_grad()
def _num_features(network: nn.Module, side: int) -> int:
    """F or C, by a gray image of `side` x `side` pixels."""
    name, modes = reference_to(network), {part: part.training for part in network.modules()}
    place = next(iter(network.parameters()), torch.empty(0)).device
    network.eval()
    try:
        features = network(torch.zeros(2, 3, side, side, device=place))
    except Exception as error:  # whatever a network of someone's own stumbles over
        raise ValueError(
            f"the network {name} must take images (B, 3, {side}, {side}), the crop of its preprocessing, got "
            f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        ) from error
    finally:
        for part, training in modes.items():
            part.training = training
    if not isinstance(features, Tensor):
        raise TypeError(
            f"the network {name} must return a tensor, got {type(features).__name__}: "
            f"put it into a module whose forward takes the tensor out"
        )
    if features.ndim not in (2, 3, 4) or len(features) != 2 or not features.is_floating_point():
        raise ValueError(
            f"the network {name} must return vectors (B, F), a map (B, C, h, w) or tokens (B, T, C), "
            f"got {features.dtype} of shape {tuple(features.shape)} for 2 images"
        )
    return features.shape[-1 if features.ndim == 3 else 1]
