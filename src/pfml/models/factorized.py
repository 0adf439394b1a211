"""A backbone whose blocks consist of sub-blocks, with routers that send each image through one of them (DFML).

Deep Factorized Metric Learning (Wang et al., CVPR 2023) splits every block of a pretrained network into G sub-blocks
that add up to it, so that the whole network is the ordinary one, with its weights. A router, a linear layer without a
bias, sees the input of a block and chooses one sub-block. Training follows two streams: the whole network, and the one
that is routed. Outside of training there is nothing but the ordinary network.

What makes a sub-block is the last linear map of a block: its input channels are divided into G groups, and its bias by
G. With pre-activation h in groups h_1 ... h_G and the one-hot choice p of the router (straight-through: its gradient is
that of the softmax),

    block(x) = W h + b,    routed block(x) = W (p_1 h_1, ..., p_G h_G) + b / G

- In a vision transformer, as in the authors' code: heads of attention and hidden units of the MLP, a choice for each
  token. The router of attention sees the normalized tokens, that of the MLP the tokens as they are.
- In a ResNet, which their code does not have: channels before the last convolution of a block, a choice for each image
  by its mean input. So with the convnet of small images, convolution by convolution, and with BN-Inception: one choice
  for the last convolutions of all branches of a module.

BatchNorm takes its running statistics in the routed stream, whatever it does in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfml.models.backbone import Backbone
from pfml.models.bn_inception import INCEPTIONS, BNInception, Inception, branch_names
from pfml.models.resnet_he import ResNet50He
from pfml.models.small_convnet import SmallConvNet
from pfml.models.timm_backbone import TimmBackbone

__all__ = ["FactorizedBackbone", "gates"]


class FactorizedBackbone(Backbone):
    """An ordinary backbone with routers.

    Args:
        inner: The backbone: a ResNet or vision transformer of timm's, "resnet50_he", "bn_inception" or "convnet".
        sub_blocks: G.
    """

    def __init__(self, inner: Backbone, sub_blocks: int) -> None:
        super().__init__()
        self.num_features = inner.num_features
        self.num_prefix_tokens = inner.num_prefix_tokens
        self.published_weights = inner.published_weights
        self.inner = inner
        self.sub_blocks = sub_blocks
        widths = [unit.width for unit in _parts(inner, sub_blocks).units]
        self.routers = nn.ModuleList(nn.Linear(width, sub_blocks, bias=False) for width in widths)
        for weight in self.routers.parameters():
            nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.inner(images)
        return features

    def streams(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features of the whole network, those of the routed stream, and how far its blocks are from whole ones, (B,).

        That distance is the sum over positions and blocks of |routed - whole|, over the number of blocks. Only routers
        receive its gradient.
        """
        parts = _parts(self.inner, self.sub_blocks)
        whole = routed = parts.stem(images)
        distance = torch.zeros(len(images), device=images.device)
        for unit, router in zip(parts.units, self.routers, strict=True):
            whole = unit.whole(whole)
            routed, by_gates = unit.routed(routed, router)
            apart = torch.linalg.vector_norm(by_gates.float() - whole.detach().float(), dim=1 if whole.ndim == 4 else 2)
            distance = distance + apart.flatten(1).sum(dim=1)
        return parts.last(whole), parts.last(routed), distance / parts.depth

    def new_parameters(self) -> list[nn.Parameter]:
        return list(self.routers.parameters())

    def weight_root(self) -> nn.Module:
        return self.inner.weight_root()

    def patch_embedding(self) -> nn.Module | None:
        return self.inner.patch_embedding()

    def takes(self, image_size: int) -> bool:
        return self.inner.takes(image_size)

    def parameter_layers(self) -> list[list[nn.Parameter]]:
        return self.inner.parameter_layers()


def gates(scores: Tensor) -> Tensor:
    """The largest score of the last dimension as one-hot numbers; their gradient is that of the softmax."""
    soft = scores.softmax(dim=-1)
    hard = F.one_hot(soft.argmax(dim=-1), scores.shape[-1]).to(soft.dtype)
    return (hard - soft).detach() + soft


