"""A headless Chromium that sees no network but loopback, and the checks that tests of pages share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no Chromium with its driver here")
WORDS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"),
    *("--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in WORDS:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def check_figures(browser: Any, names: set[str]) -> None:
    """Every figure is drawn: it has visible marks inside an SVG as wide as its place."""
    drawn = browser.execute_script(
        """return [...document.querySelectorAll(".figure")].map((place) => {
             const svg = place.querySelector("svg.main-svg");
             const marks = svg ? svg.querySelectorAll(".point path, path.js-line, .scatterpts, .points path") : [];
             return [place.id, marks.length, svg ? svg.getBoundingClientRect().width - place.clientWidth : null];
           });"""
    )
    assert {name for name, *_ in drawn} == names
    for name, marks, wider in drawn:
        assert marks > 0, f"{name} is empty"
        assert abs(wider) <= 1, f"{name} is {wider} pixels wider than its place"
