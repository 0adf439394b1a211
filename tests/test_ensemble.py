"""An ensemble in one piece of work: teachers, a student, a comparison; it resumes wherever it was stopped."""

import json
import re
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch

from pfml.audit import audit, audit_run
from pfml.cli import main, parsed_values
from pfml.data.corrections import Corrections
from pfml.data.label_noise import LabelNoise
from pfml.ensemble import (
    ENSEMBLE,
    Ensemble,
    TeacherGroup,
    is_ensemble,
    other_config,
    read_ensemble,
    run_ensemble,
    student_config,
)
from pfml.evaluation import embed
from pfml.losses.distillation import combined
from pfml.models import EmbedderConfig, load_embedder
from pfml.models.backbone_table import BACKBONES
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.config_files import read_config, write_config
from pfml.runs.data import prepare_data
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import write_manifest
from pfml.training import BatchConfig, LossConfig, Monitor, OptimizerConfig, ScheduleConfig
from pfml.training.setup import open_sources
from small_data import few_glyphs, interrupted_repeatedly
from small_photos import draw
from tiny_network import TINY


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
    opened = mock.patch("pfml.training.runner.open_sources", wraps=open_sources)
    with mock.patch("pfml.data.datasets.read_glyphs", side_effect=few_glyphs) as read, opened as open_:
        scores = run_ensemble(config, folder, TWO)
    assert read.call_count == open_.call_count == 1, "teachers, student and comparison share the data"
    return folder, scores


def weights(folder):
    return torch.cat([value.flatten().float() for value in load_embedder(folder).state_dict().values()])


def test_a_comparison_that_is_missing_is_made_again(config, whole):
    folder, scores = whole
    (folder / "comparison.json").unlink()
    assert run_ensemble(config, folder, TWO, resume=True) == scores
    assert json.loads((folder / "comparison.json").read_text()) == scores


def test_the_student_alone_sees_larger_crops_when_it_is_trained(config, tmp_path):
    one = Ensemble(teachers=1, student_epochs=1)
    run_ensemble(replace(config, test_image_size=20, teacher_dims=4), tmp_path / "run", one)
    sides = [load_embedder(folder).preprocessing.crop for folder in (tmp_path / "run", tmp_path / "run/teachers/1")]
    assert sides == [20, 16]
    assert read_ensemble(tmp_path / "run")[0].test_image_size == 20
    assert read_config(tmp_path / "run/config.yaml").teacher_dims == 4
    with pytest.raises(ValueError, match="below the 8 of all teachers, got 8"):
        run_ensemble(replace(config, teacher_dims=8), tmp_path / "refused", one)
    assert not (tmp_path / "refused").exists()


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


@pytest.fixture
def noisy(config):
    """Of labels that are wrong in places, with one teacher and a short student."""
    return replace(config, data=replace(config.data, noise=LabelNoise(rate=0.1)))


JUDGED = Ensemble(1, 1, correct_labels=True)


def a_judge_that_knows(images, true):
    """The audit of a model that has every image at its true class, nearly."""
    generator = torch.Generator().manual_seed(0)
    near = 0.05 * torch.randn(len(true), 8, generator=generator)
    return audit(torch.nn.functional.normalize(torch.nn.functional.one_hot(true) + near), images)


def test_teachers_train_on_labels_that_a_judge_has_corrected(config, noisy, tmp_path, monkeypatch):
    true = few_glyphs().train.labels
    monkeypatch.setattr("pfml.ensemble.audit", lambda points, images: a_judge_that_knows(images, true))
    remarks, out, monitor = [], tmp_path / "run", Monitor()
    monkeypatch.setattr(monitor, "remark", remarks.append)
    run_ensemble(noisy, out, JUDGED, monitor=monitor)
    assert read_ensemble(out) == (noisy, JUDGED)
    given = prepare_data(noisy.data).data.train
    wrong = (given.labels != true).nonzero()[:, 0].tolist()
    assert wrong
    corrections = Corrections.read(out / "judge" / "corrected-labels.csv", given)
    assert corrections.labels == {index: int(true[index]) for index in wrong}
    said = f"{len(wrong)} of {len(given)} labels are corrected: {out / 'judge' / 'corrected-labels.csv'}"
    assert said in remarks
    for run in (out, out / "teachers" / "1"):
        stored = read_config(run / "config.yaml")
        assert torch.equal(prepare_data(stored.data).data.train.labels, true), run
    for run in (out / "judge", out / "judge" / "teachers" / "2"):
        assert read_config(run / "config.yaml").data.corrections is None, run
    assert len(list((out / "judge" / "teachers").iterdir())) == 2


