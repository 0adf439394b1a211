"""Your own loop over several ranks: a model under DistributedDataParallel, proxies sharded over the ranks.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/sharded_training.py

It prints the same energies for any number of ranks, up to rounding: the field sees the global batch. The model has no
BatchNorm, whose statistics would be those of each rank's own batch (torch.nn.SyncBatchNorm changes that).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pfml.data import draw_glyphs
from pfml.distributed import ShardedPotentialFieldLoss, gather_state
from pfml.losses import PotentialFieldLoss

GLYPHS = "ABCDEFGHKLMN"
DIM = 16
FIELD: dict[str, Any] = {"normalization": "log", "delta": 0.6, "delta_rep": 1.2, "alpha": 6.0, "reduction": "points"}


def small_model() -> nn.Module:
    """A small convnet for glyphs of 32 x 32 pixels."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, DIM),
    )


def main() -> None:
    """Train for a few steps; rank 0 prints the energy of the global batch and the cost of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=60, help="images of all ranks together")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same on all ranks: model, proxies and batches are equal
    glyphs = draw_glyphs(GLYPHS, copies=1)
    assert isinstance(glyphs.images, torch.Tensor)
    model = DistributedDataParallel(small_model().to(device))
    loss = ShardedPotentialFieldLoss(len(GLYPHS), DIM, proxies_per_class=3, **FIELD).to(device)
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "lr": 1e-3}, *loss.param_groups(lr=1e-2)])
    for step in range(options.steps):
        chosen = torch.randperm(len(glyphs))[: options.batch][rank::world]  # this rank's shard of the global batch
        images, labels = glyphs.images[chosen].to(device) / 255, glyphs.labels[chosen].to(device)
        optimizer.zero_grad()
        energy = loss(model(images), labels)
        energy.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1:3d}   energy {energy.item():.5f}")
    whole = gather_state(loss)
    if whole is not None:
        one = PotentialFieldLoss(len(GLYPHS), DIM, proxies_per_class=3, **FIELD)
        one.load_state_dict(whole)  # a single process, or another world size, resumes from this
        print(
            f"{world} ranks, {len(loss.proxies)} of {one.proxies[..., 0].numel()} proxies on rank 0, {loss.last_step}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
