"""An ensemble in one piece of work: teachers, a student, a comparison; it resumes wherever it was stopped."""

import json
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch

from pfml.audit import audit, audit_run
from pfml.cli import main, parsed_values
from pfml.evaluation import embed
from pfml.losses.distillation import combined
from pfml.models import EmbedderConfig, load_embedder
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.config_files import read_config, write_config
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import write_manifest
from pfml.training import BatchConfig, LossConfig, OptimizerConfig, ScheduleConfig
from pfml.training.ensemble import ENSEMBLE, Ensemble, is_ensemble, read_ensemble, run_ensemble, student_config
from small_data import few_glyphs, interrupted_repeatedly


@pytest.fixture(scope="module")
def config():
    """Teachers of one epoch of four steps, on a few glyphs under a name."""
    with mock.patch("pfml.data.datasets.read_glyphs", few_glyphs):
        yield RunConfig(
            epochs=1,
            warm_up_epochs=0,
            batch_norm="train",
            batch=BatchConfig(size=32, samples_per_class=4),
            loss=LossConfig("proxy-anchor"),
            optimizer=OptimizerConfig("adamw", lr=1e-3, head_lr=1e-2),
            device="cpu",
            data=DataConfig("glyphs"),
            model=EmbedderConfig("convnet", "none", embedding_dim=8, image_size=16),
        )


TWO = Ensemble(teachers=2, student_epochs=1)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The folder of an ensemble that nothing interrupts, and its scores."""
    folder = tmp_path_factory.mktemp("ensemble") / "whole"
    with mock.patch("pfml.data.datasets.read_glyphs", side_effect=few_glyphs) as read:
        scores = run_ensemble(config, folder, TWO)
    assert read.call_count == 1, "teachers, student and comparison share the data"
    return folder, scores


def weights(folder):
    return torch.cat([value.flatten().float() for value in load_embedder(folder).state_dict().values()])


def test_one_call_trains_teachers_a_student_and_compares_them(whole):
    folder, scores = whole
    assert list(scores) == ["teacher 1", "teacher 2", "teachers side by side", "student"]
    assert json.loads((folder / "comparison.json").read_text()) == scores
    assert read_config(folder / "teachers" / "2" / "config.yaml").seed == 1
    student = read_config(folder / "config.yaml")
    assert [path.rpartition("/")[2] for path in student.teachers] == ["1", "2"]
    assert not torch.equal(weights(folder), weights(folder / "teachers" / "1"))


def test_a_student_trains_longer_and_faster_than_its_teachers_and_without_labels(config, tmp_path):
    made = student_config(replace(config, epochs=8), [tmp_path], Ensemble())
    assert (made.epochs, made.optimizer.lr, made.optimizer.head_lr) == (32, 2e-3, 2e-2)
    assert (made.loss, made.schedule) == (LossConfig("relaxed-contrastive"), ScheduleConfig("cosine"))
    assert student_config(config, [tmp_path], Ensemble(student_epochs=3)).epochs == 3


def test_an_ensemble_that_was_stopped_anywhere_resumes_to_the_bit(config, whole, tmp_path):
    """Four steps each: stopped in the first teacher, in the second, and in the student."""
    folder = tmp_path / "parts"

    def again(resume, monitor=None):
        stored, ensemble = read_ensemble(folder) if resume else (config, TWO)
        assert ensemble == TWO
        run_ensemble(stored, folder, ensemble, resume=resume, monitor=monitor)

    runs = [folder / "teachers" / "1", folder / "teachers" / "2", folder]
    begun = []
    stopped = interrupted_repeatedly(
        again, (2, 4, 4), after=lambda step: begun.append([(each / "config.yaml").is_file() for each in runs])
    )
    assert stopped == [2, 2, 2]
    assert begun == [[True, False, False], [True, True, False], [True, True, True]]
    assert torch.equal(weights(folder), weights(whole[0]))


def test_an_ensemble_is_not_begun_twice_in_one_folder(config, whole):
    assert is_ensemble(whole[0])
    with pytest.raises(FileExistsError, match="already holds an ensemble: resume it"):
        run_ensemble(config, whole[0], TWO)


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
    common = [*SMALL, "--batch.size", "32", "--batch.per_epoch", "2", "--model.image_size", "16"]
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


@pytest.mark.usefixtures("config")
def test_an_audit_of_the_student_judges_with_its_teachers_too(whole, tmp_path):
    folder, _ = whole
    data, _ = few_glyphs().joined()
    runs = [folder, folder / "teachers" / "1", folder / "teachers" / "2"]
    wanted = audit(combined([embed(load_embedder(run), data) for run in runs]), data)
    found, _ = audit_run(folder, device="cpu")
    torch.testing.assert_close(found.scores.score, wanted.scores.score)
    alone, _ = audit_run(folder, model=folder, device="cpu")
    assert not torch.allclose(alone.scores.score, found.scores.score)

    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    write_config(moved / "config.yaml", replace(read_config(moved / "config.yaml"), teachers=("gone/1", "gone/2")))
    again, _ = audit_run(moved, device="cpu")
    torch.testing.assert_close(again.scores.score, found.scores.score)
    shutil.rmtree(moved / "teachers" / "2")
    with pytest.raises(FileNotFoundError, match=r"gone/2, a teacher of .*moved, is not there: pfml audit .* --model"):
        audit_run(moved, device="cpu")
