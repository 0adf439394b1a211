"""The reliability scorecard as a Markdown table: pfml and pytorch-metric-learning, both run here and now.

python benchmarks/reliability.py --kills 100

Items 1 to 22 are probes of a loss (`reliability_probes.py`), which run unchanged on pfml's loss, by each backend of a
CPU, and on three losses of pytorch-metric-learning. Items 24 to 28 are faults of files (`reliability_files.py`). A cell
is what was seen, or why nothing can be run there. The tests in tests/scorecard are stricter: every backend, device and
dtype.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import signal
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytorch_metric_learning.losses as pml
import torch

import pfml
from machine import environment
from pfml.storage.bundle import extract_zip
from reliability_files import OURS, THEIRS, archives, damages, disk_full, images_of_pfml, images_of_timm, kills
from reliability_probes import PROBES, C, D
from reliability_subjects import Outcome, Subject

PFML = [
    Subject(
        f"PotentialFieldLoss, {backend}",
        lambda classes, dim, backend=backend: pfml.PotentialFieldLoss(classes, dim, backend=backend),  # type: ignore[misc]
        f"pfml.PotentialFieldLoss(classes, dim, proxies_per_class=1, proxy_repulsion=False, backend={backend!r})",
    )
    for backend in ("dense", "tiled")
]
PML = [
    Subject(
        "ProxyAnchorLoss",
        lambda classes, dim: pml.ProxyAnchorLoss(classes, dim),
        "losses.ProxyAnchorLoss(classes, dim)",
    ),
    Subject("ContrastiveLoss", lambda classes, dim: pml.ContrastiveLoss(), "losses.ContrastiveLoss()", False),
    Subject(
        "MultiSimilarityLoss", lambda classes, dim: pml.MultiSimilarityLoss(), "losses.MultiSimilarityLoss()", False
    ),
]
ITEMS = {
    1: "empty batch: finite, proxies feel a force",
    2: "single sample: finite",
    3: "single-class and all-distinct batch: equal to float64",
    4: "label < 0 or >= C: ValueError with value and index",
    5: "label shape, length, None: ValueError",
    6: "float or bool labels: TypeError",
    7: "NaN or Inf in an embedding: ValueError with the row",
    8: "zero vector: finite",
    9: "points of two classes 1e-6 apart: finite, separate",
    10: "total collapse: finite, one warning",
    11: "distance 1e-8 to 2: gradient within 1e-5 of float64",
    12: "distance = delta +- 1 ulp",
    13: "fp16 and bf16 inputs: within 1e-2 and 5e-2",
    14: "autocast fp16, 100 steps: proxies stay fp32, finite",
    15: "inputs of 1e20 and 1e-25: never a silent zero gradient",
    16: "C = 0: ValueError; C = 1: works",
    17: "C = 1,000,000: 1.2 x the proxies plus tiles",
    18: "wrong width, 3-D, integers: ValueError with the sizes",
    19: "gradcheck in float64",
    20: "every backend equals the dense reference",
    21: "permuted batch: relative change <= 1e-6",
    22: "same seed twice: bit-equal",
    23: "resume mid-epoch: bit-equal to the uninterrupted run",
    24: "kill -9 during a save: nothing unreadable",
    25: "disk full during a save: OSError, the old one intact",
    26: "damaged or hostile checkpoint: refused by name, no code run",
    27: "truncated or empty image: an error with the path",
    28: "archive with `../`, absolute path, bomb: refused",
}
Cell = Callable[[], str]


def cell(outcome: Outcome) -> str:
    """An outcome as a cell."""
    return f"{'pass' if outcome.passed else '**fail**'}: {outcome.seen}".replace("|", "\\|")


def probed(number: int, subjects: list[Subject]) -> str:
    """One cell for all subjects: the first that fails, else the last."""
    outcomes = []
    for subject in subjects:
        if number == 17 and subject.name.endswith("dense"):
            continue  # bounded memory is what the other backend is for
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = PROBES[number](subject)
        outcomes.append(outcome if outcome.passed else replace(outcome, seen=f"{subject.name}: {outcome.seen}"))
    passed = sum(outcome.passed for outcome in outcomes)
    shown = next((one for one in outcomes if not one.passed), outcomes[0])
    some = f" ({passed} of {len(outcomes)} losses pass)" if passed < len(outcomes) and len(subjects) > 2 else ""
    return cell(shown) + some


def both_sides_of_delta() -> str:
    """Item 12 for pfml: energies meet at delta, the force is that of one side."""
    law, seen = pfml.PowerLaw(delta=0.25), []
    for backend in ("dense", "tiled"):
        for steps in (-1, 0, 1):
            points = torch.zeros(2, 4)
            points[0, 0] = 0.25 + steps * 0.25 * torch.finfo(torch.float32).eps
            energy = pfml.potential_energy(points, torch.tensor([0, 1]), law=law, form="shifted", backend=backend)
            seen.append(abs(energy.item()))
    return cell(Outcome(max(seen) < 1e-3, f"largest jump of the energy {max(seen):.0e} of {0.25**-3:.0f}"))


def backends_agree() -> str:
    """Item 20 for pfml: the tiled backend against the dense one in float64, at awkward sizes."""
    worst = 0.0
    for seed, (n, classes, dim) in enumerate([(1, 1, 1), (3, 2, 2), (17, 7, 3), (41, 13, 40)] * 5):
        generator = torch.Generator().manual_seed(seed)
        points = torch.nn.functional.normalize(torch.randn(n, dim, generator=generator))
        labels = torch.randint(0, classes, (n,), generator=generator)
        dense = pfml.potential_energy(points.double(), labels, form="shifted", backend="dense").item()
        tiled = pfml.potential_energy(points, labels, form="shifted", backend="tiled").item()
        worst = max(worst, abs(dense - tiled) / max(abs(dense), 1e-3 * n))
    return cell(Outcome(worst <= 1e-5, f"20 states, largest relative difference {worst:.0e}"))


def resumed() -> str:
    """Item 23 for pfml: a run on glyphs that is interrupted in the middle of an epoch, and one that is not."""
    from pfml.data import RetrievalData, draw_glyphs
    from pfml.runs.checkpoint import load_checkpoint
    from pfml.training import BatchConfig, LossConfig, Monitor, OptimizerConfig, TrainConfig, train

    data = RetrievalData("glyphs", draw_glyphs("ABCD", copies=1), draw_glyphs("KL", copies=1))
    config = TrainConfig(
        epochs=2,
        warm_up_epochs=0,
        batch_norm="train",
        batch=BatchConfig(16, 4),
        loss=LossConfig("pfml", {"proxies_per_class": 2}),
        optimizer=OptimizerConfig("adamw", lr=1e-3),
        device="cpu",
    )

    class Interrupt(Monitor):
        left = 2

        def step(self, epoch: int, loss: float, images_per_second: float) -> None:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)  # Ctrl-C, after which a run saves its state

    def run(out: Path, monitor: Monitor | None, resume: bool) -> None:
        torch.manual_seed(1)
        train(data, pfml.create_embedder("convnet", embedding_dim=8), config, out=out, monitor=monitor, resume=resume)

    with tempfile.TemporaryDirectory() as name:
        run(Path(name) / "whole", None, False)
        with suppress(KeyboardInterrupt):
            run(Path(name) / "broken", Interrupt(), False)
        run(Path(name) / "broken", None, True)
        whole, broken = (load_checkpoint(Path(name) / kind / "checkpoints")[0] for kind in ("whole", "broken"))
    same = all(torch.equal(whole[key], broken[key]) for key in whole)
    return cell(Outcome(same, "bit-equal" if same else "differs"))


def their_extraction(path: Path, target: Path) -> None:
    """The lines by which its data sets unpack what they have downloaded."""
    with zipfile.ZipFile(path, "r") as archive:
        archive.extractall(target)


def rows(trials: int) -> dict[int, tuple[Cell, Cell]]:
    """Number of the item -> how the cells of pfml and of pytorch-metric-learning are made."""
    table: dict[int, tuple[Cell, Cell]] = {
        number: (lambda n=number: probed(n, PFML), lambda n=number: probed(n, PML))  # type: ignore[misc]
        for number in PROBES
    }
    table[12] = both_sides_of_delta, lambda: "not applicable: its losses have no such radius"
    table[20] = backends_agree, lambda: "not applicable: each of its losses has one way to be computed"
    table[23] = resumed, lambda: "not applicable: its trainers save weights at the end of an epoch, no state of a run"
    table[24] = lambda: cell(kills(OURS, trials)), lambda: cell(kills(THEIRS, trials))
    table[25] = lambda: cell(disk_full(OURS)), lambda: cell(disk_full(THEIRS))
    table[26] = lambda: cell(damages(OURS)), lambda: cell(damages(THEIRS))
    table[27] = lambda: cell(images_of_pfml()), lambda: f"it reads no images itself; {cell(images_of_timm())}"
    table[28] = lambda: cell(archives(extract_zip)), lambda: cell(archives(their_extraction))
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="trials of item 24, for each of the two")
    parser.add_argument("--items", type=int, nargs="*", help="numbers of items; all if none are given")
    arguments = parser.parse_args()
    versions = environment() | {"pytorch-metric-learning": importlib.metadata.version("pytorch-metric-learning")}
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    print(f"\n| # | expected | pfml ({', '.join(one.name for one in PFML)}) | pytorch-metric-learning "
          f"({', '.join(one.name for one in PML)}) |\n|---|---|---|---|")  # fmt: skip
    table = rows(arguments.kills)
    for number, expected in ITEMS.items():
        if not arguments.items or number in arguments.items:
            ours, theirs = table[number]
            print(f"| {number} | {expected} | {ours()} | {theirs()} |", flush=True)


if __name__ == "__main__":
    assert C < D  # the probes name rows and classes by numbers that must differ
    main()
