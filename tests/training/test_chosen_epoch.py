"""One model of a run is the model: that of the epoch that validation chose, where there is validation."""

import json
import os
import shutil
import signal
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import pytest
import torch

from pfml.cli import main
from pfml.data import with_validation
from pfml.evaluation import embed, evaluate, proxy_alignment
from pfml.models import load_embedder
from pfml.pages.page import Plot
from pfml.pages.run import write_run_page
from pfml.plots.grids import image_grid
from pfml.runs.folder import RunFolder
from pfml.search import ModelIdentity
from pfml.training import BatchConfig, DataConfig, LossConfig, Monitor, RunConfig, load_loss, run, train
from pfml.training.loop import Training
from small_data import few_glyphs, small_config, small_embedder

#: Proxies far enough from rest to move in every step.
LOSS = LossConfig("pfml-log", {"proxies_per_class": 2, "reduction": "points"})

BATCH = BatchConfig(16, 4, per_epoch=2)


def falling(training, role, _scores=Training.scores):
    """Scores of a run whose validation gets worse from epoch to epoch, so that the first is chosen."""
    found = _scores(training, role)
    return found | {"recall_at_1": 1 / (2 + len(training.state.history))} if role == "validation" else found


@pytest.fixture(scope="module", autouse=True)
def _falling():
    with mock.patch.object(Training, "scores", falling):
        yield


class States(Monitor):
    """The network and the proxies at each evaluation; requests a shutdown in an epoch if that is wanted."""

    def __init__(self, stop_at=None):
        self.networks, self.proxies, self.stop_at, self.steps = [], [], stop_at, 0
        self._evaluate = Training.evaluate
        monitor = self

        def recorded(training, *arguments):
            monitor.networks.append({k: v.clone() for k, v in training.embedder.state_dict().items()})
            monitor.proxies.append(training.loss.proxies.detach().clone())
            return monitor._evaluate(training, *arguments)

        self.patch = mock.patch.object(Training, "evaluate", recorded)

    def step(self, epoch, *_):
        if epoch + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
            self.stop_at = None


def trained(out, monitor, *, resume=False, **changes):
    torch.manual_seed(1)
    embedder, data = small_embedder(), with_validation(few_glyphs(), "half")
    config = small_config(epochs=3, batch=BATCH, loss=LOSS, **changes)
    with monitor.patch:
        results = train(data, embedder, config, out=out, resume=resume, monitor=monitor)
    return embedder, data, results


