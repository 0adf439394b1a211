"""A network that notes which process it runs in, and takes its time where that is not this one."""

import os
import time
from pathlib import Path

import torch
from torch import nn


class LoggingNetwork(nn.Module):
    """Means over a grid, and a line in `log` for each batch: the number of the process, the number of images."""

    def __init__(self, log, seconds):
        super().__init__()
        self.log = str(log)
        self.seconds = seconds
        self.owner = os.getpid()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 48))

    def forward(self, images):
        if os.getpid() != self.owner:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()} {len(images)}\n")
            time.sleep(self.seconds)
        return nn.functional.adaptive_avg_pool2d(images, 4).flatten(1) * self.scale

    def processes(self):
        """The processes that have embedded, the latest last."""
        log = Path(self.log)
        return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []
