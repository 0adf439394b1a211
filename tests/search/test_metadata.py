"""Metadata of an index: from a CSV or Python into hits, filters and exports; through edits, compaction and updates."""

import csv
from datetime import datetime

import pytest
import torch

from pfml.data.readers.metadata import parse_columns, read_metadata
from pfml.models import create_embedder
from pfml.search import Edit, ImageIndex, ModelIdentity, WhereError, list_images, update_index
from pfml.search.metadata import short_path
from small_index import MODEL, small_index, unit_vectors, write_images

PRICES = [{"price": float(k), "tags": ["even"] if k % 2 == 0 else ["odd", "rare"]} for k in range(10)]


def write_table(path, *rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def found(index, where, k=100):
    [hits] = index.search(unit_vectors(1), k, model=MODEL, where=where)
    return sorted(hit.path for hit in hits)


@pytest.fixture
def priced(tmp_path):
    index = small_index(tmp_path / "index")
    index.set_metadata([f"{k}.jpg" for k in range(10)], PRICES)
    return index


def test_metadata_are_found_after_opening_and_compacting(priced, tmp_path):
    priced.add(unit_vectors(1, seed=5), ["new.jpg"], ["class 9"], model=MODEL, metadata=[{"brand": "Acme"}])
    expected = {
        "price < 3": ["0.jpg", "1.jpg", "2.jpg"],
        "tags contains rare and not price < 5": ["5.jpg", "7.jpg", "9.jpg"],
        "price is missing and class = 'class 1'": ["13.jpg", "17.jpg"],
        "brand = Acme or path contains 18": ["18.jpg", "new.jpg"],
        "class is missing": [],
    }
    for _ in range(2):
        index = ImageIndex.open(tmp_path / "index")
        assert {where: found(index, where) for where in expected} == expected
        assert index.columns == {"class": "text", "path": "text", "price": "number", "tags": "list", "brand": "text"}
        assert index.entry(3).metadata == {"price": 3.0, "tags": ("odd", "rare")}
        assert (index.entry(15).metadata, index.find("new.jpg").metadata) == ({}, {"brand": "Acme"})
        assert index.matching("price < 2").tolist() == [0, 1]
        priced.compact()
    assert len(list((tmp_path / "index").glob("metadata-*"))) == 4, "those before stay for readers"


@pytest.mark.parametrize("backend", ["exact", "faiss"])
def test_a_filtered_search_is_the_unfiltered_one_without_the_others(tmp_path, backend):
    if backend == "faiss":
        pytest.importorskip("faiss", reason="needs the extra faiss")
    index = small_index(tmp_path / "index", entries=200, backend=backend)
    index.set_metadata([f"{k}.jpg" for k in range(200)], [{"price": float(k % 7)} for k in range(200)])
    queries = unit_vectors(5, seed=9)
    everything = index.search(queries, 200, model=MODEL)
    some = index.search(queries, 20, model=MODEL, where="price in (2, 5)", class_names=["class 1", "class 2"])
    for hits, every in zip(some, everything, strict=True):
        wanted = [hit for hit in every if hit.metadata["price"] in (2, 5) and hit.class_name in ("class 1", "class 2")]
        assert hits == wanted[:20]


def test_edits_change_the_class_of_a_filter_and_leave_metadata(priced):
    priced.edit(Edit("merge", "class 1", "class 2"))
    priced.edit(Edit("leave_out", paths=("2.jpg",)))
    assert found(priced, "class = 'class 2' and price < 7") == ["1.jpg", "5.jpg", "6.jpg"]
    assert found(priced, "class = 'class 1'") == []
    priced.undo()
    assert "2.jpg" in found(priced, "price < 3")


def test_columns_have_one_type_until_no_value_is_left(priced):
    with pytest.raises(ValueError, match=r"the column price .* is a number, got a text: .*--columns price:number"):
        priced.set_metadata(["12.jpg"], [{"price": "high"}])
    assert priced.columns["price"] == "number", "nothing was changed"
    priced.set_metadata([f"{k}.jpg" for k in range(10)], [{"price": f"{k} EUR"} for k in range(10)])
    assert priced.columns == {"class": "text", "path": "text", "price": "text"}
    assert found(priced, "price contains '3 E'") == ["3.jpg"]
    with pytest.raises(ValueError, match="must not be called 'class'"):
        priced.set_metadata(["1.jpg"], [{"class": "x"}])
    with pytest.raises(ValueError, match="metadata must be 1, a row for each path, got 2"):
        priced.set_metadata(["1.jpg"], [{}, {}])


def test_a_filter_that_names_no_column_is_an_error_even_if_nothing_is_found(priced):
    with pytest.raises(WhereError, match=r"price \(number\), tags \(list\), got 'prices'; did you mean 'price'"):
        priced.search(unit_vectors(1), model=MODEL, where="price < 0 and prices < 3")


def test_points_carry_metadata_as_json_has_them(priced):
    priced.set_metadata(["11.jpg"], [{"taken": datetime(2024, 5, 1), "tags": ["a"]}])
    payloads = [payload for points in priced.points(7) for payload in points.payloads]
    assert payloads[3]["metadata"] == {"price": 3.0, "tags": ["odd", "rare"]}
    assert payloads[11]["metadata"] == {"taken": "2024-05-01", "tags": ["a"]}
    assert payloads[15]["metadata"] == {}


def test_a_damaged_metadata_file_is_named_while_the_index_is_open(priced, tmp_path):
    [path] = (tmp_path / "index").glob("metadata-*")
    assert priced.damaged_files() == []
    path.write_bytes(path.read_bytes()[:-1])
    assert priced.damaged_files() == [path.name]
    assert found(priced, "price < 1") == ["0.jpg"], "what was read stays right"


def test_an_interrupted_change_leaves_the_state_before(priced, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pfml.search.index_folder.write_sealed_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            priced.set_metadata(["1.jpg"], [{"price": 99}])
    index = ImageIndex.open(tmp_path / "index")
    assert index.entry(1).metadata["price"] == 1
    assert len(list((tmp_path / "index").glob("metadata-*"))) == 2
    index.set_metadata(["1.jpg"], [{"price": 98}])
    assert len(list((tmp_path / "index").glob("metadata-*"))) == 2, "what was left over is gone"


def test_metadata_of_many_entries_take_few_bytes(tmp_path):
    index = ImageIndex.create(tmp_path / "index", MODEL, 8)
    rows = [{"price": k / 7, "brand": f"brand {k % 50}", "tags": ["red", "blue"]} for k in range(5000)]
    index.add(unit_vectors(5000), [f"{k}" for k in range(5000)], model=MODEL, metadata=rows)
    [path] = (tmp_path / "index").glob("metadata-*")
    assert path.stat().st_size < 5000 * 45, "ids, numbers, codes, offsets"


# tables


def test_types_are_inferred_and_overridden(tmp_path):
    table = write_table(
        tmp_path / "t.csv",
        ("path", "label", "price", "taken", "tags", "json", "code", "prose", "nothing", ""),
        ("a.png", "x", "3.5", "2024-05-01", "red|blue", '["a", "b"]', "007", "one; two", "", "9"),
        ("b.png", "y", "", "2024-05-01 12:30", "red", "", "12", "a, b", "", "9"),
    )
    read = read_metadata(table)
    kinds = {"price": "number", "taken": "date", "tags": "list", "json": "list", "code": "text", "prose": "text"}
    assert read.table.kinds == kinds
    assert read.table.row(0)["tags"] == ("red", "blue")
    assert read.table.row(1)["taken"] == datetime(2024, 5, 1, 12, 30)
    assert "price" not in read.table.row(1)
    given = read_metadata(table, kinds=parse_columns("code:number,prose:list,price:text,json:ignore"))
    assert "json" not in given.table.kinds
    assert (given.table.row(0)["code"], given.table.row(0)["prose"]) == (7.0, ("one", "two"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kinds": {"size": "number"}},
            r"t.csv, line 3, column size must be a number, got 'big': .*--columns size:text",
        ),
        ({"known": {"size": "number"}}, "line 3, column size must be a number as in the index, got 'big'"),
        ({"kinds": {"sise": "number"}}, "got sise, and .*t.csv has size; did you mean 'size'"),
    ],
)
def test_errors_of_a_table_name_file_line_and_column(tmp_path, options, message):
    table = write_table(tmp_path / "t.csv", ("path", "size"), ("a", "3"), ("b", "big"))
    with pytest.raises(ValueError, match=message):
        read_metadata(table, **options)


@pytest.mark.parametrize("text", ["price", "price:", ":number", "price:numbr"])
def test_columns_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match="NAME:TYPE, TYPE one of text, number, date, list, ignore"):
        parse_columns(text)


def test_a_table_is_indexed_with_its_columns_and_follows_changes_without_embedding(tmp_path, embedded):
    images = write_images(tmp_path / "images")
    files = sorted(str(path.relative_to(images)) for path in images.rglob("*.png"))
    header = ("path", "label", "price", "split")
    rows = [(name, name[0], str(k), "train") for k, name in enumerate(files)]
    table = write_table(images / "t.csv", header, *rows)
    embedder = create_embedder("convnet", embedding_dim=8)
    model = ModelIdentity.of(embedder)
    index = ImageIndex.create(tmp_path / "index", model, 8)
    update_index(index, embedder, list_images(table), shard_images=2)
    assert embedded == [2, 2, 1]
    assert index.columns == {"class": "text", "path": "text", "price": "number", "split": "text"}
    assert [entry.metadata["price"] for entry in index.entries()] == [0, 1, 2, 3, 4]
    ids = [entry.id for entry in index.entries()]
    embedded.clear()
    changed = [(name, label, "" if name == files[1] else "7", "test") for name, label, *_ in rows]
    changed[0] = (files[0], "other", "5", "test")
    update = update_index(index, embedder, list_images(write_table(table, header, *changed)))
    assert (update.with_new_metadata, update.relabeled, sum(embedded)) == (5, 1, 0)
    assert "5 with new metadata" in str(update)
    assert [entry.id for entry in index.entries()][:4] == ids[1:], "only a new class makes a new entry"
    by_path = {short_path(entry.path, entry.source): entry for entry in index.entries()}
    assert by_path[files[0]].metadata == {"price": 5.0, "split": "test"}
    assert by_path[files[1]].metadata == {"split": "test"}
    assert update_index(index, embedder, list_images(table)).with_new_metadata == 0
    plain = [(name, label) for name, label, *_ in changed]
    update_index(index, embedder, list_images(write_table(table, ("path", "label"), *plain)))
    assert index.columns == {"class": "text", "path": "text"}