def test_an_ensemble_that_corrects_labels_resumes_to_the_bit(noisy, tmp_path):
    """Four steps each: the judge's teachers, the judge, a teacher, the student; stopped in all but one of them."""
    run_ensemble(noisy, tmp_path / "whole", JUDGED)

    def again(resume, monitor=None):
        stored, ensemble = read_ensemble(tmp_path / "parts") if resume else (noisy, JUDGED)
        run_ensemble(stored, tmp_path / "parts", ensemble, resume=resume, monitor=monitor)

    assert interrupted_repeatedly(again, (2, 8, 4, 4)) == [2, 2, 2, 2]
    assert torch.equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    lists = [(tmp_path / name / "judge" / "corrected-labels.csv").read_bytes() for name in ("whole", "parts")]
    assert lists[0] == lists[1]


def test_a_list_that_is_made_after_a_resume_is_the_same_for_images_that_are_kept_small(noisy, tmp_path):
    small = replace(noisy, storage=replace(noisy.storage, short_side=12))
    run_ensemble(small, tmp_path / "run", JUDGED)
    path = tmp_path / "run" / "judge" / "corrected-labels.csv"
    written = path.read_bytes()
    path.unlink()
    with mock.patch("pfml.ensemble.audit", wraps=audit) as audited:
        run_ensemble(small, tmp_path / "run", JUDGED, resume=True)
    assert audited.call_count == 1
    assert path.read_bytes() == written


def test_a_judge_may_have_fewer_dimensions_than_are_asked_of_all_teachers(noisy, tmp_path):
    """Four teachers have 32 dimensions, the two of the judge 16."""
    run_ensemble(replace(noisy, teacher_dims=20), tmp_path / "run", Ensemble(4, 1, correct_labels=True))
    dims = [read_config(tmp_path / "run" / name / "config.yaml").teacher_dims for name in ("judge", "", "teachers/1")]
    assert dims == ["auto", 20, None]


def test_a_run_that_was_moved_with_its_list_is_audited_and_resumed(noisy, tmp_path):
    run_ensemble(noisy, tmp_path / "run", JUDGED)
    before, _ = audit_run(tmp_path / "run", device="cpu")
    (tmp_path / "run" / "results.json").unlink()
    (tmp_path / "run").rename(tmp_path / "moved")
    found, _ = audit_run(tmp_path / "moved", device="cpu")
    torch.testing.assert_close(found.scores.score, before.scores.score)
    stored, ensemble = read_ensemble(tmp_path / "moved")
    assert run_ensemble(stored, tmp_path / "moved", ensemble, resume=True)


def test_a_judge_follows_the_list_of_the_run_and_empties_no_class(config, tmp_path, monkeypatch):
    """One image was dropped by hand; a judge would then give away all images of the first class."""
    train = few_glyphs().train
    Corrections({5: None}).write(tmp_path / "own.csv", train)
    own = replace(config, data=replace(config.data, corrections=tmp_path / "own.csv"))

    def judged(points, images):
        assert len(images) == len(train) - 1
        is_first = images.labels == 0
        found = mock.Mock(scores=mock.Mock(suggested=torch.where(is_first, 1, 0)))
        found.listed.return_value = torch.cat([is_first.nonzero()[:, 0], torch.tensor([len(images) - 1])])
        return found

    monkeypatch.setattr("pfml.ensemble.audit", judged)
    run_ensemble(own, tmp_path / "run", JUDGED)
    corrections = Corrections.read(tmp_path / "run" / "judge" / "corrected-labels.csv", train)
    moved = {index: 1 for index in range(len(train)) if train.labels[index] == 0 and index != 5}
    assert corrections.labels == {5: None, len(train) - 1: 0} | moved, (
        "the last image takes the place of the first class"
    )
    monkeypatch.setattr("pfml.ensemble.audit", lambda points, images: only_first(images))
    run_ensemble(own, tmp_path / "again", JUDGED)
    assert Corrections.read(tmp_path / "again" / "judge" / "corrected-labels.csv", train).labels == {5: None}


