"""Images that Python gives: pairs, torch datasets, what looks like Hugging Face's, dictionaries of them."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset

from pfml.data import ImageSet, load_data, open_images
from pfml.data.copies import exact_copies
from pfml.data.dataset_images import to_pixels
from pfml.data.decoding import UnreadableImagesError, check_images
from pfml.data.preprocessing import Preprocessing
from pfml.data.readers.python_data import read_dataset, read_pairs

CROP = Preprocessing(8, 8)


class Shapes(Dataset):
    """Eight images of four classes, of two sizes."""

    classes = ("disc", "line", "ring", "star")

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 8

    def __getitem__(self, k):
        if not 0 <= k < 8:
            raise IndexError(k)
        self.asked.append(k)
        height = 9 if k % 2 else 12
        return Image.fromarray(np.full((height, 10, 3), 20 * k, dtype=np.uint8)), k // 2


class ClassLabel:
    names = ("ash", "elm", "oak")


class Table:
    """What a split of Hugging Face's datasets looks like: columns, features, items as dictionaries."""

    column_names = ("id", "image", "fine_label")
    _fingerprint = "f1"

    def __init__(self, asked):
        self.asked = asked
        self.features = {"fine_label": ClassLabel()}

    def __len__(self):
        return 6

    def __getitem__(self, key):
        if isinstance(key, str):
            return [0, 0, 1, 1, 2, 2]
        self.asked.append(key)
        return {"id": key, "image": Image.new("L", (8, 8), key), "fine_label": self["fine_label"][key]}


def crops_of(images, **options):
    source = open_images(images, workers=0, **options)
    return source, next(iter(source.crops([CROP.windows(torch.arange(len(images)), source.sizes)])))


def test_a_dataset_becomes_images_of_any_size_with_its_class_names():
    images = read_dataset(Shapes())
    assert images.class_names == ("disc", "line", "ring", "star")
    assert images.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert images.name_of(3) == "Shapes[3]"
    source, crops = crops_of(images)
    assert source.sizes.tolist() == [[12, 10], [9, 10]] * 4
    assert torch.allclose(crops.mean((1, 2, 3)) * 255, torch.arange(8) * 20.0, atol=1e-3)


def test_in_memory_a_dataset_is_asked_once_for_each_image():
    dataset = Shapes()
    images = read_dataset(dataset)
    dataset.asked.clear()
    open_images(images, workers=2)
    assert sorted(dataset.asked) == list(range(8))


@pytest.mark.parametrize("workers", [0, 2])
def test_beyond_the_budget_workers_ask_the_dataset(workers):
    images = read_dataset(Shapes())
    source = open_images(images, budget_gib=0, workers=workers)
    assert "read from their dataset" in source.description
    _, expected = crops_of(images)
    plan = [CROP.windows(torch.arange(8), source.sizes)]
    assert torch.equal(next(iter(source.crops(plan))), expected)


def test_subsets_and_divisions_keep_their_images():
    data = load_data(Shapes(), split="images", seed=3)
    assert data.protocol == "images"
    assert (len(data.train), len(data.test)) == (4, 4)
    joined, roles = data.joined()
    assert roles == ("train",) * 4 + ("test",) * 4
    assert sorted(joined.name_of(k) for k in range(8)) == [f"Shapes[{k}]" for k in range(8)]
    _, crops = crops_of(joined)
    brightness = (crops.mean((1, 2, 3)) * 255 / 20).round().int().tolist()
    assert [f"Shapes[{k}]" for k in brightness] == [joined.name_of(k) for k in range(8)]
    unseen = load_data(Shapes())
    assert unseen.protocol == "classes"
    assert not {*unseen.train.class_names} & {*unseen.test.class_names}


def test_a_torch_subset_keeps_names_and_labels():
    images = read_dataset(Subset(Shapes(), [6, 7, 2]))
    assert images.class_names == ("line", "star")
    assert images.labels.tolist() == [1, 1, 0]


def test_labels_of_a_column_are_read_without_the_images():
    asked = []
    images = read_dataset(Table(asked))
    assert images.class_names == ("ash", "elm", "oak")
    assert set(asked) == {0}  # to see what an item is, and that it is the same each time
    assert load_data({"train": Table([]), "test": Table([])}, split="images").test.class_names == images.class_names
    other = Table([])
    other._fingerprint = "f2"
    assert read_dataset(Table([])).fingerprint() == images.fingerprint() != read_dataset(other).fingerprint()


def test_datasets_of_two_kinds_are_joined():
    joined = read_dataset(Shapes()).joined(read_dataset(Table([])))
    assert (len(joined), joined.num_classes) == (14, 7)
    _, crops = crops_of(joined)
    assert torch.allclose(crops[8:].mean((1, 2, 3)) * 255, torch.arange(6.0), atol=1e-3)
    assert len(pickle.loads(pickle.dumps(joined.images))) == 14


