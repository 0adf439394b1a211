"""A run that dies while it writes what it ends with is resumed, by --resume and by a restart of torchrun."""

from dataclasses import replace
from unittest import mock

import pytest

from pfml.cli import main
from pfml.cli.train import is_restarted
from pfml.distributed.launch import Launch
from pfml.models import EmbedderConfig, load_embedder
from pfml.runs.folder import RunFolder
from pfml.training import BatchConfig, DataConfig, LossConfig, RunConfig, run
from small_data import few_glyphs, small_config

#: what a run calls at its end, in this order
WRITES = {
    "zero-shot": ["write_config", "RunFolder.append", "Embedder.save", "RunFolder.write_results", "write_run_cards"],
    "pfml": ["Embedder.save", "save_loss", "RunFolder.write_results", "write_run_cards"],
}
PLACES = {
    "Embedder.save": "pfml.models.Embedder.save",
    "RunFolder.append": "pfml.runs.folder.RunFolder.append",
    "RunFolder.write_results": "pfml.runs.folder.RunFolder.write_results",
}
MODULES = {"zero-shot": "pfml.training.runner", "pfml": "pfml.training.loop"}
CASES = [(loss, write) for loss, writes in WRITES.items() for write in writes]
AGAIN = Launch(size=2, restarts=1, may_restart=True)


class KilledError(BaseException):
    """As little caught as a kill."""


@pytest.fixture(scope="module", autouse=True)
def _few_glyphs():
    with mock.patch("pfml.data.datasets.read_glyphs", few_glyphs):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing happens to, by their loss."""
    folders = {loss: tmp_path_factory.mktemp("runs") / loss for loss in WRITES}
    for loss, folder in folders.items():
        run(config_of(loss), folder)
    return folders


def config_of(loss):
    options = {"proxies_per_class": 2} if loss == "pfml" else {}
    values = vars(small_config(epochs=1, loss=LossConfig(loss, options), batch=BatchConfig(32, 4, per_epoch=1)))
    return RunConfig(
        **values, model=EmbedderConfig("convnet", embedding_dim=8, image_size=16), data=DataConfig("glyphs")
    )


def killed_at(write, config, out):
    """Run `config` in `out` up to one of its last writes."""
    place = PLACES.get(write, f"{MODULES[config.loss.name]}.{write}")
    with mock.patch(place, side_effect=KilledError), pytest.raises(KilledError):
        run(config, out)


@pytest.mark.parametrize(("loss", "write"), CASES)
def test_a_run_that_dies_at_its_last_writes_is_finished_by_a_restart(tmp_path, whole, loss, write):
    config, folder = config_of(loss), RunFolder(tmp_path / "run")
    killed_at(write, config, folder.path)
    assert folder.results.exists() == (write == "write_run_cards")
    resume = is_restarted(config, folder.path, AGAIN)
    assert resume == (write != "write_config")  # before that, there is no run to resume
    results = run(config, folder.path, resume=resume)
    assert folder.read_results() == results
    assert len(folder.entries("evaluation")) == 1
    expected = RunFolder(whole[loss]).read_results()
    assert results["last"]["test"] == expected["last"]["test"]
    assert load_embedder(folder.path).config == load_embedder(whole[loss]).config
    cards = [(path / "model" / "README.md").read_text() for path in (folder.path, whole[loss])]
    assert cards[0] == cards[1]


@pytest.mark.parametrize("loss", sorted(WRITES))
def test_a_run_that_died_at_its_last_writes_is_finished_by_the_command(tmp_path, capsys, loss):
    killed_at("Embedder.save", config_of(loss), tmp_path / "run")
    main(["train", f"--resume={tmp_path / 'run'}"])
    assert "unseen classes" in capsys.readouterr().out
    assert RunFolder(tmp_path / "run").results.is_file()


def test_what_is_evaluated_only_is_not_resumed_by_another_configuration(tmp_path):
    config = config_of("zero-shot")
    killed_at("Embedder.save", config, tmp_path / "run")
    with pytest.raises(ValueError, match="another configuration"):
        run(replace(config, seed=5), tmp_path / "run", resume=True)
    with pytest.raises(FileExistsError, match="already holds a run: resume it"):
        run(config, tmp_path / "run")
