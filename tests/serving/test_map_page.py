"""The map in a browser: many points by WebGL, the lasso, and what is done with selected images."""

import random

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")
pytest.importorskip("playwright.sync_api", reason="the page is tested through the package playwright")

from browser_page import CHROMIUM, assert_accessible, load, shot
from playwright.sync_api import expect

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

MANY = 100_000
#: Milliseconds of the script of a frame with `MANY` points: of 60 frames in a second, each has 17; with room for a busy
#: machine. The drawing itself is not timed, since a CPU does here what a GPU would do.
SMOOTH = 50


def around_all(page):
    """Draw around the whole map with the lasso."""
    box = page.locator("#map-canvas").bounding_box()
    right, bottom = box["width"] - 12, box["height"] - 12  # the corners of the frame are round
    corners = [(12, 12), (right, 12), (right, bottom), (12, bottom), (12, 20)]
    x, y = corners[0]
    page.mouse.move(box["x"] + x, box["y"] + y)
    page.mouse.down()
    for x, y in corners[1:]:
        page.mouse.move(box["x"] + x, box["y"] + y, steps=4)
    page.mouse.up()


@pytest.fixture
def on_map(page):
    page.click("#tab-map")
    page.wait_for_selector("#map-canvas[data-drawn='48']")
    page.click("#map-reset")
    yield page
    if page.locator("#map-lasso").get_attribute("aria-pressed") == "true":
        page.click("#map-lasso")
    if page.locator("#map-selection").is_visible():
        page.click("#map-unselect")


def answer(page, text, verb):
    page.locator("#ask-input").fill(text)
    expect(page.locator("#ask-do")).to_have_text(verb)
    page.click("#ask-do")


@pytest.fixture
def crowded(unloaded, address):
    """A page whose server has a map of `MANY` points, and how long the script of each frame takes."""

    def many(route):
        draw = random.Random(0)
        content = route.fetch().json()
        centers = [(draw.random(), draw.random()) for _ in range(40)]
        labels = [k % 40 for k in range(MANY)]
        places = [(centers[k][0] + draw.gauss(0, 0.03), centers[k][1] + draw.gauss(0, 0.03)) for k in labels]
        content |= {
            "ids": list(range(MANY)), "labels": labels, "class_names": [f"class {k}" for k in range(40)],
            "x": [round(x, 5) for x, _ in places], "y": [round(y, 5) for _, y in places], "images": MANY,
        }  # fmt: skip
        route.fulfill(json=content)

    unloaded.route("**/api/map", many)
    load(unloaded, address, "map")
    unloaded.wait_for_selector(f"#map-canvas[data-drawn='{MANY}']")
    yield unloaded
    unloaded.unroute("**/api/map")


def test_a_map_without_proxies_has_no_switch_for_them(unloaded, address):
    none = {"proxy_x": [], "proxy_y": [], "proxy_labels": []}
    unloaded.route("**/api/map", lambda route: route.fulfill(json={**route.fetch().json(), **none}))
    load(unloaded, address, "map")
    unloaded.wait_for_selector("#map-canvas[data-drawn='48']")
    expect(unloaded.locator("#map-note")).to_have_text("PCA of 48 images")
    expect(unloaded.locator("#map-proxies-label")).to_be_hidden()
    unloaded.unroute("**/api/map")
    load(unloaded, address, "map")
    expect(unloaded.locator("#map-note")).to_have_text("PCA of 48 images, 6 proxies")
    expect(unloaded.locator("#map-proxies-label")).to_be_visible()


@pytest.mark.slow  # a server that sends so many, and software rendering
def test_a_hundred_thousand_points_are_drawn_and_moved_smoothly(crowded):
    page = crowded
    assert page.locator("#map-canvas").get_attribute("data-drawn-by") == "webgl"
    times = page.evaluate(
        """async () => {
          const canvas = document.getElementById("map-canvas");
          const times = [];
          const later = window.requestAnimationFrame.bind(window);
          window.requestAnimationFrame = (task) => later((now) => {
            const start = performance.now();
            task(now);
            times.push(performance.now() - start);
          });
          for (let k = 0; k < 10; k += 1) {
            const before = canvas.dataset.frames;
            canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: k % 2 ? 40 : -40, cancelable: true }));
            while (canvas.dataset.frames === before) await new Promise((done) => later(done));
          }
          window.requestAnimationFrame = later;
          return times.sort((a, b) => a - b);
        }"""
    )
    assert len(times) == 10
    assert times[5] < SMOOTH, f"the script of a frame took {times[5]:.0f} ms"
    shot(page, "map-100000")
    page.click("#map-lasso")
    around_all(page)
    expect(page.locator("#map-selected")).to_contain_text("images selected: at most 20,000")
    expect(page.locator("#map-relabel")).to_be_disabled()
    page.click("#map-unselect")


