"""The gallery of the docs: `make gallery` writes docs/gallery/*.png.

Photographs with free licenses, which come with PyPI packages, become a folder of crops with a few labels wrong on
purpose. The commands of the README run on that folder, and every page is shot in Debian's chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image, ImageEnhance, ImageOps

ROOT = Path(__file__).parents[1]
#: Bytes of the largest screenshot.
LIMIT = 250_000
CROPS = 32
#: Images in the folder of another class.
MISLABELED = 26


@dataclass(frozen=True)
class Photograph:
    """A photograph of which crops are made: the package that has it, its file there, who made it, its license."""

    package: str
    file: str
    author: str
    license: str


#: Class name -> its photograph.
PHOTOGRAPHS = {
    "astronaut": Photograph("scikit-image", "skimage/data/astronaut.png", "NASA", "public domain"),
    "brick": Photograph("scikit-image", "skimage/data/brick.png", "CC0 Textures", "CC0"),
    "cat": Photograph("scikit-image", "skimage/data/chelsea.png", "Stefan van der Walt", "CC0"),
    "coffee": Photograph("scikit-image", "skimage/data/coffee.png", "Rachel Michetti", "CC0"),
    "coins": Photograph("scikit-image", "skimage/data/coins.png", "Brooklyn Museum", "no known copyright restrictions"),
    "flower": Photograph("scikit-learn", "sklearn/datasets/images/flower.jpg", "vultilion", "CC BY 2.0"),
    "galaxies": Photograph("scikit-image", "skimage/data/hubble_deep_field.jpg", "NASA", "public domain"),
    "grass": Photograph("scikit-image", "skimage/data/grass.png", "CC0 Textures", "CC0"),
    "gravel": Photograph("scikit-image", "skimage/data/gravel.png", "CC0 Textures", "CC0"),
    "officer": Photograph("matplotlib", "matplotlib/mpl-data/sample_data/grace_hopper.jpg", "US Navy", "public domain"),
    "photographer": Photograph("scikit-image", "skimage/data/camera.png", "Lav Varshney", "CC0"),
    "retina": Photograph("scikit-image", "skimage/data/retina.jpg", "Mikael Häggström", "CC0"),
    "rocket": Photograph("scikit-image", "skimage/data/rocket.jpg", "SpaceX", "public domain"),
    "temple": Photograph("scikit-learn", "sklearn/datasets/images/china.jpg", "danielbuechele", "CC BY 2.0"),
    "tissue": Photograph("scikit-image", "skimage/data/ihc.png", "CMMI", "no known copyright restrictions"),
    "writing": Photograph("scikit-image", "skimage/data/text.png", "scikit-image", "public domain"),
}
#: In no folder: what is searched to show an unknown image.
STRANGER = "temple"


def opened(photograph: Photograph) -> Image.Image:
    """The photograph in RGB, from its installed package."""
    package, _, file = photograph.file.partition("/")
    return Image.open(Path(find_spec(package).submodule_search_locations[0]) / file).convert("RGB")


def crop_of(photograph: Image.Image, draw: random.Random) -> Image.Image:
    """A random part of a photograph, perhaps mirrored, brighter or darker."""
    side = min(photograph.size)
    width, height = (round(side * draw.uniform(0.35, 0.7)) for _ in range(2))
    left, top = draw.randint(0, photograph.width - width), draw.randint(0, photograph.height - height)
    crop = photograph.crop((left, top, left + width, top + height))
    crop = ImageOps.mirror(crop) if draw.random() < 0.5 else crop
    crop = ImageEnhance.Brightness(crop).enhance(draw.uniform(0.75, 1.2))
    return ImageOps.contain(crop, (288, 288), Image.Resampling.LANCZOS)


def write_folder(folder: Path) -> int:
    """Write photos/CLASS/NUMBER.jpg with some labels wrong, and new/CLASS.jpg; the number of wrong labels."""
    draw = random.Random(0)
    classes = [name for name in PHOTOGRAPHS if name != STRANGER]
    places = [(name, number) for name in classes for number in range(CROPS)]
    moved = set(draw.sample(places, MISLABELED))
    for name, photograph in PHOTOGRAPHS.items():
        image = opened(photograph)
        for number in range(CROPS if name != STRANGER else 0):
            label = name if (name, number) not in moved else draw.choice([one for one in classes if one != name])
            path = folder / "photos" / label / f"{name}-{number:02}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            crop_of(image, draw).save(path, quality=92)
        new = folder / "new" / f"{name}.jpg"
        new.parent.mkdir(parents=True, exist_ok=True)
        crop_of(image, draw).save(new, quality=92)
    return MISLABELED


def pfml(folder: Path, *arguments: str) -> None:
    """Run a command in the folder, as a reader would."""
    print("pfml", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "pfml", *arguments], cwd=folder, check=True)


@contextlib.contextmanager
def served(folder: Path, run: str) -> Iterator[str]:
    """The address of a server of the run."""
    command = [sys.executable, "-m", "pfml", "serve", run, "--port", "0"]
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        for line in server.stdout:
            if found := re.search(r"http://\S+?:\d+/", line):
                yield found[0]
                return
        raise RuntimeError("pfml serve must print its address, but it has ended")
    finally:
        server.terminate()
        server.wait(60)


def shoot(page: Any, out: Path) -> None:
    """A screenshot of what the window shows, in as many colors as `LIMIT` bytes have room for."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)  # transitions
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    for colors in (None, 256, 192, 128, 96, 64):
        shown = image if colors is None else image.quantize(colors, dither=Image.Dither.NONE)
        shown.save(out, optimize=True)
        if out.stat().st_size <= LIMIT:
            print(f"{out.name}: {out.stat().st_size / 1000:.0f} kB, {colors or 'all'} colors", flush=True)
            return
    raise ValueError(f"{out.name} must fit into {LIMIT} bytes, got {out.stat().st_size} with 64 colors")


