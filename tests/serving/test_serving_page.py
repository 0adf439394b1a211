"""The page in a browser; `PFML_SCREENSHOTS=FOLDER pytest ...` leaves pictures of it for a person to look at.

One browser, one page and one server for all tests: a new page for each would take most of their time.
"""

import csv
import re

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")
pytest.importorskip("playwright.sync_api", reason="the page is tested through the package playwright")
pytest.importorskip("axe_playwright_python", reason="accessibility is checked by axe-playwright-python")

from browser_page import CHROMIUM, LOOKS, WIDE, assert_accessible, load, shot
from playwright.sync_api import expect
from running_server import running

from pfml.search import ImageIndex
from pfml.serving import Access, create_app

TOKEN = "a token for the page tests"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture
def blue(tmp_path):
    Image.new("RGB", (40, 30), (20, 40, 220)).save(tmp_path / "my blue.png")
    return tmp_path / "my blue.png"


def share_in(text):
    """The last percentage in a text of the page, which has true minus signs."""
    return float(re.findall(r"(-?[\d.]+) %", text.replace("\N{MINUS SIGN}", "-"))[-1])


def test_an_upload_becomes_a_grid(page, blue):
    expect(page.locator("#grid .card")).to_have_count(48)
    assert len(set(page.locator("#grid .card-class").all_inner_texts()[:4])) == 4, "one of each class in turn"
    page.set_input_files("#file", blue)
    page.wait_for_selector("#grid .distance")
    assert page.locator("#grid .card").count() == 24
    assert page.locator("#query-name").inner_text() == "my blue.png"
    assert re.search(r"blue, \d+ of \d+ · \d+ % of their pull", page.locator("#query-verdict").inner_text())
    distances = [float(text) for text in page.locator("#grid .distance").all_inner_texts()]
    assert distances == sorted(distances)
    shot(page, "search-by-upload")
    page.locator("#k").fill("48")
    expect(page.locator("#grid .card")).to_have_count(48)
    is_unknown = page.locator("#query-verdict .badge.unknown").count()
    assert page.locator("#grid .divider").count() == is_unknown, "one divider, not a mark at each image"
    assert page.locator("#query-verdict .badge").count() == 1
    assert page.locator("#grid .badge").count() == 0
    page.locator("#class-filter").fill("blue")
    expect(page.locator("#grid .card")).to_have_count(10)
    assert set(page.locator("#grid .card-class").all_inner_texts()) == {"blue"}
    page.locator(".chip").click()
    expect(page.locator("#grid .card")).to_have_count(48)


def test_an_image_is_dropped_or_pasted_and_a_file_that_is_none_becomes_a_toast(page, blue, tmp_path):
    script = """([kind, bytes]) => {
        const file = new File([new Uint8Array(bytes)], `${kind}.png`, { type: "image/png" });
        const data = new DataTransfer();
        data.items.add(file);
        const event = kind === "drop"
            ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
            : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
        document.body.dispatchEvent(event);
    }"""
    for kind in ("drop", "paste"):
        page.evaluate(script, [kind, list(blue.read_bytes())])
        expect(page.locator("#query-name")).to_have_text(f"{kind}.png")
        page.wait_for_selector("#grid:not([aria-busy]) .distance")
        page.click("#query-clear")
        expect(page.locator("#grid .card")).to_have_count(48)
    (tmp_path / "bad.png").write_text("no image")
    page.set_input_files("#file", tmp_path / "bad.png")
    expect(page.locator(".toast")).to_contain_text("another kind")
    expect(page.locator("#grid .card")).to_have_count(48)
    page.click("#tab-map")
    expect(page.locator(".toast")).to_have_count(0)
    page.wrong.clear()  # the browser reports the status 415


def test_a_click_searches_and_names_stay_text(page):
    page.locator(".card", has_text="<b>bold</b>").first.locator(".card-main").click()
    page.wait_for_selector("#grid .distance")
    assert "red & <b>bold</b>" in page.locator("#query-name").inner_text()
    assert page.locator("#grid b").count() == 0
    page.locator("#grid .card-main").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#grid:not([aria-busy]) .distance")