def test_a_folder_takes_metadata_of_a_table_and_keeps_them(tmp_path, embedded):
    images = write_images(tmp_path / "images")
    rows = [("a/1.png", "Acme"), ("images/b/3.png", "Bolt"), ("gone.png", "x"), (str(images / "a" / "2.png"), "Cork")]
    table = write_table(tmp_path / "meta.csv", ("path", "brand"), *rows)
    listing = list_images(images, metadata=table)
    assert any("1 rows of" in remark and "gone.png" in remark for remark in listing.remarks)
    assert any("2 of 5 images in" in remark for remark in listing.remarks)
    embedder = create_embedder("convnet", embedding_dim=8)
    index = ImageIndex.create(tmp_path / "index", ModelIdentity.of(embedder), 8)
    update_index(index, embedder, listing)
    brands = {"a/1.png": "Acme", "a/2.png": "Cork", "b/3.png": "Bolt"}

    def stored():
        entries = ((short_path(entry.path, entry.source), entry.metadata.get("brand")) for entry in index.entries())
        return {path: brand for path, brand in entries if brand}

    assert stored() == brands
    write_images(images, ["a/1.png"], size=40)
    assert update_index(index, embedder, list_images(images)).replaced == 1
    assert stored() == brands, "a file that changed keeps what is known of it"
    with pytest.raises(ValueError, match="must be relative to .* got nowhere.png"):
        list_images(images, metadata=write_table(table, ("path", "brand"), ("nowhere.png", "x")))
    with pytest.raises(ValueError, match="put the columns into"):
        list_images(write_table(tmp_path / "l.csv", ("path", "label"), ("images/a/1.png", "a")), metadata=table)


def test_a_million_rows_are_filtered_in_columns():
    from pfml.search.metadata import EntryMetadata
    from pfml.search.where import parse_where
    from pfml.storage.columns import NumberColumn, Table, TextColumn
    from pfml.storage.metadata_shard import MetadataShard

    rows = 1_000_000
    codes = torch.arange(rows, dtype=torch.int32) % 10
    columns = {
        "price": NumberColumn(torch.arange(rows, dtype=torch.float64) % 100),
        "brand": TextColumn(codes, tuple(f"brand {k}" for k in range(10))),
    }
    metadata = EntryMetadata(torch.arange(rows), [MetadataShard(torch.arange(rows), Table(rows, columns))])

    class Columns:
        def __init__(self, kinds):
            self.kinds = kinds

        def matching(self, name, test):
            return metadata.matching(name, self.kinds[name], test)

    known = Columns({"price": "number", "brand": "text"})
    mask = parse_where("price < 50 and brand in ('brand 3', 'brand 4')", known.kinds).mask(known)
    assert int(mask.sum()) == rows // 10


def test_a_short_path_names_no_folder_above_the_source():
    assert short_path("/home/me/photos/a/b.jpg", "/home/me/photos") == "a/b.jpg"
    assert short_path("/home/me/photos/a/b.jpg", "") == "a/b.jpg"
    assert short_path("/home/me/photos2/b.jpg", "/home/me/photos") == "photos2/b.jpg"
    assert short_path("0.jpg", "") == "0.jpg"
