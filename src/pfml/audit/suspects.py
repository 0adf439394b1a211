"""Suspects: images that are probably mislabeled, the suggested classes, and the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pfml.audit.detection import Detection, detection
from pfml.audit.noise_rate import estimate_noise
from pfml.audit.scores import SCORES, K, LabelScores, field_scores, knn_votes, unjudged
from pfml.data import ImageSet
from pfml.evaluation import nearest
from pfml.evaluation.class_attraction import class_attractions, fitted_law, strength
from pfml.evaluation.nearest_neighbors import directions
from pfml.field import DecayLaw
from pfml.typos import did_you_mean

__all__ = ["Audit", "Neighbor", "Suspect", "audit"]


@dataclass(frozen=True)
class Neighbor:
    """An image near a suspect.

    Args:
        index: Its position in the image set.
        image: Its name.
        label: Its given class.
        distance: To the suspect, on the unit sphere.
        share: Its part of the attraction that acts on the suspect.
    """

    index: int
    image: str
    label: str
    distance: float
    share: float


@dataclass(frozen=True)
class Suspect:
    """An image that may be mislabeled, and the evidence.

    Args:
        index: Its position in the image set.
        image: Its name.
        part: Its part of the data: train, validation, test or gallery; "" if there are none.
        given: Its class by its label.
        suggested: The other class that attracts it most.
        score: log of the attraction of the suggested class over that of the given one.
        confidence: The probability that it is mislabeled.
        given_share: The part of the attraction on it that is the given class's.
        suggested_share: The part that is the suggested class's.
        neighbors: The nearest other images, nearest first.
    """

    index: int
    image: str
    part: str
    given: str
    suggested: str
    score: float
    confidence: float
    given_share: float
    suggested_share: float
    neighbors: tuple[Neighbor, ...]


@dataclass(frozen=True, eq=False)
class Audit:
    """The labels of all images, judged.

    Args:
        images: With their given labels.
        points: (n, D) their embeddings, on the unit sphere.
        law: Of the field.
        attractions: (n, C) how strongly each class attracts each image, itself left out.
        scores: Of the field.
        confidence: (n,) the probability that an image is mislabeled.
        lower_precision: (n,) of the list of all images with this score or a higher one, the lower end of its interval.
        noise_rate: The estimated rate of label noise, see `pfml.audit.noise_rate`; 0 if there is no sign of any.
        noise_interval: Its 90 % interval.
        compared: Other scores by name.
        detections: How well each score finds mislabeled images, by name; empty if the true labels are not known.
        true_labels: (n,) if they are known.
        roles: The part of the data that each image is in: train, validation, test or gallery; () if there are none.
        judged: (n,) which images are judged, if not all are: the others are charges only.
    """

    images: ImageSet
    points: Tensor
    law: DecayLaw
    attractions: Tensor
    scores: LabelScores
    confidence: Tensor
    lower_precision: Tensor
    noise_rate: float
    noise_interval: tuple[float, float]
    compared: dict[str, LabelScores] = field(default_factory=dict)
    detections: dict[str, Detection] = field(default_factory=dict)
    true_labels: Tensor | None = None
    roles: tuple[str, ...] = ()
    judged: Tensor | None = None

    @property
    def _order(self) -> Tensor:
        """Positions of all images, most suspicious first."""
        return self.scores.score.argsort(descending=True, stable=True)

    def listed(self, threshold: float = 0.5) -> Tensor:
        """Positions of the images that are mislabeled with at least this probability, most suspicious first."""
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must lie in (0, 1], a probability, got {threshold}")
        order = self._order
        return order[self.confidence[order] >= threshold]

    def sure(self, precision: float = 0.95) -> Tensor:
        """Positions of the longest list from the top whose precision is at least this by the lower end of the estimate.

        It is empty where label noise is too rare to be sure.
        """
        if not 0 < precision <= 1:
            raise ValueError(f"precision must lie in (0, 1], got {precision}")
        order = self._order
        enough = (self.lower_precision[order] >= precision).nonzero()[:, 0]
        return order[: int(enough.max()) + 1] if len(enough) else order[:0]

    def ranked(self, count: int) -> Tensor:
        """Positions of the `count` most suspicious images, whether or not they are listed; of those that are judged."""
        order = self._order
        return order[self.scores.score[order] > -torch.inf][:count]

    def suspicious(self, threshold: float = 0.5) -> Tensor:
        """Positions of the suspects: the listed images, or if none can be listed, where another class is stronger."""
        listed = self.listed(threshold)
        return listed if len(listed) else self.ranked(int((self.scores.score > 0).sum()))

    @property
    def unjudged(self) -> Tensor:
        """Positions of the images that cannot be judged: each is alone in its class."""
        lone = self.scores.score == -torch.inf
        return (lone if self.judged is None else lone & self.judged).nonzero()[:, 0]

    def unjudged_names(self) -> list[tuple[str, str, str]]:
        """Name, class and nearest other class of each image that cannot be judged."""
        names, labels = self.images.class_names, self.images.labels
        return [
            (self.images.name_of(k), names[int(labels[k])], names[int(self.scores.suggested[k])])
            for k in self.unjudged.tolist()
        ]

    def suspects(self, indices: Tensor, *, neighbors: int = 5) -> list[Suspect]:
        """The images at `indices`, in their order, with their evidence."""
        if not len(indices):
            return []
        k = min(neighbors, len(self.images) - 1)
        found = nearest(self.points[indices], self.points, k + 1)[1]
        return [
            self._suspect(index, [one for one in near if one != index][:k])
            for index, near in zip(indices.tolist(), found.tolist(), strict=True)
        ]

    def _suspect(self, index: int, near: list[int]) -> Suspect:
        names, labels = self.images.class_names, self.images.labels
        given, suggested = int(labels[index]), int(self.scores.suggested[index])
        pull, total = self.attractions[index], float(self.attractions[index].sum())
        distances = (self.points[near].double() - self.points[index].double()).norm(dim=1)
        shares = strength(distances, self.law) / total
        return Suspect(
            index=index,
            image=self.images.name_of(index),
            part=self.roles[index] if self.roles else "",
            given=names[given],
            suggested=names[suggested],
            score=float(self.scores.score[index]),
            confidence=float(self.confidence[index]),
            given_share=float(pull[given]) / total,
            suggested_share=float(pull[suggested]) / total,
            neighbors=tuple(
                Neighbor(one, self.images.name_of(one), names[int(labels[one])], float(r), float(share))
                for one, r, share in zip(near, distances, shares, strict=True)
            ),
        )


def audit(
    embeddings: Tensor,
    images: ImageSet,
    *,
    proxies: Tensor | None = None,
    law: DecayLaw | Literal["fitted"] = "fitted",
    true_labels: Tensor | None = None,
    compare: Sequence[str] = (),
    k: int = K,
    roles: Sequence[str] = (),
    parts: Sequence[str] = (),
) -> Audit:
    """The labels of `images` judged by the field of their embeddings.

    An image is suspicious if another class attracts it more strongly than its own. The score is the log of that
    ratio; from all scores follow the rate of label noise and each image's probability. An image that is alone in its
    class is not judged: no other image shows what the class looks like.

    Args:
        embeddings: (n, D), normalized here.
        images: With the given labels; at least two of at least two classes.
        proxies: (C, M, D) further charges; None for none.
        law: "fitted" (`pfml.evaluation.class_attraction.fitted_law`), or a law that decays, such as that of the run.
        true_labels: (n,) if they are known: the result then says how well mislabeled images were found.
        compare: Other scores, keys of `pfml.audit.scores.SCORES`.
        k: Neighbors of the k-NN scores.
        roles: The part of the data that each image is in, as `RetrievalData.joined` has it.
        parts: The parts to judge, of `roles`; () for all. Images of other parts are charges only.
    """
    if embeddings.ndim != 2 or len(embeddings) != len(images):
        raise ValueError(f"embeddings must be ({len(images)}, D), one per image, got {tuple(embeddings.shape)}")
    if len(images) < 2 or len(images.labels.unique()) < 2:
        raise ValueError(
            f"an audit needs at least two images of different classes, got {len(images)} "
            f"of {len(images.labels.unique())} classes"
        )
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    for name in compare:
        if name not in SCORES:
            raise ValueError(f"compare must be of {', '.join(SCORES)}, got {name!r}{did_you_mean(name, SCORES)}")
    if roles and len(roles) != len(images):
        raise ValueError(f"roles must name the part of {len(images)} images, got {len(roles)}")
    for part in parts:
        if part not in roles:
            known = ", ".join(dict.fromkeys(roles)) or "none"
            raise ValueError(f"there must be images in the part {part!r}, got images in {known}")
    points, labels, classes = directions(embeddings.cpu(), "embeddings"), images.labels, images.num_classes
    proxies = None if proxies is None else proxies.cpu()
    chosen = fitted_law(points, labels, classes, proxies=proxies) if isinstance(law, str) else law
    attractions = class_attractions(points, labels, classes, law=chosen, proxies=proxies)
    alone = torch.bincount(labels, minlength=classes)[labels] == 1  # its own proxies have learned from it alone
    judged = torch.tensor([role in parts for role in roles]) if parts else torch.ones(len(labels), dtype=torch.bool)
    left_out = alone | ~judged
    scores = unjudged(field_scores(attractions, labels), left_out)
    compared: dict[str, LabelScores] = {}
    if compare:
        votes = knn_votes(points, labels, classes, k)
        compared = {name: unjudged(SCORES[name](votes, labels), left_out) for name in compare}
    detections = {}
    if true_labels is not None and bool((true_labels != labels)[judged].any()):
        both = labels[judged], true_labels[judged]
        detections = {name: detection(one.of(judged), *both) for name, one in {"field": scores, **compared}.items()}
    noise = estimate_noise(scores.score, attractions, points, labels, chosen)
    return Audit(
        images=images,
        points=points,
        law=chosen,
        attractions=attractions,
        scores=scores,
        confidence=noise.probability,
        lower_precision=noise.lower_precision,
        noise_rate=noise.rate,
        noise_interval=noise.interval,
        compared=compared,
        detections=detections,
        true_labels=true_labels,
        roles=tuple(roles),
        judged=judged if parts else None,
    )