def test_why_lists_what_attracts_and_repels_and_leaves_out_duplicates(page, served_run):
    page.locator(".card button.link").first.click()
    page.wait_for_selector("#why[open] .sources img")
    assert re.match(r"\d+ % of all pull on this image comes from ", page.locator(".why-sentence").inner_text())
    shares = page.locator("#why h3 .share").all_inner_texts()
    assert not page.locator(".why-total").is_visible()
    page.click("#why summary")
    pull, push = map(share_in, shares)
    assert push - pull == pytest.approx(share_in(page.locator(".why-total").inner_text()), abs=0.15)
    assert page.locator(".why-left-out").count() == 0
    shot(page, "why")
    page.select_option("#why select", "blue")
    expect(page.locator("#why h3 .share").first).not_to_have_text(shares[0])
    script = "bars => bars.map(bar => [parseFloat(bar.style.getPropertyValue('--length')), bar.nextSibling.innerText])"
    bars = [(length, share_in(text)) for length, text in page.locator("#why .bar").evaluate_all(script)]
    largest = max(share for _, share in bars)
    for length, share in bars:  # one scale for what attracts and for what repels
        assert length == pytest.approx(100 * share / largest, abs=2)
    page.keyboard.press("Escape")
    assert not page.locator("#why").is_visible()
    page.set_input_files("#file", ImageIndex.open(served_run / "index").entry(30).path)
    page.wait_for_selector("#grid .distance")
    page.click("#query-why")
    expect(page.locator(".why-left-out")).to_have_text("One indexed image is a duplicate of this image: left out.")
    assert share_in(page.locator("#why .sources .share").first.inner_text()) < 99


def assert_classes_are_named(page):
    entries = page.locator("#map-classes li")
    expect(entries).to_have_count(4)
    names = ["blue", "green", "red & <b>bold</b>", "gray"]
    assert sorted(entries.all_inner_texts()) == sorted(names)
    color = "marks => marks.map(mark => getComputedStyle(mark).backgroundColor)"
    assert len(set(page.locator("#map-classes i").evaluate_all(color))) == 4


def assert_hovering_shows_an_image_and_a_click_searches_by_it(page):
    page.click("#tab-map")
    page.focus("#map-canvas")
    page.keyboard.press("0")  # marks the point in the middle, so that we know where one is
    tip = page.locator("#map-tip")
    expect(tip).to_be_visible()
    marked, box = tip.bounding_box(), page.locator("#map-canvas").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    page.mouse.move(640, 30)
    expect(tip).to_be_hidden()
    x, y = marked["x"] - 14, marked["y"] - 14
    page.mouse.move(x, y)
    expect(tip).to_be_visible()
    assert "/api/images/" in page.locator("#map-tip img").get_attribute("src")
    page.mouse.click(x, y)
    page.wait_for_selector("#view-search:not([hidden]) #grid .distance")


def test_the_map_names_its_colors_draws_hovers_and_searches(page):
    page.click("#tab-map")
    page.wait_for_selector("#map-canvas[data-drawn='48']")
    assert_classes_are_named(page)
    page.select_option("#map-class", "blue")
    page.wait_for_selector("#map-canvas[data-potential='blue']")
    assert "illustration" in page.locator("#map-explanation").inner_text()
    colors = page.evaluate(
        """() => { const canvas = document.getElementById("map-canvas");
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const seen = new Set();
        for (let k = 0; k < data.length; k += 40) seen.add(data[k] >> 4 << 8 | data[k + 2] >> 4);
        return seen.size; }"""
    )
    assert colors > 20
    canvas = page.locator("#map-canvas")
    canvas.focus()
    page.keyboard.press("+")
    page.wait_for_selector("#map-tip:not([hidden]) img")
    assert page.locator("#map-tip p").inner_text()
    expect(page.locator("#map-tip img")).to_have_js_property("complete", True)
    shot(page, "map")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("0")
    page.mouse.move(640, 400)
    page.mouse.wheel(0, -400)
    page.mouse.down()
    page.mouse.move(700, 430, steps=4)
    page.mouse.up()
    assert page.locator("#view-map").is_visible(), "a drag is no click"
    canvas.focus()
    page.keyboard.press("0")
    page.wait_for_selector("#map-tip:not([hidden])")
    page.keyboard.press("Enter")
    page.wait_for_selector("#grid .distance")
    assert page.locator("#view-search").is_visible()
    page.click("#query-clear")
    assert_hovering_shows_an_image_and_a_click_searches_by_it(page)


