"""What explains two runs of docs/REPRODUCTION.md, "As published": Adam's first step with Hyp, and the size of features.

    python research/first_step.py --root CUB_200_2011 --weights resnet50_he.safetensors

Adam's eps is 1e-4 in Hyp's recipe, beside which small gradients hardly move a weight: its first step is
|g| / (|g| + eps) of the rate, here the mean over the backbone's weights. One batch of training images, untrained
network, test crops.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from candidates import candidate_config
from torch import Tensor

from pfml.data import ImageSet
from pfml.data.image_source import open_images
from pfml.methods import create_loss
from pfml.models import Embedder
from pfml.models.head_init import draw_head
from pfml.runs.data import prepare_data

#: Readings of the recipe: what divides the loss, and whose metric gradients have.
READINGS = {
    "the sum": {"reduction": "sum", "riemannian": False},
    "the mean": {"reduction": "mean", "riemannian": False},
    "the mean, gradients of the ball": {"reduction": "mean", "riemannian": True},
}


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--classes", type=int, default=2, help="of 8 images each")
    options = parser.parse_args()
    config = candidate_config("q drml-pa")
    images = prepare_data(replace(config.data, root=options.root))[0].train
    images = images.subset(torch.cat([(images.labels == c).nonzero()[:8, 0] for c in range(options.classes)]))
    embedder = Embedder(replace(config.model, weights=options.weights)).eval()
    crops = batch_of(embedder, images)
    with torch.no_grad():
        features = torch.cat([embedder.features(some) for some in crops.split(8)])
    print(f"features of DRML: mean {features.mean():.1f}, mean square {features.square().mean():.0f}", flush=True)

    config = candidate_config("q hyp")
    embedder = Embedder(replace(config.model, weights=options.weights)).eval()
    draw_head(embedder.head, config.head_start, generator=torch.Generator().manual_seed(0))
    weights = [weight for weight in embedder.backbone.parameters() if weight.requires_grad]
    points = embedder.head.projected(embedder.features(crops))
    for name, reading in READINGS.items():
        loss = create_loss(replace(config.loss, options={**config.loss.options, **reading}), 100, points.shape[1])
        gradients = torch.autograd.grad(loss(points, images.labels), weights, retain_graph=True)
        sizes = torch.cat([gradient.abs().flatten() for gradient in gradients])
        print(f"Hyp, {name}: {(sizes / (sizes + config.optimizer.eps)).mean():.0%} of the rate", flush=True)


def batch_of(embedder: Embedder, images: ImageSet) -> Tensor:
    """The images as evaluation crops them."""
    source = open_images(images, device=torch.device("cpu"))
    plan = [embedder.preprocessing.windows(torch.arange(len(source.sizes)), source.sizes)]
    (crops,) = source.crops(plan)
    return crops


if __name__ == "__main__":
    main()
