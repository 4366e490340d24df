"""Every figure of performance that a page states is in a committed result, and says what that result says.

`docs/figures.toml` maps sentences to results. A number that changes on either side fails here, and so does a number
with a unit that is neither mapped nor listed as no measurement.
"""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = tomllib.loads((ROOT / "docs" / "figures.toml").read_text())
PAGES: list[str] = FIGURES["pages"]
UNITS = "%|×(?! ?\\d)|(?:CPU |processor )?(?:s|seconds?)|ms|µs|min|minutes?|hours?|[KMG]i?B|times|steps"
FIGURE = re.compile(rf"(?<![\w.])(?<!\w-)[−-]?\d[\d,.]*(?: ?[–/] ?\d[\d,.]*| to \d[\d,.]*)? ?(?:{UNITS})(?![\w-])")


@cache
def page(name: str) -> str:
    """The page with every run of white space as one space: a sentence may be broken anywhere."""
    return " ".join((ROOT / name).read_text().split())


@cache
def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def step(node: Any, word: str) -> list[Any]:
    """One step down: a key, `*` for all values, or `a=b,c=d` for the rows that have these."""
    if word == "*":
        return list(node.values()) if isinstance(node, dict) else list(node)
    if isinstance(node, list):
        wanted = dict(pair.split("=", 1) for pair in word.split(","))
        return [row for row in node if all(str(row.get(key)) == value for key, value in wanted.items())]
    return [node[word]]


def look_up(value: dict[str, Any], default: str) -> float:
    """The number that a value of the map points to; of several the least or the most, as it says."""
    found = [result(value.get("result", default))]
    for word in value["at"].split("/"):
        found = [below for node in found for below in step(node, word)]
    take = {"min": min, "max": max}.get(value.get("take", ""))
    assert take is not None or len(found) == 1, f"{value} finds {len(found)} values; wanted one, or take = min or max"
    return float(take(found) if take else found[0]) * value.get("times", 1.0)


def filled(entry: dict[str, Any]) -> str:
    """The sentence as the results have it."""
    shown = [format(look_up(value, entry.get("result", "")), value["show"]) for value in entry["values"]]
    assert entry["text"].count("{}") == len(shown), f"{entry['text']!r} has other places than values"
    return " ".join(entry["text"].format(*shown).split())


def blocks(name: str) -> list[list[str]]:
    """The fenced blocks of a page, line by line."""
    parts = re.split(r"^```.*$", (ROOT / name).read_text(), flags=re.MULTILINE)
    return [part.strip("\n").splitlines() for part in parts[1::2]]


def block_of(entry: dict[str, Any]) -> list[str]:
    (found,) = [lines for lines in blocks(entry["page"]) if lines and lines[0].startswith(entry["begins"])]
    return found


def spans(name: str) -> list[tuple[int, int]]:
    """Where the page says something that is mapped, or listed as no measurement."""
    of_page = [entry for kind in ("figure", "not_measured") for entry in FIGURES.get(kind, []) if entry["page"] == name]
    texts = [filled(entry) if "values" in entry else " ".join(entry["text"].split()) for entry in of_page]
    texts += [" ".join("\n".join(block_of(e)).split()) for e in FIGURES.get("output", []) if e["page"] == name]
    return [(at.start(), at.end()) for text in texts for at in re.finditer(re.escape(text), page(name))]


@pytest.mark.parametrize("entry", FIGURES["figure"], ids=lambda entry: entry["text"][:50])
def test_a_sentence_says_what_its_result_says(entry: dict[str, Any]) -> None:
    assert filled(entry) in page(entry["page"])


@pytest.mark.parametrize("entry", FIGURES["not_measured"], ids=lambda entry: entry["text"][:50])
def test_what_is_no_measurement_is_still_there_and_says_why(entry: dict[str, Any]) -> None:
    assert " ".join(entry["text"].split()) in page(entry["page"])
    assert entry["why"]


@pytest.mark.parametrize("entry", FIGURES.get("output", []), ids=lambda entry: entry["begins"][:50])
def test_a_block_shows_lines_that_were_printed(entry: dict[str, Any]) -> None:
    """In order, some left out; `…` stands for anything, and lines of the shell begin with a dollar."""
    if "pending" in entry:
        pytest.skip(entry["pending"])
    found = result(entry["result"])
    assert found["summary"]["exit_status"] == 0
    printed = iter([" ".join(row["line"].split()) for row in found["rows"]])
    for line in block_of(entry):
        wanted = " ".join(line.split())
        if wanted.startswith("$ "):
            assert wanted.removeprefix("$ ") == found["summary"]["printed_by"]
        elif wanted not in ("", "…"):
            pattern = re.compile(fnmatch.translate(re.sub(r"([\[\]?*])", r"[\1]", wanted).replace("…", "*")))
            assert any(pattern.match(have) for have in printed), f"{line!r} was not printed, or not in this order"


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_is_mapped_or_listed(name: str) -> None:
    known = spans(name)
    text = page(name)
    loose = [
        text[max(0, at.start() - 60) : at.end() + 20]
        for at in FIGURE.finditer(text)
        if not any(start <= at.start() and at.end() <= stop for start, stop in known)
    ]
    assert not loose, f"{name} states figures that docs/figures.toml knows nothing of:\n" + "\n".join(loose)


def test_every_page_is_held_or_says_why_not() -> None:
    written = {"README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))}
    assert written == {*PAGES, *FIGURES["not_held"]}
    assert not set(PAGES) & set(FIGURES["not_held"])
    assert all(FIGURES["not_held"].values())


def test_every_entry_is_of_a_page_that_is_held() -> None:
    entries = [entry for kind in ("figure", "not_measured", "output") for entry in FIGURES[kind]]
    assert {entry["page"] for entry in entries} <= set(PAGES)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_a_result_says_where_when_and_how(path: Path) -> None:
    found = result(path.name)
    assert found["command"].startswith("python -m benchmarks.")
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date_utc"])
    assert found["machine"]["cpu"] and found["machine"]["cores"] and found["machine"]["conditions"]
    assert found["rows"] and found["summary"]
    assert str(ROOT) not in path.read_text()


def test_every_committed_result_is_quoted() -> None:
    """A result that no page names is not kept: nobody would notice that it is old."""
    entries = [*FIGURES["figure"], *FIGURES.get("output", [])]
    named = {entry["result"] for entry in entries if "result" in entry}
    named |= {value["result"] for entry in FIGURES["figure"] for value in entry["values"] if "result" in value}
    named |= set(FIGURES.get("linked", []))
    assert {path.name for path in RESULTS.glob("*.json")} == named


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("1.2–1.4 / 5.4–6.1 %", ["5.4–6.1 %"]),
        ("takes 0.6 s, 3 ms and 12 CPU s", ["0.6 s", "3 ms", "12 CPU s"]),
        ("2.0 × as fast on 4 × 8 V100", ["2.0 ×"]),
        ("−14.1% off", ["−14.1%"]),
        ("python 3.11 on 16 cores", []),
        ("from 23 to 66 s", ["23 to 66 s"]),
    ],
)
def test_what_counts_as_a_figure(text: str, figures: list[str]) -> None:
    assert FIGURE.findall(text) == figures
