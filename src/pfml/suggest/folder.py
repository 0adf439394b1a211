"""A run suggested for a folder or table of images: load and check them once, preview them, decide the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from pfml.data import RetrievalData, check_data
from pfml.data.own_images import is_own, own_images
from pfml.data.splits import for_choices
from pfml.models import Embedder
from pfml.runs.config import RunConfig
from pfml.runs.data import held_bytes, load_listed
from pfml.suggest.comparison import untrained_embedder
from pfml.suggest.preview import preview
from pfml.suggest.suggestion import Suggestion, suggest, suggest_model, with_values
from pfml.training.environment import resolve_device
from pfml.training.progress import Monitor

__all__ = ["Prepared", "suggest_for_folder"]

#: Images in the preview.
PREVIEWED = {"cpu": 96, "cuda": 512}
#: Argument of `suggest` -> the option that it is; other suggestions depend on these.
DECIDED_FIRST = {
    "validation": "data.validation",
    "batch_size": "batch.size",
    "samples_per_class": "batch.samples_per_class",
    "epochs": "epochs",
}


@dataclass
class Prepared:
    """What was loaded and built before a run, so that the run need not do it again.

    Args:
        data: The images, listed and checked, before validation classes are set apart; None if not loaded yet.
        untrained: The backbone before training; None if not built.
    """

    data: RetrievalData | None = None
    untrained: Embedder | None = None


def suggest_for_folder(
    config: RunConfig,
    given: Collection[str],
    prepared: Prepared,
    monitor: Monitor,
    *,
    split: str | None = None,
) -> Suggestion | None:
    """How to train on the images of `config.data`, beside the `given` options; None for published data sets.

    Args:
        config: What the user has decided, defaults elsewhere.
        given: The options that the user has decided, such as "optimizer.lr".
        prepared: Gets the data and the backbone, for the run.
        monitor: Shows remarks on the data, before anything is computed, and progress.
        split: For `pfml tune`: how it divides the training classes, of which it trains on a part.

    Raises:
        ValueError: If the images do not allow training or an evaluation; the message says what to add.
    """
    if not is_own(config.data.name):
        return None
    if not config.loss.trains or config.effort is not None:
        model, reasons = suggest_model()
        del reasons["model.embedding_dim"]  # which follows from what is asked for
        return Suggestion(RunConfig(model=model), reasons)
    fixed = _decided_first(config, given)
    if split is not None:
        fixed.pop("validation", None)  # tuning divides the training classes itself
    device = resolve_device(config.device)
    data = _load(config, fixed, prepared, monitor, split)
    if split is not None:
        data = for_choices(data, split)
        suggest(data, None, device, **fixed)
    model, _ = suggest_model()
    if "model.backbone" in given:
        model = replace(model, pooling="avg")
    chosen = {
        option: getattr(config.model, name) for option in given if (name := option.removeprefix("model.")) != option
    }
    user = with_values(replace(config, model=model), chosen)
    prepared.untrained = untrained_embedder(user)
    distances = None
    if prepared.untrained is not None:
        distances = preview(
            prepared.untrained.to(device),
            data.train,
            image_size=user.model.image_size,
            limit=PREVIEWED[device.type],
            seed=config.seed,
            track=monitor.track,
        )
    suggestion = suggest(data, distances, device, **fixed)
    if split is not None:
        suggestion.reasons.pop("data.validation", None)
    return suggestion


def _decided_first(config: RunConfig, given: Collection[str]) -> dict[str, Any]:
    values = {
        "data.validation": config.data.validation,
        "batch.size": config.batch.size,
        "batch.samples_per_class": config.batch.samples_per_class,
        "epochs": config.epochs,
    }
    return {name: values[option] for name, option in DECIDED_FIRST.items() if option in given}


def _load(
    config: RunConfig, fixed: dict[str, Any], prepared: Prepared, monitor: Monitor, split: str | None
) -> RetrievalData:
    """List the images, refuse what cannot be trained on before they are checked, then check them."""
    where, device = config.resolved().data, resolve_device(config.device)  # paths as the run has them
    listed = load_listed(where)
    if split is not None:
        for_choices(listed, split)  # which says what is too little, and needs more than training does
    suggest(listed, None, device, **fixed)
    if config.data.unreadable == "refuse":
        check_data(listed, track=monitor.track)  # all parts, which a run reads one by one
    keep_bytes = held_bytes(config.storage)
    data = own_images(where.name, listed, config.data.unreadable, monitor.track, keep_bytes=keep_bytes)
    for remark in data.remarks:  # what is left out comes first: everything else depends on it
        monitor.remark(remark)
    suggest(data, None, device, **fixed)
    prepared.data = data
    return data
