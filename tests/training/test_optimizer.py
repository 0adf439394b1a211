"""Each optimizer against a few lines of arithmetic, its options and checkpoints, updates held back, and schedules."""

import pytest
import torch
from torch import nn

from pfml.runs.checkpoint import load_checkpoint
from pfml.runs.config import OPTIMIZER_OPTIONS, ScheduleConfig
from pfml.training import LossConfig, OptimizerConfig, TrainConfig, train
from pfml.training.environment import reading_lag
from pfml.training.loop import NonFiniteLossError
from pfml.training.optimizer import (
    OPTIMIZERS,
    create_optimizer,
    learning_rate_factor,
    pack_optimizer,
    unpack_optimizer,
)
from small_data import InterruptAt, few_glyphs, small_config, small_embedder

CONFIGS = {
    "sgd": OptimizerConfig("sgd", lr=0.1, weight_decay=0.0),
    "momentum": OptimizerConfig("sgd", lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": OptimizerConfig("rmsprop", lr=0.01, weight_decay=0.0),
    "rmsprop with all": OptimizerConfig(
        "rmsprop", lr=0.01, momentum=0.5, smoothing=0.8, centered=True, eps=1e-3, weight_decay=0.1
    ),
}
TRAINED = {
    "sgd": OptimizerConfig("sgd", lr=0.05, proxy_lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": OptimizerConfig("rmsprop", lr=1e-3, proxy_lr=1e-2, momentum=0.9, centered=True),
}


class OneNumber(nn.Module):
    """A network whose backbone is one number, and no head."""

    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value], dtype=torch.float64))

    def backbone_parameters(self):
        return [self.value]

    def head_parameters(self):
        return []

    def frozen_parameters(self):
        return []


def positions(config, gradients, *, start=2.0, **options):
    """Where an optimizer is after each gradient."""
    network = OneNumber(start)
    optimizer = create_optimizer(config, network, nn.Module(), **options)
    found = []
    for gradient in gradients:
        network.value.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        found.append(network.value.item())
    return found


def oracle(config, gradients, *, start=2.0):
    """The same by hand."""
    value, velocity, square, mean, found = start, 0.0, 0.0, 0.0, []
    for gradient in gradients:
        gradient = gradient + config.weight_decay * value
        if config.name == "sgd":
            velocity = config.momentum * velocity + gradient
            step = gradient + config.momentum * velocity if config.nesterov else velocity
        else:
            square = config.smoothing * square + (1 - config.smoothing) * gradient**2
            mean = config.smoothing * mean + (1 - config.smoothing) * gradient
            variance = square - mean**2 if config.centered else square
            velocity = config.momentum * velocity + gradient / (variance**0.5 + config.eps)
            step = velocity
        value -= config.lr * step
        found.append(value)
    return found


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_takes_the_steps_of_its_formula(name, fused):
    gradients = [1.0, -0.5, 2.0, 0.25]
    expected = oracle(CONFIGS[name], gradients)
    assert positions(CONFIGS[name], gradients, fused=fused) == pytest.approx(expected, rel=1e-12)


