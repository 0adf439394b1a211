"""kill -9 at random moments of saving: the save before or the one after, whole, and hardly anything left over."""

import random
import time
import warnings

import pytest
from savers import SAVERS, kill, save_for_ever

from pfml.experiments.store import TornLineWarning
from processes import CONTEXT


def kills(name, folder, trials):
    """How many orphans each kill left; every one of them left the newest whole save, and the next save tidied up."""
    saver, delays = SAVERS[name], random.Random(0)
    folder.mkdir()
    saver.save(folder, 0)
    start = time.perf_counter()
    saver.save(folder, 1)
    longest = 4 * (time.perf_counter() - start)
    found, orphans, end = [1], [], time.monotonic() + 60
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        while len(orphans) < trials or (found[-1] == 1 and time.monotonic() < end):
            started = CONTEXT.Event()
            writer = CONTEXT.Process(target=save_for_ever, args=(name, folder, found[-1] + 1, started))
            writer.start()
            assert started.wait(300)
            time.sleep(delays.uniform(0, longest))
            kill(writer)
            found.append(saver.read(folder))
            orphans.append(len(saver.orphans(folder)))
            if found[-1] == 1:  # nothing has come to an end yet: the machine is busier than it was at first
                longest *= 2
    assert found == sorted(found), "a save was lost"
    assert found[-1] > 1, "no save came to an end, so that nothing was tried"
    saver.save(folder, found[-1] + 1)
    assert saver.read(folder) == found[-1] + 1
    assert not saver.orphans(folder), "the next save must remove what a kill has left"
    return orphans


@pytest.mark.parametrize("name", SAVERS)
def test_a_kill_while_saving_leaves_a_whole_save_and_at_most_one_orphan(name, tmp_path):
    assert max(kills(name, tmp_path / "saves", 6)) <= SAVERS[name].most_orphans


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVERS)
def test_200_kills_while_saving_leave_a_whole_save_and_at_most_one_orphan(name, tmp_path):
    assert max(kills(name, tmp_path / "saves", 200)) <= SAVERS[name].most_orphans