def test_without_webgl_a_canvas_draws_the_points(browser, address):
    page = browser.new_page()
    page.add_init_script(
        """const before = HTMLCanvasElement.prototype.getContext;
        HTMLCanvasElement.prototype.getContext = function (kind, ...more) {
          return kind === "webgl2" ? null : before.call(this, kind, ...more);
        };"""
    )
    load(page, address, "map")
    page.wait_for_selector("#map-canvas[data-drawn='48']")
    assert page.locator("#map-canvas").get_attribute("data-drawn-by") == "2d"
    drawn = """() => {
      const canvas = document.getElementById("map-points");
      return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0);
    }"""
    assert page.evaluate(drawn)
    page.close()


def test_the_lasso_selects_adds_and_takes_away(on_map):
    page = on_map
    canvas = page.locator("#map-canvas")
    page.click("#map-lasso")
    around_all(page)
    expect(page.locator("#map-selected")).to_have_text("48 images selected")
    expect(page.locator("#map-strip img")).to_have_count(24)
    shot(page, "map-selected")
    page.keyboard.down("Alt")
    around_all(page)
    page.keyboard.up("Alt")
    expect(page.locator("#map-selection")).to_be_hidden()
    page.click("#map-lasso")
    page.keyboard.down("Shift")
    around_all(page)
    page.keyboard.up("Shift")
    assert canvas.get_attribute("data-selected") == "48"
    assert_accessible(page)


def test_the_keyboard_selects_too(on_map):
    page = on_map
    page.focus("#map-canvas")
    page.keyboard.press("+")
    page.wait_for_selector("#map-tip:not([hidden])")
    page.keyboard.press(" ")
    expect(page.locator("#map-selected")).to_have_text("1 image selected")
    page.keyboard.press("0")
    page.keyboard.press("v")
    expect(page.locator("#map-selected")).to_have_text("48 images selected")
    page.keyboard.press("Escape")
    expect(page.locator("#map-selection")).to_be_hidden()


def test_selected_images_are_tagged_relabeled_left_out_and_saved(on_map, service):
    page, index = on_map, service.gallery.index
    page.focus("#map-canvas")
    page.keyboard.press("+")
    page.wait_for_selector("#map-tip:not([hidden])")
    page.keyboard.press(" ")
    page.click("#map-tag")
    answer(page, "to check", "Tag")
    expect(page.locator(".toast").last).to_contain_text("Tagged 1 image to check")
    page.select_option("#map-color", "tags")
    expect(page.locator("#map-classes[data-by='tags'] li").first).to_have_text("to check")
    shot(page, "map-by-tags")
    page.select_option("#map-color", "")
    page.click("#map-relabel")
    page.locator("#ask-input").fill("a class of its own")
    expect(page.locator("#ask-hint")).to_have_text("a class of its own is a new class.")
    answer(page, "a class of its own", "Relabel")
    expect(page.locator(".toast").last).to_contain_text("Relabeled 1 image as a class of its own")
    assert index.class_counts()["a class of its own"] == 1
    (entry,) = [each for each in index.entries() if each.class_name == "a class of its own"]
    assert entry.metadata["tags"] == ("to check",)
    with page.expect_download() as waiting:
        page.click("#map-save")
    rows = waiting.value.path().read_text().splitlines()
    assert rows[0].startswith("id,image,class")
    assert "a class of its own" in rows[1]
    assert "to check" in rows[1]
    page.click("#map-leave-out")
    page.click("#ask-do")
    expect(page.locator("#map-canvas")).to_have_attribute("data-drawn", "47")
    expect(page.locator("#map-selection")).to_be_hidden()
    for _ in range(3):
        index.undo()
    page.reload()
    page.wait_for_selector("body[data-ready]")
