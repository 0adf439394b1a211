"""kill -9 at random moments of saving: the save before or the one after, whole, and hardly anything left over."""

import random
import time
import warnings

import pytest
from savers import CONTEXT, SAVERS, kill, save_for_ever

from pfml.experiments.store import TornLineWarning


def kills(name, folder, trials):
    """Numbers of the saves that were found after each kill, and the most orphans after any."""
    saver, delays = SAVERS[name], random.Random(0)
    folder.mkdir()
    saver.save(folder, 0)
    start = time.perf_counter()
    saver.save(folder, 1)
    one_save = time.perf_counter() - start
    found, most_orphans = [1], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)
        for _ in range(trials):
            started = CONTEXT.Event()
            writer = CONTEXT.Process(target=save_for_ever, args=(name, folder, found[-1] + 1, started))
            writer.start()
            assert started.wait(60)
            time.sleep(delays.uniform(0, 4 * one_save))
            kill(writer)
            found.append(saver.read(folder))
            most_orphans = max(most_orphans, len(saver.orphans(folder)))
    assert found == sorted(found), "a save was lost"
    assert found[-1] > 1, "no save came to an end, so that nothing was tried"
    saver.save(folder, found[-1] + 1)
    assert saver.read(folder) == found[-1] + 1
    assert not saver.orphans(folder), "the next save must remove what a kill has left"
    return most_orphans


@pytest.mark.parametrize("name", SAVERS)
def test_a_kill_while_saving_leaves_a_whole_save_and_at_most_one_orphan(name, tmp_path):
    assert kills(name, tmp_path / "saves", 10) <= SAVERS[name].most_orphans


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVERS)
def test_200_kills_while_saving_leave_a_whole_save_and_at_most_one_orphan(name, tmp_path):
    assert kills(name, tmp_path / "saves", 200) <= SAVERS[name].most_orphans
