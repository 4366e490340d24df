"""The pages: the tutorial runs and prints what it shows, examples run, links and the menu lead somewhere."""

from __future__ import annotations

import fnmatch
import re
import runpy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from dejavu.cluster import load_cluster
from dejavu.graphs.capture import capture
from dejavu.parallelism import Parallelism
from dejavu.planning import Planner, PlanRequest, Prices
from dejavu.what_if import varied
from dejavu.workload.loader import load_workload
from flows.__main__ import app
from flows.inputs import check, whole_numbers
from tests.conftest import spread

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
EXAMPLES = ROOT / "examples"
CLUSTERS, WORKLOADS = (sorted((EXAMPLES / name).glob("*.yaml")) for name in ("clusters", "workloads"))
PROGRAMS = [path for path in sorted(EXAMPLES.glob("*.py")) if path.name != "__init__.py"]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the file that it is the content of (or empty), its text."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text())]


def commands(block: Block) -> Iterator[tuple[list[str], list[str]]]:
    """Each command of a console block that plans, and the lines that it is said to print."""
    for part in re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        line, *printed = part.splitlines()
        words = shlex.split(line, comments=True)
        if words[:2] == ["dejavu", "plan"]:
            yield words[1:], [one for one in printed if one.strip()]


def check_printed(wanted: list[str], output: str) -> None:
    """Every wanted line is among those printed, in this order; `…` is anything."""
    printed = iter([" ".join(line.split()) for line in output.splitlines()])
    for line in wanted:
        if line.strip() != "…":
            pattern = re.sub(r"([\[\]?*])", r"[\1]", " ".join(line.split())).replace("…", "*")
            assert any(fnmatch.fnmatchcase(have, pattern) for have in printed), f"{line!r} was not printed:\n{output}"


def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an empty folder: files are written, `dejavu plan` and Python code run in the order of the page."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    num_commands = num_programs = 0
    for block in blocks(DOCS / "tutorial.md"):
        if block.language == "yaml" and block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "console":
            for words, printed in commands(block):
                done = CliRunner().invoke(app, words)
                assert done.exit_code == 0, done.output
                check_printed(printed, done.output)
                num_commands += 1
        elif block.language == "python":
            exec(compile(block.text, "docs/tutorial.md", "exec"), names)
            num_programs += 1
    assert num_commands >= 3 and num_programs >= 3
    assert Path("step.png").stat().st_size > 1000
    assert names["choice"].plan.schedule == "1f1b"


def test_what_the_tutorial_trains_can_be_read() -> None:
    """Its last command takes minutes; its files are read, and planned for above."""
    found = blocks(DOCS / "tutorial.md")
    titles = {block.title for block in found}
    run = next(line for block in found for line in block.text.splitlines() if "dejavu run" in line)
    words = shlex.split(run)
    assert {words[words.index("--workload") + 1], words[words.index("--cluster") + 1]} <= titles


def test_lengths_and_batches_that_pages_ask_for_are_the_model_s() -> None:
    asked = [
        words
        for page in DOCS.glob("*.md")
        for block in blocks(page)
        if block.language == "console"
        for words, _ in commands(block)
        if "--sequence-length" in words
    ]
    assert asked
    for words in asked:
        model, lengths, batches = (
            words[words.index(name) + 1] for name in ("--model", "--sequence-length", "--batch-size")
        )
        sizes = (whole_numbers(name, text) for name, text in (("lengths", lengths), ("batches", batches)))
        for _, workload in varied(load_workload(model), *sizes):
            check(workload)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_an_example_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From any folder, as `python examples/NAME.py` does."""
    monkeypatch.chdir(tmp_path)
    backend = matplotlib.get_backend()
    runpy.run_path(str(path), run_name="__main__")
    assert matplotlib.get_backend() == backend
    if "plan" in path.stem:
        assert "Proved" in capsys.readouterr().out
        assert (tmp_path / "step.png").is_file()


def test_ten_lines_are_ten() -> None:
    text = (EXAMPLES / "plan_in_ten_lines.py").read_text()
    code = text.split('"""')[2].strip().splitlines()
    assert len([line for line in code if line and not line.startswith(("import ", "from ", " "))]) <= 10


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_small_model_is_planned_for_every_example_cluster(path: Path) -> None:
    """With a quick search, under one schedule."""
    cluster = load_cluster(path)
    one, mlp = Parallelism.one_device(), load_workload("mlp")
    request = PlanRequest(
        mlp, cluster, parallelism=one, searches=("pipedream",), schedules=("1f1b",), microbatches=(8,)
    )
    choice = Planner().plan(replace(request, budget_seconds=1.0))
    assert choice.simulated_seconds > 0


@pytest.mark.parametrize("path", spread(WORKLOADS, 4), ids=lambda path: path.stem)
def test_every_example_workload_is_priced(path: Path) -> None:
    """On devices that are not here."""
    workload, cluster = load_workload(path), load_cluster(EXAMPLES / "clusters" / "8x8-h200.yaml")
    table = Prices(PlanRequest(workload, cluster)).table_of(workload.num_microbatches)
    assert len(table.layers) == len(capture(workload).layers)
    assert (table.forward.seconds_LD > 0).all()


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith("http"):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links {target}, which is not there"
        assert not anchor or anchor in anchors(file), (
            f"{page.name} links {target}#{anchor}; {file.name} has no such heading"
        )
        # The site has only what is in docs/, so its pages link nothing else.
        assert page.parent != DOCS or file.is_relative_to(DOCS), f"{page.name} links {target}, outside docs/"


def test_the_menu_lists_every_page() -> None:
    site = YAML(typ="safe").load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"([\w-]+\.md)", str(site["nav"]))
    assert sorted(listed) == [page.name for page in PAGES]
    assert site["theme"]["font"] is False, "otherwise pages load fonts from the network"


def test_every_part_of_a_run_s_page_is_explained() -> None:
    page, explained = (ROOT / "dejavu" / "report" / "page.html").read_text(), (DOCS / "report.md").read_text()
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert len(headings) > 5
    assert not [heading for heading in headings if heading.split(",")[0] not in explained]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
