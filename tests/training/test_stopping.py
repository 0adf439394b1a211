"""A shutdown request is heard wherever a run is: in its evaluations, at its end, and between the runs of a command."""

import os
import signal
from contextlib import contextmanager
from io import StringIO
from string import ascii_uppercase
from unittest import mock

import pytest
import torch
from rich.console import Console

from pfml.cli import main
from pfml.data import RetrievalData, draw_glyphs, with_validation
from pfml.experiments.demo import run_demo
from pfml.experiments.tune import Range, tune
from pfml.models import load_embedder
from pfml.runs.checkpoint import load_checkpoint
from pfml.runs.folder import RunFolder
from pfml.training import BatchConfig, RunConfig, train
from pfml.training.loop import Training
from pfml.training.shutdown import Interrupted
from small_data import few_glyphs, small_config, small_embedder

pytestmark = pytest.mark.usefixtures("heeds_hangups")


@contextmanager
def signal_at(method, call, number=signal.SIGTERM):
    """Send a signal to this process when `Training.method` is called for the `call`-th time."""
    calls, original = [], getattr(Training, method)

    def called(training, *arguments, **options):
        calls.append(arguments)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return original(training, *arguments, **options)

    with mock.patch.object(Training, method, called):
        yield calls


def run(out, *, resume=False, monitor=None, **changes):
    torch.manual_seed(1)
    data = with_validation(few_glyphs(), "half")
    config = small_config(batch=BatchConfig(16, 4, per_epoch=2), **changes)
    return train(data, small_embedder(), config, out=out, resume=resume, monitor=monitor)


def outcome(folder):
    tensors, state = load_checkpoint(folder / "checkpoints")
    return tensors, [{k: v for k, v in entry.items() if k != "images_per_second"} for entry in state["history"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody stops."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run(folder, average=0.5)
    return folder


def test_a_stop_during_any_evaluation_ends_it_and_the_run_resumes_with_it(whole, tmp_path):
    """Each epoch is evaluated on test, then on validation: stopped in each of these four."""
    saved_at = []
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    for attempt, (call, number) in enumerate(zip((1, 2, 3, 2), signals, strict=True)):
        with signal_at("scores", call, number) as calls, pytest.raises(Interrupted, match="state saved") as error:
            run(tmp_path / "broken", average=0.5, resume=attempt > 0)
        assert error.value.signal == number
        assert len(calls) == call, "nothing more is evaluated"
        assert not RunFolder(tmp_path / "broken").results.exists()
        saved_at.append(load_checkpoint(tmp_path / "broken" / "checkpoints")[1]["step"])
    assert saved_at == [2, 2, 4, 4], "all steps before the evaluation are saved"
    run(tmp_path / "broken", average=0.5, resume=True)
    (expected, history), (tensors, resumed) = outcome(whole), outcome(tmp_path / "broken")
    assert history == resumed
    assert expected.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in expected.items())
    pace = [entry["images_per_second"] for entry in RunFolder(tmp_path / "broken").entries("evaluation")]
    assert all(speed > 0 for speed in pace)
    ours, theirs = (load_embedder(folder).state_dict() for folder in (tmp_path / "broken", whole))
    assert all(torch.equal(value, ours[name]) for name, value in theirs.items())


def test_a_stop_before_the_first_step_leaves_a_run_that_can_be_resumed(tmp_path):
    with signal_at("embeddings", 1), pytest.raises(Interrupted):
        run(tmp_path / "run", head_start="principal")
    assert RunFolder(tmp_path / "run").config.exists()
    assert run(tmp_path / "run", head_start="principal", resume=True)["last"]["epoch"] == 2


def test_a_stop_while_the_training_images_are_embedded_for_the_results_ends_the_run(tmp_path):
    with signal_at("embeddings", 1), pytest.raises(Interrupted):  # proxies start at random here
        run(tmp_path / "run")
    assert not RunFolder(tmp_path / "run").results.exists()
    assert run(tmp_path / "run", resume=True)["last"]["epoch"] == 2


def test_an_embedder_whose_run_was_stopped_at_its_end_resumes_it_with_larger_test_images(tmp_path):
    embedder, config = small_embedder(), small_config(test_image_size=20)
    with signal_at("embeddings", 1), pytest.raises(Interrupted):
        train(few_glyphs(), embedder, config, out=tmp_path / "run")
    train(few_glyphs(), embedder, config, out=tmp_path / "run", resume=True)
    assert embedder.preprocessing.crop == load_embedder(tmp_path / "run").preprocessing.crop == 20


def test_a_stop_while_results_are_written_is_not_lost(tmp_path):
    with signal_at("written", 1), pytest.raises(Interrupted, match="its results are written"):
        run(tmp_path / "run")
    assert RunFolder(tmp_path / "run").results.exists()


def test_a_demo_stops_in_an_evaluation_and_does_not_start_the_next_method(tmp_path):
    console = Console(file=StringIO())
    data = RetrievalData("letters", draw_glyphs(ascii_uppercase, copies=1), draw_glyphs("abcd", copies=1))
    with signal_at("scores", 1), pytest.raises(Interrupted):
        run_demo(tmp_path, console=console, epochs=1, data=data)
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_demo_ends_with_the_status_of_the_signal_also_between_methods(tmp_path, capsys, number):
    def between(*_):
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was lost")

    with (
        mock.patch("pfml.experiments.demo.read_glyphs", few_glyphs),
        mock.patch("pfml.experiments.demo._trained", between),
        pytest.raises(SystemExit) as error,
    ):
        main(["demo", "--out", str(tmp_path / "demo")])
    assert error.value.code == 128 + number
    assert "pfml demo: stopped" in capsys.readouterr().err


def tuned(out, **options):
    config = RunConfig(
        **vars(small_config(epochs=1, batch=BatchConfig(16, 4, per_epoch=2))), model=small_embedder().config
    )
    with mock.patch("pfml.data.datasets.read_glyphs", few_glyphs):
        return tune(config, out, trials=2, space={"optimizer.lr": Range(1e-4, 1e-3)}, **options)


def test_tuning_stops_in_a_trial_which_does_not_count_and_resumes(tmp_path):
    with signal_at("scores", 2), pytest.raises(Interrupted):
        tuned(tmp_path)
    found = tuned(tmp_path)
    assert sum(trial["state"] == "complete" for trial in found.trials) == 2


def test_the_command_says_how_tuning_resumes(tmp_path, capsys):
    with (
        signal_at("scores", 1),
        mock.patch("pfml.data.datasets.read_glyphs", few_glyphs),
        pytest.raises(SystemExit) as error,
    ):
        main(["tune", "--config=glyphs", "--epochs=1", "--batch.size=16", "--trials=1", f"--out={tmp_path}"])
    assert error.value.code == 128 + signal.SIGTERM
    assert "the same command resumes the study" in capsys.readouterr().out