def is_same(tensors, others):
    return tensors.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in tensors.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing interrupts, what was seen of it, and what `trained` returns."""
    folder, seen = tmp_path_factory.mktemp("whole") / "run", States()
    return folder, seen, *trained(folder, seen)


@pytest.mark.parametrize("average", [0.0, 0.5])
def test_model_and_loss_are_those_of_the_chosen_epoch_and_the_last_lies_beside_them(tmp_path, whole, average):
    path, seen, embedder, data, results = whole
    if average:
        path, seen = tmp_path / "run", States()
        embedder, data, results = trained(path, seen, average=average)
    folder = RunFolder(path)
    assert (results["model"], results["validation_selected"]["epoch"], results["last"]["epoch"]) == (
        "validation_selected",
        1,
        3,
    )
    loaded = load_embedder(folder.path)
    assert is_same(loaded.state_dict(), seen.networks[0])
    assert is_same(embedder.state_dict(), seen.networks[0]), "the caller's network is the model, too"
    assert is_same(load_embedder(folder.last_model).state_dict(), seen.networks[2])
    assert torch.equal(load_loss(folder.path).proxies, seen.proxies[0])
    assert not torch.equal(seen.proxies[0], seen.proxies[2])
    assert evaluate(loaded, data).as_dict() == pytest.approx(results["validation_selected"]["test"])
    assert loaded.trained_on.epoch == 1
    assert "epoch 1, chosen by validation" in str(ModelIdentity.of(loaded))
    assert "epoch 3, the last" in str(ModelIdentity.of(load_embedder(folder.last_model)))
    points = embed(loaded, data.train)
    alignment = proxy_alignment(load_loss(folder.path).proxy_points(), points, data.train.labels)
    assert results["alignment"]["paper"] == pytest.approx(alignment.paper, rel=1e-6)


def test_the_card_of_the_model_says_its_epoch_and_what_chose_it(whole):
    model, last = ((whole[0] / name / "README.md").read_text() for name in ("model", "model-last"))
    assert "weights of epoch 1 (validation-selected; chosen on validation classes" in model
    assert "weights of epoch 3 (last epoch;" in last


def test_a_run_that_is_stopped_in_each_epoch_ends_with_the_same_model(tmp_path, whole):
    for epoch in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "broken", States(epoch), resume=epoch > 1)
    trained(tmp_path / "broken", States(), resume=True)
    expected, broken = RunFolder(whole[0]), RunFolder(tmp_path / "broken")
    for name in ("model", "last_model"):
        ours, theirs = (load_embedder(getattr(one, name)).state_dict() for one in (broken, expected))
        assert is_same(ours, theirs)
    assert is_same(load_loss(broken.path).state_dict(), load_loss(expected.path).state_dict())


def test_a_run_that_has_ended_can_be_resumed_and_keeps_its_model(tmp_path, whole):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    model = load_embedder(folder).state_dict()
    _, _, results = trained(folder, States(), resume=True)
    assert is_same(load_embedder(folder).state_dict(), model)
    assert results == whole[-1]


def test_without_validation_the_model_is_that_of_the_last_epoch(tmp_path):
    results = train(few_glyphs(), small_embedder(), small_config(loss=LOSS, batch=BATCH), out=tmp_path / "run")
    assert results["model"] == "last"
    assert load_embedder(tmp_path / "run").trained_on.epoch == 2
    assert not RunFolder(tmp_path / "run").last_model.exists()


def test_where_the_chosen_state_is_lost_the_last_epoch_is_the_model_and_it_is_said(tmp_path, whole):
    folder = shutil.copytree(whole[0], tmp_path / "run")
    lost = list((folder / "checkpoints").glob("chosen-*"))
    assert lost
    for file in lost:
        file.unlink()
    said, monitor = [], States()
    monitor.remark = said.append
    _, _, results = trained(folder, monitor, resume=True)
    assert results["model"] == "last"
    assert load_embedder(folder).trained_on.epoch == 3
    assert any("epoch 1" in line and "the model is that of the last epoch" in line for line in said)


@pytest.fixture(scope="module")
def run_of_glyphs(tmp_path_factory):
    """A run of three epochs on glyphs, of which validation chose the first."""
    folder = tmp_path_factory.mktemp("runs") / "letters"
    values = vars(small_config(epochs=3, batch=BATCH, loss=LOSS))
    config = RunConfig(**values, data=DataConfig("glyphs", validation="half"), model=small_embedder().config)
    with mock.patch("pfml.data.datasets.read_glyphs", few_glyphs):
        results = run(config, folder)
    return folder, results


def printed(*arguments):
    with redirect_stdout(StringIO()) as out, mock.patch("pfml.data.datasets.read_glyphs", few_glyphs):
        main([str(argument) for argument in arguments])
    return out.getvalue()


def test_evaluate_gives_the_numbers_of_the_headline_and_says_the_epoch(run_of_glyphs):
    folder, results = run_of_glyphs
    said = printed("evaluate", folder)
    assert "epoch 1, chosen by validation" in said
    assert f"{100 * results['validation_selected']['test']['map_at_r']:.1f}" in said


def test_audit_and_export_say_the_epoch(run_of_glyphs, tmp_path):
    folder, _ = run_of_glyphs
    assert "epoch 1, chosen by validation" in printed("audit", folder, "--top=1")
    assert "epoch 1, chosen by validation" in printed("export", folder, "--to=bundle", f"--out={tmp_path / 'bundle'}")
    content = json.loads((tmp_path / "bundle" / "model" / "model.json").read_text())
    assert content["trained_on"]["epoch"] == 1


def test_the_report_is_about_the_model(run_of_glyphs):
    folder, _ = run_of_glyphs
    plot = Plot(image_grid(torch.zeros(1, 1, 3, 8, 8)), "any plot")  # tests/pages has the real ones
    with (
        mock.patch("pfml.data.datasets.read_glyphs", few_glyphs),
        mock.patch("pfml.pages.run.in_themes", return_value=plot),
    ):
        page = write_run_page(folder).read_text()
    assert "chosen on validation classes (epoch 1, the model)" in page
    assert "The field of epoch 1" in page


def test_the_headline_of_training_says_which_row_is_the_model(tmp_path):
    said = printed(
        *("train", "--config=glyphs", "--data.validation=half", "--epochs=2", "--evaluate_every=1"),
        *("--batch.size=16", "--device=cpu", "--loss.name=pfml-log", f"--out={tmp_path / 'run'}"),
    )
    assert "chosen by validation recall_at_1, epoch 1, the model" in said
    assert "the model (epoch 1, chosen by validation recall_at_1): pfml.load_embedder" in said
