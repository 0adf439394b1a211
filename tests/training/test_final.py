"""The final model of a run: all images, the run's settings, as many steps per class, evaluated by nothing.

The oracle: how often a class is drawn, counted over the batches of the run and of its final model.
"""

import csv
import json
from collections import Counter
from dataclasses import replace

import pytest

from pfml.cli import main
from pfml.data.image_set import PROTOCOLS
from pfml.ladder import run as ladder_run
from pfml.models import load_embedder
from pfml.models.embedder import learned_by
from pfml.runs.config_files import read_config, write_config
from pfml.runs.data import prepare_data
from pfml.runs.final import final_folder, preferred_folder, read_validated
from pfml.runs.folder import RunFolder
from pfml.search import ModelIdentity, Threshold
from pfml.storage.files import DamagedFileError
from pfml.training import BatchConfig, DataConfig, LossConfig, run
from pfml.training.final import begin_final, steps_alike
from pfml.training.setup import create_batches
from plain_pages import without_plots
from small_data import InterruptAt
from small_photos import as_if_trained, config_for, draw, failure

pytestmark = pytest.mark.usefixtures("_without_plots")


def drawn(config, train):
    """Class name -> how often it was drawn in all epochs."""
    batches = create_batches(train, config)
    counts = Counter()
    for epoch in range(config.epochs):
        for batch in batches.batches(epoch):
            counts.update(train.class_names[label] for label in train.labels[batch].tolist())
    return counts


@pytest.fixture(scope="module")
def finished(trained):
    with without_plots():
        main(["train", "--final", str(trained), "--quiet"])
    return final_folder(trained)


@pytest.mark.parametrize("batch", [BatchConfig(8, 4), BatchConfig(8, 4, per_epoch=3), BatchConfig(8, 0)])
def test_a_class_gets_as_many_steps_as_in_the_run(photos, tmp_path, batch):
    config = config_for(photos, batch=batch)
    run(config, tmp_path / "run")
    final = begin_final(tmp_path / "run").config
    before, after = (prepare_data(each.data).data.train for each in (config, final))
    assert (before.num_classes, after.num_classes) == (4, 8)
    steps = [len(create_batches(*pair)) for pair in ((before, config), (after, final))]
    assert abs(steps[1] / 8 - steps[0] / 4) <= 0.5 / 8
    if batch.samples_per_class:
        mean = [sum(drawn(*pair).values()) / pair[1].num_classes for pair in ((config, before), (final, after))]
        assert mean[1] == pytest.approx(mean[0], abs=8)  # a batch
    # what all images fill would be more: the unseen classes are larger
    assert steps[1] < len(after) // batch.size


def test_steps_follow_the_number_of_classes():
    assert [steps_alike(7, 10, classes) for classes in (10, 15, 20)] == [7, 10, 14]
    assert steps_alike(1, 10, 1) == 1


def test_the_final_model_has_seen_everything_and_is_evaluated_by_nothing(trained, finished):
    config, results = read_config(finished / "config.yaml"), RunFolder(finished).read_results()
    assert (config.data.split, config.data.validation) == ("none", "none")
    assert replace(config, data=DataConfig(), batch=BatchConfig()) == replace(
        read_config(trained / "config.yaml"), data=DataConfig(), batch=BatchConfig()
    )
    assert len(learned_by(finished).class_names) == 8
    assert "test" not in results["last"]
    assert results["best_on_test"] is None
    assert results["protocol"] == "none"


def test_the_model_of_the_run_stays_what_it_was(trained, finished):
    assert len(load_embedder(trained).trained_on.class_names) == 4
    assert preferred_folder(trained) == finished
    assert preferred_folder(finished) == finished
    assert preferred_folder(trained / "model") == trained / "model"
    assert ModelIdentity.of(load_embedder(trained)) != ModelIdentity.of(load_embedder(finished))


