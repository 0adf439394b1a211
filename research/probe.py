"""Where heads start: retrieval on CUB's validation classes with the pretrained backbone as it is.

    python research/probe.py --root CUB_200_2011 --weights resnet50_he.safetensors

Nothing is trained: each head is computed from the features of the training classes, also with label noise. One pass
over the images tells what a model begins with.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from candidates import PROXY_ANCHOR, base_config
from cub import data_of
from torch import Tensor

from pfml.evaluation import embed, retrieval_metrics
from pfml.models import Embedder
from pfml.models.head_init import HEAD_STARTS, initialize_head
from pfml.sphere import unit
from pfml.training import ProgressMonitor
from pfml.training.environment import resolve_device

#: Rates of label noise.
NOISE = (0.0, 0.2)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    config = base_config(PROXY_ANCHOR)
    where = replace(config.data, root=options.root)
    data = data_of(where, "validation")
    embedder = Embedder(replace(config.model, weights=options.weights)).to(resolve_device(options.device))
    track = ProgressMonitor().track
    train, judged = (embed(embedder, images, features=True, track=track) for images in (data.train, data.test))

    def scored(points: Tensor) -> tuple[float, float]:
        found = retrieval_metrics(unit(points), data.test.labels, recall_at=(1,)).as_dict()
        return 100 * found["recall_at_1"], 100 * found["map_at_r"]

    def of_seeds(start: str, rate: float) -> Iterator[tuple[float, float]]:
        for seed in options.seeds:
            torch.manual_seed(seed)
            noisy = data_of(replace(where, noise=replace(where.noise, rate=rate, seed=seed)), "validation")
            layer = embedder.head.linear
            assert layer is not None
            torch.nn.init.kaiming_normal_(layer.weight, mode="fan_out")
            torch.nn.init.zeros_(layer.bias)
            initialize_head(embedder.head, start, train, noisy.train.labels.to(train.device))
            with torch.no_grad():
                yield scored(layer(judged))

    print("| head | labels wrong | R@1 | MAP@R |\n|---|---|---|---|")
    print("| none, all {} features | | {:.1f} | {:.1f} |".format(judged.shape[1], *scored(judged)))
    for start in HEAD_STARTS:
        for rate in NOISE if start == "whitened" else NOISE[:1]:
            recall, precision = (mean(each) for each in zip(*of_seeds(start, rate), strict=True))
            print(f"| {start} | {rate:.0%} | {recall:.1f} | {precision:.1f} |", flush=True)


if __name__ == "__main__":
    main()
