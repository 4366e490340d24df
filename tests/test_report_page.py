"""The page of a run as a browser shows it: on a phone and on a desk, in light and in dark, from disk and in a frame."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejavu.report import page
from tests.browsing import browser as browser  # a fixture
from tests.browsing import check_figures
from tests.conftest import some
from tests.test_report import Moved, figures_of, make_data

WIDTHS, SCHEMES = (390, 1280), ("light", "dark")
CSS = (Path(__file__).resolve().parents[1] / "dejavu" / "report" / "page.css").read_text()

# What people with no red, green or blue cones see of linear RGB (Machado, Oliveira and Fernandes, 2009, severity 1).
SIGHTS = {
    "all cones": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
WORKS = ("forward", "backward", "input", "weights", "once", "messages", "wait")
LEAST_DISTANCE = 0.08  # in Oklab, where black and white are 1 apart and 0.02 is just noticeable


def colors(scheme: str) -> dict[str, str]:
    """The page's colours by name; dark ones replace light ones."""
    light, dark = CSS.split("@media (prefers-color-scheme: dark)")
    named = partial(re.findall, r"--([a-z-]+): (#[0-9a-f]{6})")
    return dict(named(light)) | (dict(named(dark)) if scheme == "dark" else {})


def linear(color: str) -> np.ndarray:
    value = np.array([int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Björn Ottosson's space, in which distances are as large as they look."""
    cones = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    cones += [[0.0883024619, 0.2817188376, 0.6299787005]]
    axes = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099]]
    axes += [[0.0259040371, 0.7827717662, -0.808675766]]
    return np.array(axes) @ np.cbrt(np.array(cones) @ np.clip(rgb, 0, 1))


def contrast(a: str, b: str) -> float:
    """As WCAG 2 has it."""
    low, high = sorted(float(linear(one) @ [0.2126, 0.7152, 0.0722]) for one in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sight", SIGHTS)
def test_every_kind_of_work_has_a_color_that_all_can_tell_apart(sight: str, scheme: str) -> None:
    palette = colors(scheme)
    for a, b in itertools.combinations(WORKS, 2):
        apart = oklab(SIGHTS[sight] @ linear(palette[a])) - oklab(SIGHTS[sight] @ linear(palette[b]))
        assert np.linalg.norm(apart) > LEAST_DISTANCE, f"{a} and {b}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_texts_can_be_read(scheme: str) -> None:
    palette = colors(scheme)
    papers = [(ink, paper) for ink in ("ink", "quiet") for paper in ("paper", "card", "marked")]
    badges = [(ink, "paper") for ink in ("measured", "predicted", "proved", "mark")]
    numbers = [("on-forward", "forward"), ("on-backward", "backward"), ("on-other", "input"), ("on-other", "weights")]
    for ink, paper in (*papers, *badges, *numbers):
        assert contrast(palette[ink], palette[paper]) >= 4.5, f"{ink} on {paper}"


def show(browser: Any, file: Path, width: int, scheme: str) -> None:
    """Open the file in a window of this width, with the reader's preference for light or dark."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    prefers = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", prefers)
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # of the page before
    browser.get(file.as_uri())


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages with one stage a rank and two, whole and split backward passes, many layers, and no training at all."""
    run = make_data(schedule="1f1b", named=True)
    runs = {
        "1f1b": replace(run, migrations=(Moved(9, "a host was lost", run.plan, run.plan, 1.0, 1),)),
        "zbv": make_data(schedule="zbv", named=True),
        "many": replace(make_data(num_layers=120, num_devices=8), tried=None),
        "planned only": make_data(trained=False),
    }
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for name, run in runs.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(page(run), encoding="utf-8")
    return found


@pytest.mark.integration
@pytest.mark.parametrize("scheme", some(SCHEMES, ["light"]))
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_its_window_and_draws_its_figures(
    browser: Any, pages: dict[str, Path], width: int, scheme: str
) -> None:
    for name, file in pages.items():
        show(browser, file, width, scheme)
        found = browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
        assert found == [width, width], name
        paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert tuple(map(int, re.findall(r"\d+", paper))) == tuple(bytes.fromhex(colors(scheme)["paper"][1:]))
        check_figures(browser, set(figures_of(file.read_text())))
        assert browser.get_log("browser") == [], name
        messages = " ".join(row["message"] for row in browser.get_log("performance"))
        assert "file:" in messages and not re.findall(r'"url":"((?:https?|wss?):[^"]*)"', messages), name


@pytest.mark.integration
def test_figures_follow_the_reader_from_light_to_dark(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    show(browser, pages["zbv"], 1280, "light")
    title = 'return getComputedStyle(document.querySelector("#timeline .x2title")).fill'

    def is_in(scheme: str) -> bool:
        shown = tuple(map(int, re.findall(r"\d+", browser.execute_script(title))))
        return shown == tuple(bytes.fromhex(colors(scheme)["ink"][1:]))

    assert is_in("light")
    prefers = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", prefers)
    WebDriverWait(browser, 20).until(lambda _: is_in("dark"))


@pytest.mark.integration
def test_the_page_works_in_a_frame_that_allows_scripts_alone(
    browser: Any, pages: dict[str, Path], tmp_path: Path
) -> None:
    """As MLflow shows it: another origin, no storage, no other file."""
    frame = tmp_path / "frame.html"
    inside = pages["1f1b"].read_text().replace("&", "&amp;").replace('"', "&quot;")
    size = 'width="800" height="800"'
    frame.write_text(f'<meta charset="utf-8"><iframe sandbox="allow-scripts" {size} srcdoc="{inside}"></iframe>')
    show(browser, frame, 1280, "light")
    browser.switch_to.frame(0)
    check_figures(browser, set(figures_of(pages["1f1b"].read_text())))
    assert browser.get_log("browser") == []
    browser.switch_to.default_content()


@pytest.mark.integration
def test_a_bar_under_the_pointer_says_what_it_is(browser: Any, pages: dict[str, Path]) -> None:
    from selenium.webdriver import ActionChains

    show(browser, pages["zbv"], 1280, "light")
    bar = browser.find_element("css selector", "#timeline .bars .point path")
    ActionChains(browser).move_to_element(bar).perform()
    said = browser.execute_script('return document.querySelector("#timeline .hoverlayer").textContent')
    assert re.search(r"forward of microbatch 0, stage 0", said) and "rank 0: localhost:0" in said
