"""The audit of images without a run: a folder of class folders or a table, embedded by a pretrained backbone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pfml.audit.scores import K
from pfml.audit.suspects import Audit, audit
from pfml.data import RetrievalData, SeenClassError, load_data
from pfml.data.decoding import Track
from pfml.data.own_images import own_images
from pfml.evaluation import embed
from pfml.models import create_embedder, load_embedder
from pfml.suggest.suggestion import BACKBONE
from pfml.training.environment import resolve_device

__all__ = ["audit_folder", "load_all"]


def load_all(name: str | Path) -> RetrievalData:
    """All images of a folder or a table, in the parts that these have themselves; else all in one, train."""
    data = None
    try:
        data = load_data(str(name))
    except SeenClassError:  # test images of known classes
        try:
            return load_data(str(name), split="images")
        except ValueError:  # of some known classes, and of others
            return load_data(str(name), split="none")
    return load_data(str(name), split="none") if data.is_halved else data


def audit_folder(
    name: str | Path,
    *,
    parts: Sequence[str] = (),
    model: str | Path | None = None,
    compare: Sequence[str] = (),
    k: int = K,
    device: str = "auto",
    track: Track | None = None,
) -> tuple[Audit, RetrievalData]:
    """The audit of the labels of a folder of class folders or of a CSV table, and its images.

    Args:
        name: The folder or the table.
        parts: The parts whose images are judged, such as train or test; () for all.
        model: Folder of an embedder to judge with; None for the pretrained efficientnet_lite0, whose weights are in a
            package, so that nothing is downloaded.
        compare: Other scores, keys of `pfml.audit.scores.SCORES`.
        k: Neighbors of the k-NN scores.
        device: Where to embed.
        track: Shows the progress, as track(iterable, description, total).
    """
    data = own_images(str(name), load_all(name), track=track)
    images, roles = data.joined()
    embedder = create_embedder(BACKBONE, embedding_dim=None) if model is None else load_embedder(model)
    points = embed(embedder.to(resolve_device(device)), images, track=track)
    return audit(points, images, compare=compare, k=k, roles=roles, parts=parts), data
