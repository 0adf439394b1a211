"""The ladder: candidates of rising cost, and the best of them by validation.

1. "pretrained": the backbone before any training.
2. "views": the same backbone with generalized mean pooling; on larger images, averaged with the mirror image. Nothing
   is fitted to the images.
3. "closed form": a linear head computed from the features (`ClosedFormHeads`). Seconds.
4. "trained head": a head trained by the potential field on the same features. A minute.
5. "fine-tuned": the best so far, all of it trained at low rates (`pfml.ladder.fine_tuning`). As long as it takes.

Up to the fourth rung the images pass through the backbone once for each view; everything else is computed from their
features. Each candidate is cross-fitted (`pfml.ladder.crossfit`), and candidates are compared on the same queries. What
is fitted to the images must prove to be better than what was kept before it, by twice the standard error. Views are
better on other photographs (docs/FOLDERS.md), and are kept unless validation speaks against them (`Rung.is_better`).

Validation divides the training images as the data are divided: by classes if the test classes are unseen, else by
images, since then all classes are known.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from pfml.data import RetrievalData, open_images
from pfml.data.image_source import ImageSource
from pfml.evaluation import RetrievalMetrics, embed, retrieval_metrics
from pfml.evaluation.metrics import HEADLINE, metric_label
from pfml.ladder.crossfit import FEWEST_CLASSES, CrossFitted, Embed, Gain, cross_fit, divisions
from pfml.ladder.heads import STEPS, ClosedForm, LinearHead, closed_form_grid, closed_form_heads, train_head
from pfml.methods import LossConfig
from pfml.models import Embedder, EmbedderConfig, TrainedOn
from pfml.models.backbone_table import BACKBONES, with_image_size
from pfml.models.head_init import set_linear
from pfml.training.progress import Monitor

__all__ = ["RUNGS", "Candidate", "Climb", "Features", "FineTune", "Rung", "View", "climb", "fit"]

#: Effort -> the rungs that are tried, if there is enough to validate on.
RUNGS = {
    "seconds": ("pretrained", "views", "closed form"),
    "minutes": ("pretrained", "views", "closed form", "trained head"),
    "hours": ("pretrained", "views", "closed form", "trained head", "fine-tuned"),
}
#: The pooling of views, for a backbone with feature maps, and the side of larger crops relative to the backbone's own.
POOLING, LARGER = "gem", 9 / 7
#: Whitening of a trained head's start where no head in closed form is better than none, and its dimensions at most.
GENTLE, MOST_TRAINED = 0.25, 256
#: Validation divides up to so many images twice; more images need it less.
FEW_IMAGES = 1500
#: What is fitted must be better by so many standard errors, and must not lose more R@1 than this.
ERRORS, MOST_LOST = 2.0, 0.005


@dataclass(frozen=True)
class View:
    """How the backbone sees an image.

    Args:
        image_size: Side of the crop.
        flip_test: Whether the features of the image and of its mirror image are averaged.
    """

    image_size: int
    flip_test: bool = False

    def __str__(self) -> str:
        return f"{self.image_size} pixels" + (", flip test" if self.flip_test else "")


@dataclass(frozen=True)
class Candidate:
    """A way to make embeddings of images.

    Args:
        view: How the backbone sees them.
        pooling: See `Head`.
        head: A linear head in closed form; None for the features as they are.
        is_trained: Whether that head was only the start, and the field has trained it.
        is_fine_tuned: Whether all of it was only the start, and the field has trained the backbone as well.
    """

    view: View
    pooling: str
    head: ClosedForm | None = None
    is_trained: bool = False
    is_fine_tuned: bool = False

    def __str__(self) -> str:
        parts = [str(self.view), f"{self.pooling} pooling"]
        parts += ["no head"] if self.head is None else [str(self.head)]
        parts += ["trained by the field"] if self.is_trained else []
        return ", ".join([*parts, "fine-tuned"] if self.is_fine_tuned else parts)

    @property
    def learns(self) -> bool:
        """Whether it depends on the training images."""
        return self.head is not None or self.is_fine_tuned

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `of` reads them."""
        head = None if self.head is None else {"strength": self.head.strength, "dimension": self.head.dimension}
        return {
            "image_size": self.view.image_size, "flip_test": self.view.flip_test, "pooling": self.pooling,
            "head": head, "is_trained": self.is_trained, "is_fine_tuned": self.is_fine_tuned,
        }  # fmt: skip

    @classmethod
    def of(cls, values: dict[str, Any]) -> Candidate:
        """The candidate that `as_dict` wrote down."""
        head = None if values["head"] is None else ClosedForm(**values["head"])
        view = View(values["image_size"], values["flip_test"])
        return cls(view, values["pooling"], head, values["is_trained"], values["is_fine_tuned"])