def test_its_card_has_the_figures_of_the_run_and_says_whose_they_are(trained, finished):
    card = (finished / "model" / "README.md").read_text()
    scores = RunFolder(trained).read_results()["last"]["test"]
    assert "Evaluated by nothing: these weights have seen all images. The figures below are those of birds" in card
    assert f"| 2, last epoch of birds | {100 * scores['recall_at_1']:.1f} |" in card
    assert "Evaluated by nothing" not in (trained / "model" / "README.md").read_text()
    assert "model-index:\n- name: photos" in card or "results: []" in card  # no figure is claimed to be its own


def test_the_command_again_says_that_it_is_done(trained, finished, capsys):
    before = (finished / "model" / "model.json").read_bytes()
    main(["train", "--final", str(trained)])
    printed = capsys.readouterr().out
    assert f"the final model {finished} is trained already" in printed
    assert "evaluated by nothing: this model has seen all images; the figures of birds" in printed
    assert PROTOCOLS["classes"] in printed
    assert (finished / "model" / "model.json").read_bytes() == before
    main(["train", "--final", str(trained), "--json"])
    assert json.loads(capsys.readouterr().out)["run"] == str(finished)


@pytest.mark.parametrize("again", ["--final", "--resume"])
def test_an_interrupted_one_resumes_to_the_same_weights(trained, finished, tmp_path, again):
    copy = tmp_path / "birds"
    as_if_trained(copy, trained, read_config(trained / "config.yaml"))
    begun = begin_final(copy)
    with pytest.raises(KeyboardInterrupt):
        run(begun.config, begun.folder, monitor=InterruptAt(3))
    assert preferred_folder(copy) == copy
    main(["train", again, str(copy if again == "--final" else begun.folder), "--quiet"])
    assert ModelIdentity.of(load_embedder(preferred_folder(copy))) == ModelIdentity.of(load_embedder(finished))
    assert read_validated(begun.folder) == replace(read_validated(finished), run="birds")
    assert "Evaluated by nothing" in (begun.folder / "model" / "README.md").read_text()


