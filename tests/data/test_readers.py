"""Each reader on a small copy of the published layout, and on lists of the published size."""

import csv
from pathlib import Path

import numpy
import pytest
from PIL import Image
from scipy.io import savemat

from pfml.data import DATASETS, SeenClassError, load_data
from pfml.data.datasets import BENCHMARKS

SHARED_CUB = Path(__file__).resolve().parents[3] / "shared" / "data" / "cub200"


def draw(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (3, 2)).save(path)


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def spread(images, classes):
    """A class, 0 to classes - 1, for each image: as even as can be."""
    return [k * classes // images for k in range(images)]


def write_cub(root, classes):
    """Lists for images of these classes (numbers from 0), with one file name each."""
    names = [f"{c + 1:03}.Bird_{c}" for c in range(max(classes) + 1)]
    write(root / "classes.txt", [f"{c + 1} {name}" for c, name in enumerate(names)])
    write(root / "images.txt", [f"{k + 1} {names[c]}/bird {k}.jpg" for k, c in enumerate(classes)])
    write(root / "image_class_labels.txt", [f"{k + 1} {c + 1}" for k, c in enumerate(classes)])


def annotations(classes, files, file_field):
    kinds = [(file_field, object), ("bbox_x1", "i4"), ("class", "u1"), ("test", "u1")]
    rows = [(file, 1, c + 1, k % 2) for k, (file, c) in enumerate(zip(files, classes, strict=True))]
    return numpy.array([rows], dtype=kinds)


def car_names(count):
    return numpy.array([[f"Car Model {c} 20{c:02}" for c in range(count)]], dtype=object)


def write_cars_in_one_list(root, classes, count):
    files = [f"car_ims/{k + 1:06}.jpg" for k in range(len(classes))]
    root.mkdir(parents=True, exist_ok=True)
    content = {"annotations": annotations(classes, files, "relative_im_path"), "class_names": car_names(count)}
    savemat(root / "cars_annos.mat", content)


def write_cars_in_two_lists(root, train, test, count, test_labels="devkit"):
    for folder, name, classes in (("devkit", "train_annos", train), (test_labels, "test_annos_withlabels", test)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        files = [f"{k + 1:05}.jpg" for k in range(len(classes))]
        savemat(root / folder / f"cars_{name}.mat", {"annotations": annotations(classes, files, "fname")})
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": car_names(count)})


def write_sop(root, train, test):
    kinds = ("bicycle_final", "stapler_final")
    for file, classes, first in (("train", train, 1), ("test", test, max(train) + 2)):
        lines = ["image_id class_id super_class_id path"]
        for k, c in enumerate(classes):
            lines.append(f"{k + 1} {first + c} {1 + c % 2} {kinds[c % 2]}/{first + c}_{k}.JPG")
        write(root / f"Ebay_{file}.txt", lines)


def write_in_shop(file, train, query, gallery):
    lines = ["image_name item_id evaluation_status"]
    for part, classes, first in (("train", train, 1), ("query", query, 50_001), ("gallery", gallery, 50_001)):
        for k, c in enumerate(classes):
            item = f"id_{first + c:08}"
            lines.append(f"img/WOMEN/Dresses/{item}/{k}_{part}.jpg       {item} {part}")
    write(file, [str(len(lines) - 1), *lines])


# ---------------------------------------------------------------------------------------------------- CUB


@pytest.mark.parametrize("around", [False, True])
def test_cub_trains_on_the_first_half_of_the_classes(tmp_path, around):
    root = tmp_path / "CUB_200_2011" if around else tmp_path
    write_cub(root, [0, 3, 1, 2, 0])
    draw(root / "images" / "003.Bird_2" / "bird 3.jpg")
    data = load_data("cub", tmp_path)
    assert data.train.class_names == ("001.Bird_0", "002.Bird_1")
    assert data.train.labels.tolist() == [0, 1, 0]
    assert data.test.class_names == ("003.Bird_2", "004.Bird_3")
    assert data.test.labels.tolist() == [1, 0]
    assert data.test.images[1].is_file()
    assert data.recall_at == (1, 2, 4, 8)


def test_cub_classes_are_in_the_order_of_their_numbers(tmp_path):
    write_cub(tmp_path, list(range(12)))
    lines = (tmp_path / "classes.txt").read_text().splitlines()
    write(tmp_path / "classes.txt", lines[::-1])
    assert load_data("cub", tmp_path).train.class_names == tuple(f"{c + 1:03}.Bird_{c}" for c in range(6))


@pytest.mark.parametrize(("missing", "remarks"), [(0, 0), (1, 1)])
def test_cub_of_the_published_size_has_no_remark_and_a_missing_image_has_one(tmp_path, missing, remarks):
    write_cub(tmp_path, spread(5_864, 100)[missing:] + [100 + c for c in spread(5_924, 100)])
    data = load_data("cub", tmp_path)
    assert len(data.remarks) == remarks
    if missing:
        assert data.remarks[0] == (
            "CUB-200-2011 has 5,864 training images, found 5,863: 1 is missing; numbers will not be comparable"
        )


@pytest.mark.skipif(not SHARED_CUB.is_dir(), reason="the lists of CUB-200-2011 are not here")
def test_the_lists_of_cub_itself_have_the_published_counts():
    data = load_data("cub", SHARED_CUB)
    assert (len(data.train), len(data.test)) == (5_864, 5_924)
    assert data.train.class_names[0] == "001.Black_footed_Albatross"
    assert data.test.class_names[-1] == "200.Common_Yellowthroat"
    assert data.remarks == ()


def test_cub_without_a_list_says_which_file_of_which_layout_and_whose(tmp_path):
    write_cub(tmp_path, [0, 1])
    (tmp_path / "image_class_labels.txt").unlink()
    with pytest.raises(FileNotFoundError, match="must have images.txt.*but image_class_labels.txt is not in.*Wah"):
        load_data("cub", tmp_path)


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_a_root_that_does_not_exist_is_told(name, tmp_path):
    with pytest.raises(
        FileNotFoundError, match="must be a folder, got .*nowhere, which is none. Get .* from its authors"
    ):
        load_data(name, tmp_path / "nowhere")


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_an_empty_root_is_told_what_it_lacks(name, tmp_path):
    with pytest.raises(FileNotFoundError, match="must have .* is not in .* Get .* from its authors"):
        load_data(name, tmp_path)


def test_cub_with_an_image_of_no_class_is_refused(tmp_path):
    write_cub(tmp_path, [0, 1])
    write(tmp_path / "image_class_labels.txt", ["1 1"])
    with pytest.raises(ValueError, match="image 2 of .* must have a class of classes.txt.*got no line"):
        load_data("cub", tmp_path)


def test_a_broken_line_of_a_list_is_refused_by_its_number(tmp_path):
    write_cub(tmp_path, [0, 1])
    write(tmp_path / "images.txt", ["1 001.Bird_0/bird.jpg", "2"])
    with pytest.raises(ValueError, match=r"images.txt, line 2 must have 2 columns \(image id, path\), got '2'"):
        load_data("cub", tmp_path)


# --------------------------------------------------------------------------------------------------- Cars


def test_cars_in_one_list_pools_the_official_parts(tmp_path):
    write_cars_in_one_list(tmp_path, [0, 1, 2, 3, 0], 4)
    data = load_data("cars", tmp_path)
    assert data.train.class_names == ("Car Model 0 2000", "Car Model 1 2001")
    assert data.train.labels.tolist() == [0, 1, 0]
    assert data.train.images[2] == tmp_path / "car_ims" / "000005.jpg"
    assert data.test.labels.tolist() == [0, 1]


@pytest.mark.parametrize("test_labels", ["devkit", "."])
@pytest.mark.parametrize("around", [False, True])
def test_cars_in_two_lists_pools_them(tmp_path, test_labels, around):
    root = tmp_path / "stanford_cars" if around else tmp_path
    write_cars_in_two_lists(root, [0, 2], [1, 3, 0], 4, test_labels)
    data = load_data("cars", tmp_path)
    assert data.train.images == tuple(
        root / file for file in ("cars_train/00001.jpg", "cars_test/00001.jpg", "cars_test/00003.jpg")
    )
    assert data.train.labels.tolist() == [0, 1, 0]
    assert data.test.class_names == ("Car Model 2 2002", "Car Model 3 2003")


def test_cars_with_a_single_image_in_a_list(tmp_path):
    write_cars_in_two_lists(tmp_path, [0], [1, 1], 2)
    data = load_data("cars", tmp_path)
    assert (len(data.train), len(data.test)) == (1, 2)


@pytest.mark.slow
def test_cars_of_the_published_size_has_no_remark(tmp_path):
    write_cars_in_one_list(tmp_path, spread(8_054, 98) + [98 + c for c in spread(8_131, 98)], 196)
    assert load_data("cars", tmp_path).remarks == ()


def test_cars_without_the_labels_of_its_test_images_is_told(tmp_path):
    write_cars_in_two_lists(tmp_path, [0, 1], [0, 1], 2)
    (tmp_path / "devkit" / "cars_test_annos_withlabels.mat").unlink()
    (tmp_path / "devkit" / "cars_train_annos.mat").rename(tmp_path / "cars_train_annos.mat")
    with pytest.raises(FileNotFoundError, match="but devkit/cars_test_annos_withlabels.mat or .* is not in"):
        load_data("cars", tmp_path)


def test_cars_with_a_class_that_has_no_name_is_refused(tmp_path):
    write_cars_in_one_list(tmp_path, [0, 1, 2], 2)
    with pytest.raises(ValueError, match=r"must lie in \[1, 2\], got 1 to 3"):
        load_data("cars", tmp_path)


def test_cars_with_another_variable_is_refused(tmp_path):
    savemat(tmp_path / "cars_annos.mat", {"other": [1]})
    with pytest.raises(ValueError, match="must have the variable annotations, got other"):
        load_data("cars", tmp_path)


# ---------------------------------------------------------------------------------------------------- SOP


@pytest.mark.parametrize("around", [False, True])
def test_sop_has_its_own_division(tmp_path, around):
    root = tmp_path / "Stanford_Online_Products" if around else tmp_path
    write_sop(root, [0, 0, 1], [1, 0, 1])
    data = load_data("sop", tmp_path)
    assert data.train.class_names == ("bicycle/1", "stapler/2")
    assert data.test.class_names == ("bicycle/3", "stapler/4")
    assert data.test.labels.tolist() == [1, 0, 1]
    assert data.train.images[2] == root / "stapler_final" / "2_2.JPG"
    assert data.recall_at == (1, 10, 100, 1000)


def test_sop_with_too_many_training_images_has_a_remark_for_each_count_and_none_for_its_test_images(tmp_path):
    write_sop(tmp_path, [*spread(59_551, 11_318), 11_318, 11_318], spread(60_502, 11_316))
    images, classes = load_data("sop", tmp_path).remarks
    assert "has 59,551 training images, found 59,553: 2 are too many" in images
    assert "has 11,318 training classes, found 11,319: 1 is too many" in classes


# ------------------------------------------------------------------------------------------------ In-Shop


@pytest.mark.parametrize("list_folder", ["Eval", "."])
@pytest.mark.parametrize("pictures", ["Img/img", "img"])
def test_in_shop_searches_queries_in_a_gallery(tmp_path, list_folder, pictures):
    write_in_shop(tmp_path / list_folder / "list_eval_partition.txt", [0, 1, 1], [1, 0], [0, 1, 1])
    draw(tmp_path / pictures / "WOMEN" / "Dresses" / "id_00050002" / "0_query.jpg")
    data = load_data("in-shop", tmp_path)
    assert data.train.class_names == ("id_00000001", "id_00000002")
    assert data.test.class_names == data.gallery.class_names == ("id_00050001", "id_00050002")
    assert data.test.labels.tolist() == [1, 0]
    assert data.gallery.labels.tolist() == [0, 1, 1]
    assert data.test.images[0].is_file()
    assert data.recall_at == (1, 10, 20, 30)


def test_in_shop_without_some_gallery_images_has_a_remark_and_none_for_its_other_parts(tmp_path):
    gallery = spread(12_612 - 5, 3_985)
    write_in_shop(tmp_path / "list_eval_partition.txt", spread(25_882, 3_997), spread(14_218, 3_985), gallery)
    (remark,) = load_data("in-shop", tmp_path).remarks
    assert "has 12,612 gallery images, found 12,607: 5 are missing" in remark


def test_in_shop_with_another_status_is_refused(tmp_path):
    write(tmp_path / "list_eval_partition.txt", ["1", "image_name item_id evaluation_status", "img/a.jpg id_1 val"])
    with pytest.raises(ValueError, match="must be one of train, query, gallery, got 'val' for img/a.jpg"):
        load_data("in-shop", tmp_path)


# ------------------------------------------------------------------------------------------ class folders


def test_class_folders_are_halved_and_searched_deeply_for_images_of_any_suffix(tmp_path):
    for file in ("d/1.JPG", "a/deep/2.jpeg", "a/1.png", "b/1.webp", "c/x.tiff", "c/.hidden.png", "c/notes.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    data = load_data("folder", tmp_path, seed=None)
    assert data.train.class_names == ("a", "b")
    assert data.train.images == tuple(tmp_path / file for file in ("a/1.png", "a/deep/2.jpeg", "b/1.webp"))
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.test.class_names == ("c", "d")
    assert data.test.images == (tmp_path / "c/x.tiff", tmp_path / "d/1.JPG")
    assert data.remarks == (
        f"{Path('c', 'notes.txt')} in {tmp_path} left out: not an image file, by the ending of the name",
    )


def test_a_link_to_a_folder_around_a_class_brings_no_other_classes_into_it(tmp_path):
    for file in ("a/1.png", "b/1.png"):
        draw(tmp_path / file)
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    data = load_data("folder", tmp_path, seed=None)
    assert data.train.images == (tmp_path / "a/1.png",)
    assert data.test.images == (tmp_path / "b/1.png",)


def test_a_broken_csv_line_is_named(tmp_path):
    (tmp_path / "a.csv").write_text('path,label\n"' + "x" * 200_000)
    with pytest.raises(ValueError, match="a.csv, line .* must be a line of a CSV table"):
        load_data("csv", tmp_path / "a.csv")


def test_a_csv_with_two_columns_of_one_name_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("path,label,label\na.png,1,2\n")
    with pytest.raises(ValueError, match="one column label, got 2"):
        load_data("csv", tmp_path / "a.csv")


def test_folders_named_by_numbers_are_in_their_order(tmp_path):
    for c in (1, 2, 9, 10):
        draw(tmp_path / str(c) / "1.png")
    assert load_data("folder", tmp_path, split="none").train.class_names == ("1", "2", "9", "10")


def test_folders_train_and_test_are_the_split(tmp_path):
    for file in ("train/b/1.png", "train/a/1.png", "train/c/1.png", "test/d/1.png", "val/e/1.png"):
        draw(tmp_path / file)
    data = load_data("folder", tmp_path)
    assert data.train.class_names == ("a", "b", "c")
    assert data.test.class_names == ("d",)
    assert data.remarks == (f"val in {tmp_path} left out: neither train nor test",)


def test_classes_may_be_called_train_and_test(tmp_path):
    draw(tmp_path / "train" / "locomotive.png")
    draw(tmp_path / "test" / "tube.png")
    data = load_data("folder", tmp_path, seed=None)
    assert (data.train.class_names, data.test.class_names) == (("test",), ("train",))


def test_a_class_in_train_and_test_is_refused(tmp_path):
    for file in ("train/a/1.png", "test/a/2.png"):
        draw(tmp_path / file)
    with pytest.raises(SeenClassError, match="a is also trained on; to test on other images.*set data.split images$"):
        load_data("folder", tmp_path)


def test_folders_train_and_test_may_share_classes_whose_images_are_held_out(tmp_path):
    for file in ("train/a/1.png", "train/b/1.png", "test/b/2.png"):
        draw(tmp_path / file)
    data = load_data("folder", tmp_path, split="images")
    assert data.gallery is data.train
    assert (data.train.class_names, data.test.images) == (("a", "b"), (tmp_path / "test/b/2.png",))
    assert data.test.labels.tolist() == [1]
    assert len(load_data("folder", tmp_path, split="none").train) == 3
    draw(tmp_path / "test/c/1.png")
    with pytest.raises(ValueError, match=f"all test classes of {tmp_path} must train, but c does not"):
        load_data("folder", tmp_path, split="images")


def test_a_folder_that_moves_or_gets_its_files_in_another_order_is_divided_alike(tmp_path):
    names = [f"{c}/{k}.png" for c in ("wren", "owl", "jay", "kite", "tit", "rook") for k in range(5)]
    for root, order in (("one", names), ("deep/er/two", names[::-1])):
        for name in order:
            draw(tmp_path / root / name)
    for split in ("classes", "images"):
        found = [
            {path.relative_to(tmp_path / root) for path in load_data(str(tmp_path / root), split=split).train.images}
            for root in ("one", "deep/er/two")
        ]
        assert found[0] == found[1]
        other = load_data(str(tmp_path / "one"), split=split, seed=1).train.images
        assert {path.relative_to(tmp_path / "one") for path in other} != found[0]


def test_a_table_is_divided_as_the_folder_of_its_images_in_any_order_of_its_rows(tmp_path):
    names = [f"{c}/{k}.png" for c in ("wren", "owl", "jay", "kite") for k in range(5)]
    for name in names:
        draw(tmp_path / name)
    rows = [(name, name.split("/")[0]) for name in names]
    for number, order in enumerate((rows, rows[::-1])):
        table = write_table(tmp_path / f"t{number}.csv", ("path", "label"), *order)
        for split in ("classes", "images", "none"):
            listed, folder = (load_data(str(path), split=split, seed=5) for path in (table, tmp_path))
            assert set(listed.train.images) == set(folder.train.images)
            assert set(listed.test.images) == set(folder.test.images)
            assert listed.train.class_names == folder.train.class_names


def test_files_outside_of_classes_and_empty_classes_are_told(tmp_path):
    for file in ("a/1.png", "b/1.png", "loose.png"):
        draw(tmp_path / file)
    (tmp_path / "readme.txt").touch()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "empty").mkdir()
    assert load_data("folder", tmp_path).remarks == (
        f"loose.png, readme.txt in {tmp_path} left out: not in a class folder",
        f"empty in {tmp_path} left out: no images in it",
    )


def test_links_are_followed_and_a_link_to_a_folder_around_it_ends(tmp_path):
    draw(tmp_path / "elsewhere" / "1.png")
    draw(tmp_path / "set" / "a" / "1.png")
    (tmp_path / "set" / "b").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "set" / "a" / "again").symlink_to(tmp_path / "set" / "a", target_is_directory=True)
    data = load_data("folder", tmp_path / "set", seed=None)
    assert data.train.images == (tmp_path / "set" / "a" / "1.png",)
    assert data.test.images == (tmp_path / "set" / "b" / "1.png",)


def test_fewer_than_two_classes_are_refused(tmp_path):
    draw(tmp_path / "a" / "1.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="must have at least 2 folders with images.*got 1"):
        load_data("folder", tmp_path)


def test_the_folder_of_one_class_is_told_to_give_the_folder_around_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("jay", "wren"):
        draw(tmp_path / "birds" / name / "1.png")
    with pytest.raises(
        ValueError, match=r"jay must have .*images lie loose in it \(1\).*give the folder around it, birds$"
    ):
        load_data("birds/jay")
    monkeypatch.chdir(tmp_path / "birds" / "jay")
    with pytest.raises(ValueError, match=r"lie loose in it.*give the folder around it, \.\.$"):
        load_data(".")
    draw(tmp_path / "flat" / "all" / "1.png")
    with pytest.raises(ValueError, match="in no class folder: sort them into such folders$"):
        load_data(str(tmp_path / "flat" / "all"))


def test_a_path_that_does_not_exist_is_told_what_it_is_like(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(
        ValueError, match=r"^no such folder or file: .*phots/; did you mean 'photos'\? \(the data must be"
    ):
        load_data(f"{tmp_path}/phots/")


# ---------------------------------------------------------------------------------------------------- CSV


def write_table(path, *rows, encoding="utf-8"):
    with path.open("w", encoding=encoding, newline="") as text:
        csv.writer(text).writerows(rows)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_table_without_splits_has_its_classes_in_the_order_of_their_numbers(tmp_path, encoding):
    rows = [
        ("label", "comment", "path"),
        ("10", "", "x.png"),
        ("9", "", "y, 1.png"),
        ("1", "", "deep/z.png"),
        ("9", "", "w.png"),
    ]
    file = write_table(tmp_path / "table.csv", *rows, encoding=encoding)
    data = load_data("csv", file, seed=None)
    assert data.train.class_names == ("1",)
    assert data.train.images == (tmp_path / "deep/z.png",)
    assert data.test.class_names == ("9", "10")
    assert data.test.labels.tolist() == [1, 0, 0]
    assert data.remarks == ()


def test_a_table_with_text_labels_has_its_classes_in_the_order_of_the_text(tmp_path):
    file = write_table(
        tmp_path / "t.csv", ("path", "label"), ("1.png", "wren"), ("2.png", "10"), ("3.png", "Ä, owl"), ("4.png", "9")
    )
    assert load_data("csv", file, split="none").train.class_names == ("10", "9", "wren", "Ä, owl")


def test_a_table_with_splits_is_divided_by_them(tmp_path):
    rows = [
        ("1.png", "a", "train"),
        ("2.png", "b", "test"),
        ("3.png", "c", "gallery"),
        ("4.png", "b", "gallery"),
        ("5.png", "d", "validation"),
    ]
    data = load_data("csv", write_table(tmp_path / "t.csv", ("path", "label", "split"), *rows))
    assert data.train.images == (tmp_path / "1.png",)
    assert data.test.class_names == data.gallery.class_names == ("b", "c")
    assert data.test.labels.tolist() == [0]
    assert data.gallery.labels.tolist() == [1, 0]
    assert data.validation.class_names == ("d",)


def test_a_table_of_test_images_only_can_be_evaluated_and_says_so(tmp_path):
    data = load_data("csv", write_table(tmp_path / "t.csv", ("path", "label", "split"), ("1.png", "a", "test")))
    assert len(data.train) == 0
    assert "can evaluate on it but not train" in data.remarks[0]


def test_the_column_split_decides_what_is_held_out_whatever_the_seed(tmp_path):
    rows = [("1.png", "a", "train"), ("2.png", "b", "train"), ("3.png", "b", "test"), ("4.png", "a", "test")]
    shared = write_table(tmp_path / "shared.csv", ("path", "label", "split"), *rows)
    for seed in (0, 1, None):
        data = load_data(str(shared), split="images", seed=seed)
        assert data.train.images == (tmp_path / "1.png", tmp_path / "2.png")
        assert (data.test.labels.tolist(), data.protocol) == ([1, 0], "images")
        assert data.gallery is data.train
    with pytest.raises(SeenClassError, match=r"a, b are also trained on; to test .*set data.split images"):
        load_data(str(shared))
    everything = load_data(str(shared), split="none")
    assert (len(everything.train), len(everything.test), everything.protocol) == (4, 0, "none")
    other = write_table(tmp_path / "other.csv", ("path", "label", "split"), *rows, ("5.png", "c", "test"))
    with pytest.raises(ValueError, match=r"all test classes of .*other.csv must train, but c does not"):
        load_data(str(other), split="images")


def test_a_table_of_training_images_alone_trains_where_nothing_is_held_out(tmp_path):
    rows = [("1.png", "a", "train"), ("2.png", "b", "train")]
    table = write_table(tmp_path / "t.csv", ("path", "label", "split"), *rows)
    assert len(load_data(str(table), split="none").train) == 2
    with pytest.raises(ValueError, match="must have rows whose split is test"):
        load_data(str(table), split="images")


def test_files_that_are_listed_twice_are_told(tmp_path):
    file = write_table(tmp_path / "t.csv", ("path", "label"), ("1.png", "a"), ("2.png", "b"), ("1.png", "b"))
    assert load_data("csv", file).remarks == (f"1 files are listed more than once, the first is {tmp_path / '1.png'}",)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("path", "class"), ("1.png", "a")], "must have the column label in its first line, got path, class"),
        ([("file;label",)], "must have the column path in its first line, got file;label"),
        ([], "must have the column path in its first line, got none"),
        ([("path", "label")], "t.csv must list at least 2 classes, got 0"),
        ([("path", "label"), ("1.png", "a"), ("2.png", " ")], "line 3 must have a label, got an empty cell"),
        ([("path", "label"), ("", "a")], "line 2 must have a path, got an empty cell"),
        ([("path", "label", "split"), ("1.png", "a", "")], "line 2 must have a split, got an empty cell"),
        ([("path", "label", "split"), ("1.png", "a", "dev")], "line 2 must have a split of train, .*got 'dev'"),
        ([("path", "label"), ("1.png",)], "line 2 must have 2 cells like the first line, got 1"),
        ([("path", "label"), ("1.png", "a")], "at least 2 classes.*got 1"),
        ([("path", "label"),], "at least 2 classes.*got 0"),
        ([("path", "label", "split"), ("1.png", "a", "train")], "must have rows whose split is test"),
        ([("path", "label", "split"), ("1.png", "a", "query")], "must have rows whose split is gallery"),
    ],
)  # fmt: skip
def test_a_table_with_a_flaw_is_refused_by_its_line(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        load_data("csv", write_table(tmp_path / "t.csv", *rows))


def test_a_table_in_another_encoding_is_refused(tmp_path):
    file = write_table(tmp_path / "t.csv", ("path", "label"), ("1.png", "ü"), encoding="latin-1")
    with pytest.raises(ValueError, match="must be text in UTF-8"):
        load_data("csv", file)


# ------------------------------------------------------------------------------------------------ by name


def test_a_path_is_a_name_too(tmp_path):
    for c in "ab":
        draw(tmp_path / "set" / c / "1.png")
    table = write_table(tmp_path / "t.CSV", ("path", "label"), ("1.png", "x"), ("2.png", "y"))
    assert load_data(str(tmp_path / "set")).name == "folder"
    assert load_data(str(table)).name == "csv"


def test_glyphs_need_no_root(monkeypatch):
    monkeypatch.setattr("pfml.data.datasets.read_glyphs", lambda: "the glyphs")
    assert load_data("glyphs") == "the glyphs"


def test_the_data_sets_have_these_names():
    assert list(DATASETS) == ["glyphs", "cub", "cars", "sop", "in-shop", "folder", "csv"]


@pytest.mark.parametrize(
    ("name", "root", "message"),
    [
        ("inshop", None, "^no such folder or file: inshop; did you mean 'in-shop'\\?"),
        ("nothing-like-it", None, "^no such folder or file: nothing-like-it .*one of glyphs, cub, "),
        ("", None, "got an empty name; for the current folder, give a dot"),
        ("pyproject.toml", None, "got the file pyproject.toml, which does not end in .csv"),
        ("cub", None, "cub must have a root, the folder to read, got none"),
        ("csv", None, "csv must have a root, the file to read, got none"),
        ("glyphs", ".", "glyphs are drawn, not read"),
        (".", ".", "a data set given by its path must have no root"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name, root, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(ValueError, match=message):
        load_data(name, root)


def test_a_table_that_does_not_exist_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a CSV file, got .*no.csv"):
        load_data("csv", tmp_path / "no.csv")
