import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from pfml.data import LabelNoise
from pfml.models import EmbedderConfig, load_embedder
from pfml.runs.config_files import read_config
from pfml.runs.data import load_checked, prepare_data
from pfml.training import DataConfig, Monitor, RunConfig, StorageConfig, run
from pfml.training.runner import create_run_embedder
from small_data import small_config

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
