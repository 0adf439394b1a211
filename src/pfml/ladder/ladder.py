"""The ladder: candidates of rising cost, and the best of them that validation proves.

1. "pretrained": the backbone before any training.
2. "closed form": another pooling, and a linear head computed from the features (`ClosedFormHeads`). Seconds.
3. "trained head": the best of these, trained by the potential field on the same features. A minute.

The images pass through the backbone once; everything after that is computed from their features. Each candidate is
cross-fitted (`pfml.ladder.crossfit`) and compared with the pretrained backbone, on the same queries. It is kept only
if the sum of its gains in R@1 and MAP@R, each less its standard error, is positive, and the largest sum wins. So the
model that is saved is the pretrained one unless another has proved to be better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pfml.data import RetrievalData
from pfml.evaluation import RetrievalMetrics, embed, retrieval_metrics
from pfml.evaluation.metrics import HEADLINE, metric_label
from pfml.ladder.crossfit import CrossFitted, Gain, cross_fit, divisions
from pfml.ladder.heads import STEPS, ClosedForm, LinearHead, closed_form_grid, closed_form_heads, train_head
from pfml.methods import LossConfig
from pfml.models import Embedder, EmbedderConfig, TrainedOn
from pfml.models.head_init import set_linear
from pfml.runs.config import EFFORTS
from pfml.training.progress import Monitor

__all__ = ["Candidate", "Climb", "Rung", "climb"]

#: Poolings that are tried for a backbone with feature maps.
POOLINGS = ("avg", "gem")
#: Whitening of a trained head's start where no head in closed form is better than none, and its dimensions at most.
GENTLE, MOST_TRAINED = 0.25, 256
#: From features, labels and the head at the start to a trained head.
TrainHead = Callable[[Tensor, Tensor, LinearHead], LinearHead]
#: Validation divides up to so many images twice; more images need it less.
FEW_IMAGES = 1500


@dataclass(frozen=True)
class Candidate:
    """A way to make embeddings of the backbone's features.

    Args:
        pooling: See `Head`.
        head: A linear head in closed form; None for the features as they are.
        is_trained: Whether that head was only the start, and the field has trained it.
    """

    pooling: str
    head: ClosedForm | None = None
    is_trained: bool = False

    def __str__(self) -> str:
        parts = [f"{self.pooling} pooling"]
        parts += ["no head"] if self.head is None else [str(self.head)]
        return ", ".join([*parts, "trained by the field"] if self.is_trained else parts)


@dataclass(frozen=True)
class Rung:
    """The best candidate of one rung.

    Args:
        name: "pretrained", "closed form" or "trained head".
        candidate: Which it is.
        scores: Metric -> its cross-fitted value on the training images.
        gains: Metric -> its gain over the pretrained backbone.
        seconds: That the rung took.
    """

    name: str
    candidate: Candidate
    scores: dict[str, float]
    gains: dict[str, Gain]
    seconds: float

    @property
    def proof(self) -> float:
        """The sum of the gains, each less its standard error; the rung is worth taking if this is positive."""
        return sum(gain.mean - gain.error for gain in self.gains.values())

    def as_dict(self) -> dict[str, Any]:
        """For the log."""
        return {
            "name": self.name,
            "candidate": str(self.candidate),
            "scores": self.scores,
            "gains": {metric: {"mean": gain.mean, "error": gain.error} for metric, gain in self.gains.items()},
            "proof": self.proof,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        shown = ", ".join(f"{metric_label(metric)} {100 * value:.1f}" for metric, value in self.scores.items())
        gained = ", ".join(
            f"{100 * gain.mean:+.1f} (+- {100 * gain.error:.1f})" for gain in self.gains.values() if self.candidate
        )
        against = f"; against the pretrained model {gained}" if self.name != "pretrained" else ""
        return f"{self.name}: {self.candidate}: {shown}{against}"


@dataclass(frozen=True, eq=False)
class Climb:
    """What a ladder has found.

    Args:
        rungs: All of them, from the bottom.
        chosen: The one that is kept.
        embedder: Its model.
        before: Metrics of the pretrained backbone, on the test images.
        after: Metrics of `embedder` on the test images.
    """

    rungs: tuple[Rung, ...]
    chosen: Rung
    embedder: Embedder
    before: RetrievalMetrics
    after: RetrievalMetrics


@dataclass(frozen=True, eq=False)
class _Features:
    """Pooling -> features of each part of the data."""

    train: dict[str, Tensor]
    test: dict[str, Tensor]
    gallery: dict[str, Tensor] | None


def climb(
    backbone: Embedder,
    data: RetrievalData,
    loss_for: Callable[[Tensor, Tensor], LossConfig],
    *,
    effort: str = "minutes",
    seed: int = 0,
    head_steps: int = STEPS,
    autocast: torch.dtype | None = None,
    monitor: Monitor | None = None,
) -> Climb:
    """Work up the ladder on the training classes of `data`; the test classes are looked at once, at the end.

    Args:
        backbone: An embedder with pretrained weights and without a linear layer.
        data: Images that are divided into training and test classes.
        loss_for: The loss of the trained head, for embeddings (N, D) with labels (N,) as they are at its start.
        effort: "seconds" ends with heads in closed form, "minutes" trains one.
        seed: Of the divisions, proxies and batches.
        head_steps: Steps of a trained head.
        autocast: torch.bfloat16 or torch.float16 for mixed precision in the backbone; None for float32.
        monitor: Shows rungs and progress.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, got {effort!r}")
    if backbone.head.linear is not None:
        raise ValueError("the ladder starts with a backbone without a linear layer: set model.embedding_dim to null")
    monitor = monitor or Monitor()
    started = time.perf_counter()
    features = _all_features(backbone, data, autocast, monitor)
    labels = data.train.labels

    def train(some: Tensor, their_labels: Tensor, start: LinearHead) -> LinearHead:
        return train_head(some, their_labels, start, loss_for, seed=seed, steps=head_steps)

    base = Candidate(backbone.head.pooling)
    rungs = []
    for rung in _rungs(features.train, labels, base, train if effort == "minutes" else None, seed, monitor):
        rungs.append(replace(rung, seconds=time.perf_counter() - started))
        monitor.remark(str(rungs[-1]))
        started = time.perf_counter()
    chosen = max(rungs, key=lambda rung: rung.proof if rung.name != "pretrained" else 0.0)
    head = _fitted(features.train, labels, chosen.candidate, train)
    embedder = _with_head(backbone, chosen.candidate, head, data)
    return Climb(
        tuple(rungs),
        chosen,
        embedder,
        _metrics(features, data, base, None),
        _metrics(features, data, chosen.candidate, head),
    )


