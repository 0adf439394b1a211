"""Classes on the page: rename, merge, delete and undo, by mouse and by keyboard alone, shown at once in every view."""

import csv
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")
pytest.importorskip("playwright.sync_api", reason="the page is tested through the package playwright")
pytest.importorskip("axe_playwright_python", reason="accessibility is checked by axe-playwright-python")

from browser_page import CHROMIUM, LOOKS, WIDE, assert_accessible, load, shot
from playwright.sync_api import expect

from pfml.search import Edit, ImageIndex

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
BOLD = "red & <b>bold</b>"


@pytest.fixture(autouse=True)
def undone(served_run, service):
    """Every test begins with the index as it was made."""
    yield
    index = ImageIndex.open(served_run / "index")
    while len(index.edits):
        index.undo()
    service.gallery._refreshed_at = 0.0
    for name in ("classes.csv", "decisions.csv"):
        (served_run / "audit" / name).unlink(missing_ok=True)


@pytest.fixture
def page(unloaded, address):
    """The classes."""
    load(unloaded, address, "classes")
    unloaded.wait_for_selector("#class-images .card img")
    return unloaded


def counts(run):
    return ImageIndex.open(run / "index").class_counts()


def write_similar(run, *pairs):
    example = {entry.class_name: entry.path for entry in ImageIndex.open(run / "index").entries()}
    rows = [("merge", f"{a}; {b}", "12; 12", "0.912", f"{example[a]}; {example[b]}") for a, b in pairs]
    with open(run / "audit" / "classes.csv", "w", newline="") as file:
        csv.writer(file).writerows([("advice", "classes", "images", "share", "examples"), *rows])


def expect_names(page, *names):
    expect(page.locator("#classes-list .queued-text > span:first-child")).to_have_text(list(names))


def choose(page, name):
    page.locator("#classes-list .queued", has_text=name).click()
    expect(page.locator("#class-title")).to_have_text(name)


def focused(page):
    return page.evaluate("document.activeElement.id")


def test_a_class_is_renamed_and_every_view_says_so_at_once(page, served_run):
    for view, ready in (("map", "#map-canvas[data-drawn='48']"), ("audit", "#suspect-neighbors .card img")):
        page.click(f"#tab-{view}")
        page.wait_for_selector(ready)
    page.click("#tab-search")
    page.locator("#class-filter").fill("blue")
    expect(page.locator("#grid .card")).to_have_count(10)
    page.locator("#grid .card-main").first.click()
    page.wait_for_selector("#grid .distance")
    page.locator("#query-verdict .name").click()
    expect(page.locator("#class-title")).to_have_text("blue")
    expect(page.locator("#class-facts")).to_have_text("10 images · trained on")
    page.click("#class-rename")
    expect(page.locator("#ask-title")).to_have_text("Rename blue")
    expect(page.locator("#ask-note")).to_contain_text("none is moved or deleted")
    expect(page.locator("#ask-do")).to_be_disabled()
    page.fill("#ask-input", "navy <i>x</i>")
    page.click("#ask-do")
    expect(page.locator(".toast")).to_contain_text("Renamed blue to navy <i>x</i>.")
    expect(page.locator("#class-title")).to_have_text("navy <i>x</i>")
    expect(page.locator("#class-facts")).to_have_text("10 images · trained on · formerly blue")
    assert page.locator("i", has_text="x").count() == 0, "a name stays text"
    assert focused(page) == "class-rename", "the focus returns"
    assert counts(served_run) == {"navy <i>x</i>": 10, "green": 14, BOLD: 12, "gray": 12}
    shot(page, "classes-renamed")
    page.click("#tab-search")
    expect(page.locator("#query-verdict .name")).to_have_text("navy <i>x</i>")
    expect(page.locator("#query-name")).to_contain_text("navy <i>x</i> · ")
    expect(page.locator("#chips")).to_contain_text("navy <i>x</i>")
    assert set(page.locator("#grid .card-class").all_inner_texts()) == {"navy <i>x</i>"}
    page.click("#tab-map")
    expect(page.locator("#map-classes")).to_contain_text("navy <i>x</i>")
    assert "blue" not in page.locator("#map-class option").all_inner_texts()
    page.click("#tab-audit")
    expect(page.locator("#suspect-title")).to_have_text("Is this green, or navy <i>x</i>?")


