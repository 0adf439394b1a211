import csv
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from pfml.data import LabelNoise
from pfml.ensemble import Ensemble, run_ensemble
from pfml.evaluation import embed, evaluate
from pfml.models import EmbedderConfig, load_embedder
from pfml.runs.checkpoint import load_checkpoint
from pfml.runs.config_files import read_config
from pfml.runs.data import load_checked, prepare_data
from pfml.training import DataConfig, LossConfig, Monitor, RunConfig, StorageConfig, run
from pfml.training.runner import create_run_embedder
from small_data import interrupted_repeatedly, small_config

COLORS = {"a": 30, "b": 90, "c": 150, "d": 210}


@pytest.fixture
def folder(tmp_path):
    """Four classes of eight images, 40 x 36 pixels."""
    for name, level in COLORS.items():
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            image = Image.new("RGB", (40, 36), (level, 255 - level, 16 * number))
            image.save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def config(folder, **changes):
    small = small_config()
    values = {name: getattr(small, name) for name in ("warm_up_epochs", "batch_norm", "loss", "optimizer", "device")}
    values |= {"batch": replace(small.batch, size=8), "epochs": 1, "log_every": 1}
    model = EmbedderConfig("convnet", embedding_dim=8, image_size=16)
    return RunConfig(**{**values, "data": DataConfig(str(folder)), "model": model, **changes})


class Remarks(Monitor):
    def __init__(self):
        self.lines = []

    def remark(self, text):
        self.lines.append(text)


def test_a_folder_of_images_trains(folder, tmp_path):
    remarks = Remarks()
    results = run(config(folder), tmp_path / "run", monitor=remarks)
    assert results["last"]["test"]["num_queries"] == 16
    assert remarks.lines[0].startswith("train: 16 images decoded into memory")


def test_a_model_that_trains_nothing_sees_the_images_of_tests_too(folder, tmp_path):
    run(config(folder, loss=LossConfig("zero-shot"), test_image_size=24), tmp_path / "run")
    assert load_embedder(tmp_path / "run").preprocessing.crop == 24


def test_the_run_keeps_its_resolved_configuration(folder, tmp_path):
    asked = config(folder, seed=3)
    run(asked, tmp_path / "run")
    assert read_config(tmp_path / "run" / "config.yaml") == asked


