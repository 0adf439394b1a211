"""The model card of a run."""

from dataclasses import replace

import pytest
import torch
import yaml

from pfml.data import ImageSet, LabelNoise, RetrievalData, with_validation
from pfml.models import EmbedderConfig, TrainedOn
from pfml.runs.card import run_card
from pfml.runs.config import DataConfig, RunConfig
from pfml.templates import markdown_escaped
from pfml.training import BatchConfig, LossConfig, train
from pfml.training.runner import run
from small_data import few_glyphs, small_config, small_embedder

SCORES = {"recall_at_1": 0.5, "recall_at_2": 0.625, "map_at_r": 0.25, "r_precision": 0.3}


def description(embedder=None, names=("A", "B")):
    embedder = embedder or small_embedder()
    model = {"backbone": "convnet", "embedding_dim": 8, "pooling": "avg", "layer_norm": "none"}
    learned = {"dataset": "letters", "class_names": list(names)}
    return {"embedder": model, "preprocessing": embedder.preprocessing.to_dict(), "trained_on": learned}


def results(**changes):
    entry = {"epoch": 2, "test": SCORES}
    best = {"epoch": 1, "test": {**SCORES, "recall_at_1": 0.75}}
    return {"last": entry, "best_on_test": best, "validation_selected": None, "selected_by": "recall_at_1", **changes}


def head_of(card):
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    data = with_validation(few_glyphs(), "half")
    found = train(data, small_embedder(), small_config(epochs=1, batch=BatchConfig(16, 4)), out=folder)
    return folder, found, data


def test_training_writes_a_card_beside_its_model_with_its_numbers(trained):
    folder, found, data = trained
    card = (folder / "model" / "README.md").read_text()
    for role, images in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        assert f"| {role} | {len(images):,} | {images.num_classes:,} |" in card
    recall, name = found["last"]["test"]["recall_at_1"], "validation-selected"
    assert f"{100 * recall:.1f}" in card
    assert f"epoch 1 ({name}; chosen on" in card
    metrics = head_of(card)["model-index"][0]["results"][0]["metrics"]
    assert metrics[0] == {"type": "recall_at_1", "name": f"R@1, {name}", "value": pytest.approx(recall, abs=1e-6)}


def test_the_head_is_yaml_as_hubs_read_it(trained):
    head = head_of((trained[0] / "model" / "README.md").read_text())
    assert head["library_name"] == "pfml"
    assert head["pipeline_tag"] == "image-feature-extraction"
    assert head["model-index"][0]["results"][0]["dataset"]["name"] == "letters"


def test_the_code_of_a_card_runs(trained, monkeypatch, tmp_path):
    card = (trained[0] / "model" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    from PIL import Image

    for name in ("a.jpg", "b.jpg"):
        Image.new("RGB", (40, 32), "red").save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code.replace("this folder", str(trained[0] / "model")), names)
    assert names["similarity"].shape == (2, 2)


def test_noise_is_counted():
    card = run_card(description(), few_glyphs(), small_config(), results(), noisy_labels=4)
    assert f"4 of {len(few_glyphs().train)} were made wrong on purpose ({4 / len(few_glyphs().train):.1%})" in card
    assert "added on purpose" in card
    assert "on purpose" not in run_card(description(), few_glyphs(), small_config(), results()).replace(
        "none were changed on purpose", ""
    )


def test_each_number_says_what_it_was_chosen_on():
    card = run_card(description(), few_glyphs(), small_config(), results(validation_selected=results()["last"]))
    assert "| 2, last epoch | 50.0 | 62.5 | 30.0 | 25.0 | nothing: training ended there |" in card
    assert "| 1, best on test | 75.0 | 62.5 | 30.0 | 25.0 | the test images that it reports" in card
    assert "| 2, validation-selected | 50.0 | 62.5 | 30.0 | 25.0 | validation classes" in card
    assert "validation-selected" not in run_card(description(), few_glyphs(), small_config(), results())


def test_seen_classes_are_named_and_many_are_counted():
    assert "Classes seen in training (2): A, B. " in run_card(description(), few_glyphs(), small_config(), results())
    many = [f"class{k}" for k in range(25)]
    card = run_card(description(names=many), few_glyphs(), small_config(), results())
    assert "(25): class0, class1," in card
    assert "class19 and 5 more" in card
    assert "class20" not in card


def test_names_cannot_leave_their_cell_in_the_markdown():
    evil = "|x|\n# h <script>`a` [l](http://e) ![i](u) **b** $m$ & ---"
    pixels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    images = ImageSet(pixels, torch.tensor([0, 0]), ("t",))
    data = RetrievalData(evil, few_glyphs().train, images, remarks=(evil,))
    card = run_card(description(names=[evil]), data, small_config(), results())
    body = card.split("---\n", 2)[2]
    assert head_of(card)["model-index"][0]["results"][0]["dataset"]["name"] == evil
    assert not [line for line in body.splitlines() if line.startswith("# h") or line.strip() == "---"]
    for raw in ("<script>", "[l](", "![i]", "**b**", "`a`", " |x|"):
        assert raw not in body
    assert markdown_escaped(evil) in body


def test_a_configuration_cannot_close_its_fence_and_hides_the_folders_of_the_machine():
    model = EmbedderConfig("```\n# out", weights="/home/someone/secret/weights.pth")
    data = DataConfig("/home/someone/photos", validation="none")
    config = RunConfig(**vars(small_config()), data=data, model=model)
    card = run_card(description(), replace(few_glyphs(), name="/home/someone/photos"), config, results())
    assert "someone" not in card
    assert "weights: weights.pth" in card
    assert "name: photos" in card
    assert "Data set: photos." in card
    assert "````yaml" in card


def noisy_run(out, monkeypatch, **changes):
    """The card of a run on letters of which a quarter have noisy labels."""
    monkeypatch.setattr("pfml.runs.data.load_data", lambda name, root, **division: few_glyphs())
    data, model = DataConfig("glyphs", noise=LabelNoise(rate=0.25)), small_embedder().config
    run(RunConfig(**vars(small_config(**changes)), data=data, model=model), out)
    return (out / "model" / "README.md").read_text()


def test_a_run_without_training_has_a_card_too(tmp_path, monkeypatch):
    card = noisy_run(tmp_path / "run", monkeypatch, loss=LossConfig("zero-shot"))
    assert "epoch 0 (last epoch" in card
    assert "none: the backbone was not trained here" in card


def test_a_noisy_run_counts_its_noisy_labels(tmp_path, monkeypatch):
    card = noisy_run(tmp_path / "run", monkeypatch, epochs=1, batch=BatchConfig(32, 4, per_epoch=1))
    images = len(few_glyphs().train)
    assert f"{round(images / 4)} of {images} were made wrong on purpose (25.0%)" in card


def test_a_model_that_was_saved_by_hand_has_its_names_escaped(tmp_path):
    small_embedder().save(tmp_path, trained_on=TrainedOn("a|b <i>", ("x",)))
    assert r"a\|b \<i\>, 1 classes" in (tmp_path / "README.md").read_text()
