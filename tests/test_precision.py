import threading

import torch

from pfml.precision import full_precision


def test_threads_that_overlap_all_have_it_and_leave_things_as_they_were():
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    first_inside, second_inside, seen = threading.Event(), threading.Event(), []

    def first():
        with full_precision(torch.device("cpu")):
            first_inside.set()
            assert second_inside.wait(120)

    def second():
        assert first_inside.wait(120)
        with full_precision(torch.device("cpu")):
            second_inside.set()
            thread.join(120)
            seen.append(switch.fp32_precision)

    thread, other = threading.Thread(target=first), threading.Thread(target=second)
    try:
        thread.start()
        other.start()
        other.join(240)
        assert seen == ["ieee"]
        assert switch.fp32_precision == "tf32"
    finally:
        switch.fp32_precision = before
