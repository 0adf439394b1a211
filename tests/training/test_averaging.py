"""The mean of the weights over steps: what a run evaluates and saves, and what training knows nothing of."""

import shutil
from functools import partial

import pytest
import torch
from torch import nn

from pfml.data import with_validation
from pfml.evaluation import embed, evaluate, proxy_alignment
from pfml.models import load_embedder
from pfml.runs.checkpoint import by_prefix, load_checkpoint, save_checkpoint
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import load_loss
from pfml.training import BatchConfig, train
from pfml.training.averaging import WeightAverage, largest_share
from pfml.training.loop import Training
from small_data import InterruptAt, few_glyphs, interrupted_repeatedly, small_config, small_embedder


def mean_by_hand(states, share):
    """The oracle: of what the network holds after each step, in double precision; integers are the last ones."""
    mean = {name: value.double() for name, value in states[0].items()}
    for state in states[1:]:
        mean = {name: share * old + (1 - share) * state[name].double() for name, old in mean.items()}
    return {name: mean[name] if value.is_floating_point() else value for name, value in states[-1].items()}


def assert_close(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name].double(), value.double(), rtol=0, atol=1e-6, msg=name)


def copied(state):
    return {name: value.clone() for name, value in state.items()}


def is_equal(state, other):
    return state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())


def run(out, *, data=None, embedder=None, resume=False, monitor=None, **changes):
    torch.manual_seed(1)
    embedder = embedder or small_embedder()
    return train(data or few_glyphs(), embedder, small_config(**changes), out=out, resume=resume, monitor=monitor)


def saved(folder, name="model"):
    return load_embedder(folder / name).state_dict()


def checkpoint(folder):
    """Tensors and evaluations, without times."""
    tensors, state = load_checkpoint(folder / "checkpoints")
    return tensors, [{**entry, "images_per_second": None} for entry in state["history"]]


@pytest.fixture
def states(monkeypatch):
    """What the network holds after each step of the runs of a test."""
    recorded = []
    update = Training.update

    def recording(self, indices, pixels):
        outcomes = update(self, indices, pixels)
        recorded.append(copied(self.embedder.state_dict()))
        return outcomes

    monkeypatch.setattr(Training, "update", recording)
    return recorded