def test_broken_images_are_all_named_before_training_starts(folder, tmp_path):
    whole = (folder / "a" / "3.png").read_bytes()
    (folder / "a" / "3.png").write_bytes(whole[: len(whole) * 3 // 4])  # a good header, half of the pixels
    (folder / "b" / "5.png").write_text("no image")
    (folder / "b" / "6.png").write_bytes(b"")
    asked = config(folder)
    asked = replace(asked, data=replace(asked.data, unreadable="refuse"))
    with pytest.raises(ValueError, match="3 of 32 images cannot be read") as refused:
        run(asked, tmp_path / "run")
    assert all(str(folder / name) in str(refused.value) for name in ("a/3.png", "b/5.png", "b/6.png"))
    (folder / "a" / "3.png").write_bytes(whole)
    (folder / "b" / "5.png").write_bytes(whole)
    (folder / "b" / "6.png").write_bytes(whole)
    run(asked, tmp_path / "run")  # the folder was not taken


def test_a_run_resumes_from_another_working_directory(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    first = run(config(folder.name), tmp_path / "run")
    monkeypatch.chdir("/")
    again = run(read_config(tmp_path / "run" / "config.yaml"), tmp_path / "run", resume=True)
    assert again["last"] == first["last"]


def test_a_list_of_label_noise_is_found_from_another_working_directory(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    Path("wrong.csv").write_text(f"{folder.name}/a/3.png,b\n")
    noise = LabelNoise(variant="list", file=Path("wrong.csv"))
    run(config(folder, data=DataConfig(folder.name, noise=noise, split_seed=None)), tmp_path / "run")
    monkeypatch.chdir("/")
    saved = read_config(tmp_path / "run" / "config.yaml")
    assert prepare_data(saved.data)[1].wrong == 1


def test_a_run_does_not_resume_with_other_noise(folder, tmp_path):
    data = DataConfig(str(folder), noise=LabelNoise(0.25))
    run(config(folder, data=data), tmp_path / "run")
    before = (tmp_path / "run" / "noise.csv").read_bytes()
    other = replace(data, noise=LabelNoise(0.5))
    with pytest.raises(ValueError, match="other images or labels"):
        run(config(folder, data=other), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "noise.csv").read_bytes() == before


@pytest.mark.parametrize(
    "wrong",
    [lambda: DataConfig(validation="third"), lambda: StorageConfig(workers=-1), lambda: StorageConfig(short_side=0)],
)
def test_values_without_a_meaning_are_refused_at_once(wrong):
    with pytest.raises(ValueError, match="must"):
        wrong()


@pytest.mark.parametrize("storage", ["files", "memory"])
def test_every_storage_trains_alike(folder, tmp_path, storage):
    auto = run(config(folder), tmp_path / "auto")
    other = run(config(folder, storage=StorageConfig(storage, workers=1)), tmp_path / storage)
    assert other["last"]["loss"] == pytest.approx(auto["last"]["loss"], rel=1e-5)


def test_a_budget_too_small_for_both_parts_is_shared_by_them(folder, tmp_path):
    remarks = Remarks()
    one_part = 16 * 40 * 36 * 3 / 2**30
    run(config(folder, storage=StorageConfig(budget_gib=1.5 * one_part)), tmp_path / "run", monitor=remarks)
    assert "decoded into memory" in remarks.lines[0]
    assert "read from files" in remarks.lines[1]


def test_decoded_images_are_cached_for_the_next_run(folder, tmp_path):
    storage = StorageConfig(cache=tmp_path / "cache")
    first, second = Remarks(), Remarks()
    run(config(folder, storage=storage), tmp_path / "a", monitor=first)
    run(config(folder, storage=storage), tmp_path / "b", monitor=second)
    assert "decoded into memory" in first.lines[0]
    assert "read from a cache" in second.lines[0]
    assert "read from a cache" in second.lines[1]


def test_images_can_be_shrunk_when_they_are_decoded(folder, tmp_path):
    remarks = Remarks()
    run(config(folder, storage=StorageConfig(short_side=34)), tmp_path / "run", monitor=remarks)
    full = Remarks()
    run(config(folder), tmp_path / "full", monitor=full)
    assert remarks.lines[0] != full.lines[0]


def test_label_noise_is_listed_beside_the_run_and_said(folder, tmp_path):
    remarks = Remarks()
    data = DataConfig(str(folder), noise=LabelNoise(0.25))
    run(config(folder, data=data), tmp_path / "run", monitor=remarks)
    with (tmp_path / "run" / "noise.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == 4
    assert all(row["true class"] != row["given class"] for row in rows)
    assert remarks.lines[0].startswith("4 of 16 training labels are wrong on purpose")


def test_noise_stays_within_the_classes_that_train(folder):
    data, corruption = prepare_data(DataConfig(str(folder), validation="none", noise=LabelNoise(0.5)))
    assert corruption.wrong == 8
    assert (data.test.labels == torch.arange(2).repeat_interleave(8)).all()


def test_validation_stays_clean(folder):
    for name in ("e", "f", "g", "h"):
        (folder / name).mkdir()
        Image.new("RGB", (40, 36)).save(folder / name / "0.png")
        Image.new("RGB", (40, 36)).save(folder / name / "1.png")
    clean = DataConfig(str(folder), validation="half")
    data, corruption = prepare_data(replace(clean, noise=LabelNoise(0.5)))
    before = prepare_data(clean).data
    assert corruption.class_names == data.train.class_names == before.train.class_names
    assert (data.train.labels != before.train.labels).any()
    assert data.validation.class_names == before.validation.class_names
    assert data.validation.labels.tolist() == before.validation.labels.tolist()


def test_a_noise_list_with_validation_is_refused(folder, tmp_path):
    (tmp_path / "list.csv").write_text("a/0.png,b\n")
    noise = LabelNoise(variant="list", file=tmp_path / "list.csv")
    with pytest.raises(ValueError, match="data.validation must be none"):
        prepare_data(DataConfig(str(folder), validation="half", noise=noise))


def test_a_caller_hands_over_data_and_embedder_and_neither_is_made_again(folder, tmp_path, monkeypatch):
    asked = config(folder, seed=3)
    alone = run(asked, tmp_path / "alone")
    data, embedder = prepare_data(asked.data, loaded=load_checked(asked.data)), create_run_embedder(asked)

    def refused(*args, **options):
        raise AssertionError("what the caller has was made again")

    monkeypatch.setattr("pfml.runs.data.load_data", refused)
    monkeypatch.setattr("pfml.training.runner.Embedder", refused)
    handed = run(asked, tmp_path / "handed", data=data, embedder=embedder)
    assert handed["last"]["loss"] == alone["last"]["loss"]
    assert handed["last"]["test"] == alone["last"]["test"]
    saved = load_embedder(tmp_path / "handed").state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in embedder.state_dict().items())


def test_an_embedder_of_another_configuration_is_refused(folder, tmp_path):
    asked = config(folder)
    other = create_run_embedder(replace(asked, model=EmbedderConfig("convnet", embedding_dim=16)))
    with pytest.raises(ValueError, match=r"must be the one of config\.model"):
        run(asked, tmp_path / "run", embedder=other)


# ------------------------------------------------------------------------------------- what is held out


def divided_config(folder, split, **changes):
    return config(folder, data=DataConfig(str(folder), split=split), **changes)


def test_held_out_images_of_known_classes_are_searched_among_those_that_train(folder, tmp_path):
    results = run(divided_config(folder, "images"), tmp_path / "run")
    assert results["protocol"] == "images"
    assert results["last"]["test"]["num_queries"] == 8, "a fifth of 8 images of each of 4 classes"
    embedder, data = load_embedder(tmp_path / "run"), prepare_data(DataConfig(str(folder), split="images")).data
    queries, gallery = embed(embedder, data.test), embed(embedder, data.train)
    hits = 0
    for query, label in zip(queries, data.test.labels.tolist(), strict=True):
        nearest = min(range(len(gallery)), key=lambda k: math.dist(query.tolist(), gallery[k].tolist()))
        hits += int(data.train.labels[nearest]) == label
    assert results["last"]["test"]["recall_at_1"] == pytest.approx(hits / 8)
    assert {*embedder.trained_on.class_names} == {*COLORS}


def test_a_run_on_all_images_is_evaluated_on_nothing(folder, tmp_path):
    remarks = Remarks()
    results = run(divided_config(folder, "none"), tmp_path / "run", monitor=remarks)
    assert (results["protocol"], results["best_on_test"], results["model"]) == ("none", None, "last")
    assert "test" not in results["last"]
    assert [line for line in remarks.lines if "decoded" in line] == [remarks.lines[0]]
    assert remarks.lines[0].startswith("train: 32 images")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "Nothing was held out of training, so that these weights were evaluated on nothing." in card
    assert "R@1" not in card
    with pytest.raises(ValueError, match="nothing was held out of training, so that there is nothing to evaluate on"):
        evaluate(load_embedder(tmp_path / "run"), prepare_data(DataConfig(str(folder), split="none")).data)


def test_the_card_says_what_the_numbers_are_about(folder, tmp_path):
    cards = {}
    for split in ("classes", "images"):
        run(divided_config(folder, split), tmp_path / split)
        cards[split] = (tmp_path / split / "model" / "README.md").read_text()
    assert "Retrieval among images of classes that it was not trained on, in %" in cards["classes"]
    assert (
        "Held-out images of the classes that it was trained on, searched among its training images" in cards["images"]
    )
    for split, name in (("classes", "unseen classes"), ("images", "held-out images of known classes")):
        assert f"image retrieval, {name}" in cards[split]


@pytest.mark.parametrize("split", ["images", "none"])
def test_an_interrupted_run_resumes_to_the_same_bits_whatever_is_held_out(folder, tmp_path, split):
    asked = divided_config(folder, split, epochs=2, checkpoint_every=1)
    run(asked, tmp_path / "whole")
    stopped = interrupted_repeatedly(partial(run, asked, tmp_path / "broken"), (1, 2, 2))
    assert len(stopped) == 3
    whole, broken = (load_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "broken"))
    assert whole[0].keys() == broken[0].keys()
    assert all(torch.equal(value, broken[0][name]) for name, value in whole[0].items())
    for mine, theirs in zip(whole[1]["history"], broken[1]["history"], strict=True):
        assert mine.get("test") == theirs.get("test")
        assert mine["loss"] == theirs["loss"]


def test_a_run_does_not_resume_on_another_division(folder, tmp_path):
    run(divided_config(folder, "images"), tmp_path / "run")
    other = config(folder, data=DataConfig(str(folder), split="images", split_seed=1))
    with pytest.raises(ValueError, match="other images or labels"):
        run(other, tmp_path / "run", resume=True)


def test_a_student_of_known_classes_may_have_teachers_of_the_same_classes(folder, tmp_path):
    run(divided_config(folder, "images"), tmp_path / "teacher")
    student = {"loss": LossConfig("relaxed-contrastive"), "teachers": (str(tmp_path / "teacher"),)}
    assert run(divided_config(folder, "images", **student), tmp_path / "student")["protocol"] == "images"
    with pytest.raises(ValueError, match="must be unseen"):
        run(config(folder, **student), tmp_path / "unseen")


def test_an_ensemble_on_all_images_compares_nothing(folder, tmp_path):
    assert run_ensemble(divided_config(folder, "none"), tmp_path / "run", Ensemble(2, 1)) == {}
    assert load_embedder(tmp_path / "run").trained_on is not None
