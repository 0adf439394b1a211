"""Where a run starts that continues another one: the embedder of that run, and the proxies of its classes.

Proxies of further classes start at k-means centers of the embeddings of their class. The start is in the first
checkpoint, so that the run can be resumed without the one it began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from pfml.data import RetrievalData
from pfml.data.corrections import Corrections
from pfml.data.own_images import is_own
from pfml.data.seeding import generator_for
from pfml.losses import PotentialFieldLoss
from pfml.losses.proxy_init import class_proxies
from pfml.methods import LossConfig, create_loss
from pfml.models import Embedder, EmbedderConfig, load_embedder
from pfml.runs.config import RunConfig
from pfml.runs.config_files import read_config
from pfml.runs.data import load_listed, prepare_data
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import load_loss_of_classes
from pfml.sphere import unit
from pfml.terminal import shell_words

__all__ = ["Start", "continued_config", "learned_proxies", "load_start", "started_loss", "with_moved_corrections"]


@dataclass(frozen=True, eq=False)
class Start:
    """What a run takes over from the run that it continues.

    Args:
        embedder: Its model.
        proxies: Class name -> its proxies as the loss has them as parameters, (M, D); empty if they cannot be kept.
        remark: A sentence that says what the loss starts with.
    """

    embedder: Embedder
    proxies: dict[str, Tensor]
    remark: str


def continued_config(run: Path, more: str | Path) -> RunConfig:
    """The configuration of a run that continues `run` with further images; the other settings are those of `run`.

    Epochs stay those of `run`: a new class has learned nothing yet, and gets as many steps as the others had.

    Args:
        run: A run that has ended, on images of one's own.
        more: A folder of class folders, or a CSV.

    Raises:
        ValueError: If this run cannot be continued with these images; the message says why.
    """
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise FileNotFoundError(f"--from must be the folder of a run, with config.yaml in it, but {run} has none")
    config = read_config(folder.config)
    if not folder.results.is_file() or not (folder.model / "model.json").is_file():
        raise ValueError(f"{run} has not ended: finish it first, pfml train --resume {shell_words(str(run))}")
    if not is_own(config.data.name):
        raise ValueError(
            f"{config.data.name} is a published data set with classes of its own: --from is for images of your own"
        )
    if config.data.noise.rate or config.data.noise.variant == "list":
        raise ValueError(f"the labels of {run} are noisy on purpose (data.noise): continue a run without data.noise")
    if config.teachers:
        raise ValueError(f"{run} is the student of teachers, who do not know the new classes: continue a run on labels")
    if config.effort is None and not config.loss.trains:
        raise ValueError(
            f"{run} has trained nothing ({config.loss.name}): pfml index adds images of any class to its index"
        )
    path = Path(more).expanduser()
    own = (config.data.name, *config.data.added, *(() if config.data.root is None else (config.data.root,)))
    if path.exists() and any(Path(each).exists() and path.samefile(each) for each in own):
        raise ValueError(f"{more} are images of {run} already: put new images into a folder of their own")
    data = replace(config.data, added=(*config.data.added, str(path.absolute())))
    load_listed(data)  # before anything is computed: what is wrong with the images is said here
    if config.effort is None:
        return replace(config, data=data, start=Path(run).absolute())
    # the ladder once more: what it found for the images before is no part of the question
    model = EmbedderConfig(config.model.backbone, weights=config.model.weights)
    return replace(config, data=data, model=model, loss=LossConfig(), start=None)


def with_moved_corrections(config: RunConfig, out: Path, loaded: RetrievalData) -> RunConfig:
    """`config` with the corrections of the run that it continues, written to `out` for the images that are there now.

    Args:
        config: With a start and a list of corrections.
        out: Folder of the new run.
        loaded: Its images, before corrections.
    """
    if config.start is None or config.data.corrections is None:
        return config
    earlier = read_config(RunFolder(config.start).config).data
    if earlier.corrections is None or earlier.corrections != config.data.corrections:
        return config  # a list of the user's own, made for these images
    before = prepare_data(replace(earlier, corrections=None)).data
    now = prepare_data(replace(config.data, corrections=None), loaded=loaded).data
    corrections = Corrections.read(earlier.corrections, before.train).moved(before.train, now.train)
    target = RunFolder(out).corrections
    target.parent.mkdir(parents=True, exist_ok=True)
    corrections.write(target, now.train)
    return replace(config, data=replace(config.data, corrections=target.absolute()))


def load_start(run: Path, loss: LossConfig) -> Start:
    """What a run with the loss `loss` takes over from the run in the folder `run`."""
    if not (RunFolder(run).model / "model.json").is_file():
        raise FileNotFoundError(
            f"the run to start from must have a model, but {run} has none: restore it, or start a new run"
        )
    embedder = load_embedder(run)
    before, names = load_loss_of_classes(run)
    known = learned_proxies(before)
    with torch.random.fork_rng([]):
        fresh = create_loss(loss, len(names), embedder.embedding_dim, embedder.head.num_features)
    proxies = learned_proxies(fresh)
    if proxies is None:
        return Start(embedder, {}, f"the embedder starts as that of {run}, and what {loss.name} learns starts again")
    if known is None or known.shape != proxies.shape:
        return Start(embedder, {}, f"the embedder starts as that of {run}; its proxies do not fit and start again")
    kept = {name: known[k].detach().clone() for k, name in enumerate(names)}
    return Start(embedder, kept, f"embedder and proxies start as those of {run}; proxies of new classes by k-means")


def learned_proxies(loss: nn.Module) -> Tensor | None:
    """The parameters of a loss that are its proxies, (C, M, D); None if it has none, or learns more than these."""
    proxies = getattr(loss, "proxies", None)
    if not isinstance(proxies, Tensor) or proxies.ndim != 3 or not proxies.numel():
        return None
    return proxies if proxies.numel() == sum(each.numel() for each in loss.parameters()) else None


@torch.no_grad()
def started_loss(
    config: LossConfig, start: Start, class_names: Sequence[str], embeddings: Tensor, labels: Tensor, *, seed: int
) -> nn.Module:
    """The loss of these classes: known ones keep their proxies, the others start at k-means centers of their images.

    A new proxy has the length that proxies of this loss start with, by which the optimizer turns it.

    Args:
        config: Of the loss.
        start: With proxies.
        class_names: Of the training classes, in the order of the labels.
        embeddings: (N, D) of the training images.
        labels: (N,) of them.
        seed: Of k-means.
    """
    with torch.random.fork_rng([]):
        loss = create_loss(config, len(class_names), embeddings.shape[1], start.embedder.head.num_features)
    proxies = learned_proxies(loss)
    assert proxies is not None
    points, labels = unit(embeddings.detach().float().cpu()), labels.cpu()
    length = proxies.norm(dim=2).mean()
    for c, name in enumerate(class_names):
        if name in start.proxies:
            proxies[c].copy_(start.proxies[name])
        else:
            generator = generator_for(seed, "proxies", c)
            centers = class_proxies("kmeans", points[labels == c], proxies.shape[1], generator=generator)
            proxies[c].copy_(unit(centers) * length)
    if isinstance(loss, PotentialFieldLoss):
        loss.proxies_ready = True
    return loss
