"""HIST (Lim et al., CVPR 2022): a Gaussian per class, and a hypergraph of a batch's samples and classes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.checks import check_batch
from pfml.losses.perceptron import linear
from pfml.sphere import unit

__all__ = ["HISTLoss", "HypergraphNetwork"]


class HISTLoss(nn.Module):
    """Samples near the Gaussian of their class, and classified together with those that resemble them.

    With x and the class means m_c on the unit sphere and variances v_c = exp(relu6(log_variances)):

        d2(x, c) = sum over dimensions of (x - m_c)^2 / v_c
        loss     = mean over x of -log softmax over all classes of (-tau * d2(x, c)), at x's class
                 + hypergraph_weight * mean over x of the cross entropy of the `HypergraphNetwork`'s class scores

    In the hypergraph the batch's samples are nodes, its classes are hyperedges, and a sample belongs to its own class
    to the degree 1, to another class of the batch to the degree exp(-alpha * d2(x, c)). Gradients flow through it all.
    Computed in float32 at least, whatever autocast says; checked as `PotentialFieldLoss` is.

    Published, in the authors' code: all of the above with tau 32 (SOP 16), alpha 1.1 on CUB, 0.9 on Cars, 2 on SOP,
    hypergraph_weight 1, 512 hidden units. Adam, weight decay on everything; backbone 1.2e-4 on CUB, else 1e-4; means
    and log-variances 0.1 (SOP 0.01); network 6e-4 on CUB, else 1e-3. The defaults of alpha and network_lr are Cars'
    values. A network that is much slower than that stays at chance, log C: look at `terms["hypergraph"]`.

    Ours: the network sees sqrt(D) times the point on the sphere. That is what the published network, whose embeddings
    end in a layer norm, sees; here it does not depend on the length of the embeddings. Probabilities that underflow
    count, where the code leaves out such samples. An empty batch has loss 0.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        tau: Sharpness of the softmax over distances.
        alpha: How fast a sample ceases to belong to another class with distance.
        hypergraph_weight: Weight of the classification by the hypergraph; at 0 the network is not used.
        hidden_dim: Hidden units of the network.
        network_lr: Learning rate of the network, whatever that of the class Gaussians is; a schedule lowers both alike.

    Attributes:
        terms: Both terms of the last value, detached, before `hypergraph_weight`: "gaussians" and "hypergraph".
    """

    proxies: nn.Parameter  # (C, 1, D): the means, before normalization
    log_variances: nn.Parameter  # (C, D), before relu6

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        tau: float = 32.0,
        alpha: float = 0.9,
        hypergraph_weight: float = 1.0,
        hidden_dim: int = 512,
        network_lr: float = 1e-3,
    ) -> None:
        super().__init__()
        for name, size in (("num_classes", num_classes), ("embedding_dim", embedding_dim), ("hidden_dim", hidden_dim)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        for name, value in (("tau", tau), ("alpha", alpha), ("network_lr", network_lr)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not 0 <= hypergraph_weight < math.inf:
            raise ValueError(f"hypergraph_weight must be finite and not negative, got {hypergraph_weight}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.tau = tau
        self.alpha = alpha
        self.hypergraph_weight = hypergraph_weight
        self.hidden_dim = hidden_dim
        self.network_lr = network_lr
        self.terms: dict[str, Tensor] = {}
        # kaiming_normal with fan_out for both, as published
        spread = math.sqrt(2 / num_classes)
        self.proxies = nn.Parameter(torch.randn(num_classes, 1, embedding_dim) * spread)
        self.log_variances = nn.Parameter(torch.randn(num_classes, embedding_dim) * spread)
        self.network = HypergraphNetwork(embedding_dim, hidden_dim, num_classes)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        labels = check_batch(embeddings, labels, self.proxies)
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, self.proxies.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            points = unit(embeddings.to(wide))  # (batch, D)
            distances = self._squared_distances(points)  # (batch, C)
            count = max(len(labels), 1)
            loss = F.cross_entropy(-self.tau * distances, labels, reduction="sum") / count
            self.terms = {"gaussians": loss.detach()}
            if self.hypergraph_weight > 0:
                incidence = self._incidence(distances, labels)  # (batch, C)
                scores = self.network(math.sqrt(self.embedding_dim) * points, incidence)  # (batch, C)
                classified = F.cross_entropy(scores, labels, reduction="sum") / count
                self.terms["hypergraph"] = classified.detach()
                loss = loss + self.hypergraph_weight * classified
            return loss

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Two groups: the class Gaussians with `lr`, and the network with `network_lr`."""
        gaussians = {"params": [self.proxies, self.log_variances], "lr": lr, "weight_decay": weight_decay}
        if self.hypergraph_weight == 0:
            return [gaussians]
        network = {"params": list(self.network.parameters()), "lr": self.network_lr, "weight_decay": weight_decay}
        return [gaussians, network]

    def proxy_points(self) -> Tensor:
        """Where the means of the classes are on the unit sphere, (C, 1, D), detached."""
        return unit(self.proxies.detach())

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.embedding_dim}, tau={self.tau}, alpha={self.alpha}, "
            f"hypergraph_weight={self.hypergraph_weight}, hidden_dim={self.hidden_dim}, "
            f"network_lr={self.network_lr}"
        )

    def _squared_distances(self, points: Tensor) -> Tensor:
        """d2, (batch, C), of points (batch, D) on the sphere.

        As products of matrices, since (batch, C, D) would be gigabytes for the classes of SOP. That rounds d2 by some
        1e-7, also near 0, and is harmless here: the loss is smooth in d2, which has no root or power taken of it.
        """
        means = unit(self.proxies[:, 0].to(points.dtype))  # (C, D)
        precisions = torch.exp(-F.relu6(self.log_variances.to(points.dtype)))  # (C, D)
        crossed = points.square() @ precisions.T - 2 * points @ (means * precisions).T  # (batch, C)
        return crossed + (means.square() * precisions).sum(dim=1)

    def _incidence(self, distances: Tensor, labels: Tensor) -> Tensor:
        """To what degree samples belong to classes, (batch, C); 0 for classes without a sample in the batch."""
        own = F.one_hot(labels, self.num_classes).bool()  # (batch, C)
        degrees = torch.where(own, 1.0, torch.exp(-self.alpha * distances))
        return torch.where(own.any(dim=0), degrees, 0.0)


