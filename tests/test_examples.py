"""The programs of examples/ run, as their first lines say, and print what they promise."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from local_hub import LocalHub

EXAMPLES = Path(__file__).parents[1] / "examples"
#: Example -> its arguments, the packages that it needs, and a part of what it prints.
PROGRAMS = {
    "own_network": ((), (), "R@1 on unseen classes: 0."),
    "monitor": ((), (), "stopped: no better than 0."),
    "trackers": (("mlflow",), ("mlflow",), "the same in mlflow"),
    "augmentation": ((), (), "augmentation.png"),
    "parts_of_a_network": ((), ("peft",), "adapters of rank 4 and the head: R@1 0."),
    "large_batches": ((), (), "mini-batches of 16: mean loss"),
    "hub": (("birds/small",), (), "hf-hub:birds/small: equal embeddings: True"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    arguments, packages, expected = PROGRAMS[name]
    for package in packages:
        pytest.importorskip(package, reason=f"this example needs {package}")
    LocalHub.installed(tmp_path / "hub", monkeypatch)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert expected in printed
    if name == "large_batches":
        first, second = (line.rpartition(" ")[2] for line in printed.splitlines())
        assert float(first) == pytest.approx(float(second), abs=2e-6)


@pytest.mark.slow
def test_the_sharded_example_prints_the_same_for_any_number_of_ranks():
    printed = []
    for ranks in (1, 2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        program = [*torchrun, str(EXAMPLES / "sharded_training.py")]
        done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=300)
        printed.append([float(line.split()[-1]) for line in done.stdout.splitlines() if "energy" in line])
    one, two = printed
    assert one[:2] == two[:2]
    assert one == pytest.approx(two, abs=2e-3), "rounding differs by the number of threads, and grows with the steps"


def test_every_example_is_run():
    elsewhere = {"sharded_training"}  # by torchrun
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PROGRAMS, *elsewhere}
