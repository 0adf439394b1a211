"""A factorized backbone: sub-blocks add up to the block, one of them is the routed stream, routers choose it."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from pfml.data.preprocessing import Preprocessing
from pfml.models import Embedder, EmbedderConfig, create_embedder, load_embedder
from pfml.models.backbone_table import create_backbone
from pfml.models.factorized import FactorizedBackbone, _parts, gates
from pfml.models.timm_backbone import TimmBackbone

SIZE = 32


class SmallTimm(TimmBackbone):
    """A model of timm's that is small enough for a test."""

    def create(self, *, pretrained):
        options = {"embed_dim": 24, "depth": 2, "num_heads": 6, "img_size": SIZE} if "vit" in self.timm_name else {}
        return timm.create_model(self.timm_name, num_classes=0, global_pool="", **options)


def settled(backbone):
    """Statistics and scales of BatchNorm that are not those of the start, all in evaluation mode."""
    torch.manual_seed(0)
    for layer in backbone.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(std=0.2)
            layer.running_var.uniform_(0.5, 2)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.3)
    return backbone.eval()


BACKBONES = {
    "convnet": lambda: settled(create_backbone("convnet")[0]),
    "resnet18": lambda: settled(SmallTimm("resnet18")),
    "bn_inception": lambda: settled(create_backbone("bn_inception")[0]),
    "vit": lambda: SmallTimm("vit_small_patch16_224", image_size=SIZE).eval(),
}


@pytest.fixture(params=list(BACKBONES))
def factorized(request):
    torch.manual_seed(1)
    return FactorizedBackbone(BACKBONES[request.param](), 3).eval()


def images(count=2):
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))


def choose(backbone, number):
    """Let every router choose this sub-block, whatever it sees."""
    for router in backbone.routers:
        router.forward = lambda seen, width=router.out_features: (
            F.one_hot(torch.tensor(number), width).float().expand(*seen.shape[:-1], width) * 100
        )


def test_the_whole_stream_is_the_ordinary_network(factorized):
    whole, routed, distance = factorized.streams(images())
    torch.testing.assert_close(whole, factorized.inner(images()))
    assert routed.shape == whole.shape
    assert not torch.allclose(routed, whole)
    assert distance.shape == (2,)
    assert (distance > 0).all()


def test_gates_are_one_hot_with_the_gradient_of_the_softmax():
    scores = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 3, dtype=torch.float64)
    chosen = gates(scores)
    assert torch.equal(chosen.round(), F.one_hot(scores.argmax(dim=1), 3).double())
    (mine,) = torch.autograd.grad((chosen * weights).sum(), scores)
    (theirs,) = torch.autograd.grad((scores.softmax(dim=1) * weights).sum(), scores)
    torch.testing.assert_close(mine, theirs)