def test_a_judge_that_disagrees_with_most_labels_is_not_believed(config, tmp_path, monkeypatch):
    monkeypatch.setattr("pfml.ensemble.audit", lambda points, images: only_last_agrees(images))
    remarks, monitor = [], Monitor()
    monkeypatch.setattr(monitor, "remark", remarks.append)
    run_ensemble(config, tmp_path / "run", JUDGED, monitor=monitor)
    given = few_glyphs().train
    assert not Corrections.read(tmp_path / "run" / "judge" / "corrected-labels.csv", given).labels
    count = len(given)
    assert any(f"the judge disagrees with {count - 1} of {count} labels, too many" in said for said in remarks)


def only_last_agrees(images):
    """An audit that lists all images but the last one."""
    found = mock.Mock(scores=mock.Mock(suggested=(images.labels + 1) % images.num_classes))
    found.listed.return_value = torch.arange(len(images) - 1)
    return found


def only_first(images):
    """An audit that lists all images of the first class and none else."""
    found = mock.Mock(scores=mock.Mock(suggested=torch.ones_like(images.labels)))
    found.listed.return_value = (images.labels == 0).nonzero()[:, 0]
    return found


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


@pytest.fixture
def tiny(monkeypatch):
    """Another network, of 32 x 32 pixels."""
    monkeypatch.setitem(BACKBONES, "tiny", TINY)


def changed_by(text, config, folder):
    (folder / "changes.yaml").write_text(text)
    return other_config(config, str(folder / "changes.yaml"))


@pytest.mark.usefixtures("tiny")
def test_teachers_of_several_configurations_are_stopped_in_the_second_one_and_resume_to_the_bit(config, tmp_path):
    pair = changed_by("loss: {name: multi-similarity}\nseed: 7\ndata: {name: cub}", config, tmp_path)
    mixed = Ensemble(1, 1, others=(TeacherGroup(other_config(config, "tiny"), 2), TeacherGroup(pair)))
    remarks = []
    scores = run_ensemble(config, tmp_path / "whole", mixed, monitor=mock.Mock(remark=remarks.append))
    assert list(scores) == [
        "teacher 1 (convnet, proxy-anchor)",
        "teacher 2 (tiny, proxy-anchor)",
        "teacher 3 (tiny, proxy-anchor)",
        "teacher 4 (convnet, multi-similarity)",
        "teachers side by side",
        "student",
    ]
    assert json.loads((tmp_path / "whole" / "comparison.json").read_text()) == scores
    assert "teacher 3 of 4: tiny, proxy-anchor, seed 1" in remarks
    runs = [read_config(tmp_path / "whole" / "teachers" / str(number) / "config.yaml") for number in range(1, 5)]
    assert [(each.model.image_size, each.seed, each.data.name) for each in runs] == [
        (16, 0, "glyphs"), (None, 0, "glyphs"), (None, 1, "glyphs"), (16, 0, "glyphs"),
    ]  # fmt: skip
    assert len(read_config(tmp_path / "whole" / "config.yaml").teachers) == 4

    def again(resume, monitor=None):
        stored, ensemble = read_ensemble(tmp_path / "parts") if resume else (config, mixed)
        assert [group.teachers for group in ensemble.others] == [2, 1]
        run_ensemble(stored, tmp_path / "parts", ensemble, resume=resume, monitor=monitor)

    assert interrupted_repeatedly(again, (6, 4)) == [2, 2], "in the second teacher, and in the third"
    assert torch.equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.usefixtures("tiny")
def test_another_backbone_does_not_take_what_belongs_to_the_first(config):
    model = EmbedderConfig("resnet50_he", "he.safetensors", embedding_dim=8, image_size=256, resize=288)
    he = replace(config, model=model)
    assert other_config(he, "tiny") == replace(config, model=EmbedderConfig("tiny", "default", embedding_dim=8))
    scratch = other_config(replace(he, model=replace(model, weights="none")), "efficientnet_lite0")
    assert scratch.model.weights == "none", "without pretrained weights, as was asked"
    assert other_config(config, "efficientnet_lite0").model.weights == "default"
    shipped = other_config(he, "cub-resnet50_he-proxy_anchor")
    assert (shipped.model.weights, shipped.model.image_size, shipped.epochs) == ("he.safetensors", None, 8)


