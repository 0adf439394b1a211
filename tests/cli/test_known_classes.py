"""Classes that stay: train with data.split images or none, evaluate, calibrate, and the page."""

import json
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import pytest
import torch
from PIL import Image

from pfml.cli import main
from pfml.data import load_data
from pfml.evaluation import classification_metrics, embed, embed_test
from pfml.models import load_embedder
from pfml.pages.run import run_page
from pfml.pages.run_analysis import analyze_run
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import load_field
from pfml.search import Threshold
from pfml.training import LossConfig, RunConfig
from pfml.training.runner import write_untrained
from small_data import small_embedder

CLASSES, IMAGES = 6, 10
FAST = ("--model.backbone=convnet", "--model.embedding_dim=8", "--epochs=1", "--device=cpu")


def draw(folder, *, seed, images=IMAGES, classes=CLASSES):
    """Folders of noise around a color of their own, the colors close enough to be confused."""
    colors = torch.randint(60, 130, (classes, 3, 1, 1), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    for label in range(classes):
        (folder / f"class {label}").mkdir(parents=True)
        for number in range(images):
            light = torch.randint(-30, 30, (1,), generator=generator)
            pixels = colors[label] + light + torch.randint(0, 60, (3, 36, 40), generator=generator)
            image = Image.fromarray(pixels.byte().permute(1, 2, 0).numpy())
            image.save(folder / f"class {label}" / f"{seed}-{number}.png")
    return folder


def printed_by(*arguments):
    with redirect_stdout(StringIO()) as printed:
        main([str(argument) for argument in arguments])
    return printed.getvalue()


def failure(*arguments):
    with pytest.raises(SystemExit) as error:
        main([str(argument) for argument in arguments])
    return str(error.value.code)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photos, new photos of the same classes, and a run of each split: RUN is the name of its split."""
    folder = tmp_path_factory.mktemp("known")
    draw(folder / "photos", seed=1)
    draw(folder / "new", seed=2, images=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfml.pages.run.write_run_page", mock.Mock(return_value="report.html"))
        for split in ("images", "none"):
            said = printed_by(
                "train", "--data", folder / "photos", "--data.split", split, "--out", folder / split, *FAST
            )
            (folder / f"{split}.txt").write_text(said)
    return folder


def expected(folder, data):
    """The accuracies of the run "images", from its embeddings and proxies."""
    embedder, field = load_embedder(folder / "images"), load_field(folder / "images")
    queries, gallery = embed(embedder, data.test), embed(embedder, data.train)
    return classification_metrics(queries, data.test.labels, gallery, data.train.labels, proxies=field.proxies)


@pytest.fixture(scope="module")
def known(folder):
    return expected(folder, load_data(str(folder / "photos"), split="images"))


def test_a_run_with_held_out_images_ends_with_accuracies_on_known_classes(folder, known):
    results = json.loads((folder / "images" / "results.json").read_text())
    assert results["protocol"] == "images"
    assert results["last"]["known"] == known.as_dict()
    assert known.accuracy["nearest"].value == pytest.approx(results["last"]["test"]["recall_at_1"])
    assert set(known.accuracy) == {"nearest", "k_nearest", "class_mean", "class_potential", "proxy"}
    assert known.num_queries == CLASSES * IMAGES // 5
    said = (folder / "images.txt").read_text()
    assert "held-out images of known classes" in said
    assert re.search(rf"nearest proxy +│ {100 * known.accuracy['proxy'].value:.1f} ", said)
    lines = [json.loads(line) for line in (folder / "images" / "log.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["kind"] == "known"]
    assert line["accuracy"] == known.as_dict()["accuracy"]
    assert not any("known" in line for line in lines if line["kind"] == "evaluation"), "it is computed once"


def test_a_model_that_was_not_trained_by_steps_is_measured_too(folder, tmp_path):
    """Also where only retrieval was measured before, as by a ladder."""
    data = load_data(str(folder / "photos"), split="images")
    embedder = small_embedder()
    untrained = RunFolder(tmp_path / "run")
    untrained.start()
    config = RunConfig(loss=LossConfig("zero-shot"), device="cpu")
    test = {"recall_at_1": 0.5, "map_at_r": 0.5}
    results = write_untrained(config, data, untrained, embedder, {"epoch": 0, "test": test})
    found = embed_test(embedder, data).classification()
    assert results["last"]["known"] == found.as_dict()
    given = {"epoch": 0, "test": test, "known": {**found.as_dict(), "k": 3}}
    assert write_untrained(config, data, untrained, embedder, given)["last"]["known"]["k"] == 3


def test_a_finished_run_that_is_resumed_measures_them_no_second_time(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("pfml.pages.run.write_run_page", mock.Mock(return_value="report.html"))
    shutil.copytree(folder / "images", tmp_path / "run")
    printed_by("train", "--resume", tmp_path / "run")
    assert (tmp_path / "run" / "log.jsonl").read_text().count('"kind": "known"') == 1
    kept = [json.loads((run / "results.json").read_text()) for run in (tmp_path / "run", folder / "images")]
    assert kept[0] == kept[1]


def test_the_model_card_names_the_protocol_and_the_accuracies(folder, known):
    card = (folder / "images" / "model" / "README.md").read_text()
    assert "Held-out images of the classes that it was trained on, searched among its training images" in card
    for one in known.accuracy.values():
        low, high = one.interval
        assert f"| {100 * one.value:.1f} ({100 * low:.1f} to {100 * high:.1f}) |" in card
    assert "also of classes that it\nwas not trained on" not in card
    nothing = (folder / "none" / "model" / "README.md").read_text()
    assert "Nothing was held out of training" in nothing
    assert "class by" not in nothing


def test_evaluate_prints_the_same_numbers_again(folder, known):
    printed = printed_by("evaluate", folder / "images", "--device=cpu")
    assert "12 held-out images of 6 known classes" in printed
    assert "known classes: accuracy on 12 images" in printed
    content = json.loads(printed_by("evaluate", folder / "images", "--device=cpu", "--json", "--quiet"))
    assert content["protocol"] == "images"
    assert {name: content["known"][name] for name in known.as_dict()} == known.as_dict()
    assert {name: one["value"] for name, one in content["known"]["of_class"].items()} == {
        f"class {label}": one.value for label, one in known.of_class.items()
    }
    listed = [(one["class"], one["predicted"], one["images"]) for one in content["known"]["mistakes"]]
    assert listed == [(f"class {a}", f"class {b}", count) for (a, b), count in known.mistakes]
    assert listed, "else nothing was compared"


def test_new_images_of_known_classes_are_searched_among_the_training_images(folder):
    content = json.loads(
        printed_by(
            "evaluate", folder / "images", "--data", folder / "new", "--known", "--device=cpu", "--json", "--quiet"
        )
    )
    trained = load_data(str(folder / "photos"), split="images").train
    new = load_data(str(folder / "new"), split="none").train
    data = mock.Mock(train=trained, test=new)
    assert content["known"]["accuracy"] == expected(folder, data).as_dict()["accuracy"]
    assert (content["images"], content["protocol"]) == (18, "images")
    printed = printed_by("evaluate", folder / "none", "--data", folder / "new", "--known", "--device=cpu")
    assert "18 new images of 6 known classes" in printed


def test_training_images_among_the_new_ones_are_left_out(folder, tmp_path):
    printed = printed_by("evaluate", folder / "images", "--data", folder / "photos", "--known", "--device=cpu")
    assert "48 of 60 images of" in printed
    assert "12 new images of 6 known classes" in printed
    shutil.copytree(folder / "photos" / "class 2", tmp_path / "copies" / "class 2")  # one class is enough
    again = printed_by("evaluate", folder / "images", "--data", tmp_path / "copies", "--known", "--device=cpu")
    assert "8 of 10 images of" in again
    assert "other than the training images" in failure(
        "evaluate", folder / "none", "--data", folder / "photos", "--known", "--device=cpu"
    )


def test_what_known_cannot_mean_is_refused_in_a_sentence(folder, tmp_path):
    run = folder / "images"
    assert "add --known" in failure("evaluate", run, "--data", folder / "new", "--device=cpu")
    assert "--known takes new images" in failure("evaluate", run, "--known")
    assert "--known takes new images" in failure("evaluate", run, "--known", "--data=cub", "--root", tmp_path)
    draw(tmp_path / "more", seed=3, images=1, classes=CLASSES + 1)
    assert "but class 6 is not" in failure("evaluate", run, "--data", tmp_path / "more", "--known")
    shutil.copytree(run / "model", tmp_path / "model")
    assert "must be a run" in failure("evaluate", tmp_path / "model", "--data", folder / "new", "--known")
    assert "nothing was held out of the training" in failure("evaluate", folder / "none")


def test_calibrate_leaves_known_classes_out_and_says_so(folder):
    printed = printed_by("calibrate", folder / "images", "--false-accept-rate=0.2", "--device=cpu")
    assert "each is left out in turn of a gallery of 48 images" in printed
    assert "strangers may look more alike to it than measured" in printed
    threshold = Threshold.load(folder / "images")
    assert (threshold.protocol, threshold.searched_in) == ("images", 48)
    assert threshold.measured_on == (12, 6)
    printed = printed_by("calibrate", folder / "none", "--false-accept-rate=0.2", "--device=cpu")
    assert "a gallery of 60 images" in printed
    assert "and on these images" in printed
    assert Threshold.load(folder / "none").measured_on == (60, 6)


@pytest.mark.usefixtures("_without_plots")
def test_the_page_of_known_classes_has_their_accuracies_and_confusions(folder, known):
    page = run_page(analyze_run(folder / "images", device="cpu"))
    assert "12 held-out images of 6 known classes" in page
    assert "<h2>Known classes</h2>" in page
    assert "Held-out images of known classes, in percent" in page
    assert "nseen classes" not in page
    for one in known.accuracy.values():
        low, high = one.interval
        assert f"<td>{100 * one.value:.1f}</td><td>{100 * low:.1f} to {100 * high:.1f}</td>" in page
    (true, predicted), count = known.mistakes[0]
    row = rf'<th scope="row">class {true}</th>\s*<td[^>]*>class {predicted}</td>\s*<td>{count} of 2</td>'
    assert re.search(row, page)


@pytest.mark.usefixtures("_without_plots")
def test_the_page_of_a_run_that_held_nothing_out_says_so_and_searches_nothing(folder):
    page = run_page(analyze_run(folder / "none", device="cpu"))
    assert "nothing was held out of training" in page
    for title in ("Known classes", "What a query finds", "Verification", "Class by class", "Hardest pairs of classes"):
        assert f"<h2>{title}</h2>" not in page
    for title in ("Results", "Learning curves", "Training classes and their proxies", "How it was made"):
        assert f"<h2>{title}</h2>" in page


@pytest.mark.usefixtures("_without_plots")
def test_of_many_classes_the_most_confused_are_shown(folder, monkeypatch):
    monkeypatch.setattr("pfml.pages.known_classes.MOST_CLASSES", 3)
    monkeypatch.setattr("pfml.pages.known_classes.MOST_MISTAKES", 1)
    page = run_page(analyze_run(folder / "images", device="cpu"))
    assert re.search(r"The 3 of \d classes that are confused most", page)
    assert "more pairs of classes are left out" in page


@pytest.mark.parametrize("command", ["evaluate", "calibrate"])
def test_the_runs_own_folder_is_divided_as_the_run_did_also_where_it_is_named(folder, command, monkeypatch):
    options = ("--device=cpu", "--json", *(["--false-accept-rate=0.2"] if command == "calibrate" else []))
    wanted = json.loads(printed_by(command, folder / "images", *options))
    monkeypatch.chdir(folder)
    assert json.loads(printed_by(command, folder / "images", "--data", "photos", *options)) == wanted
    if command == "evaluate":
        assert wanted["protocol"] == "images"
        assert "nothing was held out" in failure(command, folder / "none", "--data", "photos", *options)
