"""A headless Chromium that sees no network but loopback, and the checks that tests of pages share."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_SECONDS

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WORDS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"),
    *("--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"),
)


HARMLESS = (  # errors that Prefect's and MLflow's own pages have, whatever they show
    "https://sr-client-cfg.amplitude.com/",  # Prefect's asks how to measure its use even where that is off
    "/completed.svg ",  # Prefect's graph looks for an artifact's icon beside its folder
    "/api/task_runs/filter ",  # Prefect's page of an artifact asks for its task even if it has none
    "/favicon.ico ",
    "/users/current ",  # MLflow's asks who is logged in even where nobody can be
    "ResizeObserver loop completed with undelivered notifications",  # MLflow's table, which is drawn a frame later
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not (BROWSER and DRIVER):
        pytest.skip("there is no Chromium with its driver here")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for word in WORDS:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@contextmanager
def page(browser: Any, url: str, *says: str) -> Iterator[None]:
    """Open a page, wait until it says all this, and check at the end that it had no error."""
    browser.get("about:blank")
    browser.get_log("browser")  # of the page before
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(url)
    wait_for(browser, *says)
    yield
    check_console(browser)


def check_console(browser: Any) -> None:
    errors = [row["message"] for row in browser.get_log("browser") if row["level"] == "SEVERE"]
    assert [message for message in errors if not any(known in message for known in HARMLESS)] == []


def until(browser: Any, is_so: Callable[[], Any], what: str) -> Any:
    """Wait for it; a page that has met an error is not waited for."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException, TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    def answer(_: Any) -> Any:
        check_console(browser)
        return is_so()

    wait = WebDriverWait(browser, PATIENCE_SECONDS, 0.2, (NoSuchElementException, StaleElementReferenceException))
    try:
        return wait.until(answer)
    except TimeoutException:
        where = f"{browser.current_url}, which says: {text_of(browser)[:2000]}"
        raise AssertionError(f"no {what} within {PATIENCE_SECONDS} s on {where}") from None


def text_of(browser: Any) -> str:
    return " ".join(browser.execute_script("return document.body.innerText").split())


def wait_for(browser: Any, *says: str) -> None:
    for words in says:
        until(browser, lambda words=words: words in text_of(browser), f"“{words}”")  # type: ignore[misc]


def click(browser: Any, text: str, kind: str = "*") -> None:
    """Click on the first thing that is shown and says just this."""
    xpath = f"//{kind}[normalize-space({'text()' if kind == '*' else '.'})='{text}']"

    def clicked() -> bool:
        for found in browser.find_elements("xpath", xpath):
            if found.is_displayed():
                found.click()
                return True
        return False

    until(browser, clicked, f"“{text}” to click on")


def shoot(browser: Any, name: str) -> None:
    """Keep a picture for the documentation, where it is asked for."""
    folder = os.environ.get("DEJAVU_SCREENSHOTS")
    if folder:
        from PIL import Image

        picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(Path(folder) / f"{name}.png", optimize=True)


def close_assistant(browser: Any) -> None:
    """Close the panel that MLflow opens at a reader's first visit."""
    close = "[data-component-id='mlflow.assistant.chat_panel.close']"
    for found in browser.find_elements("css selector", close):
        found.click()
        until(browser, lambda: not browser.find_elements("css selector", close), "end of the assistant")


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