def _all_features(backbone: Embedder, data: RetrievalData, autocast: torch.dtype | None, monitor: Monitor) -> _Features:
    """One pass of every image."""
    own = backbone.head.pooling
    is_map = backbone.backbone.num_prefix_tokens == 0 and own != "token"
    poolings = tuple(dict.fromkeys((own, *POOLINGS))) if is_map else (own,)

    def of(images: Any) -> dict[str, Tensor]:
        every = embed(backbone, images, autocast=autocast, track=monitor.track, features=poolings).cpu()
        return dict(zip(poolings, every.split(backbone.head.num_features, dim=1), strict=True))

    gallery = None if data.gallery is None else of(data.gallery)
    return _Features(of(data.train), of(data.test), gallery)


def _rungs(
    features: dict[str, Tensor],
    labels: Tensor,
    base: Candidate,
    train: TrainHead | None,
    seed: int,
    monitor: Monitor,
) -> Iterator[Rung]:
    """The rungs that the effort allows; the first one alone if the classes are too few to validate."""
    if len(labels.unique()) < 4:
        monitor.remark("fewer than 4 training classes cannot be divided for validation: the backbone stays as it is")
        yield Rung("pretrained", base, {}, {}, 0.0)
        return
    parts = divisions(labels, "classes", seed=seed, repeats=2 if len(labels) <= FEW_IMAGES else 1)
    widths = [each.shape[1] for each in features.values()]
    grid = closed_form_grid(widths[0], min(len(part.fitted) for part in parts))

    def candidates(some: Tensor, their_labels: Tensor) -> dict[Candidate, Callable[[Tensor], Tensor]]:
        result: dict[Candidate, Callable[[Tensor], Tensor]] = {}
        for position, (pooling, own) in enumerate(zip(features, some.split(widths, dim=1), strict=True)):
            heads = closed_form_heads(own, their_labels, grid)
            result[Candidate(pooling)] = _on(position, widths, lambda points: points)
            result |= {Candidate(pooling, each): _on(position, widths, head) for each, head in heads.items()}
        return result

    every = torch.cat(list(features.values()), dim=1)
    scores = cross_fit(every, labels, candidates, parts, track=monitor.track)
    yield _rung("pretrained", base, scores[base], scores[base])
    others = [_rung("closed form", each, scores[base], scores[each]) for each in scores if each != base]
    best = max(others, key=lambda rung: rung.proof)
    yield best
    if train is None:
        return
    start = best.candidate.head or ClosedForm(GENTLE, None)
    if start.dimension is None and widths[0] > MOST_TRAINED:
        start = replace(start, dimension=MOST_TRAINED)
    trained = Candidate(best.candidate.pooling, start, is_trained=True)

    def training(some: Tensor, their_labels: Tensor) -> dict[Candidate, Callable[[Tensor], Tensor]]:
        first = closed_form_heads(some, their_labels, [start])[start]
        return {trained: train(some, their_labels, first)}

    after = cross_fit(features[trained.pooling], labels, training, parts, track=monitor.track)[trained]
    yield _rung("trained head", trained, scores[base], after)


