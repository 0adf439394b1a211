"""How runs with wrong labels are made here: colors need no training."""

from dataclasses import replace

from pfml.data import LabelNoise
from pfml.models import EmbedderConfig
from pfml.training import DataConfig, LossConfig, RunConfig
from small_data import small_config


def noisy_config(place):
    """One epoch that changes hardly anything, on the pictures at `place` with a fifth of the labels wrong."""
    small = small_config()
    return RunConfig(
        epochs=1,
        warm_up_epochs=0,
        batch_norm="train",
        batch=replace(small.batch, size=12, samples_per_class=4),
        optimizer=replace(small.optimizer, lr=1e-5),
        loss=LossConfig("pfml", {"proxies_per_class": 1}),
        device="cpu",
        data=DataConfig(str(place), noise=LabelNoise(rate=0.2)),
        model=EmbedderConfig("convnet", weights="none", embedding_dim=8),
    )
