"""Photographs through the package's own commands, as a user would."""

import json
import tarfile
from pathlib import Path

import pytest

from pfml.cli import main
from pfml.models import load_embedder

CUB = Path(__file__).parents[3] / "shared" / "data" / "cub200"


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    """Ten classes of CUB, 12 images each, as a folder of class folders."""
    if not CUB.exists():
        pytest.skip("the images of CUB-200-2011 are not here (../shared/data/cub200)")
    folder = tmp_path_factory.mktemp("birds")
    taken: dict[str, int] = {}
    with tarfile.open(CUB / "cub-0.tar") as archive:
        for member in archive:
            if not member.isfile():
                continue
            _, name, file = member.name.split("/")
            if (name in taken or len(taken) < 10) and taken.get(name, 0) < 12:
                taken[name] = taken.get(name, 0) + 1
                (folder / name).mkdir(exist_ok=True)
                (folder / name / file).write_bytes(archive.extractfile(member).read())
    return folder


@pytest.mark.slow
def test_efficientnet_lite0_trains_on_photographs_on_a_cpu(birds, tmp_path, capsys):
    run = tmp_path / "run"
    options = ["--model.backbone=efficientnet_lite0", "--model.embedding_dim=64", "--batch.size=20", "--device=cpu"]
    options += ["--loss.name=pfml-log", "--loss.options.proxies_per_class=2", "--optimizer.lr=1e-4", "--epochs=3"]
    main(["train", f"--data.name={birds}", f"--out={run}", *options])
    results = json.loads((run / "results.json").read_text())
    # the package's weights are real: five classes of birds at random would give 0.2
    assert results["last"]["test"]["recall_at_1"] > 0.5

    photographs = sorted(birds.rglob("*.webp"))[:3]
    assert load_embedder(run).encode(photographs).shape == (3, 64)
    assert "R@1" in capsys.readouterr().out
