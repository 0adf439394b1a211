"""An ensemble in one piece of work: teachers, a student, a comparison; it resumes wherever it was stopped."""

import json
from dataclasses import replace

import pytest
import torch

from pfml.cli import main, parsed_values
from pfml.models import EmbedderConfig, load_embedder
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.config_files import read_config
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import write_manifest
from pfml.training import BatchConfig, LossConfig, OptimizerConfig, ScheduleConfig
from pfml.training.ensemble import ENSEMBLE, Ensemble, is_ensemble, read_ensemble, run_ensemble, student_config
from pfml.training.shutdown import Interrupted
from small_data import InterruptAt, letters


@pytest.fixture
def config(monkeypatch):
    """Teachers of one epoch of four steps, on a few letters under a name."""
    monkeypatch.setattr("pfml.data.datasets.read_glyphs", letters)
    return RunConfig(
        epochs=1,
        warm_up_epochs=0,
        batch_norm="train",
        batch=BatchConfig(size=32, samples_per_class=4),
        loss=LossConfig("proxy-anchor"),
        optimizer=OptimizerConfig("adamw", lr=1e-3, head_lr=1e-2),
        device="cpu",
        data=DataConfig("glyphs"),
        model=EmbedderConfig("convnet", "none", embedding_dim=8),
    )


TWO = Ensemble(teachers=2, student_epochs=1)


def weights(folder):
    return torch.cat([value.flatten().float() for value in load_embedder(folder).state_dict().values()])


def test_one_call_trains_teachers_a_student_and_compares_them(config, tmp_path):
    scores = run_ensemble(config, tmp_path / "e", TWO)
    assert list(scores) == ["teacher 1", "teacher 2", "teachers side by side", "student"]
    assert json.loads((tmp_path / "e" / "comparison.json").read_text()) == scores
    assert read_config(tmp_path / "e" / "teachers" / "2" / "config.yaml").seed == 1
    student = read_config(tmp_path / "e" / "config.yaml")
    assert [path.rpartition("/")[2] for path in student.teachers] == ["1", "2"]
    assert not torch.equal(weights(tmp_path / "e"), weights(tmp_path / "e" / "teachers" / "1"))


def test_a_student_trains_longer_and_faster_than_its_teachers_and_without_labels(config, tmp_path):
    made = student_config(replace(config, epochs=8), [tmp_path], Ensemble())
    assert (made.epochs, made.optimizer.lr, made.optimizer.head_lr) == (32, 2e-3, 2e-2)
    assert (made.loss, made.schedule) == (LossConfig("relaxed-contrastive"), ScheduleConfig("cosine"))
    assert student_config(config, [tmp_path], Ensemble(student_epochs=3)).epochs == 3


@pytest.mark.parametrize("step", [2, 6, 10])
def test_an_ensemble_that_was_stopped_anywhere_resumes_to_the_bit(config, tmp_path, step):
    """Four steps each: in the first teacher, in the second, in the student."""
    run_ensemble(config, tmp_path / "whole", TWO)
    with pytest.raises(Interrupted):
        run_ensemble(config, tmp_path / "parts", TWO, monitor=InterruptAt(step))
    assert is_ensemble(tmp_path / "parts")
    stored, shape = read_ensemble(tmp_path / "parts")
    assert shape == TWO
    run_ensemble(stored, tmp_path / "parts", shape, resume=True)
    assert torch.equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_an_ensemble_is_not_begun_twice_in_one_folder(config, tmp_path):
    with pytest.raises(Interrupted):
        run_ensemble(config, tmp_path / "e", TWO, monitor=InterruptAt(1))
    with pytest.raises(FileExistsError, match="already holds an ensemble: resume it"):
        run_ensemble(config, tmp_path / "e", TWO)


def test_a_damaged_ensemble_is_named(config, tmp_path):
    (tmp_path / "ensemble.json").write_text('{"teachers": 3}')
    with pytest.raises(DamagedFileError, match=r"ensemble.json must be the manifest of an ensemble"):
        read_ensemble(tmp_path)
    write_manifest(tmp_path / "ensemble.json", {"teacher": 3}, ENSEMBLE)
    with pytest.raises(DamagedFileError, match=r"ensemble.json must say what an ensemble consists of"):
        read_ensemble(tmp_path)
    write_manifest(tmp_path / "ensemble.json", {"teachers": 3}, replace(ENSEMBLE, version=2))
    with pytest.raises(DamagedFileError, match=r"ensemble.json .* format version 1, got version 2"):
        read_ensemble(tmp_path)


@pytest.mark.parametrize("values", [{"teachers": 0}, {"student_epochs": 0}])
def test_an_ensemble_of_nothing_is_refused(values):
    with pytest.raises(ValueError, match="at least one teacher|student_epochs must be >= 1"):
        Ensemble(**values)


@pytest.mark.parametrize(
    ("typed", "teachers", "loss"),
    [
        (["--teachers", "a", "b"], ("a", "b"), "relaxed-contrastive"),
        (["--teachers", "a", "--epochs", "3"], ("a",), "relaxed-contrastive"),
        (["--teachers=a", "--loss.name", "relational-kl"], ("a",), "relational-kl"),
        (["--config", "glyphs", "--teachers", "a"], ("a",), "relaxed-contrastive"),
        (["--config", "student.yaml", "--teachers", "a", "b"], ("a", "b"), "relational-kl"),
        (["--epochs", "3"], (), "pfml"),
    ],
)
def test_teachers_are_typed_one_after_the_other(typed, teachers, loss, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "student.yaml").write_text("loss: {name: relational-kl}\nteachers: [c]\n")
    config = parsed_values("train", typed)["config"]
    assert (config.teachers, config.loss.name, config.loss.options) == (teachers, loss, {})


def test_teachers_without_a_value_end_with_a_sentence(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--config", "glyphs", "--teachers", "--epochs", "3"])
    assert "--teachers must be followed by the folders of runs" in capsys.readouterr().err


SMALL = [
    "--config", "glyphs", "--epochs", "1", "--device", "cpu", "--model.embedding_dim", "8", "--evaluate_every", "1",
]  # fmt: skip


@pytest.mark.usefixtures("config", "one_thread")
def test_the_command_line_trains_an_ensemble_and_another_student_of_it(tmp_path, capsys):
    out = tmp_path / "ensemble"
    common = [*SMALL, "--batch.size", "32"]
    main(["train", *common, "--ensemble", "2", "--student_epochs", "1", "--out", str(out)])
    assert "teachers side by side" in capsys.readouterr().out
    teachers = [str(out / "teachers" / "1"), str(out)]
    kl = ["--loss.name", "relational-kl", "--loss.options", "{}"]
    main(["train", *common, *kl, "--teachers", *teachers, "--out", str(tmp_path / "again")])
    assert read_config(tmp_path / "again" / "config.yaml").teachers == tuple(teachers)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", str(out), "--ensemble", "2"])
    assert "give --resume alone" in str(ended.value.code)
    with pytest.raises(SystemExit) as ended:
        main(["train", *common, "--student_epochs", "2"])
    assert "--ensemble N, which must be given" in str(ended.value.code)
