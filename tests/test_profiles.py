"""The cost database under real faults: killed writers, damaged files, many processes at once (faults 8-11, 20)."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import pickle
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dejavu.foundation.hashing import stable_hash
from dejavu.profiles import (
    DIRECTIONS,
    KINDS,
    SCHEMA,
    Measurement,
    ProfileDatabase,
    ProfileError,
    host_fingerprint,
)
from dejavu.profiles.kernel import Kernel
from dejavu.profiles.measurement import FIGURES, SCHEMA_VERSION
from tests.conftest import spread
from tests.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
LAYER = Measurement(
    kind="layer",
    subject="5f1c",
    name="block.0",
    device_type="T4",
    dtype="float16",
    direction="forward",
    microbatch_size=4,
    flops=1e9,
    seconds=1e-3,
    seconds_low=0.9e-3,
    seconds_high=1.2e-3,
    repeats=10,
    host_fingerprint="00ff",
    torch_version="2.12.0",
    source="measured",
    how="torch.utils.benchmark, median",
    measured_at=datetime(2026, 1, 1, tzinfo=UTC),
)


def row(number: int, **changes: object) -> Measurement:
    return replace(LAYER, subject=stable_hash(number), name=f"block.{number}", **changes)  # type: ignore[arg-type]


def names(database: ProfileDatabase, **filters: object) -> list[str]:
    return sorted(database.read(**filters)["name"].to_pylist())


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.parquet"))


@pytest.fixture
def database(tmp_path: Path) -> ProfileDatabase:
    return ProfileDatabase(tmp_path / "profiles_db")


@pytest.fixture
def three(database: ProfileDatabase) -> ProfileDatabase:
    """Three rows in three files: on a T4, a V100 and an A100."""
    for number, device_type in enumerate(("T4", "V100", "A100")):
        database.append([row(number, device_type=device_type)])
    return database


# Rows


def test_a_missing_folder_is_an_empty_database(database):
    assert database.read().num_rows == 0
    assert (database.latest(), database.check(), database.sweep(), database.append([])) == ([], [], [], 0)
    database.compact()
    assert not database.path.exists()


def test_the_record_and_the_schema_have_the_same_columns():
    assert [field.name for field in fields(Measurement)] == SCHEMA.names


def test_the_readme_lists_every_column_with_its_type():
    readme = (ROOT / "profiles_db" / "README.md").read_text()
    for field in SCHEMA:
        type_ = str(field.type).replace("[us, tz=UTC]", "")
        assert f"| `{field.name}` | {type_}{' or null' if field.nullable else ''} |" in readme
    said = {line.split(" | ")[0][2:]: line for line in readme.splitlines() if line.startswith("| ")}
    kernel = Kernel(family="copy", name="copy", dtype="float32")
    assert [kind for kind in KINDS if kind not in said["`kind`"] or kind not in said] == []
    assert [direction for direction in DIRECTIONS if direction not in said["`direction`"]] == []
    assert [name for name in vars(kernel) if name not in said["operator"]] == []
    assert f"`dejavu_schema_version` (now {SCHEMA_VERSION};" in readme


def test_filters_take_a_value_a_list_and_none(three):
    three.append([row(3, device_type="T4", peer_device_type="V100", kind="transfer")])
    assert names(three, device_type="T4") == ["block.0", "block.3"]
    assert names(three, device_type=["T4", "A100"], kind="layer") == ["block.0", "block.2"]
    assert names(three, peer_device_type=None) == ["block.0", "block.1", "block.2"]
    assert names(three, peer_device_type=[None, "V100"], device_type="T4") == ["block.0", "block.3"]
    assert names(three, device_type=[]) == []


@pytest.mark.parametrize(("filters", "message"), [({"device": "T4"}, "no column 'device'"), ({"flops": "x"}, "double")])
def test_a_wrong_filter_is_an_error(three, filters, message):
    with pytest.raises(ProfileError, match=message):
        three.read(**filters)


def test_the_same_row_is_written_once(database):
    rows = [row(0), row(1), row(0)]
    assert [database.append(rows), database.append(rows), database.append([*rows, row(2)])] == [2, 0, 1]
    assert len(data_files(database.path)) == 2
    assert database.append([replace(row(0), seconds_low=None)]) == 1  # a null is a difference


def test_a_snapshot_answers_as_it_first_did_and_its_copies_ask_again(three):
    """Whoever appends meanwhile: one planning's prices come from one state."""
    snapshot = three.snapshot()
    questions = [{}, {"device_type": ["T4", "V100"]}, {"device_type": "V100", "peer_device_type": None}]
    before = [(snapshot.read(**one), snapshot.latest(**one), snapshot.history(**one)) for one in questions]
    assert [table.num_rows for table, _, _ in before] == [three.read(**one).num_rows for one in questions]
    three.append([row(9, device_type="V100"), row(10, device_type="T4")])
    for one, (table, newest, history) in zip(questions, before, strict=True):
        assert snapshot.read(**one).equals(table) and table.num_rows < three.read(**one).num_rows
        assert (snapshot.latest(**one), snapshot.history(**one)) == (newest, history)
    copied = pickle.loads(pickle.dumps(snapshot))
    assert all(copied.latest(**one) == three.latest(**one) != snapshot.latest(**one) for one in questions)
    snapshot.latest().clear()  # a caller's own list
    assert snapshot.latest() == before[0][1] and snapshot.snapshot() is snapshot


