"""A reader during a write sees one whole save after the other, never a mixture and never none."""

import time

import pytest
from savers import SAVERS, kill, save_for_ever

from processes import CONTEXT

#: Saves that a reader sees before it stops.
SAVES = 12


@pytest.mark.parametrize("name", SAVERS)
@pytest.mark.filterwarnings("ignore:.*is not whole and was ignored")  # a line that is being written
def test_a_reader_beside_a_writer_sees_whole_saves_in_their_order(name, tmp_path):
    saver, folder = SAVERS[name], tmp_path / "saves"
    folder.mkdir()
    saver.save(folder, 0)
    started = CONTEXT.Event()
    writer = CONTEXT.Process(target=save_for_ever, args=(name, folder, 1, started))
    writer.start()
    seen = []
    try:
        assert started.wait(300)
        end = time.monotonic() + 60
        while len(set(seen)) < SAVES and time.monotonic() < end:
            seen.append(saver.read(folder))
    finally:
        kill(writer)
    assert seen == sorted(seen)
    assert len(set(seen)) >= SAVES