def search_by(page: Any, image: Path) -> None:
    """Upload an image and wait for its results."""
    page.set_input_files("#file", image)
    page.wait_for_selector("#grid:not([aria-busy]) .distance")


def search(page: Any, folder: Path) -> None:
    """Results of an image that the index does not have."""
    search_by(page, folder / "new" / "flower.jpg")


def unknown(page: Any, folder: Path) -> None:
    """Results of an image of no indexed class."""
    search_by(page, folder / "new" / f"{STRANGER}.jpg")


def why(page: Any, folder: Path) -> None:
    """What pulls and pushes an image."""
    search_by(page, folder / "new" / "cat.jpg")
    page.click("#query-why")
    page.wait_for_selector("#why[open] .sources img")


def map_(page: Any, folder: Path) -> None:
    """The map of the embeddings, its suspects marked."""
    page.click("#tab-map")
    page.wait_for_selector("#map-canvas[data-drawn]")
    page.check("#map-suspects")


def potential(page: Any, folder: Path) -> None:
    """The map in the shades of a class's potential."""
    map_(page, folder)
    page.select_option("#map-class", "cat")
    page.wait_for_selector("#map-legend:not([hidden])")


def audit(page: Any, folder: Path) -> None:
    """A suspect and the images around it."""
    page.click("#tab-audit")
    page.locator("#audit-list .queued", has_text="→ cat").first.click()
    page.wait_for_load_state("networkidle")
    page.wait_for_selector("#suspect-neighbors img")


def classes(page: Any, folder: Path) -> None:
    """A class and its images."""
    page.click("#tab-classes")
    page.wait_for_selector("#class-images img")


#: Screenshot -> color scheme, what is done on the page first.
PAGES: dict[str, tuple[str, Callable[[Any, Path], None]]] = {
    "search": ("light", search),
    "search-dark": ("dark", search),
    "unknown": ("light", unknown),
    "why": ("light", why),
    "map": ("light", map_),
    "map-dark": ("dark", potential),
    "audit": ("light", audit),
    "classes": ("light", classes),
}
#: Screenshot of a page of the run -> its file, the heading or caption that is on top.
FILES = {
    "report": ("report.html", "The ladder"),
    "report-queries": ("report.html", "What a query finds"),
    "audit-report": ("audit/audit.html", "retina, rather cat?"),
}
#: What `pfml train` calls the first run on the folder.
RUN = "runs/photos-1"
WINDOW = {"width": 1200, "height": 760}


def main() -> None:
    """Make the folder, run the commands, shoot the pages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "gallery")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gallery")
    parser.add_argument("--keep", action="store_true", help="shoot again what is in the folder")
    arguments = parser.parse_args()
    folder, chromium = arguments.work.resolve(), shutil.which("chromium")
    if not chromium or find_spec("skimage") is None:
        raise SystemExit("the gallery needs chromium and scikit-image: make gallery")
    from playwright.sync_api import sync_playwright

    if not arguments.keep:
        for name in ("photos", "new", "runs"):
            shutil.rmtree(folder / name, ignore_errors=True)
        print(f"{write_folder(folder)} labels are wrong")
        pfml(folder, "train", "--data", "photos", "--effort", "seconds", "--device", "cpu")
        pfml(folder, "audit", RUN)
        pfml(folder, "index", RUN, "photos")
        pfml(folder, "calibrate", RUN)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with served(folder, RUN) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (scheme, act) in PAGES.items():
            page = browser.new_page(viewport=WINDOW, color_scheme=scheme)
            page.goto(address)
            page.wait_for_selector("body[data-ready]")
            act(page, folder)
            shoot(page, arguments.out / f"{name}.png")
            page.close()
        for name, (file, top) in FILES.items():
            page = browser.new_page(viewport=WINDOW)
            page.goto((folder / RUN / file).as_uri())
            page.get_by_text(top, exact=True).first.evaluate("one => scrollTo(0, one.getBoundingClientRect().top - 24)")
            shoot(page, arguments.out / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
