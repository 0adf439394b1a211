"""Runs with label noise: plain colors, which need no training."""

from dataclasses import replace

from pfml.data import LabelNoise
from pfml.models import EmbedderConfig
from pfml.training import DataConfig, LossConfig, RunConfig
from small_data import small_config


def noisy_config(table):
    """One epoch that changes hardly anything, on the images of `table` with 20 % label noise."""
    small = small_config()
    return RunConfig(
        epochs=1,
        warm_up_epochs=0,
        batch_norm="train",
        batch=replace(small.batch, size=12, samples_per_class=4),
        optimizer=replace(small.optimizer, lr=1e-5),
        loss=LossConfig("pfml", {"proxies_per_class": 1}),
        device="cpu",
        data=DataConfig(str(table), noise=LabelNoise(rate=0.2)),
        model=EmbedderConfig("convnet", weights="none", embedding_dim=8),
    )
