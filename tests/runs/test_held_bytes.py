"""How many decoded images a check keeps: those that the run will hold, and no more than half of the free memory."""

import pytest

from pfml.data.decoding import KEPT_BYTES
from pfml.runs import data
from pfml.runs.config import StorageConfig
from pfml.runs.data import held_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("storage", "free", "expected"),
    [
        (StorageConfig(), None, 8 * GIB),
        (StorageConfig(), 100 * GIB, 8 * GIB),
        (StorageConfig(budget_gib=5.0), 100 * GIB, 5 * GIB),
        (StorageConfig(), 10 * GIB, 5 * GIB),
        (StorageConfig(), GIB, KEPT_BYTES),
        (StorageConfig(storage="files"), 100 * GIB, KEPT_BYTES),
        (StorageConfig(short_side=256), 100 * GIB, KEPT_BYTES),
    ],
)
def test_a_check_keeps_what_the_run_will_hold(monkeypatch, storage, free, expected):
    monkeypatch.setattr(data, "available_memory", lambda: free)
    assert held_bytes(storage) == expected


def test_images_of_a_run_are_kept_up_to_these_bytes(monkeypatch, tmp_path):
    from small_photos import draw

    folder = draw(tmp_path, {"a": 2, "b": 2, "c": 2, "d": 2})
    config = data.DataConfig(str(folder))
    monkeypatch.setattr(data, "held_bytes", lambda storage: 10)
    assert data.load_checked(config, storage=StorageConfig()).train.pixels is None
    monkeypatch.setattr(data, "held_bytes", lambda storage: GIB)
    assert data.load_checked(config, storage=StorageConfig()).train.pixels is not None
