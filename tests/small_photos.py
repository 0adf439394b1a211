"""Folders of images that a run of seconds learns from, and the command line that refuses."""

import pytest
import torch
from PIL import Image

from pfml.cli import main
from pfml.models import load_embedder
from pfml.models.embedder import EmbedderConfig
from pfml.runs.config_files import write_config
from pfml.training import BatchConfig, DataConfig, LossConfig, OptimizerConfig, RunConfig

MODEL = EmbedderConfig("convnet", embedding_dim=8, image_size=16)


def draw(folder, counts, side=18):
    """Class folders of noise around a color, with so many images each."""
    generator = torch.Generator().manual_seed(0)
    for name, images in counts.items():
        color = torch.randint(0, 200, (3, 1, 1), generator=generator)
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(images):
            pixels = color + torch.randint(0, 56, (3, side, side), generator=generator)
            Image.fromarray(pixels.byte().permute(1, 2, 0).numpy()).save(folder / name / f"{number}.png")
    return folder


def config_for(photos, **changes):
    values = {
        "epochs": 2,
        "warm_up_epochs": 0,
        "batch_norm": "train",
        "batch": BatchConfig(size=8, samples_per_class=4),
        "loss": LossConfig("pfml", {"proxies_per_class": 2}),
        "optimizer": OptimizerConfig("adamw", lr=1e-3),
        "device": "cpu",
        "log_every": 1,
        "model": MODEL,
        "data": DataConfig(str(photos)),
    }
    return RunConfig(**{**values, **changes})


def as_if_trained(folder, trained, config):
    """In `folder` the model, log and results of the run in `trained`, with another configuration."""
    load_embedder(trained).save(folder / "model")
    for file in ("log.jsonl", "results.json"):
        (folder / file).write_bytes((trained / file).read_bytes())
    write_config(folder / "config.yaml", config, sealed=True)


def failure(*arguments):
    """The message of a command that must fail."""
    with pytest.raises(SystemExit) as error:
        main(list(map(str, arguments)))
    return str(error.value.code)
