"""Classes that were renamed, merged and deleted in an index, in training again: the list, the table, the command."""

import csv
from dataclasses import replace

import pytest
import torch
from PIL import Image

from pfml.audit import audit_run, corrections_of, of_training, write_table
from pfml.cli import main
from pfml.data import ImageSet, load_data
from pfml.data.corrections import Corrections
from pfml.models import EmbedderConfig, load_embedder
from pfml.runs.config_files import read_config
from pfml.runs.data import prepare_data
from pfml.search import Edit, ImageIndex, ModelIdentity, list_images, update_index
from pfml.training import DataConfig, LossConfig, RunConfig, run
from small_data import small_config

pytestmark = pytest.mark.usefixtures("one_thread")
COLORS = {"blue": (20, 40, 220), "green": (30, 200, 40), "red": (220, 30, 30), "gray": (128, 128, 128)}
EACH = 6


def images_of(labels, names):
    pixels = torch.zeros(len(labels), 3, 2, 2, dtype=torch.uint8)
    return ImageSet(pixels, torch.tensor(labels), tuple(names), tuple(f"image {k}" for k in range(len(labels))))


def named(images):
    """Image -> class, of all that are there."""
    return {
        name: images.class_names[k]
        for name, k in zip(map(images.name_of, range(len(images))), images.labels.tolist(), strict=True)
    }


def corrected_by_oracle(corrections, images):
    """One image after the other: first its label, then the new name of its class."""
    found = {}
    for k, label in enumerate(images.labels.tolist()):
        label = corrections.labels.get(k, label)
        if label is not None:
            name = images.class_names[label]
            name = corrections.classes.get(name, name)
            if name is not None:
                found[images.name_of(k)] = name
    return found


IMAGES = images_of([0, 0, 1, 1, 2, 2, 3, 3], "abcd")
LISTS = [
    Corrections({}, {"a": "new"}),
    Corrections({0: 1}, {"b": "a"}),
    Corrections({0: 1, 4: None}, {"b": "x", "c": "x", "d": None}),
    Corrections({2: 0}, {"a": "b", "b": "a"}),
    Corrections({6: 0, 7: 1}, {"d": "a"}),
]


@pytest.mark.parametrize("corrections", LISTS)
def test_labels_are_given_and_then_classes_named(corrections, tmp_path):
    corrected = corrections.apply(IMAGES)
    assert named(corrected) == corrected_by_oracle(corrections, IMAGES)
    assert [IMAGES.name_of(k) for k in corrections.kept(IMAGES)] == list(named(corrected))
    assert set(corrected.class_names) == set(named(corrected).values()), "no class without images is left"
    corrections.write(tmp_path / "list.csv", IMAGES)
    assert Corrections.read(tmp_path / "list.csv", IMAGES) == corrections


@pytest.mark.parametrize("first", LISTS)
@pytest.mark.parametrize("classes", [{}, {"a": "z"}, {"x": "a", "b": None}])
def test_one_list_after_the_other_is_one_list(first, classes):
    between = first.apply(IMAGES)
    later = Corrections({0: len(between.class_names) - 1, 1: None}, classes)
    expected = corrected_by_oracle(later, between)
    both = first.then(later, IMAGES)
    assert corrected_by_oracle(both, IMAGES) == expected
    assert all(label != int(IMAGES.labels[k]) for k, label in both.labels.items())


def test_a_list_moves_to_more_images_with_its_classes():
    more = images_of([3, 0, 0, 1, 1, 2, 2, 3, 3], "abcd")
    more = replace(more, sources=("another", *(f"image {k}" for k in range(8))))
    moved = Corrections({0: 1}, {"b": "x"}).moved(IMAGES, more)
    assert moved == Corrections({1: 1}, {"b": "x"})


def test_a_class_that_would_lose_all_images_is_named_as_it_is_called_then():
    with pytest.raises(ValueError, match="got none left of 'x'"):
        Corrections({0: None, 1: None}, {"a": "x"}).apply(IMAGES)
    Corrections({0: None, 1: None}, {"a": "b"}).apply(IMAGES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (",e,x", "must name another training class, got 'e'"),
        (",a,x\n,a,y", "must name another training class, got 'a'"),
    ],
)
def test_a_line_about_a_class_that_is_not_there_is_refused(tmp_path, line, message):
    (tmp_path / "list.csv").write_text(f"image,given class,corrected class\n{line}\n")
    with pytest.raises(ValueError, match=message):
        Corrections.read(tmp_path / "list.csv", IMAGES)


