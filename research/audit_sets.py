"""How well `pfml audit` finds label noise in small sets of photographs: classes of CUB, an untrained model.

python research/audit_sets.py --root CUB_200_2011
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pfml.audit.mixture import fit_mixture
from pfml.audit.scores import field_scores
from pfml.data import load_data
from pfml.evaluation import embed
from pfml.evaluation.class_attraction import class_attractions, fitted_law
from pfml.models import create_embedder
from pfml.sphere import unit

#: Classes and images of each.
SIZES = ((6, 15), (12, 12), (20, 20), (50, 30))
RATES = (0.0, 0.05, 0.1, 0.2)
CLASSES, IMAGES = 50, 30


@dataclass
class Tally:
    """Of the sets with one rate of label noise."""

    sets: int = 0
    silent: int = 0
    listed: int = 0
    found: int = 0
    wrong: int = 0

    def add(self, listed: Tensor, wrong: Tensor) -> None:
        self.sets, self.silent = self.sets + 1, self.silent + int(not listed.any())
        self.listed, self.wrong = self.listed + int(listed.sum()), self.wrong + int(wrong.sum())
        self.found += int((listed & wrong).sum())

    def __str__(self) -> str:
        if not self.wrong:
            return f"{self.sets - self.silent} of {self.sets} | {self.listed:,} images listed |"
        precision, recall = self.found / max(self.listed, 1), self.found / self.wrong
        return f"{self.sets - self.silent} of {self.sets} | {precision:.0%} | {recall:.0%}"


def subsampled(points: Tensor, labels: Tensor, size: tuple[int, int], rate: float, seed: int) -> tuple[Tensor, ...]:
    """Points of some classes, labels of which some are wrong, and which ones."""
    generator = torch.Generator().manual_seed(seed)
    classes = labels.unique()[torch.randperm(CLASSES, generator=generator)[: size[0]]]
    rows = [(labels == c).nonzero()[:, 0] for c in classes]
    rows = [each[torch.randperm(len(each), generator=generator)[: size[1]]] for each in rows]
    given = torch.arange(size[0]).repeat_interleave(torch.tensor([len(each) for each in rows]))
    changed = torch.randperm(len(given), generator=generator)[: round(rate * len(given))]
    given[changed] = (given[changed] + torch.randint(1, size[0], (len(changed),), generator=generator)) % size[0]
    wrong = torch.zeros(len(given), dtype=torch.bool)
    wrong[changed] = True
    return points[torch.cat(rows)], given, wrong


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=4, help="sets of each size and rate")
    options = parser.parse_args()
    images = load_data("cub", root=options.root).test  # classes 101 to 200, on which nothing was chosen
    few = torch.cat([(images.labels == c).nonzero()[:IMAGES, 0] for c in range(CLASSES)])
    images = images.subset(few)
    points = unit(embed(create_embedder("efficientnet_lite0", embedding_dim=None), images))
    tallies: dict[tuple[float, str], Tally] = {}
    for rate in RATES:
        for size in SIZES:
            for seed in range(options.seeds):
                some, given, wrong = subsampled(points, images.labels, size, rate, seed)
                law = fitted_law(some, given, size[0])
                found = fit_mixture(field_scores(class_attractions(some, given, size[0], law=law), given).score)
                listed = found.probability >= 0.5
                tallies.setdefault((rate, "with a third"), Tally()).add(listed, wrong)
                alone = listed if found.components == 2 else torch.zeros_like(listed)
                tallies.setdefault((rate, "two bells alone"), Tally()).add(alone, wrong)
    print("| label noise | | sets with a list | precision | recall |\n|---|---|---|---|---|")
    for (rate, how), tally in tallies.items():
        print(f"| {rate:.0%} | {how} | {tally} |")


if __name__ == "__main__":
    main()