def test_undo_in_the_toast_takes_back_what_was_done(page, served_run):
    choose(page, "gray")
    page.click("#class-delete")
    expect(page.locator("#ask-title")).to_have_text("Delete gray?")
    expect(page.locator("#ask-text")).to_contain_text("12 images leave the index")
    expect(page.locator("#ask-note")).to_contain_text("Your image files stay where they are")
    assert focused(page) == "ask-cancel", "Enter alone deletes nothing"
    shot(page, "classes-delete")
    page.click("#ask-do")
    expect(page.locator(".toast")).to_contain_text("Deleted gray (12 images).")
    expect(page.locator("#run-facts")).to_contain_text("36 images · 3 classes")
    expect_names(page, "blue", "green", BOLD)
    expect(page.locator("#class-title")).to_have_text("green", timeout=5000)
    page.locator(".toast-action").click()
    expect(page.locator(".toast")).to_contain_text("Undone: deleted gray (12 images).")
    expect(page.locator("#run-facts")).to_contain_text("48 images · 4 classes")
    expect_names(page, "blue", "gray", "green", BOLD)
    assert counts(served_run)["gray"] == 12
    expect(page.locator("#changes")).to_be_hidden()


def test_a_name_that_is_taken_becomes_a_merge(page, served_run):
    choose(page, "blue")
    page.click("#class-rename")
    page.fill("#ask-input", "gray")
    expect(page.locator("#ask-hint")).to_have_text("gray is a class already, with 12 images: blue becomes part of it.")
    expect(page.locator("#ask-do")).to_have_text("Merge")
    page.keyboard.press("Escape")
    expect(page.locator("#ask")).to_be_hidden()
    assert counts(served_run)["blue"] == 10
    page.click("#class-rename")
    page.fill("#ask-input", "  gray ")
    page.keyboard.press("Enter")
    expect(page.locator("#class-title")).to_have_text("gray")
    expect(page.locator("#class-facts")).to_have_text("22 images · trained on · with blue")
    assert counts(served_run) == {"green": 14, BOLD: 12, "gray": 22}


def test_all_is_done_by_keyboard_alone(page, served_run):
    page.focus("#tab-classes")
    page.keyboard.press("j")
    expect(page.locator("#class-title")).to_have_text("gray")
    page.keyboard.press("r")
    page.keyboard.type("silver")  # the name before it is selected
    page.keyboard.press("Enter")
    expect(page.locator("#class-title")).to_have_text("silver")
    assert focused(page) == "tab-classes"
    page.keyboard.press("i")
    page.keyboard.type("violet")
    expect(page.locator("#ask-hint")).to_have_text("No class of the index has this name.")
    page.keyboard.press("Enter")
    expect(page.locator("#ask")).to_be_visible()
    page.locator("#ask-input").fill("green")
    expect(page.locator("#ask-hint")).to_have_text("12 images of silver join 14 images of green.")
    page.keyboard.press("Enter")
    expect(page.locator("#class-title")).to_have_text("green")
    assert counts(served_run) == {"blue": 10, "green": 26, BOLD: 12}
    page.keyboard.press("d")
    expect(page.locator("#ask-title")).to_have_text("Delete green?")
    page.keyboard.press("Enter")  # on Cancel
    expect(page.locator("#ask")).to_be_hidden()
    page.keyboard.press("d")
    expect(page.locator("#ask")).to_be_visible()  # a dialog says a moment later that it was closed
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#class-title")).to_have_text(BOLD)
    assert counts(served_run) == {"blue": 10, BOLD: 12}
    for left in (2, 1, 0):
        page.keyboard.press("u")
        expect(page.locator("#changes-list li")).to_have_count(left)
    expect_names(page, "blue", "gray", "green", BOLD)
    assert counts(served_run) == {"blue": 10, "green": 14, BOLD: 12, "gray": 12}
    page.focus("#class-merge")
    page.keyboard.press("Space")
    expect(page.locator("#ask")).to_be_visible()
    page.keyboard.press("Escape")
    assert focused(page) == "class-merge"


