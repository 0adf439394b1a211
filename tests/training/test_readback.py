"""A run that reads its numbers one step late, as on a GPU, forced on the CPU."""

import json
from functools import partial

import pytest
import torch

from pfml.losses import CollapseWarning, ProxyAnchorLoss
from pfml.losses.checks import deferred_checks
from pfml.models import create_embedder
from pfml.runs.checkpoint import has_checkpoint, load_checkpoint
from pfml.runs.folder import RunFolder
from pfml.training import BatchConfig, LossConfig, Monitor, NonFiniteLossError, OptimizerConfig, train
from pfml.training.optimizer import create_optimizer
from pfml.training.readback import Batch, Readback
from small_data import InterruptAt, few_glyphs, interrupted_repeatedly, small_config, small_embedder

CPU = torch.device("cpu")


def batch(step):
    return Batch(step, epoch=0, position=step, indices=torch.tensor([step]))


def number(value):
    return torch.tensor(float(value))


@pytest.fixture
def lagging(monkeypatch):
    monkeypatch.setattr("pfml.training.loop.reading_lag", lambda config, device: 1)


def run(out, *, embedder=None, resume=False, monitor=None, **changes):
    torch.manual_seed(1)
    embedder = embedder or small_embedder()
    return train(few_glyphs(), embedder, small_config(**changes), out=out, resume=resume, monitor=monitor)


def test_without_a_lag_each_step_is_read_at_once():
    readback = Readback(CPU, lag=0)
    for step in range(3):
        (outcome,) = readback.add(batch(step), number(step), number(2 * step))
        assert (outcome.batch.step, outcome.loss, outcome.norm, outcome.held) == (step, step, 2 * step, False)
    assert readback.flush() == []


@pytest.mark.parametrize("lag", [0, 1])
def test_terms_of_the_loss_are_read_with_it(lag):
    readback = Readback(CPU, lag=lag)
    outcomes = (
        readback.add(batch(0), number(3), number(0), terms={"near": number(1), "far": number(2)}) + readback.flush()
    )
    assert [(outcome.loss, outcome.terms) for outcome in outcomes] == [(3.0, {"near": 1.0, "far": 2.0})]


def test_terms_cost_no_further_reading_of_the_device(monkeypatch):
    readback, read = Readback(CPU, lag=1), []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: read.append(self.shape) or original(self))
    for step in range(3):
        readback.add(batch(step), number(0), number(0), terms={"near": number(1), "far": number(2)})
    assert read == [(5,), (5,)], "one reading a step: loss, norm, whether it is held, and the terms"


def test_with_a_lag_each_step_is_read_during_the_next_and_the_last_by_a_flush():
    readback = Readback(CPU, lag=1)
    read = [[o.loss for o in readback.add(batch(step), number(step), number(0))] for step in range(3)]
    assert read == [[], [0.0], [1.0]]
    assert [(o.batch.step, o.loss) for o in readback.flush()] == [(2, 2.0)]
    assert readback.flush() == []


@pytest.mark.parametrize(("loss", "norm"), [(torch.nan, 1), (torch.inf, 1), (1, torch.nan), (1, torch.inf)])
def test_the_device_knows_of_a_bad_step_before_anybody_reads_it(loss, norm):
    readback = Readback(CPU, lag=1)
    readback.add(batch(0), number(loss), number(norm))
    assert readback.hold == 1
    (outcome,) = readback.add(batch(1), number(1), number(1))
    assert outcome.held
    assert readback.hold == 0


def test_the_exact_value_of_a_float32_loss_is_kept():
    readback = Readback(CPU, lag=1)
    readback.add(batch(0), torch.tensor(0.1), number(0))
    assert readback.flush()[0].loss == torch.tensor(0.1).item()


def test_another_lag_is_refused():
    with pytest.raises(ValueError, match="lag must be 0 or 1, got 2"):
        Readback(CPU, lag=2)


def test_checks_that_found_something_come_with_their_step():
    loss, labels = ProxyAnchorLoss(4, 8), torch.arange(4)
    good, bad = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.full((4, 8), torch.nan)
    readback = Readback(CPU, lag=1)
    for step, embeddings in enumerate((good, bad)):
        with deferred_checks() as checks:
            loss(embeddings, labels)
        readback.add(batch(step), number(1), number(1), checks)
        assert readback.hold == step
    (outcome,) = readback.flush()
    assert outcome.held
    with pytest.raises(ValueError, match="embeddings must be finite"):
        outcome.checks[0].explain()


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_an_optimizer_on_hold_changes_nothing_not_even_its_moments(name):
    embedder, loss, hold = small_embedder(), ProxyAnchorLoss(4, 8), torch.zeros(())
    optimizer = create_optimizer(OptimizerConfig(name), embedder, loss, hold=hold, fused=True)

    def everything():
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [value.detach().clone() for value in (*embedder.parameters(), *loss.parameters(), *moments)]

    def step(scale):
        optimizer.zero_grad()
        (loss(embedder(torch.rand(4, 3, 16, 16)), torch.arange(4)) * scale).backward()
        optimizer.step()

    step(1.0)
    before = everything()
    hold.fill_(1.0)
    step(torch.nan)
    assert all(map(torch.equal, everything(), before))
    hold.fill_(0.0)
    step(1.0)
    assert not all(map(torch.equal, everything(), before))


