import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def method_cost(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import method_cost

    yield method_cost
    sys.modules.pop("method_cost")


def test_every_method_takes_as_many_timed_steps_as_asked_for(method_cost):
    found, per_epoch = method_cost.seconds_of_steps(["proxy-anchor", "pfml-log"], steps=2)
    assert {method: len(seconds) for method, seconds in found.items()} == {"proxy-anchor": 2, "pfml-log": 2}
    assert all(second > 0 for seconds in found.values() for second in seconds)
    assert per_epoch == 67  # whole batches of 100 of the 6,768 images


def test_the_table_has_proxy_anchor_as_one(method_cost, monkeypatch, capsys):
    steps = {"proxy-anchor": [1.0, 1.0, 9.0], "snr": [2.0, 2.0, 2.0]}
    asked = []
    monkeypatch.setattr(method_cost, "seconds_of_steps", lambda *given: asked.append(given) or (steps, 10))
    monkeypatch.setattr(method_cost.torch, "set_num_threads", lambda number: asked.append(number))
    monkeypatch.setattr(sys, "argv", ["method_cost.py", "--methods", "snr", "--steps", "3"])
    method_cost.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "snr" in line or "proxy-anchor " in line]
    assert [[row[1], row[3], row[5]] for row in rows[-2:]] == [
        ["proxy-anchor", "10.00", "1.00"],
        ["snr", "20.00", "2.00"],
    ]
    assert asked == [1, (["proxy-anchor", "snr"], 3)]