def test_a_block_is_the_sum_of_its_sub_blocks():
    """Of a residual block before its last ReLU, in double precision, from torch's own layers."""
    backbone = FactorizedBackbone(settled(SmallTimm("resnet18")), 3).double().eval()
    block = backbone.inner.network.layer2[0]
    maps = torch.randn(2, 64, 8, 8, dtype=torch.float64)
    inner = block.act1(block.bn1(block.conv1(maps)))
    whole = block.bn2(block.conv2(inner))
    shift = block.bn2(torch.zeros_like(whole))
    parts = []
    for number in range(3):
        members = [channel for channel in range(128) if channel * 3 // 128 == number]
        kept = torch.zeros_like(inner)
        kept[:, members] = inner[:, members]
        parts.append(block.bn2(block.conv2(kept)) - shift + shift / 3)
    torch.testing.assert_close(sum(parts), whole)
    unit = _parts(backbone.inner, 3).units[2]  # the first block of the second stage
    for number in range(3):
        choose(backbone, number)
        routed, by_gates = unit.routed(maps, backbone.routers[2])
        expected = F.relu(parts[number] + block.downsample(maps))
        torch.testing.assert_close(routed, expected)
        torch.testing.assert_close(by_gates, expected)


@pytest.mark.parametrize(("place", "name"), [(0, "3a"), (2, "3c")], ids=["with all branches", "that halves the image"])
def test_sub_blocks_of_an_inception_module_add_up_before_its_last_relu(place, name):
    """From torch's own layers: every branch has a third of the channels before its last convolution."""
    backbone = FactorizedBackbone(settled(create_backbone("bn_inception")[0]), 3).double().eval()
    unit, layer = _parts(backbone.inner, 3).units[place], lambda part: backbone.inner.get_submodule(part)
    maps = torch.randn(2, unit.width, 4, 4, dtype=torch.float64)

    def normal(part, inner):
        return layer(f"inception_{name}_{part}_bn")(layer(f"inception_{name}_{part}")(inner))

    pool = F.avg_pool2d(maps, 3, 1, padding=1) if name == "3a" else F.max_pool2d(maps, 3, 2, ceil_mode=True)
    inner = {
        "1x1": maps,
        "3x3": F.relu(normal("3x3_reduce", maps)),
        "double_3x3_2": F.relu(normal("double_3x3_1", F.relu(normal("double_3x3_reduce", maps)))),
        "pool_proj": pool,
    }
    if name == "3c":
        inner = {part: inner[part] for part in ("3x3", "double_3x3_2")}
    sums = dict.fromkeys(inner, 0.0)
    for number in range(3):
        expected = []
        for part, before in inner.items():
            channels = before.shape[1]
            kept = before.clone()
            kept[:, [channel for channel in range(channels) if channel * 3 // channels != number]] = 0
            nothing = normal(part, torch.zeros_like(before))
            sub_block = normal(part, kept) - nothing + nothing / 3
            sums[part] = sums[part] + sub_block
            expected.append(F.relu(sub_block))
        expected += [pool] if name == "3c" else []
        choose(backbone, number)
        for routed in unit.routed(maps, backbone.routers[place]):
            torch.testing.assert_close(routed, torch.cat(expected, 1))
    for part, before in inner.items():
        torch.testing.assert_close(sums[part], normal(part, before))


def test_sub_blocks_of_a_transformer_are_those_of_the_authors_conversion():
    """Attention of two heads each and a third of the MLP, with layers cut out of the pretrained ones."""
    backbone = FactorizedBackbone(SmallTimm("vit_small_patch16_224", image_size=SIZE).eval(), 3).double()
    block, dim = backbone.inner.network.blocks[0], 24
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
    tokens = torch.randn(2, 5, dim, dtype=torch.float64)

    def attention(seen, number):
        rows = slice(number * 8, number * 8 + 8)  # two heads of four channels
        query, key, value = (
            (
                seen @ block.attn.qkv.weight[k * dim : (k + 1) * dim][rows].T
                + block.attn.qkv.bias[k * dim : (k + 1) * dim][rows]
            )
            .unflatten(2, (2, 4))
            .transpose(1, 2)
            for k in range(3)
        )
        heads = (query @ key.mT / 2).softmax(dim=-1) @ value
        return heads.transpose(1, 2).flatten(2) @ block.attn.proj.weight[:, rows].T + block.attn.proj.bias / 3

    def mlp(seen, number):
        rows = slice(number * 32, number * 32 + 32)
        hidden = F.gelu(seen @ block.mlp.fc1.weight[rows].T + block.mlp.fc1.bias[rows])
        return hidden @ block.mlp.fc2.weight[:, rows].T + block.mlp.fc2.bias / 3

    first, second = _parts(backbone.inner, 3).units[:2]
    torch.testing.assert_close(
        first.whole(tokens), tokens + sum(attention(block.norm1(tokens), number) for number in range(3))
    )
    torch.testing.assert_close(second.whole(tokens), tokens + sum(mlp(block.norm2(tokens), k) for k in range(3)))
    for unit, part, norm in ((first, attention, block.norm1), (second, mlp, block.norm2)):
        for number in range(3):
            choose(backbone, number)
            for found in unit.routed(tokens, backbone.routers[0]):
                torch.testing.assert_close(found, tokens + part(norm(tokens), number))


def test_the_distance_moves_routers_only(factorized):
    *_, distance = factorized.streams(images())
    distance.sum().backward()
    assert all(router.weight.grad.abs().max() > 0 for router in factorized.routers)
    moved = [name for name, each in factorized.inner.named_parameters() if each.grad is not None and each.grad.any()]
    assert not moved


def test_the_routed_stream_moves_the_network_and_the_routers(factorized):
    _, routed, _ = factorized.streams(images())
    routed.square().sum().backward()
    assert all(router.weight.grad is not None for router in factorized.routers)
    assert all(each.grad is not None for each in factorized.inner.parameters())


def test_in_training_mode_the_routed_stream_leaves_statistics_alone():
    """Only the whole stream counts for them, once."""
    backbone = settled(create_backbone("convnet")[0]).train()
    ordinary = copy.deepcopy(backbone)
    ordinary(images())
    FactorizedBackbone(backbone, 3).train().streams(images())
    for name, value in ordinary.state_dict().items():
        assert torch.equal(backbone.state_dict()[name], value), name


def test_an_embedder_is_the_ordinary_one_with_routers(tmp_path):
    torch.manual_seed(0)
    plain = create_embedder("convnet", embedding_dim=8).eval()
    torch.manual_seed(0)
    embedder = create_embedder("convnet", embedding_dim=8, sub_blocks=3).eval()
    pixels = torch.rand(3, 3, SIZE, SIZE)
    assert torch.equal(embedder(pixels), plain(pixels))
    whole, routed, distance = embedder.routed_features(pixels).split([96, 96, 1], dim=1)
    torch.testing.assert_close(whole, plain.features(pixels))
    assert (distance > 0).all()
    assert not torch.allclose(routed, whole)
    routers = {id(each) for each in embedder.backbone.routers.parameters()}
    assert routers <= {id(each) for each in embedder.head_parameters()}
    assert not routers & {id(each) for each in embedder.backbone_parameters()}
    embedder.save(tmp_path)
    loaded = load_embedder(tmp_path)
    assert torch.equal(loaded.routed_features(pixels), embedder.routed_features(pixels))


def test_published_weights_load_into_it(tmp_path):
    plain = create_embedder("resnet50", weights="none", embedding_dim=8)
    torch.save(plain.backbone.weight_root().state_dict(), tmp_path / "weights.pth")
    config = EmbedderConfig("resnet50", str(tmp_path / "weights.pth"), 8, sub_blocks=3)
    loaded = Embedder(config).backbone.weight_root().state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in plain.backbone.weight_root().state_dict().items())


def test_other_backbones_are_refused_by_name():
    with pytest.raises(ValueError, match="sub_blocks need a ResNet, BN-Inception, .* or the convnet, got EfficientNet"):
        create_embedder("efficientnet_lite0", weights="none", sub_blocks=3)
    with pytest.raises(ValueError, match="sub_blocks must be an integer >= 1, got 0"):
        EmbedderConfig(sub_blocks=0)
    network = Embedder.wrap(nn.Conv2d(3, 4, 3), Preprocessing(8, 8))
    with pytest.raises(ValueError, match="a routed stream needs images and an embedder with sub_blocks"):
        network.routed_features(torch.rand(1, 3, 8, 8))
