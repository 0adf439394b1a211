"""Heads against the formulas, in loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pfml.models.head import POOLINGS, Head


def pooled_by_loops(tokens: Tensor, pooling: str, prefix: int) -> Tensor:
    """(T, C) -> (C,)."""
    if pooling == "token":
        return tokens[0]
    patches = [tokens[k] for k in range(prefix, len(tokens))]
    average = sum(patches[1:], patches[0]) / len(patches)
    largest = torch.tensor([max(float(patch[c]) for patch in patches) for c in range(tokens.shape[1])])
    return {"avg": average, "max": largest, "avg+max": average + largest}[pooling]


def normalized(values: Tensor) -> Tensor:
    """LayerNorm without parameters."""
    centered = values - values.mean()
    return centered / ((centered**2).mean() + 1e-5).sqrt()


@pytest.mark.parametrize("pooling", ["avg", "max", "avg+max", "token"])
@pytest.mark.parametrize("layer_norm", ["none", "features", "embedding"])
def test_the_embedding_of_tokens_is_that_of_the_formulas(pooling: str, layer_norm: str) -> None:
    head = Head(6, 4, pooling=pooling, layer_norm=layer_norm, num_prefix_tokens=2)
    torch.nn.init.normal_(head.linear.bias)
    tokens = torch.randn(3, 7, 6)
    for embedding, image in zip(head(tokens), tokens, strict=True):
        pooled = pooled_by_loops(image, pooling, 2)
        if layer_norm == "features":
            pooled = normalized(pooled)
        expected = head.linear.weight @ pooled + head.linear.bias
        if layer_norm == "embedding":
            expected = normalized(expected)
        torch.testing.assert_close(embedding, expected / expected.norm())


@pytest.mark.parametrize("pooling", ["avg", "max", "avg+max"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_map_is_pooled_over_its_places(pooling: str, memory_format: torch.memory_format) -> None:
    features = torch.randn(2, 6, 3, 5).to(memory_format=memory_format)
    head = Head(6, None, pooling=pooling)
    expected = [pooled_by_loops(image.flatten(1).T, pooling, 0) for image in features]
    torch.testing.assert_close(head(features), torch.stack([e / e.norm() for e in expected]))


def test_without_a_dimension_the_pooled_features_are_the_embedding_and_there_are_no_parameters() -> None:
    head = Head(6, None)
    assert head.embedding_dim == 6
    assert list(head.parameters()) == []


def test_the_linear_layer_starts_as_kaiming_normal_of_its_outputs_with_zero_bias() -> None:
    head = Head(2000, 500)
    # fan_out and the gain of ReLU: variance 2 / 500
    weight = head.linear.weight.detach()
    assert float(weight.std()) == pytest.approx(math.sqrt(2 / 500), rel=0.01)
    assert float(weight.mean()) == pytest.approx(0.0, abs=1e-3)
    assert not head.linear.bias.any()


def test_the_bias_can_be_left_out() -> None:
    assert Head(6, 4, bias=False).linear.bias is None


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e18])
def test_embeddings_have_unit_length_whatever_the_size_of_features(size: float) -> None:
    points = Head(6, 4)(size * torch.randn(5, 6, 2, 2))
    torch.testing.assert_close(points.norm(dim=1), torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_computed_in_float32_also_under_autocast(dtype: torch.dtype) -> None:
    head = Head(6, 4)
    features = torch.randn(5, 6, 2, 2).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        points = head(features)
    assert points.dtype == torch.float32
    assert torch.equal(points, head(features.float()))


def test_a_head_in_half_precision_gives_unit_vectors_in_float32() -> None:
    points = Head(6, 4).half()(torch.randn(5, 6, 2, 2).half())
    assert points.dtype == torch.float32
    torch.testing.assert_close(points.norm(dim=1), torch.ones(5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "mean"}, "pooling must be one of"),
        ({"layer_norm": "both"}, "layer_norm must be one of"),
        ({"embedding_dim": 0}, "embedding_dim must be a positive integer or None, got 0"),
        ({"pooling": "token"}, "pooling='token' needs a backbone with a CLS token"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Head(6, **{"embedding_dim": 4, **options})


@pytest.mark.parametrize("shape", [(5, 6), (5, 4, 2, 2), (5, 6, 4)])
def test_features_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"features must be a map \(B, 6, h, w\) or tokens \(B, T, 6\), got shape"):
        Head(6, 4)(torch.randn(shape))


@pytest.mark.parametrize("pooling", ["max", "avg+max"])
def test_the_gradient_of_the_maximum_never_compares_it_with_the_features_again(pooling):
    """What torch.compile computes anew need not be equal to it bit by bit."""
    tokens = torch.rand(3, 49, 8, requires_grad=True)
    POOLINGS[pooling](tokens).sum().backward()
    assert ((tokens.grad > 0.5).sum(1) == 1).all()  # each maximum has one place, also among equal values
    tied = torch.ones(1, 4, 1, requires_grad=True)
    POOLINGS["max"](tied).sum().backward()
    assert sorted(tied.grad.flatten().tolist()) == [0, 0, 0, 1]
