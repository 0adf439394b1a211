"""A network under DistributedDataParallel and sharded proxies: the training of one process."""

import pytest
import torch
from cases import in_one_process, under_ddp


@pytest.mark.parametrize("deal", ["even", "uneven"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("options", [{}, {"normalization": "log", "delta": 0.6, "delta_rep": 1.2}], ids=["none", "log"])
def test_three_steps_on_two_ranks_are_those_of_one_process(world, options, optimizer, deal):
    values, parameters, proxies = in_one_process(options, optimizer)
    answers = world.run(under_ddp, 2, options, optimizer, deal, "averaged")
    for got_values, got_parameters, _ in answers:
        assert got_values == pytest.approx(values, rel=1e-5)
        for mine, expected in zip(got_parameters, parameters, strict=True):
            torch.testing.assert_close(torch.tensor(mine), expected, rtol=1e-5, atol=1e-5)
    together = torch.tensor([row for answer in answers for row in answer[2]])
    torch.testing.assert_close(together, proxies, rtol=1e-5, atol=1e-5)


def test_a_rank_without_samples_takes_part(world):
    values, parameters, _ = in_one_process({}, "SGD")
    for got_values, got_parameters, _ in world.run(under_ddp, 2, {}, "SGD", "one for all", "averaged"):
        assert got_values == pytest.approx(values, rel=1e-5)
        torch.testing.assert_close(torch.tensor(got_parameters[0]), parameters[0], rtol=1e-5, atol=1e-5)


def test_gradients_that_are_to_be_summed_are_not_those_that_ddp_needs(world):
    expected = in_one_process({}, "SGD")[1][0]
    for _, parameters, _ in world.run(under_ddp, 2, {}, "SGD", "even", "summed"):
        assert (torch.tensor(parameters[0]) - expected).abs().max() > 1e-4