def test_selected_images_are_deleted_and_their_files_stay(page, served_run):
    choose(page, BOLD)
    boxes = page.locator("#class-images .pick input")
    expect(boxes).to_have_count(12)
    for k in (0, 3):
        boxes.nth(k).check()
    expect(page.locator("#class-chosen")).to_have_text("2 images selected")
    shot(page, "classes-selected")
    page.click("#class-unselect")
    expect(page.locator("#class-selection")).to_be_hidden()
    for k in (1, 2, 5):
        boxes.nth(k).focus()
        page.keyboard.press("Space")
    page.keyboard.press("d")
    expect(page.locator("#ask-title")).to_have_text("Delete 3 images?")
    page.keyboard.press("Escape")
    page.click("#class-delete-chosen")
    page.click("#ask-do")
    expect(page.locator("#class-images .card")).to_have_count(9)
    expect(page.locator("#class-selection")).to_be_hidden()
    expect(page.locator("#tab-classes")).to_be_focused()  # the button is gone
    index = ImageIndex.open(served_run / "index")
    assert (index.class_counts()[BOLD], len(index.edits.left_out)) == (9, 3)
    assert all(Path(path).is_file() for path in index.edits.left_out)
    page.locator(".toast-action").click()
    expect(page.locator("#class-images .card")).to_have_count(12)


def test_the_query_image_can_be_deleted(page):
    page.click("#tab-search")
    page.locator("#grid .card-main").first.click()
    page.wait_for_selector("#grid .distance")
    page.click("#query-delete")
    page.click("#ask-do")
    expect(page.locator("#query-facts")).to_be_hidden()
    expect(page.locator("#run-facts")).to_contain_text("47 images")
    expect(page.locator("#grid .card")).to_have_count(47)
    page.wrong.clear()  # the browser reports that the deleted image is not there


def test_pairs_that_may_be_one_class_are_merged_by_one_key(unloaded, address, served_run):
    page = unloaded
    write_similar(served_run, ("blue", "green"), (BOLD, "gray"))
    load(page, address, "classes")
    expect(page.locator("#similar-note")).to_contain_text("1 of 2 · their images are mixed 91 %")
    expect(page.locator("#classes-count")).to_have_text("2")
    expect(page.locator("#similar-merge")).to_contain_text("Merge blue into green")
    expect(page.locator("#similar-pair img")).to_have_count(10)
    shot(page, "classes-similar")
    assert_accessible(page)
    page.keyboard.press("s")
    expect(page.locator("#similar-merge")).to_contain_text("Merge green into blue")
    page.keyboard.press("n")
    expect(page.locator("#similar-note")).to_contain_text("2 of 2")
    held = []  # images of blue that are asked for before the merge, and would be refused after it
    page.route(lambda url: "class_name=blue&limit" in url, lambda route: held.append(route))
    page.keyboard.press("n")
    page.keyboard.press("m")
    page.keyboard.press("m")  # before the answer: it merges nothing twice
    expect(page.locator("#class-title")).to_have_text("green")
    assert held
    for route in held:
        route.continue_()
    page.unroute_all()
    expect(page.locator("#classes-count")).to_have_text("1")
    expect(page.locator("#similar-note")).to_contain_text("1 of 1")
    assert counts(served_run) == {"green": 24, BOLD: 12, "gray": 12}
    page.keyboard.press("u")
    expect(page.locator("#classes-count")).to_have_text("2")
    assert counts(served_run)["blue"] == 10