def test_the_map_of_many_classes_names_them_at_their_centers_and_finds_one(unloaded, address):
    def many(route):
        answer = route.fetch().json()
        answer["class_names"] = [f"class {k}" for k in range(13)]
        answer["labels"] = [k % 13 for k in range(len(answer["labels"]))]
        route.fulfill(json=answer)

    unloaded.route("**/api/map", many)
    load(unloaded, address, "map")
    unloaded.wait_for_selector("#map-canvas[data-drawn='48']")
    expect(unloaded.locator("#map-classes")).to_be_hidden()
    canvas = unloaded.locator("#map-canvas")
    assert 0 < int(canvas.get_attribute("data-names")) <= 13
    for typed, found in (("class 7", "class 7"), ("CLASS 12", "class 12"), ("class 1", "class 1"), ("class", None)):
        unloaded.locator("#map-find").fill(typed)
        assert canvas.get_attribute("data-found") == found
    unloaded.locator("#map-suspects").check()
    unloaded.wait_for_selector("#map-canvas[data-suspects]")
    assert int(canvas.get_attribute("data-suspects")) > 0
    shot(unloaded, "map-many")
    unloaded.unroute("**/api/map")


def decided(run):
    with open(run / "audit" / "decisions.csv", newline="") as file:
        return [(row["decision"], row["label"]) for row in csv.DictReader(file)]


def assert_a_decision_that_cannot_be_saved_is_a_toast_and_the_queue_stays(page, table):
    table.mkdir()  # a folder in the place of the table: no user may write it, not even root
    try:
        name = page.locator("#suspect-name").inner_text()
        page.keyboard.press("a")
        expect(page.locator(".toast")).to_contain_text("nothing was saved")
        expect(page.locator(".toast")).to_contain_text("audit/decisions.csv")
        assert page.locator("#suspect-name").inner_text() == name
        expect(page.locator("#audit-progress")).to_have_text("0 of 5 decided")
    finally:
        table.rmdir()
    page.wrong.clear()  # the browser reports the status 503


def test_audit_decisions_are_saved_to_the_table(unloaded, address, served_run):
    page, table = unloaded, served_run / "audit" / "decisions.csv"
    table.unlink(missing_ok=True)
    load(page, address)
    assert page.locator("#audit-count").inner_text() == "5"
    page.click("#tab-audit")
    page.wait_for_selector("#suspect-neighbors .card img")
    shot(page, "audit")
    assert_a_decision_that_cannot_be_saved_is_a_toast_and_the_queue_stays(page, table)
    page.keyboard.press("a")
    expect(page.locator("#audit-progress")).to_have_text("1 of 5 decided")
    assert decided(served_run) == [("accept", "blue")]
    page.click("#audit-reject")
    expect(page.locator("#audit-progress")).to_have_text("2 of 5 decided")
    page.keyboard.press("l")
    page.keyboard.type("red & <b>bold</b>")
    page.keyboard.press("Enter")
    expect(page.locator("#audit-progress")).to_have_text("3 of 5 decided")
    assert decided(served_run) == [("accept", "blue"), ("reject", "green"), ("relabel", "red & <b>bold</b>")]
    page.keyboard.press("k")
    page.keyboard.press("u")
    expect(page.locator("#audit-progress")).to_have_text("2 of 5 decided")
    assert decided(served_run) == [("accept", "blue"), ("reject", "green")]
    page.wait_for_selector("#neighbor-classes button")
    label = page.locator("#neighbor-classes button").first.get_attribute("data-label")
    page.keyboard.press("1")
    expect(page.locator("#audit-progress")).to_have_text("3 of 5 decided")
    assert decided(served_run)[-1] == ("relabel", label)
    page.keyboard.press("k")
    page.keyboard.press("u")
    expect(page.locator("#audit-progress")).to_have_text("2 of 5 decided")
    assert page.locator("#audit-count").inner_text() == "3"


def test_undo_withdraws_one_decision_after_the_other_and_returns_to_its_image(unloaded, address, served_run):
    (served_run / "audit" / "decisions.csv").unlink(missing_ok=True)
    page = unloaded
    load(page, address, "audit")
    page.wait_for_selector("#suspect-neighbors .card img")
    expect(page.locator("#audit-undo")).to_be_disabled()
    heights = "rows => rows.map(row => row.getBoundingClientRect().height)"
    before = page.locator("#audit-list li").evaluate_all(heights)
    names = []
    for number, key in enumerate("ard", start=1):
        names.append(page.locator("#suspect-name").inner_text())
        page.keyboard.press(key)
        expect(page.locator("#audit-progress")).to_have_text(f"{number} of 5 decided")
    assert page.locator("#audit-list li").evaluate_all(heights) == before, "a decision changes no row's height"
    shot(page, "audit-decided")
    for number in (2, 1):
        page.keyboard.press("u")
        expect(page.locator("#audit-progress")).to_have_text(f"{number} of 5 decided")
        assert page.locator("#suspect-name").inner_text() == names[number]
        assert [decision for decision, _ in decided(served_run)] == ["accept", "reject"][:number]
    page.reload()  # the order of the decisions is in the table
    page.wait_for_selector("#suspect-neighbors .card img")
    page.keyboard.press("r")
    page.keyboard.press("u")  # before the answer to R
    page.keyboard.press("u")
    expect(page.locator("#audit-progress")).to_have_text("0 of 5 decided")
    assert page.locator("#suspect-name").inner_text() == names[0]
    assert decided(served_run) == []
    expect(page.locator("#audit-undo")).to_be_disabled()