#: Two epochs of two steps.
SHORT = {"batch": BatchConfig(32, 4, per_epoch=2)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a run without a mean."""
    run(folder := tmp_path_factory.mktemp("plain") / "run")
    return folder


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """The folder of the same run with a mean."""
    run(folder := tmp_path_factory.mktemp("averaged") / "run", average=0.5)
    return folder


@pytest.mark.parametrize(("share", "warm_up", "batch_norm"), [(0.7, 0, "train"), (0.5, 1, "freeze")])
def test_the_saved_model_is_the_mean_of_the_weights_since_the_warm_up(tmp_path, states, share, warm_up, batch_norm):
    embedder = small_embedder()
    changes = {"average": share, "warm_up_epochs": warm_up, "batch_norm": batch_norm}
    run(tmp_path / "run", embedder=embedder, **changes)
    assert len(states) == 8
    assert_close(saved(tmp_path / "run"), mean_by_hand(states[4 * warm_up :], share))
    assert is_equal(embedder.state_dict(), saved(tmp_path / "run"))  # what the caller has is what was saved
    assert not is_equal(states[-1], saved(tmp_path / "run"))
    if batch_norm == "train":  # its statistics are averaged, and its count of batches is not
        statistics = {name: value for name, value in states[-1].items() if "running" in name}
        assert statistics
        assert not any(torch.equal(saved(tmp_path / "run")[name], value) for name, value in statistics.items())
        counts = [value for name, value in saved(tmp_path / "run").items() if name.endswith("num_batches_tracked")]
        assert {int(count) for count in counts} == {8}


def test_the_mean_reaches_over_half_of_the_steps_at_most(tmp_path):
    steps = 2 * 2
    run(tmp_path / "long", average=0.999, **SHORT)
    run(tmp_path / "half", average=1 - 2 / steps, **SHORT)
    run(tmp_path / "less", average=0.4, **SHORT)
    long, half, less = (by_prefix(checkpoint(tmp_path / name)[0], "average/") for name in ("long", "half", "less"))
    assert is_equal(long, half)
    assert not is_equal(long, less)
    assert [largest_share(steps) for steps in (0, 1, 2, 4, 400)] == [0, 0, 0, 0.5, 0.995]


def test_training_is_what_it_is_without_a_mean(plain, averaged):
    (tensors, history), (with_mean, averaged_history) = (checkpoint(folder) for folder in (plain, averaged))
    assert not by_prefix(tensors, "average/")
    assert is_equal(tensors, {name: value for name, value in with_mean.items() if not name.startswith("average/")})
    assert is_equal(saved(plain), by_prefix(tensors, "embedder/"))
    losses, expected = ([e["loss"] for e in RunFolder(folder).entries("step")] for folder in (averaged, plain))
    assert losses == expected
    assert [entry["loss"] for entry in averaged_history] == [entry["loss"] for entry in history]
    assert [entry["test"] for entry in averaged_history] != [entry["test"] for entry in history]


def test_evaluations_see_the_mean_and_those_of_a_warm_up_the_weights(tmp_path, states):
    run(tmp_path / "run", average=0.5, warm_up_epochs=1, epochs=3, **SHORT)
    expected = [states[1], mean_by_hand(states[2:4], 0.5), mean_by_hand(states[2:], 0.5)]
    embedder = small_embedder()
    for entry, weights in zip(checkpoint(tmp_path / "run")[1], expected, strict=True):
        embedder.load_state_dict(weights)
        by_hand = evaluate(embedder, few_glyphs(), recall_at=few_glyphs().recall_at).as_dict()
        assert entry["test"] == pytest.approx(by_hand, abs=1e-6)


def test_the_epoch_that_validation_chooses_is_saved_as_the_mean_that_it_was_evaluated_with(tmp_path, states):
    data = with_validation(few_glyphs(), "half")
    chosen = run(tmp_path / "run", data=data, batch=BatchConfig(16, 4), average=0.8, epochs=3)["validation_selected"]
    until = len(states) // 3 * chosen["epoch"]
    assert_close(saved(tmp_path / "run", "model"), mean_by_hand(states[:until], 0.8))


def test_the_alignment_of_proxies_is_that_with_the_saved_model(averaged):
    results = RunFolder(averaged).read_results()
    points = embed(load_embedder(averaged), few_glyphs().train)
    alignment = proxy_alignment(load_loss(averaged).proxy_points(), points, few_glyphs().train.labels)
    assert results["alignment"]["paper"] == pytest.approx(alignment.paper, rel=1e-6)


def test_a_run_that_is_all_warm_up_has_no_mean(tmp_path, states):
    run(tmp_path / "run", average=0.5, warm_up_epochs=2, **SHORT)
    assert not by_prefix(checkpoint(tmp_path / "run")[0], "average/")
    assert is_equal(saved(tmp_path / "run"), states[-1])


def test_a_run_resumes_from_its_mean_to_the_bit(tmp_path):
    """Stopped in the warm-up of four steps, after the first step of the mean, and later."""
    changes = {"average": 0.7, "warm_up_epochs": 1, "epochs": 3}
    run(tmp_path / "whole", **changes)
    has_mean = []
    stopped = interrupted_repeatedly(
        partial(run, tmp_path / "parts", **changes),
        (2, 3, 5),
        after=lambda step: has_mean.append(bool(by_prefix(checkpoint(tmp_path / "parts")[0], "average/"))),
    )
    assert stopped == [2, 5, 10]
    assert has_mean == [False, True, True]
    (whole, history), (parts, same_history) = (checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert by_prefix(whole, "average/")
    assert is_equal(parts, whole)
    assert same_history == history
    assert is_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


def test_a_finished_run_that_is_resumed_leaves_the_same_model(averaged, tmp_path):
    embedder, folder = small_embedder(), shutil.copytree(averaged, tmp_path / "run")
    before = saved(folder)
    run(folder, average=0.5, resume=True, embedder=embedder)
    assert is_equal(saved(folder), before)
    assert is_equal(embedder.state_dict(), before)


def forget_options(folder):
    """Make a checkpoint one of a package that did not have these options yet."""
    tensors, state = load_checkpoint(folder / "checkpoints")
    del state["config"]["average"], state["config"]["head_start"]
    del state["config"]["optimizer"]["centered"], state["network"]["resize"]
    save_checkpoint(folder / "checkpoints", tensors, state)


def test_a_checkpoint_from_before_an_option_resumes_without_it_and_not_with_it(tmp_path, plain):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "old", monitor=InterruptAt(3))
    forget_options(tmp_path / "old")
    with pytest.raises(ValueError, match=r"configuration it started with, got average: it was 0\.0, now 0\.5$"):
        run(tmp_path / "old", resume=True, average=0.5)
    with pytest.raises(ValueError, match="configuration it started with, got seed: it was 0, now 5$"):
        run(tmp_path / "old", resume=True, seed=5)
    run(tmp_path / "old", resume=True)
    assert is_equal(checkpoint(tmp_path / "old")[0], checkpoint(plain)[0])


@pytest.mark.parametrize("share", [-0.1, 1.0, 99.0, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=rf"^average must lie in \[0, 1\), got {share}$"):
        small_config(average=share)
    with pytest.raises(ValueError, match=rf"^share must lie in \[0, 1\), got {share}$"):
        WeightAverage(small_embedder(), share)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_as_on_a_gpu_it_is_the_same_mean_and_resumes_to_the_bit(tmp_path, states):
    changes = {"average": 0.4, **SHORT}
    run(tmp_path / "whole", **changes)
    assert_close(saved(tmp_path / "whole"), mean_by_hand(states, 0.4))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", monitor=InterruptAt(2), **changes)
    run(tmp_path / "parts", resume=True, **changes)
    assert is_equal(checkpoint(tmp_path / "parts")[0], checkpoint(tmp_path / "whole")[0])
    assert is_equal(saved(tmp_path / "parts"), saved(tmp_path / "whole"))


class TwoUpdates:
    """A small network, and its mean over two states of all ones and all threes."""

    def __init__(self):
        self.network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)
        self.average = WeightAverage(self.network, 0.75)
        for value in (1.0, 3.0):
            self.fill(value)
            self.average.update()

    def fill(self, value):
        for tensor in self.network.state_dict().values():
            tensor.fill_(value)


def values(network):
    return {float(value.mean()) for value in network.state_dict().values() if value.is_floating_point()}


def test_the_mean_is_in_the_model_within_the_block_and_the_weights_are_after_it():
    two = TwoUpdates()
    addresses = [value.data_ptr() for value in two.network.state_dict().values()]
    with two.average.applied():
        assert values(two.network) == {0.75 * 1 + 0.25 * 3}
        assert int(two.network[1].num_batches_tracked) == 3
        assert [value.data_ptr() for value in two.network.state_dict().values()] == addresses
    assert values(two.network) == {3.0}
    assert [value.data_ptr() for value in two.network.state_dict().values()] == addresses
    two.average.adopt()
    assert values(two.network) == {1.5}


def test_an_error_within_the_block_leaves_the_weights_too():
    two = TwoUpdates()
    with pytest.raises(RuntimeError, match="no memory"), two.average.applied():
        raise RuntimeError("no memory")
    assert values(two.network) == {3.0}
    assert {float(mean.mean()) for mean in two.average.state_dict().values()} == {1.5}


def test_an_evaluation_that_fails_leaves_the_weights_that_train(tmp_path, monkeypatch, states):
    def failing(self, *_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Training, "evaluate", failing)
    embedder = small_embedder()
    with pytest.raises(RuntimeError, match="no memory"):
        run(tmp_path / "run", average=0.5, embedder=embedder, **SHORT)
    assert is_equal(embedder.state_dict(), states[-1])


def test_a_share_of_none_keeps_no_mean():
    average = WeightAverage(nn.Linear(2, 2), 0.0)
    average.update()
    assert not average.state_dict()


def test_a_stored_mean_has_the_memory_format_of_the_weights_their_order_and_their_names():
    two, other = TwoUpdates(), TwoUpdates()
    stored = {name: mean.contiguous() for name, mean in reversed(two.average.state_dict().items())}
    other.average.load_state_dict(stored)
    assert is_equal(other.average.state_dict(), two.average.state_dict())
    assert list(other.average.state_dict()) == list(two.average.state_dict())
    assert other.average.state_dict()["0.weight"].stride() == two.network[0].weight.stride()
    del stored["1.running_var"]
    with pytest.raises(ValueError, match=r"must be one of this model's weights, but they differ in 1\.running_var"):
        other.average.load_state_dict(stored)
