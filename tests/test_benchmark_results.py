"""Where a benchmark's JSON cannot be written, that is said before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from benchmarks._report import report, report_table


def never() -> None:
    raise AssertionError("the work began")


@pytest.mark.parametrize("place", ["", "file/result.json", "file/deeper/result.json"])
def test_a_place_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(typer.Exit) as ended:
        report_table(never, tmp_path / place)  # type: ignore[arg-type]
    assert ended.value.exit_code == 2
    assert str(tmp_path / place) in capsys.readouterr().err


@pytest.mark.parametrize("place", ["result.json", "new/deep/result.json"])
def test_the_file_says_what_the_table_says(tmp_path: Path, place: str) -> None:
    rows = [{"way": "ours", "mape_percent": 1.23456789, "rows": 3}, {"way": "theirs", "mape_percent": None}]
    for _ in range(2):  # a file that is there is replaced
        report_table(lambda: ("title", rows, {"mape_percent": 1.23456789}), tmp_path / place)
    found = json.loads((tmp_path / place).read_text())
    assert found["rows"] == rows and found["summary"] == {"mape_percent": 1.23456789}


@pytest.mark.parametrize(
    "name", ["lab [a100]", "[/b] of lab", "a [bold]plan[/bold]", "[red]", "back\\slash\\", "[[x]]"]
)
def test_names_with_brackets_are_shown_as_they_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    report(f"about {name}", [{name: name, "rows": 1}], {name: f"in {name}", "all": [name]}, None)
    shown = capsys.readouterr().out
    assert shown.count(name) == 5 + (repr(name)[1:-1] == name)
