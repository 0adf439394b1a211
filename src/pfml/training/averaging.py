"""Weight averaging: the exponential moving average of a model's weights over the steps of its training.

    mean <- share * mean + (1 - share) * weights    after each step

The weights scatter around the optimum from batch to batch. Their mean is closer to it, and is what a run evaluates and
saves; training continues with the weights. The mean starts at the first weights with their full weight, so it must not
reach over more than half of a run (`largest_share`).

Parameters of a loss, such as proxies, are not averaged: they may be sharded over ranks, and a schedule that ends at
zero brings weights and mean together.

By hand, on torch's own update: `torch.optim.swa_utils.AveragedModel` compares its step count, a tensor on the device,
in every update, which synchronizes a GPU; it averages BatchNorm's integer counts; and it holds a second module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import get_ema_multi_avg_fn

__all__ = ["Follower", "WeightAverage", "largest_share"]


def largest_share(steps: int) -> float:
    """The share with which a mean reaches over half of so many steps: 1 / (1 - share) is about how many it does."""
    return max(1 - 2 / steps, 0.0) if steps > 0 else 0.0


class WeightAverage:
    """The running mean of all that is learned or gathered in a model: parameters, and statistics of BatchNorm.

    There is no mean before the first `update`, which starts it at the weights; until then `applied` and `adopt` leave
    the model as it is. Integers, such as BatchNorm's count of batches, are the model's own throughout.

    Args:
        model: Whose weights; they must stay in the memory that they are in.
        share: Of the old mean in the new one, in [0, 1); with 0 there never is a mean.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"share must lie in [0, 1), got {share}")
        self.share = share
        self._weights = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
        self._means: dict[str, Tensor] = {}
        self._mix = get_ema_multi_avg_fn(share)

    def update(self) -> None:
        """Add the weights to the mean, after a step, without a device synchronization."""
        if not self.share:
            return
        if not self._means:
            self._begin()
            return
        self._mix([*self._means.values()], [*self._weights.values()], 0)  # which needs no count of steps

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The mean in place of the weights within the block; afterwards the weights, whatever has happened.

        Values are copied within the same memory, which a compiled model and the optimizer know.
        """
        trained = {name: self._weights[name].clone() for name in self._means}
        try:
            self.adopt()
            yield
        finally:
            self._write(trained)

    def adopt(self) -> None:
        """Put the mean in place of the weights for good, at the end of training."""
        self._write(self._means)

    def state_dict(self) -> dict[str, Tensor]:
        """The mean by the names of the model's own `state_dict`; nothing before it has begun."""
        return dict(self._means)

    def load_state_dict(self, means: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        if means and means.keys() != self._weights.keys():
            differing = ", ".join(sorted(means.keys() ^ self._weights.keys()))
            raise ValueError(f"the stored mean must be one of this model's weights, but they differ in {differing}")
        # in the order and the memory format of the weights, which files do not keep
        names = [name for name in self._weights if name in means]
        self._means = {name: torch.empty_like(self._weights[name]).copy_(means[name]) for name in names}

    def _begin(self) -> None:
        self._means = {name: weight.clone() for name, weight in self._weights.items()}

    def _write(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._weights[name].copy_(value)


class Follower(WeightAverage):
    """A network whose weights are the running mean of another's: the momentum network of a loss that needs one (DiVA).

    It starts as that network is when it is first asked.

    Args:
        model: Whose weights it follows.
        share: Of its old weights in the new ones; with 0 it is that network itself.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__(model, share)
        self._model = model

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """What the network returns for these images, without a graph."""
        if self.share and not self._means:
            self._begin()
        result: Tensor = functional_call(self._model, self._means, (images,))
        return result