def _on(position: int, widths: Sequence[int], head: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`head` on its part of the features of all poolings."""
    return lambda every: head(every.split(list(widths), dim=1)[position])


def _rung(name: str, candidate: Candidate, before: CrossFitted, after: CrossFitted) -> Rung:
    gains = {metric: Gain.between(before, after, metric) for metric in HEADLINE}
    return Rung(name, candidate, {metric: after.mean(metric) for metric in HEADLINE}, gains, 0.0)


def _fitted(
    features: dict[str, Tensor],
    labels: Tensor,
    candidate: Candidate,
    train: TrainHead,
) -> LinearHead | None:
    """The head of a candidate, fitted to all training images."""
    if candidate.head is None:
        return None
    own = features[candidate.pooling]
    head = closed_form_heads(own, labels, [candidate.head])[candidate.head]
    return train(own, labels, head) if candidate.is_trained else head


def _with_head(backbone: Embedder, candidate: Candidate, head: LinearHead | None, data: RetrievalData) -> Embedder:
    """The backbone with this pooling and head; it has learned from the training classes if there is a head."""
    config: EmbedderConfig = replace(
        backbone.config, pooling=candidate.pooling, embedding_dim=None if head is None else len(head.bias)
    )
    embedder = Embedder(replace(config, weights="none"))
    embedder.config = config
    embedder.preprocessing = backbone.preprocessing
    embedder.backbone = backbone.backbone
    if head is not None and embedder.head.linear is not None:
        set_linear(embedder.head.linear, head.weight, head.bias)
        embedder.trained_on = TrainedOn(data.name, data.train.class_names)
    return embedder.to(next(backbone.parameters()).device)


def _metrics(
    features: _Features, data: RetrievalData, candidate: Candidate, head: LinearHead | None
) -> RetrievalMetrics:
    """On the test images, from their features."""

    def embedded(some: dict[str, Tensor]) -> Tensor:
        return some[candidate.pooling] if head is None else head(some[candidate.pooling])

    return retrieval_metrics(
        embedded(features.test),
        data.test.labels,
        gallery=None if features.gallery is None else embedded(features.gallery),
        gallery_labels=None if data.gallery is None else data.gallery.labels,
        recall_at=data.recall_at,
    )