def test_copies_stand_side_by_side_and_one_key_leaves_one_out(unloaded, address, served_run):
    page, entries = unloaded, list(ImageIndex.open(served_run / "index").entries())[:3]
    (served_run / "audit" / "decisions.csv").unlink(missing_ok=True)
    rows = [
        f"{group},{entry.path},train,{entry.class_name},{kind}"
        for group, kind, entry in zip((1, 1, 2), ("exact,yes,no", "exact,yes,no", "near,no,no"), entries, strict=True)
    ]
    rows.append(rows[-1].replace(entries[2].path, entries[0].path))
    header = "group,path,part,class,copy,across_classes,across_parts"
    (served_run / "audit" / "duplicates.csv").write_text("\n".join([header, *rows]) + "\n")
    load(page, address, "copies")
    expect(page.locator("#copies-title")).to_have_text("2 exact copies, in different classes")
    expect(page.locator("#copies-images .card img")).to_have_count(2)
    page.keyboard.press("2")
    expect(page.locator("#copies-progress")).to_have_text("1 of 2 groups decided")
    shot(page, "copies")
    assert_accessible(page)
    assert decided(served_run) == [("drop", "")]
    page.keyboard.press("2")
    expect(page.locator("#copies-progress")).to_have_text("0 of 2 groups decided")
    assert decided(served_run) == []
    page.keyboard.press("j")
    expect(page.locator("#copies-title")).to_have_text("2 near copies")


def test_the_page_shows_that_the_index_is_damaged_as_long_as_it_is(unloaded, address, served_run, monkeypatch):
    monkeypatch.setattr("pfml.serving.gallery.REFRESH_INTERVAL", 0.0)
    page, manifest = unloaded, served_run / "index" / "index.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:100])
    try:
        load(page, address)
        expect(page.locator("#problem")).to_contain_text("index.json is damaged")
        expect(page.locator("#grid .card")).to_have_count(48)
        shot(page, "damaged-index")
    finally:
        manifest.write_bytes(whole)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # it looks then, and every ten seconds
    expect(page.locator("#problem")).to_be_hidden()


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_is_accessible_and_does_not_scroll_sideways(unloaded, address, blue, width, scheme):
    page = unloaded
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    try:
        load(page, address, "map")
        for view, ready in (("map", "#map-canvas[data-drawn]"), ("search", "#grid .card"), ("audit", "#audit-list li")):
            page.click(f"#tab-{view}")
            page.wait_for_selector(ready)
            shot(page, f"{view}-{width}-{scheme}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert_accessible(page)
        page.click("#tab-search")
        page.set_input_files("#file", blue)
        page.wait_for_selector("#grid .distance")
        cut = "cards => cards.filter(card => card.scrollWidth > card.clientWidth).length"
        assert page.locator("#grid .card-facts").evaluate_all(cut) == 0
        assert_accessible(page)
        page.click("#query-why")
        page.wait_for_selector("#why[data-ready] .sources li")
        shot(page, f"why-{width}-{scheme}")
        assert_accessible(page)
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert color == {"light": "rgb(245, 246, 249)", "dark": "rgb(17, 20, 27)"}[scheme]
    finally:
        page.set_viewport_size(WIDE)
        page.emulate_media(color_scheme="null")


def test_the_documentation_of_the_api_needs_no_network(unloaded, address):
    page = unloaded
    page.goto(address + "api/docs")
    page.wait_for_selector("details.operation")
    assert "/api/why" in page.locator("#operations").inner_text()
    page.locator("summary").nth(5).click()
    shot(page, "api")


def test_the_login_admits(unloaded, service):
    page = unloaded
    with running(create_app(service, Access(token=TOKEN))) as server:
        page.goto(f"http://127.0.0.1:{server.port}/")
        shot(page, "login")
        page.fill("#token", "wrong")
        page.click("button")
        expect(page.locator(".wrong")).to_be_visible()
        page.fill("#token", TOKEN)
        page.click("button")
        page.wait_for_selector("#grid .card img")
        page.goto("about:blank")  # no request may be in flight when the server shuts down
    page.wrong.clear()  # requests to another server, and the status 401