def test_changes_are_listed_and_undone_in_an_order_that_is_possible(page, served_run):
    choose(page, "blue")
    for name in ("navy", "indigo"):
        page.keyboard.press("r")
        page.keyboard.type(name)
        page.keyboard.press("Enter")
        expect(page.locator("#class-title")).to_have_text(name)
    page.click("#changes summary")
    rows = page.locator("#changes-list li")
    expect(rows).to_have_count(2)
    assert rows.locator("span").all_inner_texts() == ["Renamed navy to indigo.", "Renamed blue to navy."]
    expect(rows.nth(1).locator("button")).to_be_disabled()
    assert rows.nth(1).locator("button").get_attribute("title") == "Undo first: renamed navy to indigo"
    shot(page, "classes-changes")
    assert_accessible(page)
    rows.nth(0).locator("button").click()
    expect(rows).to_have_count(1)
    expect(page.locator(".toast-action")).to_have_count(1)  # that of the first change, which can still be undone
    rows.nth(0).locator("button").click()
    expect(page.locator("#class-title")).to_have_text("blue")
    expect(page.locator("#tab-classes")).to_be_focused()
    assert counts(served_run)["blue"] == 10


def test_an_edit_that_cannot_be_saved_is_a_toast_and_nothing_changes(page, served_run):
    lock = served_run / "index" / "lock"
    lock.unlink()
    lock.mkdir()  # a folder in its place: no user may write it, not even root
    try:
        choose(page, "gray")
        page.keyboard.press("r")
        page.keyboard.type("silver")
        page.keyboard.press("Enter")
        expect(page.locator(".toast")).to_contain_text("nothing was saved: pfml serve cannot write index/index.json")
        expect(page.locator("#class-title")).to_have_text("gray")
    finally:
        lock.rmdir()
    page.wrong.clear()  # the browser reports the status 503


def test_the_page_takes_up_what_another_process_does(page, served_run, service):
    ImageIndex.open(served_run / "index").edit(Edit("rename", "gray", "silver"))
    service.gallery._refreshed_at = 0.0
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # it looks then, and every ten seconds
    expect(page.locator("#classes-list")).to_contain_text("silver")
    expect(page.locator("#changes-count")).to_have_text("1")


def test_a_class_is_found_by_a_part_of_its_name(page):
    page.fill("#classes-find", "RE")
    expect_names(page, "green", BOLD)
    page.keyboard.press("Enter")
    expect(page.locator("#class-title")).to_have_text("green")
    page.fill("#classes-find", "")
    page.click("#tab-search")
    page.locator("#class-filter").fill("blue")
    page.click("#edit-class")
    expect(page.locator("#class-title")).to_have_text("blue")


def test_rates_that_were_measured_before_a_merge_are_called_so(page):
    choose(page, "blue")
    page.keyboard.press("i")
    page.keyboard.type("green")
    page.keyboard.press("Enter")
    expect(page.locator("#run-facts")).to_contain_text("measured before a merge: run pfml calibrate")


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_classes_are_accessible_and_do_not_scroll_sideways(unloaded, address, served_run, width, scheme):
    page = unloaded
    write_similar(served_run, ("blue", "green"))
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    try:
        load(page, address, "classes")
        page.wait_for_selector("#class-images .card img")
        page.locator("#class-images .pick input").first.check()
        for name, key in (("list", None), ("rename", "r"), ("merge", "i"), ("delete", "d")):
            if key:
                page.focus("#tab-classes")
                page.keyboard.press(key)
                expect(page.locator("#ask")).to_be_visible()
            shot(page, f"classes-{name}-{width}-{scheme}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert_accessible(page)
            page.keyboard.press("Escape")
        tabs = page.locator(".tabs button")
        heights = tabs.evaluate_all("found => found.map(one => Math.round(one.getBoundingClientRect().height))")
        assert len(set(heights)) == 1, "no tab takes two lines"
        page.focus("#tab-classes")
        page.keyboard.press("m")
        page.wait_for_selector(".toast-action")
        assert_accessible(page)
        shot(page, f"classes-merged-{width}-{scheme}")
    finally:
        page.set_viewport_size(WIDE)
        page.emulate_media(color_scheme="null")