def test_it_trains_as_long_as_the_model_that_validation_chose(photos, tmp_path):
    run(config_for(photos, epochs=3, data=DataConfig(str(photos), validation="half")), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    results = folder.read_results()
    first = next(entry for entry in folder.entries("evaluation") if entry["epoch"] == 1)
    folder.write_results({**results, "validation_selected": first, "model": "validation_selected"})
    final = begin_final(tmp_path / "run")
    assert final.config.epochs == 1
    assert "1 epochs, as many as validation chose of 3" in final.description
    assert final.config.data.validation == "none"
    assert read_validated(final.folder).choice == "validation_selected"


def test_corrections_apply_to_the_same_images_among_more(tmp_path):
    """With folders train and test, the training images of the run share one folder more than all images do."""
    draw(tmp_path / "photos" / "train", {"a": 8, "b": 8})
    draw(tmp_path / "photos" / "test", {"c": 8, "d": 8})
    with (tmp_path / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerows(
            [("image", "given class", "corrected class"), ("a/0.png", "a", "b"), ("b/1.png", "b", "")],
        )
    data = DataConfig(str(tmp_path / "photos"), corrections=tmp_path / "list.csv")
    run(config_for(tmp_path / "photos", data=data), tmp_path / "run")
    main(["train", "--final", str(tmp_path / "run"), "--quiet"])
    config = read_config(tmp_path / "run" / "final" / "config.yaml")
    train = prepare_data(config.data).data.train
    labels = {train.name_of(k): train.class_names[label] for k, label in enumerate(train.labels.tolist())}
    folder = tmp_path / "photos" / "train"
    assert labels[str(folder / "a" / "0.png")] == "b"
    assert str(folder / "b" / "1.png") not in labels
    assert labels[str(folder / "a" / "1.png")] == "a"
    assert len(labels) == 31


def copied(run_folder, target, **changes):
    """A copy of a run without its final model, with other settings."""
    load_embedder(run_folder).save(target / "model")
    for file in ("results.json", "log.jsonl"):
        (target / file).write_bytes((run_folder / file).read_bytes())
    write_config(target / "config.yaml", replace(read_config(run_folder / "config.yaml"), **changes), sealed=True)
    return target


def printed_config(capsys, *arguments):
    main(["train", *map(str, arguments), "--print_config"])
    return capsys.readouterr().out


def test_printing_writes_nothing_and_shows_what_would_train(trained, finished, tmp_path, capsys):
    copy = copied(trained, tmp_path / "birds")
    before = sorted(tmp_path.rglob("*"))
    text = printed_config(capsys, "--final", copy)
    assert sorted(tmp_path.rglob("*")) == before
    assert text.startswith(f"# the settings of {copy} on all images\n")
    (tmp_path / "printed.yaml").write_text(text)
    assert read_config(tmp_path / "printed.yaml") == read_config(finished / "config.yaml")
    # one that is trained already, too
    assert printed_config(capsys, "--final", trained).replace(str(trained), str(copy)) == text


def test_printing_names_the_corrections_that_training_would_write(trained, tmp_path, capsys):
    data = read_config(trained / "config.yaml").data
    (tmp_path / "list.csv").write_text("image,given class,corrected class\n")
    copy = copied(trained, tmp_path / "birds", data=replace(data, corrections=tmp_path / "list.csv"))
    target = copy / "final" / "corrections.csv"
    assert f"on all images; training starts by writing {target}\n" in printed_config(capsys, "--final", copy)
    assert not target.parent.exists()


def test_printing_the_final_model_of_a_ladder_names_what_it_has_kept(trained, tmp_path, capsys):
    copy = copied(trained, tmp_path / "birds", effort="hours", loss=LossConfig("zero-shot"))
    assert "has not chosen a rung" in failure("train", "--final", copy, "--print_config")
    settings = {"name": "views", "candidate": "16 pixels, gem pooling, no head", "is_kept": True}
    RunFolder(copy).append("rung", 0, **settings)
    text = printed_config(capsys, "--final", copy)
    assert f"# what the ladder of {copy} has kept is fitted to all images: 16 pixels, gem pooling, no head;" in text
    assert "these rungs are tried" not in text
    assert not final_folder(copy).exists()
    begin_final(copy)
    write_config(copy / "final" / "config.yaml", read_config(copy / "config.yaml"), sealed=True)
    assert "is fitted to all images" in printed_config(capsys, "--resume", copy / "final")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": DataConfig("glyphs")}, "glyphs is published with test classes that stay unseen"),
        ({"data": DataConfig("photos", split="none")}, "was trained on everything already"),
        ({"loss": LossConfig("relaxed-contrastive"), "teachers": ("a",)}, "is the student of teachers"),
        ({"loss": LossConfig("zero-shot")}, "has trained nothing"),
    ],
)
def test_runs_that_can_have_none_are_refused_in_one_sentence(trained, tmp_path, change, message):
    folder = tmp_path / "run"
    as_if_trained(folder, trained, config_for("photos", **change))
    error = failure("train", "--final", folder)
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not final_folder(folder).exists()


def test_label_noise_on_purpose_is_refused(trained, tmp_path):
    noisy = replace(read_config(trained / "config.yaml").data, noise=replace(DataConfig().noise, rate=0.1))
    folder = tmp_path / "run"
    as_if_trained(folder, trained, config_for("photos", data=noisy))
    assert "are noisy on purpose (data.noise), which is an experiment" in failure("train", "--final", folder)


