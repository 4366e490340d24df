"""What a person sees of a run in a browser: Prefect's form and pages, MLflow's pages, and the report in MLflow's frame.

`DEJAVU_SCREENSHOTS=docs/images python -m pytest tests/test_browser.py` writes the pictures of the documentation.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from matplotlib.image import imread
from mlflow.entities import Run

from tests.browsing import browser as browser  # a fixture
from tests.browsing import check_figures, needs_browser
from tests.test_flow import children_of, client_of, needs_two_cores, runs_of
from tests.test_flow import project as project  # a fixture
from tests.test_report import figures_of
from tests.test_up import Up
from tests.test_up import up as up  # a fixture
from tests.waiting import PATIENCE_SECONDS

pytestmark = [pytest.mark.integration, needs_two_cores, needs_browser]
WORKLOAD = "examples/workloads/small.yaml"
MODE = "workflowType=machine_learning"  # of MLflow's pages
PARTS = ("initialize", "plan", "profile", "train")
ARTIFACTS = {  # what each of the run's artifacts shows
    "plans": "even split",
    "summary": "best baseline",
    "mlflow": "the run in MLflow",
    "measuring": "Progress: 100%",
    "trials": "Progress: 100%",
    "training": "Progress: 100%",
}
HARMLESS = (  # errors that Prefect's and MLflow's own pages have, whatever they show
    "https://sr-client-cfg.amplitude.com/",  # Prefect's asks how to measure its use even where that is off
    "/completed.svg ",  # Prefect's graph looks for an artifact's icon beside its folder
    "/api/task_runs/filter ",  # Prefect's page of an artifact asks for its task even if it has none
    "/favicon.ico ",
    "/users/current ",  # MLflow's asks who is logged in even where nobody can be
    "ResizeObserver loop completed with undelivered notifications",  # MLflow's table, which is drawn a frame later
)


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
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, PATIENCE_SECONDS, 0.2, (NoSuchElementException, StaleElementReferenceException))
    return wait.until(lambda _: is_so(), f"no {what} within {PATIENCE_SECONDS} s on {browser.current_url}")


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


@pytest.fixture(scope="module")
def submitted(up: Up, browser: Any) -> str:
    """The id of a run that was started from Prefect's form, and has ended."""
    with page(browser, up.services.prefect_url, "Deployments"):  # its first page sends on to the rest
        click(browser, "Deployments")
        click(browser, "full", "a")
        click(browser, "Run", "button")
        click(browser, "Custom run")
        wait_for(browser, "Parameters", "what to train", "cluster file", "Dask scheduler")
        click(browser, "a file, an example or a model")
        field = until(
            browser,
            lambda: next((one for one in browser.find_elements("css selector", "textarea") if not one.text), None),
            "field for the workload",
        )
        field.send_keys(WORKLOAD)
        shoot(browser, "prefect-form")
        click(browser, "Submit", "button")
        link = until(browser, lambda: browser.find_element("partial link text", "View run"), "link to the run")
        identity = str(re.search(r"[0-9a-f-]{36}", link.get_attribute("href")).group())  # type: ignore[union-attr]
    assert up.end_of(identity) == "COMPLETED", up.logs(identity)
    return identity


@pytest.fixture(scope="module")
def planned(up: Up, submitted: str) -> str:
    """The id of another run, which goes on while the first one's pages are looked at."""
    deployment = up.api.get("/deployments/name/dejavu/plan").raise_for_status().json()["id"]
    asked = up.api.post(f"/deployments/{deployment}/create_flow_run", json={"parameters": {"workload": WORKLOAD}})
    return str(asked.raise_for_status().json()["id"])


@pytest.fixture(scope="module")
def tracked(up: Up, submitted: str) -> tuple[Run, dict[str, Run]]:
    """The same run as MLflow has it, and its children by name."""
    run = runs_of(up.project)[0][-1]
    assert run.data.tags["prefect.flow_run"] == submitted
    assert run.data.tags["mlflow.source.name"] == "prefect deployment run dejavu/full"
    return run, {child.info.run_name: child for child in children_of(up.project, run)}


def mlflow(up: Up, path: str) -> str:
    return f"{up.services.mlflow_url}/#/{path}{'&' if '?' in path else '?'}{MODE}"


def run_page(up: Up, run: Run, path: str = "") -> str:
    return mlflow(up, f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}{path}")


def comparison(up: Up, *runs: Run) -> str:
    ids = quote(json.dumps([run.info.run_id for run in runs]))
    return mlflow(up, f"compare-runs?runs={ids}&experiments={quote(json.dumps([runs[0].info.experiment_id]))}")


def test_a_run_from_the_form_has_what_was_typed(up: Up, submitted: str, planned: str) -> None:
    run = up.run(submitted)
    assert (run["name"], run["parameters"]["workload"]) == ("gpt on cluster.yaml", WORKLOAD)


def greens(png: bytes) -> float:
    """The share of a picture that is as green as what has succeeded."""
    red, green, blue = imread(io.BytesIO(png), format="png")[..., :3].transpose(2, 0, 1)
    return float(((green > 0.5) & (green > 1.5 * red) & (green > 1.5 * blue)).mean())