class _Parts:
    """What a stream passes through: a stem, units of a whole and a routed way, and what comes last."""

    def __init__(self, stem: Callable[[Tensor], Tensor], units: list[Any], depth: int) -> None:
        self.stem, self.units, self.depth = stem, units, depth
        self.last: Callable[[Tensor], Tensor] = nn.Identity()


def _parts(inner: Backbone, count: int) -> _Parts:
    network: Any = inner.network if isinstance(inner, TimmBackbone) else inner
    if isinstance(network, SmallConvNet):
        return _of_convnet(network, count)
    if isinstance(network, BNInception):
        return _of_inception(network, count)
    if isinstance(network, ResNet50He) or hasattr(network, "layer4"):
        return _of_resnet(network, count)
    if hasattr(network, "blocks") and hasattr(network, "patch_embed") and hasattr(network, "_pos_embed"):
        return _of_transformer(network, count)
    raise ValueError(
        f"sub_blocks need a ResNet, BN-Inception, a vision transformer or the convnet, got {type(network).__name__}; "
        f"choose the backbone resnet50 or vit_small, or sub_blocks 1"
    )


def _spread(choice: Tensor, channels: int) -> Tensor:
    """Gates (..., G) for each of so many channels, in groups of neighbors, (..., channels)."""
    groups = torch.arange(channels, device=choice.device) * choice.shape[-1] // channels
    return choice.index_select(-1, groups)