def test_a_hold_without_a_fused_optimizer_is_refused():
    with pytest.raises(ValueError, match="hold needs fused=True"):
        create_optimizer(OptimizerConfig(), small_embedder(), ProxyAnchorLoss(4, 8), hold=torch.zeros(()))


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}, {"clip_value": 0.01, "clip_norm": 0.1}], ids=str)
def test_a_run_that_lags_learns_and_logs_what_one_does_that_does_not(tmp_path, monkeypatch, options):
    # a smooth loss and small steps: roundings, which differ, do not grow
    changes = {"loss": LossConfig("proxy-anchor"), "optimizer": OptimizerConfig("adamw", lr=1e-4, **options)}
    changes["batch"] = BatchConfig(32, 4, per_epoch=2)
    run(tmp_path / "plain", **changes)
    monkeypatch.setattr("pfml.training.loop.reading_lag", lambda config, device: 1)
    run(tmp_path / "lagging", **changes)
    plain, lagging = (RunFolder(tmp_path / name) for name in ("plain", "lagging"))
    assert [e["step"] for e in lagging.entries("step")] == [1, 2, 3, 4]
    for kind in ("step", "evaluation"):
        expected = [e["loss"] for e in plain.entries(kind)]
        assert [e["loss"] for e in lagging.entries(kind)] == pytest.approx(expected, rel=1e-5)
    a, b = (load_checkpoint(folder.checkpoints)[0]["embedder/head.linear.weight"] for folder in (plain, lagging))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_lagging_run_interrupted_at_any_step_ends_as_one_that_was_not(tmp_path, lagging):
    """At the end of an epoch the request comes with the steps that are caught up, and stops the evaluation."""
    run(tmp_path / "whole")
    stopped = interrupted_repeatedly(partial(run, tmp_path / "broken"), (1, 2, 1, 2))
    assert stopped == [2, 4, 6, 8]
    whole, broken = (load_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "broken"))
    assert all(torch.equal(value, broken[0][name]) for name, value in whole[0].items())
    logs = [[(e["step"], e["loss"]) for e in RunFolder(tmp_path / n).entries("step")] for n in ("whole", "broken")]
    assert logs[0] == logs[1]
    assert [e["loss"] for e in whole[1]["history"]] == [e["loss"] for e in broken[1]["history"]]


def test_a_checkpoint_waits_for_the_steps_under_way(tmp_path, lagging):
    run(tmp_path / "run", checkpoint_every=3, epochs=1, evaluate_every=1)
    losses = [entry["loss"] for entry in RunFolder(tmp_path / "run").entries("step")]
    assert len(losses) == 4
    assert RunFolder(tmp_path / "run").entries("evaluation")[0]["loss"] == pytest.approx(sum(losses) / 4)


class Saboteur:
    """Spoils what a module computes, once; remembers all parameters of the time, and the images of the batches."""

    def __init__(self, monkeypatch, embedder, at, spoil):
        self.embedder, self.left, self.spoil = embedder, at, spoil
        original = ProxyAnchorLoss.forward

        def forward(loss, embeddings, labels):
            self.left -= 1
            if self.left + 1 != 0:
                return original(loss, embeddings, labels)
            self.loss, self.before = loss, self.parameters(loss)
            return self.spoil(lambda points: original(loss, points, labels), embeddings)

        monkeypatch.setattr(ProxyAnchorLoss, "forward", forward)

    def parameters(self, loss):
        return [value.detach().clone() for value in (*self.embedder.parameters(), *loss.parameters())]

    def nothing_moved(self):
        return all(map(torch.equal, self.parameters(self.loss), self.before))


def not_a_gradient(loss, embeddings):
    embeddings.register_hook(lambda gradient: gradient * torch.nan)
    return loss(embeddings)


SPOILS = {
    "the loss is inf": lambda loss, embeddings: loss(embeddings) + torch.inf,
    "the norm of the gradient is nan": not_a_gradient,
    "embeddings must be finite, got NaN or Inf in 32 rows": lambda loss, embeddings: loss(embeddings * torch.nan),
}


