"""The table of docs/RELIABILITY.md is made of outcomes, and the list of licenses of all dependencies."""

import re
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("pytorch_metric_learning")

import reliability
from reliability_probes import PROBES
from reliability_subjects import Outcome, Subject

ROOT = Path(__file__).parents[1]
QUICK = (1, 2, 4, 5, 6, 7, 8, 9, 10, 15, 16, 18, 19, 21, 22)


@pytest.mark.parametrize("number", QUICK)
def test_pfml_passes_the_probe(number):
    assert reliability.probed(number, reliability.PFML).startswith("pass: ")


@pytest.mark.parametrize("number", [4, 6, 7, 10, 15, 18])
def test_the_probe_tells_a_loss_that_fails(number):
    """What the scorecard says of pytorch-metric-learning."""
    assert reliability.probed(number, reliability.PML).startswith("**fail**: ")


def test_a_probe_is_run_and_not_looked_up(monkeypatch):
    monkeypatch.setitem(PROBES, 4, lambda subject: Outcome(False, f"seen of {subject.name}"))
    assert "seen of" in reliability.probed(4, reliability.PFML)
    broken = Subject("broken", lambda classes, dim: reliability.pml.ContrastiveLoss(), "", False)
    assert "**fail**: broken: " in reliability.probed(7, [broken])


def test_every_item_has_two_cells_and_a_line_in_the_document():
    assert list(reliability.ITEMS) == list(range(1, 29))
    assert reliability.rows(1).keys() == reliability.ITEMS.keys()
    listed = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "RELIABILITY.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(number) for number in listed} >= set(reliability.ITEMS)


def test_every_dependency_has_a_line_in_the_list_of_licenses():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: needed for name, needed in project["optional-dependencies"].items() if name not in ("all", "dev")}
    listed = (ROOT / "docs" / "LICENSES.md").read_text(encoding="utf-8")
    for requirement in [*project["dependencies"], *(one for needed in extras.values() for one in needed)]:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
        assert f"| {name} |" in listed, f"{name}: python tools/licenses.py > docs/LICENSES.md"