def test_a_file_changes_a_part_of_the_configuration(config, tmp_path):
    own = replace(config, loss=LossConfig("pfml", {"delta": 0.5}))
    assert changed_by("loss: {name: proxy-anchor}", own, tmp_path) == config, "without the options of the first loss"
    assert changed_by("loss: {options: {alpha: 2}}", own, tmp_path).loss.options == {"delta": 0.5, "alpha": 2}
    larger = changed_by("model: {image_size: 24}\nloss:", config, tmp_path).model
    assert larger == replace(config.model, image_size=24)
    given = "model: {backbone: resnet50_he, weights: he.pth, image_size: 192}"
    assert changed_by(given, config, tmp_path).model == EmbedderConfig(
        "resnet50_he", "he.pth", embedding_dim=8, image_size=192
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("efficientnet_lite", "a file that ends in .yaml, .* or a backbone: .* nearest: efficientnet_lite"),
        ("glyfs", "did you mean 'glyphs'"),
        ("gone.yaml", "gone.yaml must be a configuration: .*No such file"),
        ("wrong.yaml", "wrong.yaml must be a configuration, or a part of one: .*lose"),
    ],
)
def test_a_name_of_no_teachers_is_refused(config, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text("lose: {name: pfml}")
    with pytest.raises(ValueError, match=message):
        other_config(config, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("model: {backbone: resnet50_he}", r"teachers \(resnet50_he, proxy-anchor\) cannot .*FILE.yaml=N.*weights"),
        (
            "model: {backbone: efficientnet_lite0, weights: none, pooling: token}",
            "cannot be trained so: pooling='token'",
        ),
        ("seed: 3", r"teachers of one configuration \(convnet, proxy-anchor\) must be counted once, got 2 more"),
        ("effort: minutes", "leave out effort minutes"),
        ("test_image_size: 24", "must be counted once, got 2 more"),
        ("batch: {size: 64, samples_per_class: 4}", "cannot be trained so: batch.size 64 with .* needs 16 training"),
    ],
)
def test_teachers_that_could_not_be_trained_end_an_ensemble_before_it_begins(config, changes, message, tmp_path):
    ensemble = Ensemble(1, others=(TeacherGroup(changed_by(changes, config, tmp_path), 2),))
    with pytest.raises(ValueError, match=message):
        run_ensemble(config, tmp_path / "run", ensemble)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"sigma": -1}, "sigma must be a positive number, got -1"),
        ({"test_image_size": 48}, {}, "vit_tiny_patch16_224 is built for images of 32 pixels, got 48"),
        ({"freeze": "trunk"}, {}, "freeze trunk has no crops that teachers could see"),
    ],
)
def test_a_student_that_could_not_be_trained_ends_an_ensemble_before_it_begins(
    config, changes, options, message, tmp_path
):
    model = EmbedderConfig("vit_tiny_patch16_224", "none", embedding_dim=8, image_size=32)
    with pytest.raises(ValueError, match=message):
        run_ensemble(replace(config, model=model, **changes), tmp_path / "run", Ensemble(1, student_options=options))
    assert not (tmp_path / "run").exists()


def test_teachers_that_differ_otherwise_are_called_by_their_file(config, tmp_path):
    longer = changed_by("epochs: 2", config, tmp_path)
    scores = run_ensemble(config, tmp_path / "run", Ensemble(1, 1, others=(TeacherGroup(longer),)))
    assert list(scores)[:2] == ["teacher 1 (teachers.yaml)", "teacher 2 (teachers-2.yaml)"]
    assert read_config(tmp_path / "run" / "teachers-2.yaml") == replace(longer, teacher_dims=None)


def test_an_ensemble_of_before_is_read_and_a_plain_one_is_written_so(config, whole, tmp_path):
    before = {"teachers": 3, "student_epochs": None, "student_loss": "relational-kl"}
    write_manifest(tmp_path / "ensemble.json", before, ENSEMBLE)
    write_config(tmp_path / "teachers.yaml", config, sealed=True)
    assert read_ensemble(tmp_path) == (config, Ensemble(3, None, "relational-kl"))
    assert json.loads((whole[0] / "ensemble.json").read_text()).keys() - before.keys() == {
        "kind", "format_version", "manifest_sha256",
    }  # fmt: skip
    assert [path.name for path in whole[0].glob("teachers*.yaml")] == ["teachers.yaml"]


