import pytest
from worlds import World


@pytest.fixture(scope="package")
def world(tmp_path_factory):
    """Four processes for all tests of this folder."""
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.stop()
