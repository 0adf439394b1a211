import json
import logging
from dataclasses import replace
from unittest import mock

import pytest
from PIL import Image

from pfml.data import draw_glyphs, load_data
from pfml.experiments.tune import Range, space_of, tune, tuning_data, with_value
from pfml.models import EmbedderConfig
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.config_files import read_config
from pfml.training import BatchConfig, LossConfig, OptimizerConfig
from pfml.training.shutdown import Interrupted

pytest.importorskip("optuna", reason="pfml tune needs the extra tune")

GLYPHS = "ABCDEFGHKLMN"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve glyphs in a few type faces as class folders."""
    root = tmp_path_factory.mktemp("glyphs")
    images = draw_glyphs(GLYPHS, copies=1)
    for k, (pixels, label) in enumerate(zip(images.images, images.labels.tolist(), strict=True)):
        path = root / images.class_names[label] / f"{k}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    return root


@pytest.fixture
def config(folder):
    return RunConfig(
        data=DataConfig(str(folder)),
        model=EmbedderConfig("convnet", weights="none", embedding_dim=8),
        epochs=2,
        warm_up_epochs=0,
        batch_norm="train",
        batch=BatchConfig(size=12, samples_per_class=4),
        loss=LossConfig("pfml-log", {"proxies_per_class": 1}),
        optimizer=OptimizerConfig("adamw", lr=1e-3),
        device="cpu",
    )


def test_a_range_is_read_as_it_is_written():
    assert Range.parse("0.2:1") == Range(0.2, 1.0)
    assert Range.parse("log:1e-5:1e-3") == Range(1e-5, 1e-3, log=True)
    assert Range.parse("int:1:15") == Range(1, 15, whole=True)
    assert Range.parse("log:int:1:64") == Range(1, 64, log=True, whole=True)
    for text, reason in (
        ("3", "LOW:HIGH"),
        ("lin:1:2", "unknown prefix"),
        ("2:1", "lower to a higher"),
        ("log:0:1", "positive"),
    ):
        with pytest.raises(ValueError, match=reason):
            Range.parse(text)


def test_values_are_set_by_the_name_of_their_option(config):
    assert with_value(config, "optimizer.lr", 0.5).optimizer.lr == 0.5
    assert with_value(config, "loss.options.delta", 0.3).loss.options == {"proxies_per_class": 1, "delta": 0.3}
    with pytest.raises(ValueError, match="no option 'optimzer' to tune; did you mean 'optimizer'"):
        with_value(config, "optimzer.lr", 1.0)
    with pytest.raises(ValueError, match="group of options"):
        with_value(config, "optimizer", 1.0)


def test_learning_rates_are_looked_for_around_those_of_the_configuration(config):
    space = space_of(config)
    assert space["optimizer.lr"].low < 1e-3 < space["optimizer.lr"].high
    assert space["optimizer.proxy_lr"].low < 0.1 < space["optimizer.proxy_lr"].high
    assert "loss.options.delta_rep" in space
    assert "loss.options.delta_rep" not in space_of(replace(config, loss=LossConfig("proxy-anchor")))


def test_no_test_image_is_in_the_data_of_a_trial(config, folder):
    real, seen = load_data(str(folder)), tuning_data(config, "half")
    assert set(seen.train.class_names) | set(seen.test.class_names) == set(real.train.class_names)
    assert not set(real.test.images) & (set(seen.train.images) | set(seen.test.images))
    with pytest.raises(ValueError, match="needs classes to judge by"):
        tuning_data(config, "none")


def test_trials_on_known_classes_are_judged_by_other_images_of_them(config, folder, tmp_path):
    known = replace(config, data=DataConfig(str(folder), split="images"))
    real, seen = load_data(str(folder), split="images"), tuning_data(known, "half")
    assert set(seen.train.images) | set(seen.test.images) == set(real.train.images)
    assert not set(seen.train.images) & set(seen.test.images)
    assert seen.gallery is seen.train
    assert seen.test.class_names == real.train.class_names
    tuned = tune(known, tmp_path, trials=1, space={"loss.options.delta": Range(0.2, 1.0)})
    assert tuned.config.data.split == "images"
    assert json.loads((tmp_path / "tuning.json").read_text())["split"] == "images"


def test_validation_rows_of_a_table_judge_the_trials(config, folder, tmp_path):
    splits = dict(zip(GLYPHS, ["train"] * 6 + ["validation"] * 3 + ["test"] * 3, strict=True))
    glyphs = [(path, path.parent.name[-1]) for path in sorted(folder.rglob("*.png"))]
    rows = [f"{path},{glyph},{splits[glyph]}" for path, glyph in glyphs]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    listed = replace(config, data=DataConfig(str(tmp_path / "list.csv")))
    for split in ("half", "none"):
        seen = tuning_data(listed, split)
        assert (seen.train.class_names, seen.test.class_names) == (tuple("ABCDEF"), tuple("GHK"))


def test_with_nothing_held_out_there_is_nothing_to_tune_by(config, folder, tmp_path):
    everything = replace(config, data=DataConfig(str(folder), split="none"))
    with pytest.raises(ValueError, match="data.split none holds nothing out: set data.split classes or images"):
        tune(everything, tmp_path / "study", trials=1)
    assert not (tmp_path / "study").exists()


def test_a_range_is_written_as_it_is_read():
    for text in ("0.2:1", "log:1e-05:0.001", "int:1:15", "log:int:1:64"):
        assert str(Range.parse(text)) == text


def test_tuning_finds_values_and_resumes(config, tmp_path):
    space = {"loss.options.delta": Range(0.2, 1.0), "optimizer.lr": Range(1e-4, 1e-2, log=True)}
    seen = []
    first = tune(config, tmp_path, trials=2, space=space, on_trial=seen.append)
    assert len(first.trials) == len(seen) == 2
    second = tune(config, tmp_path, trials=3, space=space, on_trial=seen.append)
    assert [trial["number"] for trial in seen] == [0, 1, 2]
    scores = [trial["score"] for trial in second.trials if trial["state"] == "complete"]
    assert second.score == max(scores)
    best = read_config(tmp_path / "best.yaml")
    assert best.optimizer.lr == second.values["optimizer.lr"]
    assert best.loss.options["delta"] == second.values["loss.options.delta"]
    record = json.loads((tmp_path / "tuning.json").read_text())
    assert record["metric"] == "recall_at_1"
    assert len(record["trials"]) == 3
    assert not list(tmp_path.glob("trial-*"))


def test_values_that_do_not_go_together_fail_a_trial_and_not_the_study(config, tmp_path):
    tuned = tune(config, tmp_path, trials=6, space={"batch.size": Range(12, 13, whole=True)})
    by_size = {(trial["values"]["batch.size"], trial["state"]) for trial in tuned.trials}
    assert (13, "fail") in by_size
    assert (13, "complete") not in by_size
    assert tuned.config.batch.size == 12
    assert all("multiple" in trial["error"] for trial in tuned.trials if trial["state"] == "fail")


def test_nothing_to_tune_is_refused(config, tmp_path):
    with pytest.raises(ValueError, match="at least one value"):
        tune(config, tmp_path, space={})
    with pytest.raises(ValueError, match="at least 1"):
        tune(config, tmp_path, trials=0)


def test_a_stop_in_a_trial_is_no_traceback(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("pfml.experiments.tune.train", mock.Mock(side_effect=Interrupted("stopped", 15)))
    printed = logging.getLogger("optuna")  # which has a handler of its own, and passes nothing on
    printed.addHandler(caplog.handler)
    try:
        with pytest.raises(Interrupted):
            tune(config, tmp_path / "study", trials=1)
    finally:
        printed.removeHandler(caplog.handler)
    assert caplog.text == ""