def test_latest_is_the_newest_of_each_thing(database):
    hour = timedelta(hours=1)
    old, new = row(0, seconds=1.1e-3), row(0, measured_at=LAYER.measured_at + hour)
    other = row(0, device_type="V100", measured_at=LAYER.measured_at - hour)
    database.append([new, other])
    database.append([old])
    assert sorted(database.latest(), key=lambda m: m.device_type) == [new, other]
    database.compact()
    assert database.latest(device_type="T4") == [new]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": float("nan")}, r"row 1 \(layer 'block.1' on T4\): seconds is nan, expected a finite"),
        ({"seconds": -1.0}, "seconds is -1.0"),
        ({"seconds": 0.0}, "seconds is 0.0"),
        ({"seconds": float("inf")}, "seconds is inf"),
        ({"seconds": None}, "seconds is missing"),
        ({"seconds": "1 ms"}, r"row 1 \('block.1'\): seconds is '1 ms', expected double"),
        ({"seconds_low": 2e-3}, "seconds_low is 0.002, expected no more than seconds"),
        ({"seconds_high": 1e-6}, "seconds_high is 1e-06, expected no less than seconds"),
        ({"flops": float("nan")}, "flops is nan"),
        ({"peak_bytes": -1}, "peak_bytes is -1"),
        ({"repeats": 0}, "repeats is 0"),
        ({"kind": "layr"}, "kind is 'layr', expected one of layer, operator"),
        ({"direction": "sideways"}, "direction is 'sideways'"),
        ({"device_type": ""}, "device_type is ''"),
        ({"extra": "{"}, "expected a JSON object"),
        ({"measured_at": datetime(2026, 1, 1)}, "expected a datetime with a time zone"),
        ({"microbatch_size": 2**63}, "microbatch_size is 9223372036854775808, expected int64"),
    ],
)
def test_a_bad_row_is_refused_by_name_and_nothing_is_written(database, changes, message):
    bad = row(1, **changes)
    with pytest.raises(ProfileError, match=message):
        database.append([row(0), bad])
    with pytest.raises(ProfileError):
        bad.check()
    assert database.read().num_rows == 0


