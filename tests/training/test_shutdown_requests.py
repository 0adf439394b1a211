import os
import signal
import threading

import pytest

from pfml.training.shutdown import Interrupted, catch_shutdown_requests, interruptible

pytestmark = pytest.mark.usefixtures("heeds_hangups")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_is_a_request(number):
    with catch_shutdown_requests() as request:
        os.kill(os.getpid(), number)
        assert request.received


def test_a_second_signal_interrupts_at_once():
    with catch_shutdown_requests():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_are_as_they_were_afterwards():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with catch_shutdown_requests():
        pass
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_another_thread_can_train_too():
    received = []

    def work():
        with catch_shutdown_requests() as request:
            received.append(request.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert received == [False]


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with catch_shutdown_requests() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.received
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_between_runs_a_signal_ends_at_once_and_a_run_takes_it_as_a_request(number):
    with interruptible("what was left"):
        with catch_shutdown_requests() as request:
            os.kill(os.getpid(), number)
            assert request.received
        with pytest.raises(Interrupted, match="what was left") as error:
            os.kill(os.getpid(), number)
    assert error.value.signal == number