@dataclass(frozen=True)
class Rung:
    """The best candidate of one rung.

    Args:
        name: "pretrained", "views", "closed form", "trained head" or "fine-tuned".
        candidate: Which it is.
        scores: Metric -> its cross-fitted value on the training images.
        gains: Metric -> its gain over the pretrained backbone.
        over_last: Metric -> its gain over what was kept before it.
        seconds: That the rung took.
    """

    name: str
    candidate: Candidate
    scores: dict[str, float]
    gains: dict[str, Gain]
    over_last: dict[str, Gain] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_better(self) -> bool:
        """Whether it is kept in place of what was kept before it; see above."""
        if not self.over_last:
            return False
        if not self.candidate.learns:
            return sum(gain.mean + gain.error for gain in self.over_last.values()) > 0
        is_proved = sum(gain.mean - ERRORS * gain.error for gain in self.over_last.values()) > 0
        return is_proved and self.over_last["recall_at_1"].mean >= -MOST_LOST

    @property
    def _reason(self) -> str:
        """Why it is not kept."""
        if not self.candidate.learns:
            return "since validation speaks against it"
        is_lossy = self.over_last["recall_at_1"].mean < -MOST_LOST
        return f"since it loses more than {100 * MOST_LOST:g} R@1" if is_lossy else "since it is not surely better"

    def as_dict(self) -> dict[str, Any]:
        """For the log."""
        return {
            "name": self.name,
            "candidate": str(self.candidate),
            "settings": self.candidate.as_dict(),
            "scores": self.scores,
            "gains": {metric: asdict(gain) for metric, gain in self.gains.items()},
            "over_last": {metric: asdict(gain) for metric, gain in self.over_last.items()},
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        shown = ", ".join(f"{metric_label(metric)} {100 * value:.1f}" for metric, value in self.scores.items())
        gained = ", ".join(f"{metric_label(metric)} {_shown(gain)}" for metric, gain in self.gains.items())
        against = f"; against the pretrained model {gained}" if self.name != "pretrained" else ""
        decision = f": {'kept' if self.is_better else f'not kept, {self._reason}'}" if self.over_last else ""
        return f"{self.name}: {self.candidate}: {shown or 'not validated'}{against}{decision}"


def _shown(gain: Gain) -> str:
    """A gain in points with its 95 % interval, as the report has it."""
    low, high = gain.interval
    interval = f" (95 %: {100 * low:+.1f} to {100 * high:+.1f})" if math.isfinite(gain.error) else ""
    return f"{100 * gain.mean:+.1f}{interval}"


#: From positions of training images, a name for them, an embedder fitted to them and their embeddings by it, to that
#: embedder after training on them.
FineTune = Callable[[Tensor, str, Embedder, Tensor], Embedder]
#: From features, labels and the head at the start to a trained head.
TrainHead = Callable[[Tensor, Tensor, LinearHead], LinearHead]


@dataclass(frozen=True, eq=False)
class Climb:
    """What a ladder has found.

    Args:
        rungs: All of them, from the bottom.
        chosen: The one that is kept.
        embedder: Its model.
        before: Metrics of the pretrained backbone on the test images; None where nothing is held out.
        after: Those of `embedder`.
        embeddings: By `embedder`, of the test images and of the gallery if there is one; empty with nothing held out.
    """

    rungs: tuple[Rung, ...]
    chosen: Rung
    embedder: Embedder
    before: RetrievalMetrics | None
    after: RetrievalMetrics | None
    embeddings: Mapping[str, Tensor]


@dataclass(eq=False)
class Features:
    """Features of all images, each view computed on first use.

    Args:
        backbone: An embedder without a linear layer.
        data: Its training and test images.
        autocast: Mixed precision of the backbone, or None.
        monitor: Shows the progress.
        sources: Role -> its images, opened; others are opened on first use.
    """

    backbone: Embedder
    data: RetrievalData
    autocast: torch.dtype | None = None
    monitor: Monitor = field(default_factory=Monitor)
    sources: dict[str, ImageSource] = field(default_factory=dict)
    _passes: dict[tuple[int, bool, str], dict[str, Tensor]] = field(default_factory=dict)

    @property
    def base(self) -> Candidate:
        """The pretrained backbone itself."""
        return Candidate(View(self.backbone.preprocessing.crop), self.backbone.head.pooling)

    @property
    def poolings(self) -> tuple[str, ...]:
        """Its own pooling, and the one of views if it could have that."""
        own = self.backbone.head.pooling
        is_map = self.backbone.backbone.num_prefix_tokens == 0 and own != "token"
        return tuple(dict.fromkeys((own, POOLING))) if is_map else (own,)

    def views(self, *, is_quick: bool = False) -> list[Candidate]:
        """The same backbone in other ways, the one that is usually best first; only one pass of the images if quick."""
        base, pooling = self.base, self.poolings[-1]
        side = base.view.image_size
        is_free = self.backbone.config.backbone in BACKBONES  # which are all convolutional: they see any size
        larger = View(round(side * LARGER) if is_free else side, flip_test=True)
        every = [Candidate(view, pooling) for view in ([base.view] if is_quick else [larger, base.view])]
        return [each for each in every if each != base]

    def of(self, view: View, role: str = "train") -> dict[str, Tensor]:
        """Pooling -> (N, F) of the images of a role."""
        plain = self._pass(view.image_size, False, role)
        if not view.flip_test:
            return plain
        mirrored = self._pass(view.image_size, True, role)
        return {pooling: (each + mirrored[pooling]) / 2 for pooling, each in plain.items()}

    def source(self, role: str) -> ImageSource:
        """The images of a role, opened."""
        if role not in self.sources:
            device = next(self.backbone.parameters()).device
            self.sources[role] = open_images(self.data.parts[role], device=device, track=self.monitor.track)
        return self.sources[role]

    def embedded(self, embedder: Embedder, candidate: Candidate, role: str) -> Tensor:
        """Embeddings of the images of a role, (N, D); from features as far as the candidate has the same backbone."""
        if candidate.is_fine_tuned:
            return embed(embedder, self.source(role), autocast=self.autocast, track=self.monitor.track).cpu()
        points = self.of(candidate.view, role)[candidate.pooling]
        layer = embedder.head.linear
        if layer is None:
            return points
        return LinearHead(layer.weight.detach().double().cpu(), layer.bias.detach().double().cpu())(points)

    def _pass(self, image_size: int, is_mirrored: bool, role: str) -> dict[str, Tensor]:
        key = image_size, is_mirrored, role
        if key not in self._passes:
            own = self.backbone.preprocessing
            self.backbone.preprocessing = with_image_size(own, image_size) if image_size != own.crop else own
            try:
                every = embed(
                    self.backbone,
                    self.source(role),
                    autocast=self.autocast,
                    track=self.monitor.track,
                    features=self.poolings,
                    mirrored=is_mirrored,
                ).cpu()
            finally:
                self.backbone.preprocessing = own
            parts = every.split(self.backbone.head.num_features, dim=1)
            self._passes[key] = dict(zip(self.poolings, parts, strict=True))
        return self._passes[key]


def climb(
    backbone: Embedder,
    data: RetrievalData,
    loss_for: Callable[[Tensor, Tensor], LossConfig],
    *,
    effort: str = "minutes",
    seed: int = 0,
    head_steps: int = STEPS,
    fine_tune: FineTune | None = None,
    autocast: torch.dtype | None = None,
    monitor: Monitor | None = None,
    keep: Callable[[Embedder], None] = lambda embedder: None,
    features: Features | None = None,
) -> Climb:
    """Work up the ladder on the training images of `data`; the test images are evaluated once, at the end.

    Args:
        backbone: An embedder with pretrained weights and without a linear layer.
        data: Images that are divided into training and test images by one of the protocols.
        loss_for: The loss of the trained head, for embeddings (N, D) with labels (N,) as they are at its start.
        effort: A key of `RUNGS`.
        seed: Of the divisions, proxies and batches.
        head_steps: Steps of a trained head.
        fine_tune: How to fine-tune, for "hours".
        autocast: torch.bfloat16 or torch.float16 for mixed precision in the backbone; None for float32.
        monitor: Shows rungs and progress.
        keep: Called with the pretrained model at once, then with that of each rung that is better than those before it.
        features: Those of `backbone` and `data`, from a caller that has them already.
    """
    if effort not in RUNGS:
        raise ValueError(f"effort must be one of {', '.join(RUNGS)}, got {effort!r}")
    if backbone.head.linear is not None:
        raise ValueError("the ladder starts with a backbone without a linear layer: set model.embedding_dim to null")
    monitor = monitor or Monitor()
    features = features or Features(backbone, data, autocast, monitor)

    def train(some: Tensor, their_labels: Tensor, start: LinearHead) -> LinearHead:
        return train_head(some, their_labels, start, loss_for, seed=seed, steps=head_steps)

    ladder = _Ladder(features, train, fine_tune, seed)
    rungs: list[Rung] = []
    started = time.perf_counter()
    embedder = _with_head(backbone, features.base, None)
    keep(embedder)
    for rung in ladder.rungs(effort):
        rungs.append(replace(rung, seconds=time.perf_counter() - started))
        monitor.remark(str(rungs[-1]))
        started = time.perf_counter()
        if len(rungs) > 1 and best_of(rungs) is rungs[-1]:
            embedder = fit(features, rung.candidate, train, fine_tune)
            keep(embedder)
    chosen = best_of(rungs)
    if data.protocol == "none":
        return Climb(tuple(rungs), chosen, embedder, None, None, {})
    before = _held_out(data, lambda role: features.of(features.base.view, role)[features.base.pooling])
    after = _held_out(data, partial(features.embedded, embedder, chosen.candidate))
    return Climb(tuple(rungs), chosen, embedder, _metrics(data, before), _metrics(data, after), after)


def best_of(rungs: Sequence[Rung]) -> Rung:
    """What is kept: the last rung that is better than what was kept before it, else the pretrained backbone."""
    return [rungs[0], *(rung for rung in rungs if rung.is_better)][-1]


def fit(features: Features, candidate: Candidate, train: TrainHead, fine_tune: FineTune | None = None) -> Embedder:
    """The model of a candidate, fitted to all training images."""
    labels = features.data.train.labels
    points = features.of(candidate.view)[candidate.pooling]
    head = _head(points, labels, candidate, train)
    embedder = _with_head(features.backbone, candidate, head)
    if candidate.is_fine_tuned:
        assert fine_tune is not None
        embedder = fine_tune(torch.arange(len(labels)), "all", embedder, (head or _unchanged)(points))
    if candidate.learns:
        embedder.trained_on = TrainedOn(features.data.name, features.data.train.class_names)
    return embedder


@dataclass(eq=False)
class _Ladder:
    """The rungs, one after the other."""

    features: Features
    train: TrainHead
    fine_tune: FineTune | None
    seed: int

    def __post_init__(self) -> None:
        self.labels = self.features.data.train.labels
        self.protocol = "classes" if self.features.data.protocol == "classes" else "images"

    def rungs(self, effort: str) -> Iterator[Rung]:
        """The rungs that the effort allows; the first one alone if there is too little to validate on."""
        base, about = self.features.base, too_few(self.labels, self.protocol)
        if about is not None:
            self.features.monitor.remark(f"{about}: the backbone stays as it is")
            yield Rung("pretrained", base, {}, {})
            return
        self.parts = divisions(
            self.labels, self.protocol, seed=self.seed, repeats=2 if len(self.labels) <= FEW_IMAGES else 1
        )
        self.before = self.cross_fitted([base])[base]
        self.kept, self.kept_scores = base, self.before
        yield self.rung("pretrained", base, self.before)
        yield from self.views(is_quick=effort == "seconds")
        yield self.closed_form()
        if "trained head" in RUNGS[effort]:
            yield self.trained_head(self.kept)
        if "fine-tuned" in RUNGS[effort] and self.fine_tune is not None:
            yield self.fine_tuned(self.kept)

    def rung(self, name: str, candidate: Candidate, found: CrossFitted) -> Rung:
        """A rung of this candidate, compared with the pretrained backbone and with what was kept before it."""
        gains, over_last = (self.gains(before, found) for before in (self.before, self.kept_scores))
        scores = {metric: found.mean(metric) for metric in HEADLINE}
        return Rung(name, candidate, scores, gains, over_last if candidate != self.features.base else {})

    def gains(self, before: CrossFitted, after: CrossFitted) -> dict[str, Gain]:
        """Metric -> the gain from one candidate to another."""
        return {metric: Gain.between(before, after, metric, protocol=self.protocol) for metric in HEADLINE}

    def after(self, rung: Rung, found: CrossFitted) -> Rung:
        """The same rung; what is better is kept from here on."""
        if rung.is_better:
            self.kept, self.kept_scores = rung.candidate, found
        return rung

    def views(self, *, is_quick: bool) -> Iterator[Rung]:
        """The first view that validation does not speak against; the first of all if there is none."""
        first: Rung | None = None
        for candidate in self.features.views(is_quick=is_quick):
            found = self.cross_fitted([candidate])[candidate]
            rung = self.rung("views", candidate, found)
            first = first or rung
            if rung.is_better:
                yield self.after(rung, found)
                return
        if first is not None:
            yield first

    def closed_form(self) -> Rung:
        """The head that is best by its gain less its errors."""
        fewest = min(len(part.fitted) for part in self.parts)
        grid = closed_form_grid(self.features.backbone.head.num_features, fewest)
        scores = self.cross_fitted([replace(self.kept, head=head) for head in grid])
        every = {each: self.rung("closed form", each, found) for each, found in scores.items()}

        def proof(rung: Rung) -> tuple[bool, float]:
            return rung.is_better, sum(gain.mean - gain.error for gain in rung.over_last.values())

        best = max(every.values(), key=proof)
        return self.after(best, scores[best.candidate])

    def cross_fitted(self, candidates: Sequence[Candidate]) -> dict[Candidate, CrossFitted]:
        """Scores of candidates whose heads, if any, are in closed form."""
        found: dict[Candidate, CrossFitted] = {}
        for view, pooling in dict.fromkeys((each.view, each.pooling) for each in candidates):
            own = [each for each in candidates if (each.view, each.pooling) == (view, pooling)]
            found |= self.validated(self.features.of(view)[pooling], partial(_closed_forms, own))
        return found

    def validated(
        self, points: Tensor, heads_of: Callable[[Tensor, Tensor], dict[Candidate, Embed]]
    ) -> dict[Candidate, CrossFitted]:
        """Scores of heads, from features and labels of the images to fit to, on these features of all images."""

        def fitted(positions: Tensor) -> dict[Candidate, Embed]:
            heads = heads_of(points[positions], self.labels[positions])
            return {each: partial(_embedded, head, points) for each, head in heads.items()}

        return cross_fit(self.labels, fitted, self.parts, track=self.features.monitor.track)

    def trained_head(self, best: Candidate) -> Rung:
        """The head of `best`, or a gentle one, trained by the field."""
        start = best.head or ClosedForm(GENTLE, None)
        if start.dimension is None and self.features.backbone.head.num_features > MOST_TRAINED:
            start = replace(start, dimension=MOST_TRAINED)
        candidate = replace(best, head=start, is_trained=True)
        found = self.validated(
            self.features.of(best.view)[best.pooling],
            lambda some, labels: {candidate: _head(some, labels, candidate, self.train) or _unchanged},
        )
        return self.after(self.rung("trained head", candidate, found[candidate]), found[candidate])

    def fine_tuned(self, best: Candidate) -> Rung:
        """`best`, trained as a whole on each part of one division and judged on the rest, beside `best` itself."""
        candidate, points = replace(best, is_fine_tuned=True), self.features.of(best.view)[best.pooling]
        base_points = self.features.of(self.features.base.view)[self.features.base.pooling]
        numbers = count(1)

        def fitted(positions: Tensor) -> dict[Candidate, Embed]:
            head = _head(points[positions], self.labels[positions], best, self.train)
            assert self.fine_tune is not None
            start = _with_head(self.features.backbone, best, head)
            untuned = partial(_embedded, head or _unchanged, points)
            embedder = self.fine_tune(positions, f"part {next(numbers)}", start, untuned(positions))
            tuned = self.features.embedded(embedder, candidate, "train")
            return {candidate: tuned.__getitem__, best: untuned, self.features.base: base_points.__getitem__}

        found = cross_fit(self.labels, fitted, divisions(self.labels, self.protocol, seed=self.seed, repeats=1))
        after, base = found[candidate], found[self.features.base]
        return Rung(
            "fine-tuned",
            candidate,
            {metric: after.mean(metric) for metric in HEADLINE},
            self.gains(base, after),
            self.gains(found[best], after),
        )


def too_few(labels: Tensor, protocol: str) -> str | None:
    """Why images with these labels cannot be divided for validation; None if they can."""
    counts = torch.bincount(labels)
    classes = int((counts > 0).sum())
    if protocol == "classes" and classes < FEWEST_CLASSES:
        enough = f"{2 * FEWEST_CLASSES} classes in all are enough, --data.split images needs 2"
        return f"validation needs {FEWEST_CLASSES} training classes or more, got {classes} ({enough})"
    if protocol == "classes" and int(counts.max()) < 2:
        return "validation needs a class with two training images or more, and each has one"
    if protocol == "images" and (classes < 2 or int(counts.max()) < 2):
        return "validation needs two classes, and one with two training images or more"
    return None


def _closed_forms(candidates: Sequence[Candidate], features: Tensor, labels: Tensor) -> dict[Candidate, Embed]:
    """The heads of candidates in closed form, fitted to these images by one decomposition."""
    heads = closed_form_heads(features, labels, [each.head for each in candidates if each.head is not None])
    return {each: _unchanged if each.head is None else heads[each.head] for each in candidates}


def _head(features: Tensor, labels: Tensor, candidate: Candidate, train: TrainHead) -> LinearHead | None:
    """The head of a candidate, fitted to these images; None if it has none."""
    if candidate.head is None:
        return None
    head = closed_form_heads(features, labels, [candidate.head])[candidate.head]
    return train(features, labels, head) if candidate.is_trained else head


def _unchanged(features: Tensor) -> Tensor:
    return features


def _embedded(head: Embed, points: Tensor, positions: Tensor) -> Tensor:
    return head(points[positions])


def _with_head(backbone: Embedder, candidate: Candidate, head: LinearHead | None) -> Embedder:
    """A copy of the backbone that sees images as the candidate says, with its pooling and this head."""
    view = candidate.view
    config: EmbedderConfig = replace(
        backbone.config,
        pooling=candidate.pooling,
        embedding_dim=None if head is None else len(head.bias),
        image_size=view.image_size if view.image_size != backbone.preprocessing.crop else backbone.config.image_size,
        flip_test=view.flip_test,
    )
    embedder = Embedder(replace(config, weights="none"))
    embedder.config = config
    embedder.backbone.load_state_dict(backbone.backbone.state_dict())
    if head is not None and embedder.head.linear is not None:
        set_linear(embedder.head.linear, head.weight, head.bias)
    return embedder.eval().to(next(backbone.parameters()).device)


def _held_out(data: RetrievalData, points_of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """What a test needs: embeddings of the test images, and of the gallery if there is one."""
    found = {"test": points_of("test")}
    if data.gallery is not None:
        found["gallery"] = points_of("train" if data.gallery is data.train else "gallery")
    return found


def _metrics(data: RetrievalData, embeddings: Mapping[str, Tensor]) -> RetrievalMetrics:
    return retrieval_metrics(
        embeddings["test"],
        data.test.labels,
        gallery=embeddings.get("gallery"),
        gallery_labels=None if data.gallery is None else data.gallery.labels,
        recall_at=data.recall_at,
    )