def test_check_flags_a_thousandfold_difference(database):
    database.append([row(0), row(0, seconds=1.01, seconds_high=None), row(1), row(1, seconds=1.1e-3)])
    (finding,) = database.check()
    assert "'block.0' on T4 was measured as both 0.001 s and 1.01 s" in finding.what


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
named = text.filter(lambda name: name not in FIGURES)  # which have bounds of their own
count = st.integers(1, 2**63 - 1)
# Times that neither physics nor the other sizes of a message deny; no host takes so long for a launch.
possible = st.floats(min_value=1e-2, max_value=1e-1)
size = st.integers(0, 2**30)
zones = st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))])
measurements = st.builds(
    Measurement,
    kind=st.sampled_from([kind for kind in KINDS if kind != "launch"]),
    direction=st.none() | st.sampled_from(DIRECTIONS),
    **dict.fromkeys(("subject", "name", "device_type", "dtype"), text),
    **dict.fromkeys(("host_fingerprint", "torch_version", "source", "how"), text),
    **dict.fromkeys(("microbatch_size", "num_ranks", "peak_bytes"), st.none() | count),
    size_bytes=st.none() | size,
    **dict.fromkeys(("tensor_parallel", "repeats"), count),
    peer_device_type=st.none() | text,
    flops=st.none() | st.floats(min_value=0, max_value=1e9),
    seconds=possible,
    seconds_low=st.none(),
    seconds_high=st.none(),
    measured_at=st.datetimes(datetime(1970, 1, 2), datetime(2200, 1, 1), timezones=zones),
    extra=st.none() | st.dictionaries(named, st.integers()).map(json.dumps),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(measurements, max_size=6, unique=True))
def test_every_row_comes_back_as_it_was(tmp_path_factory, rows):
    database = ProfileDatabase(tmp_path_factory.mktemp("round_trip"))
    half = len(rows) // 2
    assert database.append(rows[:half]) + database.append(rows) == len(rows)
    for _ in range(2):
        back = [Measurement(**values) for values in database.read().to_pylist()]
        assert set(back) == set(rows)
        assert set(database.latest()) <= set(rows)
        database.compact()
    assert database.append(rows) == 0


# Files


def test_compaction_keeps_the_rows_and_the_sweep_removes_the_old_files(three):
    before = three.read().sort_by("name")
    three.compact()
    assert three.read().sort_by("name").equals(before)
    assert len(data_files(three.path)) == 4
    assert three.sweep() == []  # readers may still hold the old manifest
    assert three.check() == []
    assert len(replace(three, grace_seconds=0).sweep()) == 3
    assert three.read().sort_by("name").equals(before)
    kept = data_files(three.path)
    three.compact()
    assert data_files(three.path) == kept


def test_the_grace_period_starts_at_the_compaction(three):
    for path in data_files(three.path):
        os.utime(path, (0, 0))
    three.compact()
    assert three.sweep() == []


def test_many_small_appends_stay_few_files(database, monkeypatch):
    monkeypatch.setattr("dejavu.profiles.database._MOST_SMALL_FILES", 3)
    tidy = replace(database, grace_seconds=0)
    for number in range(10):
        tidy.append([row(number)])
        assert len(data_files(database.path)) <= 3
    assert len(names(database)) == 10
    assert tidy.append([row(number) for number in range(10)]) == 0


