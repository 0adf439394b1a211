"""A retrieval set that trains in a second, a few letters, and a way to interrupt that."""

import os
import signal
from functools import cache

from pfml.data import RetrievalData, draw_glyphs
from pfml.data.glyphs import Distortion
from pfml.models import create_embedder
from pfml.training import BatchConfig, LossConfig, Monitor, OptimizerConfig, TrainConfig


@cache
def letters():
    mild = Distortion(rotation=5, scale=1.05, shear=0.05, shift=1, noise=0.05)
    train, test = (draw_glyphs(chosen, copies=1, distortion=mild) for chosen in ("ABCDEFGH", "KLMN"))
    return RetrievalData("letters", train, test)


def small_embedder(**options):
    return create_embedder("convnet", embedding_dim=8, pooling="avg+max", **options)


def small_config(**changes):
    """Two epochs of four steps."""
    values = {
        "epochs": 2,
        "warm_up_epochs": 0,
        "batch_norm": "train",
        "batch": BatchConfig(size=32, samples_per_class=4),
        "loss": LossConfig("pfml", {"proxies_per_class": 2}),
        "optimizer": OptimizerConfig("adamw", lr=1e-3),
        "device": "cpu",
        "log_every": 1,
    }
    return TrainConfig(**{**values, **changes})


class InterruptAt(Monitor):
    """Ctrl-C during a step."""

    def __init__(self, step):
        self.left = step

    def step(self, *_):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