# a run with an index


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run on three training classes and one unseen, with an index of all."""
    folder = tmp_path_factory.mktemp("images")
    rows = []
    for name, color in COLORS.items():
        for k in range(EACH):
            Image.new("RGB", (20, 20), tuple(max(0, level - 3 * k) for level in color)).save(folder / f"{name}-{k}.png")
            rows.append((f"{name}-{k}.png", name, "test" if name == "gray" else "train"))
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    small = small_config()
    config = RunConfig(
        epochs=1,
        warm_up_epochs=0,
        batch_norm="train",
        batch=replace(small.batch, size=12, samples_per_class=4),
        optimizer=small.optimizer,
        loss=LossConfig("pfml", {"proxies_per_class": 1}),
        device="cpu",
        data=DataConfig(str(folder / "table.csv")),
        model=EmbedderConfig("convnet", weights="none", embedding_dim=8),
    )
    run(config, folder / "run")
    embedder = load_embedder(folder / "run")
    index = ImageIndex.create(folder / "run" / "index", ModelIdentity.of(embedder), 8)
    update_index(index, embedder, list_images(folder / "table.csv"))
    return folder / "run"


@pytest.fixture
def index(made):
    """The index, whose edits a test may add to."""
    found = ImageIndex.open(made / "index")
    yield found
    while len(found.edits):
        found.undo()


def classes_of(part):
    counts = torch.bincount(part.labels, minlength=part.num_classes).tolist()
    return dict(zip(part.class_names, counts, strict=True))


def prepared(made, listed):
    return prepare_data(replace(read_config(made / "config.yaml").data, corrections=listed)).data


@pytest.mark.usefixtures("without_plots")
def test_images_that_were_relabeled_in_an_index_are_trained_with_their_class(made, index):
    index.edit(Edit("relabel", into="blue", paths=(str(made.parent / "green-2.png"),)))
    index.edit(Edit("relabel", into="a new class", paths=(str(made.parent / "green-3.png"),)))
    index.edit(Edit("rename", "blue", "navy"))
    main(
        [
            "audit",
            str(made),
            "--top",
            "1",
            "--no-faults",
            "--apply",
            "--policy",
            "keep",
            "--decisions",
            str(made / "index"),
        ]
    )
    data = prepared(made, made / "audit" / "corrections.csv")
    assert classes_of(data.train) == {"navy": EACH + 1, "green": EACH - 2, "red": EACH}, "no training class: left out"


@pytest.mark.usefixtures("without_plots")
def test_the_command_takes_an_index_to_a_list_and_a_table(made, index, tmp_path, capsys):
    index.edit(Edit("rename", "blue", "navy"))
    index.edit(Edit("merge", "red", "green"))
    index.edit(Edit("leave_out", paths=(str(made.parent / "green-2.png"),)))
    out = tmp_path / "corrected.csv"
    options = ["--top", "1", "--no-faults", "--apply", "--decisions"]
    main(["audit", str(made), *options, str(made / "index"), "--out", str(out)])
    printed = capsys.readouterr().out
    assert "corrections.csv: 0 images relabeled, 1 left out, 2 classes renamed or merged" in printed
    assert "train again: pfml train" in printed
    listed = made / "audit" / "corrections.csv"
    assert [line for line in listed.read_text().splitlines() if line.startswith(",")] == [",blue,navy", ",red,green"]
    data = prepared(made, listed)
    assert classes_of(data.train) == {"navy": EACH, "green": 2 * EACH - 1}
    assert classes_of(data.test) == {"gray": EACH}
    assert any("2 classes have another name" in remark for remark in data.remarks)
    table = load_data(str(out))
    assert classes_of(table.train) == {"green": 2 * EACH - 1, "navy": EACH}
    assert classes_of(table.test) == {"gray": EACH}
    config = read_config(made / "config.yaml")
    config = replace(config, data=replace(config.data, corrections=listed), batch=replace(config.batch, size=8))
    run(config, tmp_path / "again")
    assert load_embedder(tmp_path / "again").trained_on.class_names == ("navy", "green")


@pytest.mark.usefixtures("without_plots")
def test_decisions_about_images_come_before_the_names_of_classes(made, index, tmp_path, capsys):
    index.edit(Edit("rename", "blue", "navy"))
    index.edit(Edit("delete", "red"))
    decisions = tmp_path / "decisions.csv"
    decisions.write_text(f"path,decision,label\n{made.parent / 'red-1.png'},relabel,blue\n")
    main(["audit", str(made), "--no-faults", "--apply", "--decisions", str(decisions), str(made / "index")])
    assert "1 image relabeled, 0 left out, 1 class renamed or merged, 1 class left out" in capsys.readouterr().out
    train = prepared(made, made / "audit" / "corrections.csv").train
    assert classes_of(train) == {"navy": EACH + 1, "green": EACH}
    main(["audit", str(made), "--no-faults", "--apply", "--decisions", str(decisions)])
    printed = capsys.readouterr().out
    assert "2 changes of classes and images made in the index, such as deleted red" in printed
    assert "to --decisions to apply them" in printed


@pytest.fixture(scope="module")
def judged(made):
    return audit_run(made, device="cpu")


def test_training_and_held_out_classes_stay_apart_when_merged(made, index, judged, tmp_path):
    found, data = judged
    index.edit(Edit("merge", "gray", "red"))  # a held-out class into a training class
    corrections = corrections_of(found, policy="keep", decisions=[made / "index"])
    assert corrections.classes == {"gray": "red"}
    assert of_training(corrections, data) == Corrections({}), "a list is about training images"
    write_table(tmp_path / "table.csv", data, corrections)
    rows = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert {(row["label"], row["split"]) for row in rows} == {(name, "train") for name in ("blue", "green", "red")}
    index.undo()
    index.edit(Edit("merge", "red", "gray"))  # a training class into a held-out one
    corrections = corrections_of(found, policy="keep", decisions=[made / "index"])
    assert of_training(corrections, data).classes == {"red": None}, "it must not be trained on"
    write_table(tmp_path / "table.csv", data, corrections)
    assert classes_of(load_data(str(tmp_path / "table.csv")).test) == {"gray": 2 * EACH}


def test_an_image_of_a_held_out_class_that_now_trains_is_relabeled(made, index, judged):
    found, data = judged
    index.edit(Edit("merge", "gray", "red"))
    names, first = found.images.class_names, 0
    corrections = corrections_of(found, policy="keep", decisions=made / "index")
    corrections = Corrections({first: names.index("gray")}, corrections.classes)
    assert of_training(corrections, data) == Corrections({first: data.train.class_names.index("red")})


def test_a_run_that_tests_on_its_training_classes_names_both_alike(made, tmp_path):
    files = [(made.parent / f"{name}-{k}.png", name) for name in COLORS for k in range(EACH)]
    (tmp_path / "all.csv").write_text("path,label\n" + "".join(f"{path},{name}\n" for path, name in files))
    config = DataConfig(str(tmp_path / "all.csv"), split="images")
    before = prepare_data(config).data
    Corrections({}, {"red": "green", "gray": None}).write(tmp_path / "list.csv", before.train)
    data = prepare_data(replace(config, corrections=tmp_path / "list.csv")).data
    assert data.train.class_names == data.test.class_names == ("blue", "green")
    counts = classes_of(before.test)
    assert classes_of(data.test) == {"blue": counts["blue"], "green": counts["green"] + counts["red"]}


def test_the_truth_of_a_noisy_run_follows_its_merged_classes(made, tmp_path):
    from pfml.audit.run_audit import _true_labels
    from pfml.data import LabelNoise
    from pfml.runs.data import load_checked

    config = DataConfig(str(made.parent / "table.csv"), noise=LabelNoise(rate=0.3))
    noisy, _ = prepare_data(config)
    Corrections({0: None}, {"red": "green", "blue": "navy"}).write(tmp_path / "list.csv", noisy.train)
    config = replace(config, corrections=tmp_path / "list.csv")
    data, _ = prepare_data(config)
    images, _ = data.joined()
    true = _true_labels(config, data, load_checked(config))
    merged = {"red": "green", "blue": "navy"}
    for k in range(len(images)):
        color = images.images[k].name.split("-")[0]
        assert images.class_names[int(true[k])] == merged.get(color, color)