@pytest.mark.parametrize(("lag", "at"), [(0, 0), (0, 7), (1, 0), (1, 3), (1, 7)])
@pytest.mark.parametrize("reason", SPOILS)
def test_a_step_that_is_not_finite_stops_the_run_with_its_own_batch_named(tmp_path, monkeypatch, reason, lag, at):
    monkeypatch.setattr("pfml.training.loop.reading_lag", lambda config, device: lag)
    embedder = small_embedder()
    saboteur = Saboteur(monkeypatch, embedder, at, SPOILS[reason])
    if lag == 0 and "embeddings" in reason:
        pytest.skip("is raised by the loss itself, whose embeddings the loop does not see here")
    with pytest.raises(
        NonFiniteLossError, match=rf"{reason}.* at step {at} \(epoch {at // 4 + 1}, batch {at % 4 + 1}\)"
    ):
        run(tmp_path / "run", embedder=embedder, loss=LossConfig("proxy-anchor"))
    assert saboteur.nothing_moved()
    record = json.loads(RunFolder(tmp_path / "run").failed_batch.read_text())
    assert record["step"] == at
    assert record["images"] == images_of_step(at)
    stored = has_checkpoint(RunFolder(tmp_path / "run").checkpoints)
    assert stored == (at >= 4)
    assert not stored or load_checkpoint(RunFolder(tmp_path / "run").checkpoints)[1]["step"] == 4


def images_of_step(step):
    from pfml.training.loop import create_batches

    images = few_glyphs().train
    batches = create_batches(images, small_config())
    return [images.name_of(int(k)) for k in batches.batches(step // 4)[step % 4]]


def test_interrupting_after_a_bad_step_saves_nothing_of_it(tmp_path, monkeypatch, lagging):
    embedder = small_embedder()
    Saboteur(monkeypatch, embedder, 2, SPOILS["the loss is inf"])
    with pytest.raises(NonFiniteLossError, match="at step 2"):
        # the monitor hears of the second step while the third, which is bad, is under way
        run(tmp_path / "run", embedder=embedder, loss=LossConfig("proxy-anchor"), monitor=InterruptAt(2))
    assert not has_checkpoint(RunFolder(tmp_path / "run").checkpoints)


def test_a_collapse_is_said_in_a_lagging_run_too(tmp_path, lagging):
    embedder = small_embedder()
    with torch.no_grad():
        embedder.head.linear.weight.zero_()
        embedder.head.linear.bias.fill_(1.0)
    with pytest.warns(CollapseWarning, match="all 32 embeddings of the batch coincide"):
        run(tmp_path / "run", embedder=embedder, epochs=1, batch=BatchConfig(32, 4, per_epoch=1))


def test_the_monitor_hears_of_every_step_once_and_in_order(tmp_path, lagging):
    heard = []

    class Listen(Monitor):
        def step(self, epoch, loss, speed):
            heard.append((epoch, loss))

        def evaluated(self, entry):
            heard.append("evaluation")

    run(tmp_path / "run", monitor=Listen())
    logged = [(e["epoch"], e["loss"]) for e in RunFolder(tmp_path / "run").entries("step")]
    assert heard == [*logged[:4], "evaluation", *logged[4:], "evaluation"]


@pytest.mark.gpu
def test_a_gpu_holds_back_a_bad_update_by_itself(tmp_path, monkeypatch):
    embedder = create_embedder("convnet", embedding_dim=8)
    saboteur = Saboteur(monkeypatch, embedder, 2, SPOILS["the norm of the gradient is nan"])
    with pytest.raises(NonFiniteLossError, match="norm of the gradient is nan at step 2"):
        run(tmp_path / "run", embedder=embedder, loss=LossConfig("proxy-anchor"), device="cuda")
    assert saboteur.nothing_moved()


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_a_step_on_a_gpu_waits_for_nothing_but_the_step_before(tmp_path, monkeypatch, autocast):
    """Torch itself refuses every wait here; what is left is the event of the step before."""
    from pfml.training.loop import Training

    class Strict(Monitor):
        def step(self, *_):
            torch.cuda.set_sync_debug_mode("error")

    modes, catch_up = [], Training.catch_up

    def lenient(training):
        modes.append(torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("default")
        catch_up(training)
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Training, "catch_up", lenient)
    changes = {"device": "cuda", "autocast": autocast, "loss": LossConfig("proxy-anchor"), "epochs": 1}
    try:
        run(tmp_path / "run", monitor=Strict(), **changes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert modes[0] == 2  # the epoch's steps went on under the strict mode