class _Convolution:
    """The last convolution of a residual block, or one of the convnet's, and what stands before and after it.

    Args:
        whole: The ordinary way.
        before: From the input to what the convolution sees, without an effect on BatchNorm.
        convolution, norm: Which is factorized, and the BatchNorm after it.
        between: From the convolution to BatchNorm.
        shortcut: What is added before the last ReLU; None for nothing.
        width: Channels of the input.
        count: G.
    """

    def __init__(
        self,
        whole: Callable[[Tensor], Tensor],
        before: Callable[[Tensor], Tensor],
        convolution: nn.Conv2d,
        norm: nn.BatchNorm2d,
        *,
        between: Callable[[Tensor], Tensor] | None = None,
        shortcut: Callable[[Tensor], Tensor] | None = None,
        width: int,
        count: int,
    ) -> None:
        self.whole, self.before, self.convolution, self.norm = whole, before, convolution, norm
        self.between, self.shortcut, self.width, self.count = between, shortcut, width, count

    def routed(self, maps: Tensor, router: nn.Linear) -> tuple[Tensor, Tensor]:
        mean = maps.mean(dim=(2, 3))
        inner, added = self.before(maps), None if self.shortcut is None else self.shortcut(maps)
        by_gates = self.ended(inner.detach(), gates(router(mean.detach())), added, detached=True)
        return self.ended(inner, gates(router(mean)), added, detached=False), by_gates

    def ended(self, inner: Tensor, choice: Tensor, added: Tensor | None, *, detached: bool) -> Tensor:
        """What the convolution and all after it make of the channels of `inner` that were chosen."""
        layer, scale, shift = self.convolution, *_affine(self.norm)
        weight, bias = layer.weight, layer.bias
        if bias is not None:
            shift = shift + scale * bias
        if detached:
            weight, scale, shift, added = weight.detach(), scale.detach(), shift.detach(), _detached(added)
        chosen = inner * _spread(choice, inner.shape[1])[:, :, None, None].to(inner.dtype)
        maps = F.conv2d(chosen, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
        maps = maps if self.between is None else self.between(maps)
        maps = maps * scale[:, None, None] + shift[:, None, None] / self.count
        return F.relu(maps if added is None else maps + added)


class _Branches:
    """A module of BN-Inception: branches side by side, with one choice for all.

    Args:
        whole: The ordinary way.
        branches: Those that end in a convolution.
        passed: What the last branch is if it has none; None if there is no such branch.
    """

    def __init__(
        self,
        whole: Callable[[Tensor], Tensor],
        branches: list[_Convolution],
        passed: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.whole, self.branches, self.passed, self.width = whole, branches, passed, branches[0].width

    def routed(self, maps: Tensor, router: nn.Linear) -> tuple[Tensor, Tensor]:
        mean = maps.mean(dim=(2, 3))
        choice, by_gates = gates(router(mean)), gates(router(mean.detach()))
        parts, chosen = [], []
        for branch in self.branches:
            inner = branch.before(maps)
            parts.append(branch.ended(inner, choice, None, detached=False))
            chosen.append(branch.ended(inner.detach(), by_gates, None, detached=True))
        if self.passed is not None:
            parts.append(self.passed(maps))
            chosen.append(parts[-1].detach())
        return torch.cat(parts, dim=1), torch.cat(chosen, dim=1)


def _detached(maps: Tensor | None) -> Tensor | None:
    return None if maps is None else maps.detach()


def _affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """The scale and shift of a BatchNorm with its running statistics, (C,) each."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    return scale, norm.bias - norm.running_mean * scale


def _settled(layers: Iterator[nn.Module] | list[nn.Module], maps: Tensor) -> Tensor:
    """`maps` through the layers, BatchNorm with its running statistics."""
    for layer in layers:
        if isinstance(layer, nn.BatchNorm2d):
            scale, shift = _affine(layer)
            maps = maps * scale[:, None, None] + shift[:, None, None]
        else:
            maps = layer(maps)
    return maps


def _of_resnet(network: Any, count: int) -> _Parts:
    def stem(images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(network.bn1(network.conv1(images))), 3, 2, padding=1)

    if not isinstance(getattr(network, "maxpool", nn.MaxPool2d(3)), nn.MaxPool2d):
        raise ValueError("sub_blocks need a ResNet that begins with a convolution and max-pooling, such as resnet50")
    blocks = [block for number in range(1, 5) for block in network.get_submodule(f"layer{number}")]
    return _Parts(stem, [_of_residual(block, count) for block in blocks], len(blocks))


def _of_residual(block: Any, count: int) -> _Convolution:
    if getattr(block, "se", None) is not None or not isinstance(getattr(block, "act1", nn.ReLU()), nn.ReLU):
        raise ValueError("sub_blocks need a ResNet of plain blocks with ReLU, such as resnet50")
    pairs = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
    if hasattr(block, "conv3"):
        pairs.append((block.conv3, block.bn3))
    *first, (convolution, norm) = pairs

    def before(maps: Tensor) -> Tensor:
        for layer, its_norm in first:
            maps = F.relu(_settled([layer, its_norm], maps))
        return maps

    def shortcut(maps: Tensor) -> Tensor:
        layers = block.downsample
        return maps if layers is None or isinstance(layers, nn.Identity) else _settled(layers, maps)

    width = block.conv1.in_channels
    return _Convolution(block, before, convolution, norm, shortcut=shortcut, width=width, count=count)


def _of_inception(network: BNInception, count: int) -> _Parts:
    units = [_of_module(network, module, count) for module in INCEPTIONS]
    return _Parts(network.stem, units, len(units))


def _of_module(network: BNInception, module: Inception, count: int) -> _Branches:
    names = branch_names(module)
    width = network.get_submodule(names[1][0]).get_parameter("weight").shape[1]

    def branch(names: tuple[str, ...], start: Callable[[Tensor], Tensor]) -> _Convolution:
        pairs = [[network.get_submodule(name), network.get_submodule(f"{name}_bn")] for name in names]
        *first, (convolution, norm) = pairs
        assert isinstance(convolution, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)

        def before(maps: Tensor) -> Tensor:
            maps = start(maps)
            for pair in first:
                maps = F.relu(_settled(pair, maps))
            return maps

        return _Convolution(nn.Identity(), before, convolution, norm, width=width, count=count)

    def pooled(maps: Tensor) -> Tensor:
        return network.pooled(module, maps)

    *direct, projection = names
    branches = [branch(each, nn.Identity()) for each in direct]
    if projection:
        branches.append(branch(projection, pooled))
    return _Branches(lambda maps: network.inception(module, maps), branches, None if projection else pooled)


def _of_convnet(network: SmallConvNet, count: int) -> _Parts:
    layers = list(network.layers)
    starts = [place for place, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    stages = [layers[start:end] for start, end in zip(starts, [*starts[1:], len(layers)], strict=True)]

    def unit(stage: list[nn.Module]) -> _Convolution:
        convolution, *pooling, norm, _ = stage
        assert isinstance(convolution, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        between = pooling[0] if pooling else None
        whole = nn.Sequential(*stage)
        return _Convolution(
            whole, nn.Identity(), convolution, norm, between=between, width=convolution.in_channels, count=count
        )

    return _Parts(nn.Sequential(*stages[0]), [unit(stage) for stage in stages[1:]], len(stages) - 1)


class _Attention:
    """The attention of a transformer's block, by groups of heads."""

    def __init__(self, block: Any, count: int) -> None:
        self.block, self.count, self.width = block, count, block.attn.qkv.in_features

    def whole(self, tokens: Tensor) -> Tensor:
        block = self.block
        added: Tensor = block.drop_path1(block.ls1(block.attn(block.norm1(tokens))))
        return tokens + added

    def routed(self, tokens: Tensor, router: nn.Linear) -> tuple[Tensor, Tensor]:
        block, attention = self.block, self.block.attn
        seen = block.norm1(tokens)
        batch, length, _ = seen.shape
        split = attention.qkv(seen).reshape(batch, length, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = attention.q_norm(split[0]), attention.k_norm(split[1]), split[2]
        heads = F.scaled_dot_product_attention(query, key, value, scale=attention.scale).transpose(1, 2)
        inner = heads.reshape(batch, length, -1)
        # whole heads: a group of heads is a group of their channels
        return _added(tokens, inner, seen, router, attention.proj, block.ls1, self.count, attention.num_heads)


class _Mlp:
    """The MLP of a transformer's block, by groups of hidden units."""

    def __init__(self, block: Any, count: int) -> None:
        self.block, self.count, self.width = block, count, block.mlp.fc1.in_features

    def whole(self, tokens: Tensor) -> Tensor:
        block = self.block
        added: Tensor = block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))
        return tokens + added

    def routed(self, tokens: Tensor, router: nn.Linear) -> tuple[Tensor, Tensor]:
        block, mlp = self.block, self.block.mlp
        inner = mlp.norm(mlp.act(mlp.fc1(block.norm2(tokens))))
        return _added(tokens, inner, tokens, router, mlp.fc2, block.ls2, self.count, inner.shape[2])


def _added(
    tokens: Tensor,
    inner: Tensor,
    seen: Tensor,
    router: nn.Linear,
    layer: nn.Linear,
    scaled: Callable[[Tensor], Tensor],
    count: int,
    units: int,
) -> tuple[Tensor, Tensor]:
    """Tokens plus the last layer of what the router leaves of its input; and with the gradient of the gates only.

    Args:
        tokens: (B, T, C).
        inner: What the layer gets, (B, T, I).
        seen: What the router sees.
        router, layer: Linear layers.
        scaled: What follows the layer.
        count: G.
        units: How many pieces `inner` consists of, that stay whole.
    """

    def kept(choice: Tensor) -> Tensor:
        return _spread(choice, units).repeat_interleave(inner.shape[2] // units, dim=-1).to(inner.dtype)

    bias = layer.bias / count
    routed = tokens + scaled(F.linear(inner * kept(gates(router(seen))), layer.weight, bias))
    chosen = inner.detach() * kept(gates(router(seen.detach())))
    return routed, tokens.detach() + scaled(F.linear(chosen, layer.weight.detach(), bias.detach()))


def _of_transformer(network: Any, count: int) -> _Parts:
    def stem(images: Tensor) -> Tensor:
        tokens: Tensor = network.norm_pre(network.patch_drop(network._pos_embed(network.patch_embed(images))))
        return tokens

    block = network.blocks[0]
    plain = all(hasattr(block, name) for name in ("norm1", "attn", "ls1", "norm2", "mlp", "ls2"))
    if not plain or not hasattr(block.attn, "qkv") or not hasattr(block.mlp, "fc2") or block.mlp.fc2.bias is None:
        raise ValueError("sub_blocks need a plain vision transformer, such as vit_small or dino_vits16")
    units = [unit for block in network.blocks for unit in (_Attention(block, count), _Mlp(block, count))]
    parts = _Parts(stem, units, len(network.blocks))
    parts.last = network.norm
    return parts
