"""What tests do with a page in a browser: load it, leave screenshots of it, and ask axe-core about it."""

import itertools
import os
import shutil
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from running_server import LIMIT

expect.set_options(timeout=1000 * LIMIT)
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
SHOTS = os.environ.get("PFML_SCREENSHOTS")
LOADS = itertools.count()
WIDE = {"width": 1280, "height": 860}
#: Widths and color schemes of a page: each one quickly, all combinations slowly.
LOOKS = [
    (1400, "light"),
    (400, "dark"),
    pytest.param(1400, "dark", marks=pytest.mark.slow),
    pytest.param(400, "light", marks=pytest.mark.slow),
]


def load(page, address, view=""):
    """Load the page again; at the same address, or with another hash only, a browser would stay where it is."""
    page.goto(f"{address}?{next(LOADS)}#{view}")
    page.wait_for_selector("body[data-ready]")


def shot(page, name):
    if SHOTS:
        page.wait_for_load_state("networkidle")
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


#: Rules of WCAG 2 on levels A and AA, and what axe-core calls best practices.
RULES = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}}


def assert_accessible(page):
    """What axe-core finds nothing wrong with."""
    found = Axe().run(page, options=RULES).response["violations"]
    assert not found, [(rule["id"], [node["html"][:120] for node in rule["nodes"]][:3]) for rule in found]
