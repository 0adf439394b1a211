"""The filter language: random filters against Python's own evaluation, row by row; errors name place and column."""

from datetime import datetime, timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfml.search.where import DEEPEST, LONGEST, WhereError, parse_where
from pfml.storage.columns import Table

KINDS = {"price": "number", "brand": "text", "taken": "date", "tags": "list", "shelf life": "number"}
WORDS = ["a", "b", "Acme", "two words", "it's", 'a "quote"', "and", "2024-05-01", "é"]
DAY = datetime(2024, 5, 1)


class Rows:
    """The rows of a table as a filter sees them."""

    def __init__(self, rows):
        self.table, self.kinds = Table.of(rows), KINDS
        self.length = len(rows)

    def matching(self, name, test):
        column = self.table.columns.get(name)
        return torch.zeros(self.length, dtype=torch.bool) if column is None else test(column)


def quoted(text):
    return "'" + text.replace("'", "''") + "'"


def column_named(name):
    return name if name.isalpha() else quoted(name)


COMPARE = {
    "=": lambda a, b: a == b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def value_of(name):
    if KINDS[name] == "number":
        return st.integers(-3, 3).map(float)
    if KINDS[name] == "date":
        return st.integers(0, 5).map(lambda day: DAY + timedelta(days=day))
    return st.sampled_from(WORDS)


def written(name, value):
    if isinstance(value, datetime):
        return value.date().isoformat()
    return quoted(value) if isinstance(value, str) else f"{value:g}"


def compared(name, sign, value):
    """Python's evaluation of a comparison; a date of the filter is the whole day."""

    def holds(row):
        got = row.get(name)
        if got is None:
            return False
        if isinstance(got, datetime):
            got = datetime(got.year, got.month, got.day)
        return COMPARE[sign](got, value)

    return holds


@st.composite
def leaves(draw):
    name = draw(st.sampled_from(list(KINDS)))
    column, kind = column_named(name), KINDS[name]
    form = draw(st.sampled_from(["missing", "compare", "in", "contains"]))
    opposite = draw(st.booleans())
    if form == "missing":
        text = f"{column} is {'not ' if opposite else ''}missing"
        return text, lambda row: (row.get(name) is None) != opposite
    if kind == "list" or (form == "contains" and kind == "text"):
        value = draw(st.sampled_from(WORDS))
        text = f"{column} {'not ' if opposite else ''}CONTAINS {quoted(value)}"
        return text, lambda row: (row.get(name) is not None and value in row[name]) != opposite
    if form == "in":
        values = draw(st.lists(value_of(name), min_size=1, max_size=3))
        tests = [compared(name, "=", value) for value in values]
        text = f"{column} {'not ' if opposite else ''}in ({', '.join(written(name, one) for one in values)})"
        return text, lambda row: any(test(row) for test in tests) != opposite
    sign, value = draw(st.sampled_from(["!=", *COMPARE])), draw(value_of(name))
    test = compared(name, "=" if sign == "!=" else sign, value)
    return f"{column}{sign}{written(name, value)}", lambda row: test(row) != (sign == "!=")


def combined(inner):
    two = st.tuples(inner, inner)
    return st.one_of(
        inner.map(lambda one: (f"not ({one[0]})", lambda row: not one[1](row))),
        two.map(lambda both: (f"({both[0][0]}) and ({both[1][0]})", lambda row: both[0][1](row) and both[1][1](row))),
        two.map(lambda both: (f"({both[0][0]} OR {both[1][0]})", lambda row: both[0][1](row) or both[1][1](row))),
    )


ROW = st.fixed_dictionaries(
    {},
    optional={
        "price": st.integers(-3, 3).map(float),
        "shelf life": st.integers(-3, 3).map(float),
        "brand": st.sampled_from(WORDS),
        "taken": st.integers(0, 5 * 24).map(lambda hour: DAY + timedelta(hours=hour)),
        "tags": st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(tuple),
    },
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(ROW, min_size=1, max_size=8), st.recursive(leaves(), combined, max_leaves=6))
def test_a_filter_is_what_python_says_row_by_row(rows, filter_):
    text, expected = filter_
    found = parse_where(text, KINDS).mask(Rows(rows))
    assert found.tolist() == [expected(row) for row in rows], text


def test_and_binds_more_than_or_and_words_may_be_bare():
    rows = Rows([{"price": 1.0, "brand": "a"}, {"price": 5.0, "brand": "a"}, {"price": 5.0, "brand": "b"}])
    found = parse_where("brand = b or brand = a and price < 3", KINDS).mask(rows)
    assert found.tolist() == [True, False, True]
    assert parse_where("not brand = a and price == 5", KINDS).mask(rows).tolist() == [False, False, True]


def test_a_date_without_a_time_is_the_whole_day():
    rows = Rows([{"taken": DAY + timedelta(hours=hour)} for hour in (-1, 0, 23, 24)])
    expected = {
        "<": [True, False, False, False],
        "<=": [True, True, True, False],
        "=": [False, True, True, False],
        ">=": [False, True, True, True],
        ">": [False, False, False, True],
        "!=": [True, False, False, True],
    }
    for sign, answer in expected.items():
        assert parse_where(f"taken {sign} 2024-05-01", KINDS).mask(rows).tolist() == answer, sign
    assert parse_where("taken > '2024-05-01T22:00'", KINDS).mask(rows).tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("prise < 20", 0, r"columns of the index, price \(number\), .* got 'prise'; did you mean 'price'\?"),
        ("price < cheap", 8, "the column price is a number, such as 20 or 3.5, got 'cheap'"),
        ("taken > 2024", 8, "the column taken is a date, such as 2024-05-01, got '2024'"),
        ("taken > 2024-13-01", 8, "the column taken is a date"),
        ("tags = a", 5, "the column tags is a list, which can be compared by contains, is missing, got '='"),
        ("price contains 2", 6, "the column price is a number, which can be compared by"),
        ("brand ~ a", 6, "the column brand must be compared by one of =, !=, <"),
        ("brand = two words", 12, "followed by and, or, or the end, got 'words'; quote .*: 'two words'"),
        ("brand = and", 8, "the column brand must be compared with a value; quote the text 'and'"),
        ("brand in a", 9, "brand in must be followed by values in parentheses"),
        ("brand in (a b)", 12, "the values of brand must be divided by commas"),
        ("brand in ()", 10, "the column brand must be compared with a value"),
        ("brand is gone", 9, "brand is must be followed by missing"),
        ("brand not a", 10, "not must be followed by in or contains"),
        ("(price < 3", 10, "a parenthesis must be closed"),
        ("price < 3)", 9, "followed by and, or, or the end"),
        ("price <", 7, "the column price must be compared with a value, but the filter ends"),
        ("price", 5, "the column price must be compared, such as price < 20"),
        ("price < 3 and", 13, "a column must follow here"),
        ("= 3", 0, "must begin with a column"),
        ("brand = 'open", 8, "an open quote"),
        ("brand ! a", 6, "got '!'"),
        (" ", 0, "got nothing"),
        ("__import__('os').system('true')", 0, "columns of the index"),
    ],
)
def test_an_error_points_at_the_place_and_names_the_column(text, position, message):
    with pytest.raises(WhereError, match=message) as caught:
        parse_where(text, KINDS)
    assert caught.value.position == position
    assert ("the end" if position == len(text) else f"character {position + 1}") in str(caught.value)


def test_a_filter_is_bounded_in_length_and_depth():
    assert parse_where("not " * DEEPEST + "price < 3", KINDS)
    with pytest.raises(WhereError, match=f"at most {DEEPEST} terms within each other"):
        parse_where("(" * 5000 + "price < 3" + ")" * 4000, KINDS)
    long = " or ".join(["price<1"] * (LONGEST // 12))
    assert parse_where(long, KINDS).mask(Rows([{"price": 0.0}, {"price": 1.0}])).tolist() == [True, False]
    with pytest.raises(WhereError, match="at most 10,000 characters"):
        parse_where("x" * (LONGEST + 1), KINDS)
