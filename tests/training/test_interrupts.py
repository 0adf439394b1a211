import os
import signal
import threading

import pytest

from pfml.training.interrupts import stop_wish


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_a_wish(number):
    with stop_wish() as wish:
        os.kill(os.getpid(), number)
        assert wish.asked


def test_a_second_signal_interrupts_at_once():
    with stop_wish():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_are_as_they_were_afterwards():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_wish():
        pass
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_another_thread_can_train_too():
    asked = []

    def work():
        with stop_wish() as wish:
            asked.append(wish.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]
