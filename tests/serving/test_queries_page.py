"""Filters, metadata, several images, negatives and crops on the page in a browser."""

import re
import shutil

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")
pytest.importorskip("playwright.sync_api", reason="the page is tested through the package playwright")
pytest.importorskip("axe_playwright_python", reason="accessibility is checked by axe-playwright-python")

from browser_page import CHROMIUM, WIDE, assert_accessible, shot
from playwright.sync_api import expect

from pfml.search import ImageIndex

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
SIZES = {"narrow": {"width": 400, "height": 860}, "wide": WIDE}


@pytest.fixture(scope="module")
def served_run(made_run, tmp_path_factory):
    run = shutil.copytree(made_run, tmp_path_factory.mktemp("queries") / "run")
    index = ImageIndex.open(run / "index")
    entries = list(index.entries())
    rows = [{"price": float(entry.id), "tags": ["<b>odd</b>"] if entry.id % 2 else ["even"]} for entry in entries]
    index.set_metadata([entry.path for entry in entries], rows)
    return run


def settle(page):
    expect(page.locator("#grid[aria-busy]")).to_have_count(0)


def filter_by(page, text):
    page.fill("#where", text)
    page.press("#where", "Enter")


def test_a_filter_narrows_the_list_and_the_hits_and_its_errors_stand_below_it(page):
    expect(page.locator("#where-columns dt")).to_have_text(["class", "path", "price", "tags"])
    filter_by(page, "price < 6 and tags contains even")
    expect(page.locator("#grid .card")).to_have_count(3)
    expect(page.locator("#grid .card-meta").first).to_have_text(re.compile(r"price \d · tags even"))
    page.locator("#grid .card-main").first.click()
    page.wait_for_selector("#grid .distance")
    expect(page.locator("#grid .card")).to_have_count(2)
    expect(page.locator("#query-metadata")).to_contain_text("even")
    filter_by(page, "prise < 6")
    expect(page.locator("#where-error")).to_contain_text("got 'prise'; did you mean 'price'")
    expect(page.locator("#where")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".toast")).to_have_count(0)
    expect(page.locator("#grid .card")).to_have_count(2)
    page.wrong.clear()  # the browser reports the status 422
    filter_by(page, "price = -1")
    expect(page.locator("#grid-empty")).to_have_text("No image passes the filter.")
    filter_by(page, "")
    expect(page.locator("#where-error")).to_have_text("")
    expect(page.locator("#grid .card")).to_have_count(24)


def test_hits_are_added_to_a_query_and_marked_as_unlike_it(page, tmp_path):
    page.locator("#grid .vote").first.click()
    page.wait_for_selector("#grid .distance")
    first = page.locator("#grid .card").first.get_attribute("data-id")
    page.locator("#grid .card").first.get_by_label("More like this").click()
    expect(page.locator("#like li")).to_have_count(2)
    expect(page.locator(f"#grid .card[data-id='{first}']")).to_have_count(0)
    settle(page)
    mean = page.locator("#grid .distance").all_inner_texts()
    page.select_option("#combine", "any")
    expect(page.locator("#grid .distance").first).not_to_have_text(mean[0])
    settle(page)
    last = page.locator("#grid .card").last.get_attribute("data-id")
    page.locator("#grid .card").last.get_by_label("Not like this").click()
    expect(page.locator("#unlike li")).to_have_count(1)
    expect(page.locator(f"#grid .card[data-id='{last}']")).to_have_count(0)
    settle(page)
    expect(page.locator("#query-verdict .badge")).to_have_count(0)
    shot(page, "several-images")
    Image.new("RGB", (40, 30), (20, 40, 220)).save(tmp_path / "blue.png")
    page.set_input_files("#add-file", tmp_path / "blue.png")
    expect(page.locator("#like li")).to_have_count(3)
    settle(page)
    assert_accessible(page)
    (tmp_path / "bad.png").write_text("no image")
    page.set_input_files("#add-file", tmp_path / "bad.png")
    expect(page.locator(".toast")).to_contain_text("another kind")
    expect(page.locator("#like li")).to_have_count(3)
    page.wrong.clear()  # the browser reports the status 415
    for _ in range(2):
        page.locator("#like button").first.click()
    expect(page.locator("#like li")).to_have_count(1)
    page.locator("#unlike button").click()
    expect(page.locator("#query-name")).to_have_text("blue.png")
    page.click("#query-clear")
    expect(page.locator("#query-set")).to_be_hidden()
    expect(page.locator("#grid .card")).to_have_count(48)


@pytest.mark.parametrize("size", SIZES)
def test_a_part_is_drawn_or_set_by_its_edges(page, tmp_path, size):
    page.set_viewport_size(SIZES[size])
    two = Image.new("RGB", (80, 40), (20, 40, 220))
    two.paste((220, 30, 30), (40, 0, 80, 40))
    two.save(tmp_path / "two.png")
    page.set_input_files("#file", tmp_path / "two.png")
    page.wait_for_selector("#grid .distance")
    settle(page)
    page.click("#query-crop")
    page.wait_for_selector("#crop[open]")
    assert_accessible(page)
    box = page.locator("#crop-image").bounding_box()
    page.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + 0.1 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 0.9 * box["height"], steps=3)
    page.mouse.up()
    edges = [page.input_value(f"#crop-{edge}") for edge in ("left", "top", "right", "bottom")]
    assert [int(edge) for edge in edges] == pytest.approx([55, 10, 95, 90], abs=1)
    shot(page, f"crop-{size}")
    page.click("#crop-do")
    expect(page.locator("#query-name")).to_have_text("A part of two.png")
    settle(page)
    drawn = page.locator("#query-verdict").inner_text()
    assert "red & <b>bold</b>" in drawn
    page.locator("#query-crop").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#crop[open]")
    for edge, value in {"left": "0", "top": "0", "right": "45", "bottom": "100"}.items():
        page.fill(f"#crop-{edge}", value)
        page.keyboard.press("Tab")
    page.locator("#crop-do").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#query-verdict")).to_contain_text("blue")
    page.click("#query-crop")
    page.keyboard.press("Escape")
    expect(page.locator("#query-name")).to_have_text("A part of two.png")
    page.click("#query-crop")
    page.click("#crop-whole")
    expect(page.locator("#query-name")).to_have_text("two.png")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size(WIDE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_indexed_image_is_cropped_in_both_color_schemes(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.locator("#grid .card-main").nth(2).click()
    page.wait_for_selector("#grid .distance")
    page.click("#query-crop")
    page.fill("#crop-right", "60")
    page.keyboard.press("Tab")
    page.click("#crop-do")
    expect(page.locator("#query-name")).to_contain_text("A part of ")
    settle(page)
    expect(page.locator("#query-why")).to_be_hidden()
    page.locator("details summary").first.click()
    assert_accessible(page)
    page.emulate_media(color_scheme="light")
