"""A retrieval set that trains in a second, a few glyphs, and a way to interrupt that."""

import os
import re
import signal
from functools import cache

from pfml.data import RetrievalData, draw_glyphs
from pfml.data.glyphs import Distortion
from pfml.models import create_embedder
from pfml.training import BatchConfig, LossConfig, Monitor, OptimizerConfig, TrainConfig


@cache
def few_glyphs():
    mild = Distortion(rotation=5, scale=1.05, shear=0.05, shift=1, noise=0.05)
    train, test = (draw_glyphs(chosen, copies=1, distortion=mild) for chosen in ("ABCDEFGH", "KLMN"))
    return RetrievalData("letters", train, test)


def small_embedder(**options):
    """A network of 53 thousand weights that sees 16 x 16 pixels."""
    return create_embedder("convnet", **{"embedding_dim": 8, "pooling": "avg+max", "image_size": 16, **options})


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


def interrupted_repeatedly(run, counts, *, after=lambda step: None):
    """The steps at which a run was stopped that was interrupted after so many steps each time, and then ended.

    Args:
        run: Called with `resume` and `monitor`.
        counts: Steps from one interruption to the next.
        after: Called after each interruption, with the step.
    """
    stopped = []
    for count in counts:
        try:
            run(resume=bool(stopped), monitor=InterruptAt(count))
        except KeyboardInterrupt as interrupted:
            stopped.append(int(re.fullmatch(r"stopped at step (\d+), state saved", str(interrupted))[1]))
            after(stopped[-1])
        else:
            raise AssertionError(f"the run ended before it was interrupted, after {stopped}")
    run(resume=True)
    return stopped
