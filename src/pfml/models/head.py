"""From features to a point on the unit sphere."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfml.models.relational import RelationalLayer
from pfml.sphere import unit

__all__ = ["LAYER_NORMS", "POOLINGS", "Head"]

#: The power of generalized mean pooling (Radenovic et al., TPAMI 2019): 1 is the mean, infinity the maximum.
GEM_POWER = 3.0


def _maximum(tokens: Tensor) -> Tensor:
    # Not amax: its gradient looks for the maximum again and divides by how many it finds. In compiled bfloat16 that may
    # be none, the suspected cause of a NaN (docs/STUDENTS.md).
    return tokens.max(1).values


#: pooling -> features (B, T, C) to (B, C); "token" takes the first token, the others never see prefix tokens
POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg": lambda tokens: tokens.mean(1),
    "max": _maximum,
    "avg+max": lambda tokens: tokens.mean(1) + _maximum(tokens),
    "gem": lambda tokens: tokens.clamp_min(1e-6).pow(GEM_POWER).mean(1).pow(1 / GEM_POWER),
    "token": lambda tokens: tokens[:, 0],
}
LAYER_NORMS = ("none", "features", "embedding")


class Head(nn.Module):
    """Pooling, a linear layer and the unit sphere; computed in float32, also under autocast.

    Args:
        num_features: C, the channels of a feature map or the width of tokens.
        embedding_dim: D; None to leave out the linear layer, so that the pooled features are the embedding.
        pooling: "avg", "max", "avg+max" (their sum, as the public Proxy-Anchor and HIST code does),
            "gem" (generalized mean, between mean and maximum, usual in image retrieval) or "token" (the CLS token of a
            vision transformer).
        layer_norm: "none", or LayerNorm without parameters on the pooled "features" (HIER) or on the "embedding"
            before it is put on the sphere (HIST).
        parts: Unit vectors that the embedding consists of, side by side, for methods whose heads are normalized one by
            one (DiVA); the whole is a unit vector again.
        relations: Groups of features with a sub-embedding each, which a `RelationalLayer` integrates in place of the
            linear layer (DRML); 1 for the linear layer.
        bias: Whether the linear layer has one.
        num_prefix_tokens: How many tokens stand before those of the patches.
    """

    def __init__(
        self,
        num_features: int,
        embedding_dim: int | None = 512,
        *,
        pooling: str = "avg",
        layer_norm: str = "none",
        parts: int = 1,
        relations: int = 1,
        bias: bool = True,
        num_prefix_tokens: int = 0,
    ) -> None:
        super().__init__()
        if embedding_dim is not None and (not isinstance(embedding_dim, int) or embedding_dim < 1):
            raise ValueError(f"embedding_dim must be a positive integer or None, got {embedding_dim!r}")
        for name, choice, choices in (
            ("pooling", pooling, tuple(POOLINGS)),
            ("layer_norm", layer_norm, LAYER_NORMS),
        ):
            if choice not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {choice!r}")
        if pooling == "token" and num_prefix_tokens == 0:
            raise ValueError(
                "pooling='token' needs a backbone with a CLS token, such as vit_small or dino_vits16, "
                "got one without; use pooling='avg'"
            )
        self.num_features = num_features
        self.embedding_dim = num_features if embedding_dim is None else embedding_dim
        self.pooling = pooling
        self.layer_norm = layer_norm
        if not isinstance(parts, int) or parts < 1 or self.embedding_dim % parts:
            raise ValueError(f"parts must be a divisor of the {self.embedding_dim} dimensions, got {parts!r}")
        self.parts = parts
        self.num_prefix_tokens = num_prefix_tokens
        self.linear: nn.Linear | None = None
        self.relation: RelationalLayer | None = None
        if not isinstance(relations, int) or relations < 1 or (relations > 1 and embedding_dim is None):
            raise ValueError(f"relations must be an integer >= 1, and 1 without an embedding_dim, got {relations!r}")
        if relations > 1:
            self.relation = RelationalLayer(num_features, self.embedding_dim, relations)
        elif embedding_dim is not None:
            self.linear = nn.Linear(num_features, embedding_dim, bias=bias)
            nn.init.kaiming_normal_(self.linear.weight, mode="fan_out")
            if bias:
                nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Unit vectors (B, D) in float32 of a feature map (B, C, h, w) or of tokens (B, T, C)."""
        with torch.autocast(features.device.type, enabled=False):
            return self.embedded(self.pooled(features))

    def embedded(self, pooled: Tensor) -> Tensor:
        """Unit vectors (B, D) in float32 of what `pooled` returns."""
        with torch.autocast(pooled.device.type, enabled=False):
            vectors = self.projected(pooled)
            if self.parts == 1:
                return unit(vectors)
            return unit(vectors.unflatten(-1, (self.parts, -1))).flatten(-2) / math.sqrt(self.parts)

    def projected(self, pooled: Tensor) -> Tensor:
        """What `embedded` puts on the unit sphere, (B, D) in float32, with its length."""
        with torch.autocast(pooled.device.type, enabled=False):
            layer = self.linear if self.relation is None else self.relation
            vectors = pooled if layer is None else layer(pooled.to(next(layer.parameters()).dtype)).float()
            return F.layer_norm(vectors, (self.embedding_dim,)) if self.layer_norm == "embedding" else vectors

    def nodes(self, pooled: Tensor) -> Tensor:
        """The sub-embeddings of a head with relations, unit vectors (B, K, D / K) in float32."""
        assert self.relation is not None
        with torch.autocast(pooled.device.type, enabled=False):
            return self.relation.nodes(pooled.to(self.relation.score.weight.dtype)).float()

    def pooled(self, features: Tensor, pooling: str | None = None) -> Tensor:
        """What the linear layer gets, or would get with another pooling, (B, C) in float32."""
        pooled = POOLINGS[pooling or self.pooling](self._tokens(features))
        return F.layer_norm(pooled, (self.num_features,)) if self.layer_norm == "features" else pooled

    def extra_repr(self) -> str:
        return f"{self.num_features} -> {self.embedding_dim}, pooling={self.pooling}, layer_norm={self.layer_norm}"

    def _tokens(self, features: Tensor) -> Tensor:
        """What is pooled, (B, T, C) in float32."""
        channels = 1 if features.ndim == 4 else 2
        if features.ndim not in (3, 4) or features.shape[channels] != self.num_features:
            raise ValueError(
                f"features must be a map (B, {self.num_features}, h, w) or tokens (B, T, {self.num_features}), "
                f"got shape {tuple(features.shape)}"
            )
        if features.ndim == 4:
            return features.flatten(2).mT.float()
        return features.float() if self.pooling == "token" else features[:, self.num_prefix_tokens :].float()
