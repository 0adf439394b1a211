"""A run of seconds that others continue or finish."""

import pytest

from pfml.runs.data import prepare_data
from pfml.training import DataConfig, run
from small_photos import config_for, draw


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Eight classes; those that are unseen by the seed are larger, so that an epoch of all images is too long."""
    folder = draw(tmp_path_factory.mktemp("photos"), {f"c{k}": 8 for k in range(8)})
    unseen = prepare_data(DataConfig(str(folder))).data.test.class_names
    return draw(folder, dict.fromkeys(unseen, 16))


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "birds"
    run(config_for(photos), out)
    return out
