import re
from io import BytesIO

import pytest
from jinja2 import UndefinedError
from PIL import Image

from pfml.pages import page as page_module
from pfml.pages.page import Plot, Table, in_themes, render, short, write_page
from pfml.plots.theme import new_figure

NASTY = "<script>alert(\"x\")</script> & 'quotes'"


def png(width=40, height=20, color=(255, 0, 0)):
    buffer = BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, format="PNG")
    return buffer.getvalue()


def page_of(sections, **values):
    """A page with these blocks in it."""
    names = "caption, figure, gallery, listing, section, table, text"
    source = (
        f'{{% extends "base.html" %}}{{% from "blocks.html" import {names} %}}'
        f"{{% block sections %}}{sections}{{% endblock %}}"
    )
    return page_module._environment().from_string(source).render(title="Title", **values)


def test_every_text_is_escaped():
    blocks = """
    {% call section(nasty) %}
    {% call text() %}{{ nasty }}{% endcall %}
    {% call gallery() %}{% call figure(plot, nasty) %}{{ nasty }}{% endcall %}{% endcall %}
    {% call caption() %}{{ nasty }}{% endcall %}
    {% call table(table_) %}{{ nasty }}{% endcall %}
    {{ listing(nasty) }}{{ listing(nasty, nasty) }}
    {% endcall %}
    """
    table = Table((NASTY, NASTY), ((NASTY, NASTY),), strong=frozenset({(0, 1)}))
    html = page_of(blocks, nasty=NASTY, plot=Plot(png(), NASTY), table_=table)
    assert "<script" not in html
    assert 'alert("' not in html
    assert html.count("&lt;script&gt;") == 1 + 1 + 3 + 1 + 5 + 3
    html = render("paper.html", title=NASTY, lead=NASTY, tables=[], figures=[])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 3


def test_a_page_refers_to_nothing_outside_of_itself():
    html = page_of("{{ figure(plot) }}", plot=Plot(png(), "alt", png(color=(0, 0, 0))))
    assert not re.search(r"https?://|@import|<link|<script|url\(", html)
    addresses = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    assert len(addresses) == 2
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert "default-src 'none'" in html  # a browser would refuse to load anything else


def test_a_dark_plot_is_for_readers_who_prefer_dark_pages():
    assert "prefers-color-scheme: dark" in page_of("text")
    with_dark = page_of("{{ figure(plot) }}", plot=in_themes(lambda theme: new_figure(theme, width=9, height=9), "a"))
    assert re.search(r'<picture><source srcset="data:[^"]*" media="\(prefers-color-scheme: dark\)">', with_dark)
    assert "<source" not in page_of("{{ figure(plot) }}", plot=Plot(png(), "a"))


def test_a_plot_takes_half_of_its_pixels_on_the_page():
    assert 'width="20" height="10"' in page_of("{{ figure(plot) }}", plot=Plot(png(40, 20), "a"))


def test_a_table_has_headings_for_columns_and_rows_and_emphasized_cells():
    table = Table(("method", "R@1"), (("one", "12.3"), ("two", "45.6")), strong=frozenset({(1, 1)}))
    html = page_of("{% call table(table_) %}numbers\nand more{% endcall %}", table_=table)
    assert '<th scope="col">R@1</th>' in html
    assert '<th scope="row">one</th><td>12.3</td>' in html
    assert '<th scope="row">two</th><td><strong>45.6</strong></td>' in html
    assert '</table></div><p class="caption">numbers and more</p>' in html  # it does not scroll with the table
    assert 'class="caption"' not in page_of("{{ table(table_) }}", table_=table)


def test_columns_of_words_start_at_the_left_and_break():
    table = Table(("rung", "candidate", "R@1"), (("one", "some words", "12.3"),), prose=frozenset({1}))
    html = page_of("{{ table(table_) }}", table_=table)
    assert '<th scope="col" class="prose">candidate</th><th scope="col">R@1</th>' in html
    assert '<td class="prose">some words</td><td>12.3</td>' in html
    assert re.search(r"td\.prose { white-space: normal", html)


def test_a_gallery_says_how_narrow_its_figures_may_be():
    assert "--narrowest: 123px" in page_of("{% call gallery(123) %}{% endcall %}")


def test_a_listing_with_a_summary_is_folded_and_keeps_its_lines():
    assert "<details><summary>more</summary><pre" in page_of("{{ listing('text', 'more') }}")
    assert "<details" not in page_of("{{ listing('text') }}")
    assert ">a: 1\n  b: 2\n</pre>" in page_of("{{ listing(yaml) }}", yaml="a: 1\n  b: 2\n")


def test_a_value_that_is_missing_is_an_error():
    with pytest.raises(UndefinedError, match="'lead' is undefined"):
        render("paper.html", title="", tables=[], figures=[])


def test_writing_replaces_a_page_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "folder" / "page.html"
    write_page(path, "old")
    html = render("paper.html", title="Überschrift Ж", lead="lead", tables=[], figures=[])
    write_page(path, html)
    assert path.read_text(encoding="utf-8") == html
    assert [one.name for one in path.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plot(b"<svg>", "a"), "light must be a PNG file, got bytes that begin with b'<svg>'"),
        (lambda: Plot(png(), "a", b"no"), "dark must be a PNG file"),
        (lambda: Plot(png(), ""), "alt must describe the plot"),
        (lambda: Table(("a", "b"), (("1", "2"), ("3",))), "a row must have 2 cells, got 1 in row 1"),
    ],
)
def test_what_cannot_be_shown_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_long_class_names_are_cut():
    assert short("a" * 40) == "a" * 29 + "..."
    assert short("a" * 40, 50) == "a" * 40
