import re
import struct
from io import BytesIO

import pytest
from PIL import Image

from pfml.pages.page import Figure, Gallery, Listing, Page, Section, Table, render, write_page

NASTY = "<script>alert(\"x\")</script> & 'quotes'"


def png(width=40, height=20, color=(255, 0, 0)):
    buffer = BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, format="PNG")
    return buffer.getvalue()


def page_of(*blocks, **options):
    return render(Page("Title", "Lead", (Section("Heading", blocks),), **options))


def test_every_text_is_escaped():
    figure = Figure(png(), NASTY, alt=NASTY, title=NASTY)
    table = Table((NASTY, NASTY), ((NASTY, NASTY),), NASTY, strong=frozenset({(0, 1)}))
    blocks = (NASTY, figure, Gallery((figure,), NASTY), table, Listing(NASTY), Listing(NASTY, summary=NASTY))
    html = render(Page(NASTY, NASTY, (Section(NASTY, blocks),), footer=NASTY))
    assert "<script" not in html
    assert 'alert("' not in html
    assert html.count("&lt;script&gt;") == 21


def test_a_page_refers_to_nothing_outside_of_itself():
    html = page_of(Figure(png(), "caption", alt="alt", dark=png(color=(0, 0, 0))))
    assert not re.search(r"https?://|@import|<link|<script|url\(", html)
    addresses = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    assert len(addresses) == 2
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert "default-src 'none'" in html  # a browser would refuse to load anything else


def test_a_dark_picture_is_for_readers_who_prefer_dark_pages():
    assert "prefers-color-scheme: dark" in page_of("text")
    with_dark = page_of(Figure(png(), "", alt="a", dark=png(color=(0, 0, 0))))
    assert re.search(r'<source srcset="data:[^"]*" media="\(prefers-color-scheme: dark\)">', with_dark)
    assert "<source" not in page_of(Figure(png(), "", alt="a"))


def test_a_picture_takes_half_of_its_pixels_on_the_page():
    assert 'width="20" height="10"' in page_of(Figure(png(40, 20), "", alt="a"))


def test_a_table_has_headings_for_columns_and_rows_and_emphasized_cells():
    html = page_of(Table(("method", "R@1"), (("one", "12.3"), ("two", "45.6")), "numbers", strong=frozenset({(1, 1)})))
    assert '<th scope="col">R@1</th>' in html
    assert '<th scope="row">one</th><td>12.3</td>' in html
    assert '<th scope="row">two</th><td><strong>45.6</strong></td>' in html
    assert '</table></div><p class="caption">numbers</p>' in html  # it does not scroll with the table


def test_a_gallery_says_how_narrow_its_pictures_may_be():
    assert "--narrowest: 123px" in page_of(Gallery((Figure(png(), "", alt="a"),), narrowest=123))


def test_a_listing_with_a_summary_is_folded():
    assert "<details><summary>more</summary><pre" in page_of(Listing("text", summary="more"))
    assert "<details" not in page_of(Listing("text"))


def test_a_footer_is_optional():
    assert "<footer><p>small print</p></footer>" in page_of("text", footer="small print")
    assert "<footer>" not in page_of("text")


def test_writing_replaces_a_page_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old")
    page = Page("Überschrift Ж", "lead", ())
    write_page(path, page)
    assert path.read_text(encoding="utf-8") == render(page)
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Figure(b"<svg>", "", alt="a"), "light must be a PNG file, got bytes that begin with b'<svg>'"),
        (lambda: Figure(png(), "", alt="a", dark=b"no"), "dark must be a PNG file"),
        (lambda: Figure(png(), "", alt=""), "alt must describe the picture"),
        (lambda: Table(("a", "b"), (("1", "2"), ("3",))), "a row must have 2 cells, got 1 in row 1"),
    ],
)
def test_what_cannot_be_shown_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_block_of_another_type_is_refused():
    with pytest.raises(TypeError, match="got int"):
        page_of(3)


def test_the_size_of_a_picture_is_read_from_its_header():
    assert struct.unpack(">II", png(40, 20)[16:24]) == (40, 20)