def test_the_loss_of_the_student_has_options(config, tmp_path):
    made = student_config(config, [tmp_path], Ensemble(student_options={"sigma": 1.3}))
    assert made.loss == LossConfig("relaxed-contrastive", {"sigma": 1.3})
    with pytest.raises(ValueError, match="did you mean 'sigma'"):
        Ensemble(student_options={"sigmo": 1.3})


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("tiny=2", "starts with the number of teachers of the run itself, as in 4 tiny=2"),
        ("2 tiny=1 tiny=2", "must name the teachers of tiny once"),
        ("2 3", "further teachers are NAME=N"),
        ("2 tiny", "--ensemble must be N, and then NAME=N .*, got 'tiny'"),
        ("2 tiny=0", r"teachers of another configuration \(tiny, pfml\) must be at least one, got 0"),
        ("0", "at least one teacher"),
        ("", "--ensemble must be followed by how many teachers, N"),
        ("2 --student_options 3", "student_options must be names and values, got 3"),
        ("2 --teacher_dims some", "argument --teacher_dims: invalid int value: 'some'"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_a_mistake_in_the_option_is_said(typed, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", *SMALL, "--out", str(tmp_path / "run"), "--ensemble", *typed.split()])
    assert re.search(message, f"{ended.value.code} {capsys.readouterr().err}")


@pytest.mark.usefixtures("config", "one_thread", "tiny")
def test_the_command_line_trains_teachers_of_several_configurations(tmp_path, capsys):
    common = [*SMALL, "--batch.size", "32", "--batch.per_epoch", "2", "--student_epochs", "1"]
    options = ["--student_options", '{"sigma": 1.3}', "--out", str(tmp_path / "run")]
    main(["train", *common, *options, "--ensemble", "1", "tiny=1", "--correct_labels"])
    said = capsys.readouterr().out
    assert "teacher 2 (tiny)" in said
    assert "the judge of labels: 2 teachers and a student of them" in said
    assert (tmp_path / "run" / "judge" / "corrected-labels.csv").is_file()
    assert read_config(tmp_path / "run" / "config.yaml").loss.options == {"sigma": 1.3}
    with pytest.raises(SystemExit) as ended:
        main(["train", *common[:-2], "--student_options", "{}"])
    assert "--student_options is about the student of --ensemble N" in str(ended.value.code)
    with pytest.raises(SystemExit) as ended:
        main(["train", *common[:-2], "--correct_labels"])
    assert "--correct_labels is about the labels of teachers: give --ensemble N too" in str(ended.value.code)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", str(tmp_path / "run"), "--correct_labels"])
    assert "give --resume alone" in str(ended.value.code)


@pytest.mark.usefixtures("one_thread")
def test_the_page_of_images_of_ones_own_has_the_corrected_labels(tmp_path, monkeypatch):
    draw(tmp_path / "photos", dict.fromkeys("abcd", 8))
    pages = []
    monkeypatch.setattr("pfml.pages.run.write_run_page", lambda out, **given: pages.append(given["data"]) or out)
    monkeypatch.setattr("pfml.ensemble.audit", lambda points, images: first_becomes_second(images))
    options = ["--data", str(tmp_path / "photos"), "--data.split", "images", "--out", str(tmp_path / "run")]
    small = ["--model.backbone", "convnet", "--model.weights", "none", *SMALL[2:], "--batch.size", "8"]
    shape = ["--ensemble", "1", "--student_epochs", "1", "--correct_labels"]
    main(["train", *options, *small, *shape, "--model.image_size", "16", "--loss.name", "proxy-anchor", "--quiet"])
    (data,) = pages
    stored = prepare_data(read_config(tmp_path / "run" / "config.yaml").data).data
    assert torch.equal(data.train.labels, stored.train.labels)
    assert data.train.labels[0] == 1, "whose folder is that of the first class"


def first_becomes_second(images):
    """An audit that lists the first image, of the first class, and suggests the second one."""
    found = mock.Mock(scores=mock.Mock(suggested=torch.ones_like(images.labels)))
    found.listed.return_value = torch.tensor([0])
    return found


@pytest.mark.parametrize(("typed", "dims"), [("auto", "auto"), ("null", None), ("12", 12)])
def test_the_dimensions_of_teachers_are_a_number_or_a_word(typed, dims):
    assert parsed_values("train", [*SMALL, "--teacher_dims", typed])["config"].teacher_dims == dims


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