def test_a_query_reads_only_its_row_groups(database):
    num_rows = 1_000_000
    number = np.arange(num_rows)
    columns = {
        field.name: pa.nulls(num_rows, field.type)
        if field.nullable
        else pa.array(np.broadcast_to(getattr(LAYER, field.name), num_rows), field.type)
        for field in SCHEMA
        if field.name not in ("kind", "device_type", "seconds", "measured_at")
    }
    columns["kind"] = pa.array(np.array(KINDS[:4])[number % 4])
    columns["device_type"] = pa.array(np.char.add("device-", (number // 4 % 10).astype(str)))
    columns["seconds"] = pa.array(1e-6 * (number + 1))
    columns["measured_at"] = pa.nulls(num_rows, pa.int64()).fill_null(0).cast(SCHEMA.field("measured_at").type)
    assert database.append_table(pa.table([columns[name] for name in SCHEMA.names], names=SCHEMA.names)) == num_rows

    assert database.read(device_type="device-3", kind=["layer"]).num_rows == num_rows // 40
    wanted = (ds.field("device_type") == "device-3") & ds.field("kind").isin(["layer"])
    (fragment,) = ds.dataset(data_files(database.path)).get_fragments(wanted)
    assert fragment.metadata.num_row_groups > 20
    assert len(fragment.split_by_row_group(wanted)) <= 3


@pytest.mark.parametrize("damage", ["truncated", "empty", "altered", "missing"])
@pytest.mark.parametrize("then", ["read", "append"])
def test_a_damaged_file_is_named_and_set_aside_and_the_rest_is_used(three, damage, then, caplog):
    victim = next(path for path in data_files(three.path) if "V100" in pq.read_table(path)["device_type"].to_pylist())
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        half = len(content) // 2
        altered = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        victim.write_bytes({"truncated": content[:half], "empty": b"", "altered": altered}[damage])
    (finding,) = three.check()
    assert finding.path == victim
    assert "on V100: `dejavu profile`" in finding.remedy

    with caplog.at_level(logging.WARNING, "dejavu.profiles"):
        expected = ["block.0", "block.2"]
        if then == "append":
            three.append([row(9, device_type="T4")])
            expected.append("block.9")
        assert names(three) == expected
    (message,) = [one.getMessage() for one in caplog.records if one.name.startswith("dejavu")]
    assert str(victim) in message
    assert "on V100: `dejavu profile`" in message
    assert not victim.exists()
    assert (three.path / "set_aside" / victim.name).exists() == (damage != "missing")
    assert three.append([row(1, device_type="V100")]) == 1  # measured again
    assert len(names(three)) == len(expected) + 1


def test_a_reader_without_the_right_to_write_still_reads(three, caplog):
    victim = data_files(three.path)[0]
    victim.write_bytes(b"")
    (three.path / ".lock").unlink(missing_ok=True)
    (three.path / ".lock").mkdir()  # root ignores permissions; a lock that cannot be opened stands for them
    assert len(names(three)) == 2
    assert "not set aside" in caplog.text
    with pytest.raises(ProfileError, match="cannot be written"):
        three.append([row(9)])


LISTED = {"name": f"{'a' * 16}.parquet", "sha256": "a" * 64, "rows": 1, "bytes": 1, "device_types": ["T4"]}
NO_VALUES: list[object] = [None, [], {}, "x", [3], math.inf, -math.inf, math.nan]
DAMAGED = (
    *(b"", b"[]", b'{"schema_version": 1}', b'{"schema_version": 1, "files": [{"na', b"[" * 100_000),
    *(json.dumps({"schema_version": value, "files": []}).encode() for value in NO_VALUES),
    *(json.dumps({"schema_version": 1, "files": value}).encode() for value in NO_VALUES if value != []),
    *(
        json.dumps({"schema_version": 1, "files": [LISTED | {key: value}]}).encode()
        for key in LISTED
        for value in NO_VALUES
        if (key, value) != ("device_types", [])
    ),
)


@pytest.mark.parametrize("content", spread(DAMAGED, 15), ids=range(len(DAMAGED)))
def test_a_damaged_manifest_is_made_again(three, content, caplog):
    three.compact()  # so that old files, which must not count twice, are still there
    (three.path / "manifest.json").write_bytes(content)
    assert three.check()[0].path.name == "manifest.json"
    assert names(three) == ["block.0", "block.1", "block.2"]
    assert "manifest.json is damaged" in caplog.text
    assert (three.path / "set_aside" / "manifest.json").read_bytes() == content
    assert three.append([row(0, device_type="T4")]) == 0


def with_listed_file(path: Path, table: pa.Table) -> None:
    """Puts a whole file into the database as some other program would: listed, with the right hash."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    payload = sink.getvalue().to_pybytes()
    sha256 = hashlib.sha256(payload).hexdigest()
    name = f"{sha256[:16]}.parquet"
    (path / name).write_bytes(payload)
    manifest = json.loads((path / "manifest.json").read_text())
    line = {"name": name, "rows": len(table), "bytes": len(payload), "sha256": sha256, "device_types": ["T4"]}
    manifest["files"].append(line)
    (path / "manifest.json").write_text(json.dumps(manifest))


def in_milliseconds(table: pa.Table) -> pa.Table:
    return table.rename_columns(["milliseconds" if name == "seconds" else name for name in table.column_names])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (in_milliseconds, "expected columns seconds: double; found milliseconds: double"),
        (lambda table: table.drop_columns(["repeats"]), "expected columns repeats: int64; found -"),
        (lambda table: table.set_column(0, "kind", pa.array([1])), "expected columns kind: string; found kind: int64"),
        (
            lambda table: table.replace_schema_metadata({"dejavu_schema_version": "3"}),
            "expected dejavu_schema_version 2 or older, found 3",
        ),
    ],
)
def test_a_file_of_another_schema_or_unit_or_version_is_refused(three, change, message):
    table = change(three.read(device_type="T4"))
    with pytest.raises(ProfileError, match=message):
        three.append_table(table)
    assert three.read().num_rows == 3
    with_listed_file(three.path, table)
    for refused in (three.read, three.compact, lambda: three.append([row(9)])):
        with pytest.raises(ProfileError, match=message):
            refused()
    (finding,) = three.check()
    assert message in finding.what


def test_a_file_without_our_version_is_refused(three):
    with_listed_file(three.path, three.read(device_type="T4").replace_schema_metadata(None))
    with pytest.raises(ProfileError, match="expected dejavu_schema_version 2 or older, found none"):
        three.read()


def test_rows_of_the_first_version_are_read_compacted_and_held_equal(three):
    """Before there was `disturbed_share`: such a file stays readable, and its rows are known when appended again."""
    older = three.read(device_type="T4").drop_columns(["disturbed_share"])
    older = older.set_column(older.schema.get_field_index("subject"), "subject", pa.array(["older"] * len(older)))
    older = older.replace_schema_metadata({"dejavu_schema_version": "1"})
    with_listed_file(three.path, older)
    (found,) = three.latest(subject="older")
    assert found == replace(row(0), subject="older", disturbed_share=None) and not found.is_disturbed
    assert three.append([found]) == 0 and three.append_table(older) == 0
    three.compact()
    assert three.latest(subject="older") == [found] and three.read().num_rows == 4


def test_a_column_that_a_version_has_is_not_left_out(three):
    with_listed_file(three.path, three.read(device_type="T4").drop_columns(["disturbed_share"]))
    with pytest.raises(ProfileError, match="expected columns disturbed_share: double; found -"):
        three.read()


SHARES = st.sampled_from([None, 0.0, 0.3, 0.5, 0.6, 1.0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SHARES, st.integers(0, 9)), min_size=1, max_size=8))
def test_a_disturbed_row_never_overrules_a_quiet_one(history):
    with tempfile.TemporaryDirectory() as folder:
        database = ProfileDatabase(Path(folder))
        rows = [
            row(0, seconds=1e-3 * (n + 1), seconds_low=None, seconds_high=None, disturbed_share=share,
                measured_at=LAYER.measured_at + timedelta(days=day))
            for n, (share, day) in enumerate(history)
        ]  # fmt: skip
        database.append(rows)
        (found,) = database.latest()
        candidates = [one for one in rows if not one.is_disturbed] or rows
        assert found.measured_at == max(one.measured_at for one in candidates)
        assert found in candidates


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_share_that_is_none_is_refused(database, share):
    with pytest.raises(ProfileError, match=r"disturbed_share is .* expected a share from 0 to 1"):
        database.append([row(0, disturbed_share=share)])


def test_a_newer_manifest_is_refused(three):
    (three.path / "manifest.json").write_text('{"schema_version": 3, "files": []}')
    for refused in (three.read, three.compact, three.sweep, lambda: three.append([row(9)])):
        with pytest.raises(ProfileError, match="expected schema version 2 or older, found 3"):
            refused()
    assert len(three.check()) == 1
    assert len(data_files(three.path)) == 3


@pytest.mark.parametrize(
    "use",
    [
        lambda database: database.read(),
        lambda database: database.latest(kind="layer"),
        lambda database: database.append([row(1)]),
        lambda database: database.snapshot().history(),
        lambda database: database.check(),
    ],
    ids=["read", "latest", "append", "history", "check"],
)
@pytest.mark.parametrize("spoil", ["a file", "below a file", "a folder in the manifest's place"])
def test_a_path_that_can_be_no_database_is_an_error_with_its_name(use, spoil, tmp_path):
    file = tmp_path / "w.yaml"
    file.write_text("model: gpt")
    path = {"a file": file, "below a file": file / "db"}.get(spoil, tmp_path / "db")
    if spoil == "a folder in the manifest's place":
        (path / "manifest.json").mkdir(parents=True)
    try:
        found = use(ProfileDatabase(path))
    except ProfileError as error:
        found = error
    assert "cost database cannot be" in str(found) and str(path) in str(found)
    assert "newer version" not in str(found)


def test_strangers_in_the_folder_are_left_alone_and_reported(three):
    (three.path / "mine.parquet").write_bytes(b"?")
    assert len(names(three)) == 3
    assert replace(three, grace_seconds=0).sweep() == []
    assert [finding.path.name for finding in three.check()] == ["mine.parquet"]


def test_without_a_manifest_the_sweep_removes_no_data(three):
    (three.path / "manifest.json").unlink()
    (three.path / ".tmp-1").touch()
    assert [path.name for path in replace(three, grace_seconds=0).sweep()] == [".tmp-1"]


def test_a_held_lock_is_an_error_with_its_path(three):
    with FileLock(three.path / ".lock"):
        assert three.read().num_rows == 3
        with pytest.raises(ProfileError, match=r"\.lock: another process has held it for 0\.1 s"):
            replace(three, lock_timeout_seconds=0.1).append([row(9)])


# Processes


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    preamble = "import sys; sys.path[:0] = ['tests', '.']\nfrom test_profiles import *\n"
    command = [sys.executable, "-c", preamble + textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def output_of(process: subprocess.Popen[str]) -> str:
    try:
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output


KILLED_WRITES = """
    import shutil, signal
    from dejavu.profiles import manifest

    template, folder, action = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

    def act(path):
        database = ProfileDatabase(path)
        if action == "append": database.append([row(8), row(9)])
        if action == "compact": database.compact()
        if action == "set aside": database.read()

    steps = []
    manifest._step = steps.append
    act(shutil.copytree(template, folder / "whole"))
    for number, step in enumerate(steps):
        path = shutil.copytree(template, folder / f"{number} {step}")
        child = os.fork()
        if child == 0:
            count = iter(range(len(steps)))
            manifest._step = lambda name: os.kill(os.getpid(), signal.SIGKILL) if next(count) == number else None
            act(path)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, step
        print(path.name)
"""


@pytest.mark.parametrize("action", ["append", "compact", "set aside"])
def test_a_writer_killed_at_any_step_leaves_the_old_state_or_the_new_one(three, tmp_path, action, caplog):
    if action == "set aside":
        data_files(three.path)[0].write_bytes(b"")
    killed = output_of(start(KILLED_WRITES, three.path, tmp_path, action)).splitlines()
    assert len(killed) == {"append": 10, "compact": 10, "set aside": 5}[action]
    new = names(ProfileDatabase(tmp_path / "whole"))
    old = names(three) if action == "set aside" else ["block.0", "block.1", "block.2"]
    seen = set()
    for name in killed:
        database = ProfileDatabase(tmp_path / name, lock_timeout_seconds=5, grace_seconds=0)
        assert names(database) in (old, new), name
        seen.add(tuple(names(database)))
        database.append([row(8), row(9)])  # once more, as a user would
        complete = sorted({*old, "block.8", "block.9"})
        assert names(database) == complete
        database.compact()
        database.sweep()
        assert names(database) == complete
        left = [path.name for path in database.path.iterdir() if path.suffix != ".json" and path.is_file()]
        assert [file for file in left if file != ".lock"] == [path.name for path in data_files(database.path)]
        assert len(data_files(database.path)) == 1
    assert seen == {tuple(old), tuple(new)}
    assert action == "set aside" or not caplog.records  # nothing was damaged and mended: there was no damage


def test_a_disk_that_refuses_the_bytes_leaves_the_old_state(three):
    program = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            ProfileDatabase(sys.argv[1]).append([row(9)])
        except ProfileError as error:
            print(error)
    """
    message = output_of(start(program, three.path))
    assert "bytes could not be written: [Errno 27] File too large" in message
    assert str(three.path) in message
    assert names(three) == ["block.0", "block.1", "block.2"]
    assert not list(three.path.glob(".tmp-*"))


WRITER = """
    database = ProfileDatabase(sys.argv[1], grace_seconds=0)
    writer = int(sys.argv[2])
    for turn in range(6):
        own = [row(100 * writer + 10 * turn + number) for number in range(3)]
        assert database.append([*own, row(-1 - turn)]) in (3, 4)   # the last row, every writer has
        if writer == 0:
            database.compact()
            database.sweep()
"""
READER = """
    database = ProfileDatabase(sys.argv[1])
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    rows = reads = 0
    while not Path(sys.argv[2]).exists() or not reads:
        found = names(database)
        assert len(found) == len(set(found)) and len(found) >= rows, found
        rows, reads = len(found), reads + 1
    assert rows == 4 * 6 * 3 + 6, rows
"""


def test_writers_and_readers_at_once_lose_and_repeat_nothing(database, tmp_path):
    done = tmp_path / "done"
    readers = [start(READER, database.path, done) for _ in range(2)]
    writers = [start(WRITER, database.path, writer) for writer in range(4)]
    try:
        for writer in writers:
            output_of(writer)
    finally:
        done.touch()
        warnings = [output_of(reader) for reader in readers]
    assert warnings == ["", ""]
    assert len(names(database)) == 4 * 6 * 3 + 6
    assert database.check() == []
    assert not (database.path / "set_aside").exists()


# Names


def test_stable_hash_names_a_value_not_its_spelling():
    assert stable_hash({"a": 1, "b": [1.5, None]}) == stable_hash({"b": (1.5, None), "a": 1})
    assert stable_hash({"a": 1}) == "015abd7f5cc57a2d"
    assert stable_hash({"a": 1}) != stable_hash({"a": 2})
    with pytest.raises(ValueError):
        stable_hash(float("nan"))


def test_the_host_has_one_name_and_needs_no_torch():
    program = "from dejavu.profiles import host_fingerprint\nprint(host_fingerprint(), 'torch' in sys.modules)"
    assert output_of(start(program)).split() == [host_fingerprint(), "False"]


def test_shipped_rows_are_read_and_never_written(tmp_path: Path) -> None:
    own, shipped = ProfileDatabase(tmp_path / "db"), ProfileDatabase(tmp_path / "db" / "shipped")
    old = row(1, seconds=1.0, seconds_low=None, seconds_high=None, measured_at=datetime(2025, 1, 1, tzinfo=UTC))
    new = replace(old, seconds=2.0, measured_at=datetime(2026, 1, 1, tzinfo=UTC))
    shipped.append([old])
    before = sorted((path.name, path.stat().st_mtime_ns) for path in shipped.path.iterdir())
    assert [found.seconds for found in own.latest()] == [1.0]
    own.append([new])
    own.compact()
    own.sweep()
    assert own.read().num_rows == 2 and [found.seconds for found in own.latest()] == [2.0]
    assert sorted((path.name, path.stat().st_mtime_ns) for path in shipped.path.iterdir()) == before
    assert own.check() == []
    assert replace(own, with_shipped=False).read().num_rows == 1