class HypergraphNetwork(nn.Module):
    """Two layers of a hypergraph network (Feng et al., AAAI 2019): class scores of a batch's nodes.

    With incidence H, node degrees V = diag(row sums of H) and hyperedge degrees E = diag(column sums of H):

        G      = V^-1/2 H E^-1 H^T V^-1/2
        scores = G linear2(leaky_relu(batch_norm(G linear1(nodes)), 0.1))

    In training mode the batch norm takes the statistics of the batch, and its running statistics, which are part of the
    state_dict, follow; in evaluation mode it takes those. A single node has no variance: it is normalized by the
    running statistics in training mode too, and leaves them as they are.

    Args:
        in_dim: D.
        hidden_dim: Width of the layer between.
        num_classes: C.
    """

    def __init__(self, in_dim: int, hidden_dim: int, num_classes: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(in_dim, hidden_dim)
        self.batch_norm = nn.BatchNorm1d(hidden_dim)  # holds parameters and statistics; see `_normalized`
        self.linear2 = nn.Linear(hidden_dim, num_classes)

    def forward(self, nodes: Tensor, incidence: Tensor) -> Tensor:
        """Scores (batch, C) of nodes (batch, D), given incidence (batch, hyperedges); an empty hyperedge is ignored."""
        spread = _propagation(incidence)
        hidden = self._normalized(spread @ linear(self.linear1, nodes))
        return spread @ linear(self.linear2, F.leaky_relu(hidden, 0.1))

    def _normalized(self, hidden: Tensor) -> Tensor:
        """The batch norm in the dtype of `hidden`, whatever that of its parameters is."""
        norm = self.batch_norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        dtype, learns = hidden.dtype, self.training and len(hidden) > 1
        mean, variance = norm.running_mean.to(dtype), norm.running_var.to(dtype)
        hidden = F.batch_norm(hidden, mean, variance, norm.weight.to(dtype), norm.bias.to(dtype), training=learns)
        if learns and dtype != norm.running_mean.dtype:
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
        return hidden


def _propagation(incidence: Tensor) -> Tensor:
    """G, (batch, batch), of incidence (batch, hyperedges)."""
    edge_degrees = incidence.sum(dim=0)  # (hyperedges,)
    per_edge = torch.where(edge_degrees > 0, edge_degrees, 1.0).reciprocal()
    scaled = incidence * incidence.sum(dim=1, keepdim=True).rsqrt()  # V^-1/2 H; a node's own class alone makes V >= 1
    return (scaled * per_edge) @ scaled.T