def test_pairs_are_files(tmp_path):
    for k in range(4):
        Image.new("RGB", (9, 9), (k, 0, 0)).save(tmp_path / f"{k}.png")
    pairs = [(str(tmp_path / f"{k}.png"), "ab"[k % 2]) for k in range(4)]
    images = read_pairs(pairs)
    assert images.images[0] == tmp_path / "0.png"
    assert load_data(pairs, split="none").train.class_names == ("a", "b")
    assert read_pairs([("x.png", 10), ("y.png", 9)]).class_names == ("9", "10")


def test_a_folder_dataset_that_changes_nothing_is_read_from_its_files(tmp_path):
    from torchvision.datasets import ImageFolder

    for name in ("owl", "wren"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / name / "1.png")
    images = read_dataset(ImageFolder(tmp_path))
    assert images.images == (tmp_path / "owl" / "1.png", tmp_path / "wren" / "1.png")
    assert images.class_names == ("owl", "wren")
    inverted = ImageFolder(tmp_path, transform=lambda image: Image.eval(image, lambda value: 255 - value))
    _, crops = crops_of(read_dataset(inverted))
    assert crops.min() > 0.99


@pytest.mark.parametrize(
    "image",
    [
        Image.new("L", (4, 2), 51),
        np.full((2, 4), 51, dtype=np.uint8),
        np.full((2, 4, 3), 51, dtype=np.uint8),
        torch.full((1, 2, 4), 51, dtype=torch.uint8),
        torch.full((3, 2, 4), 0.2),
    ],
)
def test_images_come_in_many_forms(image):
    assert torch.equal(to_pixels(image), torch.full((3, 2, 4), 51, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.randn(3, 8, 8), "leave out the normalization"),
        (torch.zeros(4, 8, 8), r"must be \(3, height, width\).*got \(4, 8, 8\)"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "uint8, or floats"),
        ("a.jpg", "got str"),
    ],
)
def test_images_that_cannot_be_used_are_named(image, message):
    with pytest.raises(UnreadableImagesError, match=rf"(?s)list\[1\].*{message}"):
        check_images(read_dataset([(Image.new("RGB", (8, 8)), 0), (image, 1)]))


class Restless(Shapes):
    def __getitem__(self, k):
        return Image.effect_noise((9, 9), 50).convert("RGB"), k // 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Restless(), "leave out its random transform"),
        ([], "empty list"),
        ([(Image.new("RGB", (8, 8)), 1.5)], "whole numbers or texts, got float"),
        ([(Image.new("RGB", (8, 8)), 1), (Image.new("RGB", (8, 8)), "a")], "got both"),
        ([("a.jpg", 1), ("b.jpg",)], r"must be \(path, label\)"),
        ([{"picture": 0, "label": 1}], "name it, read_dataset"),
        ([5, 6], "must be .image, label. or dictionaries, got int"),
        (iter([]), "must have a length"),
        ({"train": [("a.jpg", 1)]}, "keys train and test"),
    ],
)
def test_sources_that_cannot_be_used_are_refused(source, message):
    with pytest.raises((ValueError, TypeError), match=message):
        load_data(source)


def test_options_of_files_are_refused_for_datasets(tmp_path):
    with pytest.raises(ValueError, match="leave them out"):
        load_data(Shapes(), tmp_path)
    with pytest.raises(ValueError, match=r"leave out storage\.cache"):
        open_images(read_dataset(Shapes()), cache=tmp_path)


def test_copies_in_a_dataset_are_found():
    image = Image.new("RGB", (8, 8), (1, 2, 3))
    assert exact_copies(read_dataset([(image, 0), (Image.new("RGB", (8, 8)), 0), (image, 1)])) == [[0, 2]]


def test_an_image_set_is_divided_too():
    pixels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    images = ImageSet(pixels, torch.tensor([0, 0, 1, 1]), ("a", "b"))
    assert load_data(images, split="none").train is images


def test_a_split_of_hugging_face_datasets_is_taken_as_it_is():
    datasets = pytest.importorskip("datasets", reason="needs the extra huggingface")
    content = {
        "image": [Image.new("RGB", (9 + k, 9), (10 * k, 0, 0)) for k in range(6)],
        "label": [0, 0, 1, 1, 2, 2],
    }
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["ash", "elm", "oak"])})
    whole = datasets.Dataset.from_dict(content, features=features)
    images = read_dataset(whole)
    assert images.class_names == ("ash", "elm", "oak")
    source, crops = crops_of(images)
    assert source.sizes[:, 1].tolist() == [9, 10, 11, 12, 13, 14]
    assert torch.allclose(crops[:, 0].mean((1, 2)) * 255, torch.arange(6) * 10.0, atol=1e-3)
    assert read_dataset(whole.select([4, 5])).class_names == ("oak",)
    assert (
        images.fingerprint() == read_dataset(whole).fingerprint() != read_dataset(whole.select(range(6))).fingerprint()
    )
    parts = load_data(datasets.DatasetDict(train=whole.select([0, 1, 2, 3]), test=whole.select([4, 5])))
    assert (parts.train.class_names, parts.test.class_names) == (("ash", "elm"), ("oak",))
    undecoded = whole.cast_column("image", datasets.Image(decode=False))
    assert torch.equal(crops_of(read_dataset(undecoded))[1], crops)