def test_the_page_of_a_run_has_its_graph_its_log_and_its_parts(up: Up, browser: Any, submitted: str) -> None:
    nodes = [node for _, node in up.api.get(f"/flow_runs/{submitted}/graph-v2").raise_for_status().json()["nodes"]]
    flows = sorted(node["label"].partition(" / ")[0] for node in nodes if node["kind"] == "flow-run")
    assert flows == sorted(PARTS)
    url = f"{up.services.prefect_url}/v2/runs/flow-run/{submitted}"
    with page(browser, url, "gpt on cluster.yaml", "Completed", "Beginning flow run"):
        graph = until(browser, lambda: browser.find_element("css selector", "canvas"), "graph")
        until(browser, lambda: greens(graph.screenshot_as_png) > 0.01, "bar in the graph")
        shoot(browser, "prefect-run")
        click(browser, "Task Runs", "button")
        wait_for(browser, "compare-with-baseline", "report")
        click(browser, "Subflow Runs", "button")
        wait_for(browser, *PARTS)
        click(browser, "Artifacts", "button")
        wait_for(browser, "mlflow", "summary")


def test_every_artifact_can_be_read_and_one_leads_to_mlflow(
    up: Up, browser: Any, submitted: str, tracked: tuple[Run, dict[str, Run]]
) -> None:
    with page(browser, f"{up.services.prefect_url}/v2/artifacts", *ARTIFACTS):
        pass
    found = {one["key"]: one["id"] for one in up.api.post("/artifacts/filter", json={}).raise_for_status().json()}
    assert set(found) == set(ARTIFACTS)
    for key, says in ARTIFACTS.items():
        with page(browser, f"{up.services.prefect_url}/v2/artifacts/artifact/{found[key]}", key, says):
            if key == "mlflow":
                link = browser.find_element("link text", says).get_attribute("href")
    with page(browser, link, tracked[0].info.run_name, "Description"):
        pass


def test_mlflow_lists_the_run_and_its_page_begins_with_the_verdict(
    up: Up, browser: Any, tracked: tuple[Run, dict[str, Run]]
) -> None:
    run, children = tracked
    with page(browser, mlflow(up, f"experiments/{run.info.experiment_id}/runs"), run.info.run_name):
        close_assistant(browser)
    note = run.data.tags["mlflow.note.content"]
    verdict = note.splitlines()[0].strip("*")
    strip = "img[src*='report/strip.png']"
    says = (run.info.run_name, verdict, "A step takes", "measured_step_seconds", "text (")
    with page(browser, run_page(up, run), *says):
        loaded = "return document.querySelector(arguments[0])?.naturalWidth"
        until(browser, lambda: browser.execute_script(loaded, strip), "strip of the plan")
        below = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
        more = browser.find_element("xpath", "//button[normalize-space(.)='Show more']")
        assert browser.execute_script(below, strip) <= more.rect["y"], "the strip is folded away"
        shoot(browser, "mlflow-run")
        click(browser, "Show more")
        wait_for(browser, "Repeat it with", "dejavu run")
    with page(browser, run_page(up, children["training"], "/model-metrics"), "loss", "measured_step_seconds"):
        lines = "return document.querySelectorAll('svg.main-svg path.js-line').length"
        until(browser, lambda: browser.execute_script(lines), "curve of the loss")


def test_the_weights_are_a_model_with_a_description(up: Up, browser: Any, tracked: tuple[Run, dict[str, Run]]) -> None:
    with page(browser, run_page(up, tracked[1]["training"]), "registered model gpt version 1", "Registered models"):
        pass
    with page(browser, mlflow(up, "models/gpt"), "Version 1", "Trained for 16 steps"):
        pass
    with page(browser, mlflow(up, "models/gpt/versions/1"), "training", "dejavu.draw", "Inputs (1)", "Outputs (1)"):
        pass


def test_runs_and_trials_can_be_compared(
    up: Up, browser: Any, planned: str, tracked: tuple[Run, dict[str, Run]]
) -> None:
    children = tracked[1]
    assert up.end_of(planned) == "COMPLETED", up.logs(planned)
    two = runs_of(up.project)[0]
    assert len(two) == 2
    names = [one.info.run_name for one in two]
    with page(browser, comparison(up, *two), "Comparing 2 Runs", *names, "predicted_step_seconds"):
        pass
    trials = children_of(up.project, children["trials"])
    with page(browser, comparison(up, *trials), f"Comparing {len(trials)} Runs", "trial 0", "gain", "loss"):
        axes = "return document.querySelectorAll('.parcoords .axis-title').length"
        until(browser, lambda: browser.execute_script(axes) >= 3, "parallel coordinates")
        shoot(browser, "mlflow-compare")


def test_the_report_draws_its_figures_in_mlflow_s_frame(
    up: Up, browser: Any, tracked: tuple[Run, dict[str, Run]]
) -> None:
    run, _ = tracked
    report = Path(client_of(up.project).download_artifacts(run.info.run_id, "report/report.html")).read_text()
    with page(browser, run_page(up, run, "/artifacts/report/report.html"), "report.html"):
        frame = until(browser, lambda: browser.find_element("css selector", "iframe[sandbox]"), "frame")
        browser.switch_to.frame(frame)
        try:
            done = "return document.querySelectorAll('.figure svg.main-svg').length >= arguments[0]"
            until(browser, lambda: browser.execute_script(done, len(figures_of(report))), "figures")
            check_figures(browser, set(figures_of(report)))
            assert "measured" in text_of(browser) and "proved" in text_of(browser)
            fits = browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
            assert fits, "the report is wider than its frame"
            browser.execute_script("document.getElementById('timeline').scrollIntoView({block: 'center'})")
        finally:
            browser.switch_to.default_content()
        shoot(browser, "report-in-mlflow")
