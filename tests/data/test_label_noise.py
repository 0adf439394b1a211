"""Label noise against its definition, and its record."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from pfml.data import Corruption, ImageSet, LabelNoise, corrupt


@cache
def birds(classes=10, per_class=50, suffix=".jpg"):
    labels = torch.arange(classes).repeat_interleave(per_class)
    names = tuple(f"{c + 1:03}.Bird_{c}" for c in range(classes))
    paths = tuple(Path("/data/birds") / names[c] / f"bird, {k}{suffix}" for k, c in enumerate(labels.tolist()))
    return ImageSet(paths, labels, names)


def write_list(path, images, labels, header=False):
    lines = ["path,label"] if header else []
    for image, label in zip(images.images, labels, strict=True):
        lines.append(f'"/elsewhere/{image.parent.name}/{image.stem}.png",{label}')
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("variant", ["exact", "with-own", "bernoulli"])
def test_a_rate_of_zero_changes_nothing(variant):
    images = birds()
    corrupted, corruption = corrupt(images, LabelNoise(variant=variant))
    assert (corrupted.labels == images.labels).all()
    assert len(corruption) == 0


@pytest.mark.parametrize("rate", [0.2, 0.333, 1.0])
def test_exact_gives_exactly_that_many_images_another_class(rate):
    images = birds()
    corrupted, corruption = corrupt(images, LabelNoise(rate))
    changed = corrupted.labels != images.labels
    assert changed.sum() == round(rate * 500) == corruption.wrong
    assert changed.nonzero()[:, 0].tolist() == corruption.indices.tolist()
    assert (corrupted.labels[corruption.indices] == corruption.given_labels).all()
    assert (images.labels[corruption.indices] == corruption.true_labels).all()
    assert corrupted.images == images.images


@pytest.mark.parametrize("variant", ["exact", "bernoulli"])
def test_wrong_labels_are_uniform_over_the_other_classes(variant):
    images = birds(classes=5, per_class=1_000)
    corrupted, _ = corrupt(images, LabelNoise(0.5, variant))
    for c in range(5):
        given = corrupted.labels[(images.labels == c) & (corrupted.labels != c)].bincount(minlength=5).double()
        expected = given.sum() / 4
        others = [k for k in range(5) if k != c]
        assert ((given[others] - expected).abs() < 5 * expected.sqrt()).all()


def test_with_own_draws_over_all_classes_so_that_some_stay_right():
    images = birds(classes=5, per_class=1_000)
    _, corruption = corrupt(images, LabelNoise(0.5, "with-own"))
    assert len(corruption) == 2_500
    assert abs(corruption.wrong - 2_000) < 5 * (2_500 * 0.8 * 0.2) ** 0.5


def test_bernoulli_varies_in_number_around_its_rate():
    images = birds(per_class=200)
    counts = {corrupt(images, LabelNoise(0.2, "bernoulli", seed))[1].wrong for seed in range(8)}
    assert len(counts) > 1
    assert all(abs(count - 400) < 5 * (2_000 * 0.2 * 0.8) ** 0.5 for count in counts)


@pytest.mark.parametrize("variant", ["exact", "with-own", "bernoulli"])
def test_the_seed_decides_the_draw(variant):
    labels = [corrupt(birds(), LabelNoise(0.2, variant, seed))[0].labels.tolist() for seed in (0, 0, 1)]
    assert labels[0] == labels[1] != labels[2]


def test_the_images_given_keep_their_labels():
    images = birds()
    before = images.labels.clone()
    corrupt(images, LabelNoise(0.5))
    assert (images.labels == before).all()


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("header", [False, True])
def test_a_list_counts_classes_from_0_or_1_and_names_files_of_any_root_and_suffix(tmp_path, first, header):
    images = birds()
    listed = corrupt(images, LabelNoise(0.2))[0].labels
    file = write_list(tmp_path / "noise.csv", images, (listed + first).tolist(), header)
    corrupted, corruption = corrupt(images, LabelNoise(variant="list", file=file))
    assert (corrupted.labels == listed).all()
    assert corruption.wrong == len(corruption) == 100
    assert corruption.remarks == ()


def test_a_list_may_name_the_classes(tmp_path):
    images = birds()
    listed = corrupt(images, LabelNoise(0.2))[0].labels
    file = write_list(tmp_path / "noise.csv", images, [images.class_names[label] for label in listed])
    assert (corrupt(images, LabelNoise(variant="list", file=file))[0].labels == listed).all()


def test_a_listed_label_that_is_no_class_leaves_the_true_one_and_is_told(tmp_path):
    images = birds()
    labels = (images.labels + 1).tolist()
    labels[7], labels[8] = 0, 5
    corrupted, corruption = corrupt(
        images, LabelNoise(variant="list", file=write_list(tmp_path / "noise.csv", images, labels))
    )
    assert corruption.indices.tolist() == [8]
    assert corrupted.labels[7] == images.labels[7]
    assert len(corruption.remarks) == 1
    assert "gives 1 images a label that is no class (0)" in corruption.remarks[0]


def test_a_list_of_more_or_fewer_images_is_told(tmp_path):
    images = birds()
    file = write_list(tmp_path / "noise.csv", images, images.labels.tolist())
    some = images.subset(range(100))
    assert "400 of the 500 lines" in corrupt(some, LabelNoise(variant="list", file=file))[1].remarks[0]
    file = write_list(tmp_path / "noise.csv", some, some.labels.tolist())
    assert "does not list 400 of the 500 images" in corrupt(images, LabelNoise(variant="list", file=file))[1].remarks[0]


def test_a_list_of_other_images_is_refused(tmp_path):
    other = birds(suffix=".jpg")
    other = replace(other, images=tuple(Path("x") / path.name for path in other.images))
    file = write_list(tmp_path / "noise.csv", other, other.labels.tolist())
    with pytest.raises(ValueError, match="must list images of the set by folder and file name, got none of 500"):
        corrupt(birds(), LabelNoise(variant="list", file=file))


def test_a_list_with_a_broken_line_is_refused_by_its_number(tmp_path):
    (tmp_path / "noise.csv").write_text("a/b.jpg,1\na/c.jpg\n")
    with pytest.raises(ValueError, match="noise.csv, line 2 must have a path and a label, got 1 cells"):
        corrupt(birds(), LabelNoise(variant="list", file=tmp_path / "noise.csv"))


@pytest.mark.parametrize("variant", ["exact", "with-own"])
def test_a_record_is_read_back_as_it_was_written(tmp_path, variant):
    images = birds()
    corrupted, corruption = corrupt(images, LabelNoise(0.2, variant))
    corruption.write(tmp_path / "labels.csv")
    again = Corruption.read(tmp_path / "labels.csv", images)
    assert again.indices.tolist() == corruption.indices.tolist()
    assert (again.apply(images).labels == corrupted.labels).all()
    assert again.wrong == corruption.wrong
    assert [path.name for path in tmp_path.iterdir()] == ["labels.csv"]


def test_a_record_outlives_a_move_of_the_data(tmp_path):
    images = birds()
    _, corruption = corrupt(images, LabelNoise(0.2))
    corruption.write(tmp_path / "labels.csv")
    moved = replace(images, images=tuple(Path("/new") / path.relative_to("/data") for path in images.images))
    assert Corruption.read(tmp_path / "labels.csv", moved).indices.tolist() == corruption.indices.tolist()
    first = (tmp_path / "labels.csv").read_text().splitlines()[1]
    assert first.startswith('"001.Bird_0/bird, ')


def test_a_record_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    images = birds()
    path = tmp_path / "labels.csv"
    corruption = corrupt(images, LabelNoise(0.2))[1]
    corruption.write(path)
    before = path.read_text()
    with pytest.raises(ValueError):
        replace(corruption, image_names=corruption.image_names[:3]).write(path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["labels.csv"]


def test_pixels_are_recorded_by_their_sources(tmp_path):
    images = ImageSet(torch.zeros(4, 3, 1, 1, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), ("a", "b"), tuple("wxyz"))
    _, corruption = corrupt(images, LabelNoise(0.25))
    corruption.write(tmp_path / "labels.csv")
    (row,) = (tmp_path / "labels.csv").read_text().splitlines()[1:]
    index = int(corruption.indices)
    assert row == f"{'wxyz'[index]},{'aabb'[index]},{'bbaa'[index]}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("001.Bird_0/nothing.jpg,001.Bird_0,002.Bird_1", "line 3 must name an image of the set"),
        ('"001.Bird_0/bird, 1.jpg",003.Bird_2,002.Bird_1', "line 3 must have the true class of .*001.Bird_0, got 003"),
        ('"001.Bird_0/bird, 1.jpg",001.Bird_0,Penguin', "line 3 must have a given class of the set, got 'Penguin'"),
        ('"001.Bird_0/bird, 1.jpg",001.Bird_0', "line 3 must have 3 cells"),
        ('"001.Bird_0/bird, 0.jpg",001.Bird_0,003.Bird_2', "line 3 must name a new image"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_its_line(tmp_path, line, message):
    path = tmp_path / "labels.csv"
    path.write_text(f'image,true class,given class\n"001.Bird_0/bird, 0.jpg",001.Bird_0,002.Bird_1\n{line}\n')
    with pytest.raises(ValueError, match=message):
        Corruption.read(path, birds())


def test_a_record_with_other_columns_is_refused(tmp_path):
    (tmp_path / "labels.csv").write_text("path,label\n")
    with pytest.raises(ValueError, match="must have the columns image, true class, given class, got path, label"):
        Corruption.read(tmp_path / "labels.csv", birds())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.5}, r"must lie in \[0, 1\], got 1.5"),
        ({"rate": float("nan")}, r"must lie in \[0, 1\], got nan"),
        ({"variant": "exakt"}, "got 'exakt'; did you mean 'exact'?"),
        ({"variant": "list"}, "must have a file if and only if it is a list"),
        ({"file": Path("noise.csv")}, "must have a file if and only if it is a list"),
        ({"rate": 0.2, "variant": "list", "file": Path("noise.csv")}, "must stay 0 for a list"),
    ],
)
def test_a_noise_that_contradicts_itself_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LabelNoise(**options)


def test_noise_needs_another_class():
    with pytest.raises(ValueError, match="at least 2 classes to choose from, got 1"):
        corrupt(birds(classes=1), LabelNoise(0.2))
