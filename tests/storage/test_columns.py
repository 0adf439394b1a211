"""Typed columns: what is put in comes out, by row, by selection, joined, and from a file's tensors."""

import copy
import pickle
from datetime import date, datetime

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfml.storage.columns import Table
from pfml.storage.files import DamagedFileError
from pfml.storage.metadata_shard import MetadataShard, read_metadata, write_metadata
from pfml.storage.values import json_value, parse_date, shown_value

TEXT = st.text(min_size=1, max_size=4)
ROWS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "number": st.floats(allow_nan=False, allow_infinity=False),
            "text": TEXT,
            "date": st.datetimes(min_value=datetime(1500, 1, 1)),
            "list": st.lists(TEXT, min_size=1, max_size=3).map(tuple),
        },
    ),
    max_size=6,
)


def as_dicts(table):
    return [dict(table.row(k)) for k in range(len(table))]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ROWS, ROWS, st.randoms(use_true_random=False))
def test_rows_come_back_selected_joined_and_stored(some, others, random):
    table = Table.of(some)
    assert as_dicts(table) == some
    chosen = [random.randrange(len(some)) for _ in range(4)] if some else []
    picked = table.rows(torch.tensor(chosen, dtype=torch.int64))
    assert as_dicts(picked) == [some[k] for k in chosen]
    joined = Table.joined([table, Table.of(others), picked])
    assert as_dicts(joined) == [*some, *others, *(some[k] for k in chosen)]
    assert as_dicts(Table.read(joined.tensors(), len(joined))) == as_dicts(joined)


def test_a_selection_keeps_only_the_texts_that_occur_in_it():
    table = Table.of([{"name": f"text {k}", "tags": [f"tag {k}"]} for k in range(100)])
    few = table.rows(torch.tensor([7, 3]))
    assert few.columns["name"].texts == ("text 3", "text 7")
    assert few.columns["tags"].texts == ("tag 3", "tag 7")


def test_a_row_is_a_view_whose_copies_are_of_the_row():
    row = Table.of([{"a": 1, "b": "x"}, {"a": 2}]).row(0)
    assert (len(row), row["b"], "c" in row) == (2, "x", False)
    assert copy.deepcopy(row) == pickle.loads(pickle.dumps(row)) == {"a": 1.0, "b": "x"}


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([{"a": 1}, {"a": "x"}], ValueError, "a must be of one type in all rows, got a number in row 0 and a text"),
        ([{"a": True}], TypeError, "a of row 0 must be a text, a number, a date or a list of texts, got True"),
        ([{"a": [1]}], TypeError, "a of row 0"),
        ([{"a": float("nan")}], ValueError, "a of row 0 must be finite"),
    ],
)
def test_values_of_no_type_are_refused_by_name(rows, error, message):
    with pytest.raises(error, match=message):
        Table.of(rows)


def test_dates_are_iso_texts_and_zones_become_utc():
    assert parse_date("2024-05-01") == datetime(2024, 5, 1)
    assert parse_date("2024-05-01T02:30+02:00") == datetime(2024, 5, 1, 0, 30)
    assert [parse_date(text) for text in ("2024", "20240501", "2024-02-30", "1.5.2024", "2024-05-01 25:00")] == [
        None
    ] * 5
    assert json_value(datetime(2024, 5, 1)) == "2024-05-01"
    assert json_value(datetime(2024, 5, 1, 12, 30)) == "2024-05-01T12:30:00"
    assert Table.of([{"d": date(2024, 5, 1)}]).row(0)["d"] == datetime(2024, 5, 1)
    assert [shown_value(one) for one in (3.0, 2.5, ("a", "b"))] == ["3", "2.5", "a, b"]


def test_a_metadata_shard_is_refused_after_any_change(tmp_path):
    path = tmp_path / "metadata-1.safetensors"
    shard = MetadataShard(torch.tensor([3, 9]), Table.of([{"a": "x"}, {"tags": ["p", "q"]}]))
    entry = write_metadata(path, shard)
    again = read_metadata(path, entry)
    assert (again.ids.tolist(), as_dicts(again.table)) == ([3, 9], as_dicts(shard.table))
    assert again.is_whole(path, entry)
    content = path.read_bytes()
    for changed in (content[:-1], content + b"x", content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(changed)
        assert not again.is_whole(path, entry)
        with pytest.raises(DamagedFileError, match="metadata-1.safetensors must have sha256"):
            read_metadata(path, entry)
    path.unlink()
    assert not again.is_whole(path, entry)
    with pytest.raises(ValueError, match="ascending"):
        MetadataShard(torch.tensor([9, 3]), shard.table)