def test_other_folders_runs_that_have_not_ended_and_other_options_are_refused(trained, finished, tmp_path):
    assert "must be the folder of a run, with config.yaml in it" in failure("train", "--final", tmp_path)
    write_config(tmp_path / "config.yaml", read_config(trained / "config.yaml"), sealed=True)
    assert f"finish it first, pfml train --resume {tmp_path}" in failure("train", "--final", tmp_path)
    assert "give --final alone" in failure("train", "--final", trained, "--epochs", "3")
    assert "was trained on everything already" in failure("train", "--final", finished)


def test_data_that_are_gone_are_named(trained, tmp_path):
    folder = tmp_path / "run"
    as_if_trained(
        folder, trained, replace(read_config(trained / "config.yaml"), data=DataConfig(str(tmp_path / "gone")))
    )
    assert f"no such folder or file: {tmp_path / 'gone'}" in failure("train", "--final", folder)


def test_commands_use_the_final_model_and_its_own_index(photos, trained, finished, tmp_path, capsys):
    image = str(photos / "c0" / "0.png")
    main(["index", str(trained / "model"), str(photos), "--out", str(tmp_path / "earlier")])
    assert "belongs to" in failure("search", str(trained), image, "--index", str(tmp_path / "earlier"))
    (trained / "index").mkdir(exist_ok=True)  # as an earlier pfml index left it
    assert f"({trained / 'index'} belongs to the model before the final one)" in failure("search", str(trained), image)
    main(["index", str(trained), str(photos)])
    assert f"using the final model of {trained}, trained on all 8 classes" in capsys.readouterr().out
    assert (finished / "index" / "index.json").is_file()
    main(["search", str(trained), image, "--k", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["index"] == str(finished / "index")
    main(["embed", str(trained), image, "--out", str(tmp_path / "vectors.npz")])
    assert "using the final model" in capsys.readouterr().out
    main(["export", str(trained), "--to", "bundle"])
    assert str(finished / "bundle") in capsys.readouterr().out
    main(["evaluate", str(trained)])
    assert "final" not in capsys.readouterr().out


def test_the_threshold_is_that_of_the_final_model(trained, finished, capsys):
    main(["calibrate", str(trained), "--false-accept-rate", "0.1"])
    assert "using the final model" in capsys.readouterr().out
    assert Threshold.load(finished).model == ModelIdentity.of(load_embedder(finished))
    assert Threshold.load(trained) is None


def test_the_report_mentions_the_final_model(trained, finished, tmp_path, capsys):
    main(["report", str(trained), "--out", str(tmp_path / "page.html")])
    assert f"{finished}: the final model" in capsys.readouterr().out
    assert "on all 8 classes" in " ".join((tmp_path / "page.html").read_text().split())


def test_damaged_figures_are_refused_by_name(finished, tmp_path):
    text = (finished / "validated.json").read_text()
    (tmp_path / "validated.json").write_text(text.replace('"epoch": 2', '"epoch": 3'))
    with pytest.raises(DamagedFileError, match="validated.json does not match its own checksum"):
        read_validated(tmp_path)


def test_a_run_that_worked_up_the_ladder_is_finished_by_the_ladder(trained, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    ladder = replace(read_config(trained / "config.yaml"), effort="minutes", loss=LossConfig("zero-shot"))
    as_if_trained(folder, trained, ladder)
    calls = []

    def finish(source, out, *, monitor):
        assert not (out / "config.yaml").exists()  # an interrupted one is fitted again
        calls.append((source, out))
        write_config(out / "config.yaml", ladder, sealed=True)
        load_embedder(trained).save(out / "model")
        (out / "results.json").write_bytes((folder / "results.json").read_bytes())
        return RunFolder(out).read_results()

    monkeypatch.setattr(ladder_run, "finish_ladder", finish)
    assert begin_final(folder).config.data.split == "none"
    write_config(folder / "final" / "config.yaml", ladder, sealed=True)
    main(["train", "--final", str(folder)])
    assert calls == [(folder, folder / "final")]
    assert "evaluated by nothing" in capsys.readouterr().out
    assert read_validated(folder / "final").classes == 4