def test_every_option_changes_the_steps():
    gradients = [1.0, -0.5, 2.0]
    changes = {"eps": 0.1, "momentum": 0.3, "nesterov": True, "smoothing": 0.5, "centered": True}
    for name, options in OPTIMIZER_OPTIONS.items():
        usual = {"name": name, "lr": 0.1} | ({"momentum": 0.5} if "momentum" in options else {})
        for option in options:
            changed = OptimizerConfig(**{**usual, option: changes[option]})
            assert positions(changed, gradients) != positions(OptimizerConfig(**usual), gradients), (name, option)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sgdd"}, "must be one of adam, adamw, sgd, rmsprop, got 'sgdd'; did you mean 'sgd'"),
        ({"name": "sgd", "momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"name": "rmsprop", "smoothing": -0.1}, r"smoothing must lie in \[0, 1\), got -0.1"),
        ({"name": "sgd", "nesterov": True}, "nesterov needs a positive optimizer.momentum"),
        ({"name": "adam", "momentum": 0.9}, "momentum is an option of sgd, rmsprop and must be left out for adam"),
        ({"name": "sgd", "eps": 0.1}, "eps is an option of adam, adamw, rmsprop and must be left out for sgd"),
        ({"name": "rmsprop", "momentum": 0.9, "nesterov": True}, "nesterov is an option of sgd and"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


def test_a_held_first_step_leaves_neither_a_trace_nor_a_momentum_of_chance():
    config, hold = CONFIGS["nesterov"], torch.ones(())
    network = OneNumber(2.0)
    optimizer = create_optimizer(config, network, nn.Module(), hold=hold, fused=True)
    network.value.grad = torch.full_like(network.value, torch.nan)
    optimizer.step()
    assert network.value.item() == 2.0
    hold.zero_()
    network.value.grad = torch.ones_like(network.value)
    optimizer.step()
    assert network.value.item() == pytest.approx(oracle(config, [1.0])[0], rel=1e-12)


def test_a_parameter_may_join_its_group_later():
    embedder = small_embedder()
    optimizer = create_optimizer(TRAINED["sgd"], embedder, nn.Module(), fused=True)
    first, *others = list(embedder.backbone_parameters())
    first.grad = torch.ones_like(first)
    optimizer.step()
    for one in others:
        one.grad = torch.ones_like(one)
    optimizer.step()
    assert all(torch.isfinite(one).all() for one in (first, *others))


def test_what_cannot_hold_an_update_back_is_read_before_it():
    gpu = torch.device("cuda")
    for name, algorithm in OPTIMIZERS.items():
        config = TrainConfig(optimizer=OptimizerConfig(name))
        assert reading_lag(config, gpu) == int(algorithm.is_fused)
        assert reading_lag(config, torch.device("cpu")) == 0
    with pytest.raises(ValueError, match="an optimizer that has it, got True and rmsprop"):
        create_optimizer(TRAINED["rmsprop"], small_embedder(), nn.Module(), hold=torch.zeros(()), fused=True)


@pytest.mark.parametrize(("name", "fused"), [("sgd", False), ("sgd", True), ("rmsprop", False)])
def test_a_run_resumes_from_its_checkpoint_to_the_bit(name, fused, tmp_path, monkeypatch):
    config = small_config(optimizer=TRAINED[name], loss=LossConfig("proxy-anchor"), warm_up_epochs=1)
    if fused:  # as on a GPU
        monkeypatch.setattr(
            "pfml.training.loop.reading_lag", lambda config, _: int(OPTIMIZERS[config.optimizer.name].is_fused)
        )

    def run(out, **options):
        torch.manual_seed(1)
        return train(few_glyphs(), small_embedder(), config, out=tmp_path / out, **options)

    results = run("whole")
    assert results["last"]["test"]["recall_at_1"] > 0.4
    with pytest.raises(KeyboardInterrupt):
        run("broken", monitor=InterruptAt(6))
    run("broken", resume=True)
    whole, broken = (load_checkpoint(tmp_path / folder / "checkpoints")[0] for folder in ("whole", "broken"))
    assert whole.keys() == broken.keys()
    assert any(key.endswith("momentum_buffer") for key in whole)
    assert all(torch.equal(value, broken[key]) for key, value in whole.items())


@pytest.mark.parametrize("name", TRAINED)
def test_a_step_that_is_not_finite_is_not_taken(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pfml.training.loop.reading_lag", lambda config, _: int(OPTIMIZERS[config.optimizer.name].is_fused)
    )
    config = small_config(optimizer=TRAINED[name], epochs=1)
    embedder = small_embedder()
    before = embedder.head.linear.weight.detach().clone()
    embedder.head.linear.weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(NonFiniteLossError, match="at step 0"):
        train(few_glyphs(), embedder, config, out=tmp_path / "run")
    assert torch.equal(embedder.head.linear.weight, before)


def test_a_state_without_moments_is_stored_and_read_too():
    network, config = OneNumber(2.0), CONFIGS["sgd"]
    optimizer = create_optimizer(config, network, nn.Module())
    network.value.grad = torch.ones_like(network.value)
    optimizer.step()
    assert pack_optimizer(optimizer) == {}
    unpack_optimizer(optimizer, {})


def factors(schedule, epochs=10, steps_per_epoch=5):
    return [learning_rate_factor(schedule, step, steps_per_epoch, epochs) for step in range(epochs * steps_per_epoch)]


def test_a_constant_schedule_is_one():
    assert set(factors(ScheduleConfig("constant"))) == {1.0}


def test_steps_halve_every_so_many_epochs():
    values = factors(ScheduleConfig("step", every=4, factor=0.5))
    assert values[:20] == [1.0] * 20
    assert values[20:40] == [0.5] * 20
    assert values[40:] == [0.25] * 10


def test_milestones_lower_the_rates_after_each_of_these_epochs():
    values = factors(ScheduleConfig("milestones", factor=0.1, milestones=(3, 8)))
    assert values == pytest.approx([1.0] * 15 + [0.1] * 25 + [0.01] * 10)


@pytest.mark.parametrize("name", ["step", "constant"])
def test_milestones_belong_to_their_schedule(name):
    with pytest.raises(
        ValueError, match=rf"schedule.milestones are epochs of schedule.name milestones.*got \[3\] with {name}"
    ):
        ScheduleConfig(name, milestones=(3,))
    with pytest.raises(ValueError, match=r"which needs some: got \[\] with milestones"):
        ScheduleConfig("milestones")
    for wrong in ((0, 3), (5, 5), (6, 2)):
        with pytest.raises(ValueError, match="schedule.milestones must be rising epochs >= 1"):
            ScheduleConfig("milestones", milestones=wrong)
    assert ScheduleConfig("milestones", milestones=[2, 4]) == ScheduleConfig("milestones", milestones=(2, 4))


def test_a_cosine_falls_from_one_to_nearly_zero_and_never_up():
    values = factors(ScheduleConfig("cosine"))
    assert values[0] == 1
    assert values[25] == pytest.approx(0.5)
    assert values[-1] < 0.01
    assert values == sorted(values, reverse=True)


def test_one_cycle_peaks_after_three_tenths():
    values = factors(ScheduleConfig("one-cycle"))
    assert values[0] == pytest.approx(0.04)
    assert values.index(max(values)) == 15
    assert max(values) == pytest.approx(1)
    assert values[-1] < 0.01


@pytest.mark.parametrize("wrong", [{"every": 0}, {"factor": 0.0}, {"factor": 1.5}])
def test_a_schedule_of_values_without_a_meaning_is_refused(wrong):
    with pytest.raises(ValueError, match="schedule"):
        ScheduleConfig("step", **wrong)
