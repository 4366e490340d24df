"""Shared pieces: a small workload, devices of this machine, an environment that touches nothing of the user's."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from dejavu.binding.binding import Binding, Placement
from dejavu.cluster import Device
from dejavu.plans import Plan, Stage, StageConfiguration
from dejavu.workload import TrialSettings, Workload

os.environ.update(
    {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    }
)
os.environ["DEJAVU_TESTED_BY"] = str(os.getpid())  # on every process that these tests start
for name in ("MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
    os.environ.pop(name, None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background: what tests start would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def pytest_configure(config: pytest.Config) -> None:
    """What MLflow, torch and Prefect leave among the temporary files goes when the tests end; `tmp_path` stays."""
    if hasattr(config, "workerinput"):
        return  # it has the folder of the process that started it
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.TemporaryDirectory(prefix="dejavu-tests-", ignore_cleanup_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name
    config.add_cleanup(folder.cleanup)


def _ignored() -> set[signal.Signals]:
    return {number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN}


@pytest.fixture(autouse=True)
def no_signal_is_left_ignored(request: pytest.FixtureRequest) -> Iterator[None]:
    """What later tests start would ignore it too, and a shell can't trap what it was started to ignore.

    Those that start servers or ranks may leave one; it is put back.
    """
    before = _ignored()
    yield
    left = _ignored() - before
    for number in left:
        signal.signal(number, signal.SIG_DFL)
    assert not left or request.node.get_closest_marker("integration")


settings.register_profile("dejavu", deadline=None)  # no test asserts a wall-clock time
settings.load_profile("dejavu")

TINY = Workload(  # a GPT of 5 layers that takes milliseconds a step
    model_options={"num_blocks": 3, "width": 32, "num_heads": 2},
    sequence_length=32,
    batch_size=8,
    num_microbatches=4,
    num_steps=8,
    checkpoint_every=3,
    trials=TrialSettings(count=0),
)
SHARED = Path(__file__).resolve().parents[2] / "shared"


# What takes minutes is begun first: begun last, it runs while the other cores have nothing left to do. Of these the
# later ones start from what the first has measured; see `project` in tests/test_flow.py.
LONGEST = ("test_flow", "test_pipeline", "test_migration", "test_profiler", "test_launcher", "test_up")
LONGEST = (*LONGEST, "test_interrupted", "test_hosts", "test_trials")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """What all test files have imported stays to the end: collections of garbage need not go through it each time."""
    gc.collect()
    gc.freeze()


# In a line of its own: all tests of the file.
ALL_INTEGRATION = re.compile(r"^pytestmark = .*pytest\.mark\.integration\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that have none of the tests that the Makefile asks for: importing all of them takes a while."""
    if collection_path.suffix != ".py":
        return None
    asked, text = config.getoption("markexpr"), collection_path.read_text()
    if asked.startswith("integration and "):
        return None if "pytest.mark.integration" in text else True
    return True if asked.endswith(" not integration") and ALL_INTEGRATION.search(text) else None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real measurements, beside the project; tests that need it skip where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"there is no {SHARED / 'data'}")
    return SHARED / "data"


@pytest.fixture
def tiny() -> Workload:
    return TINY.model_copy(update={"trials": TrialSettings(count=4, steps=3)})


def draws(few: Iterable[int], others: Iterable[int], name: str = "seeds") -> pytest.MarkDecorator:
    """A campaign of random problems: a few in every run of the tests, the others in `make slow`."""
    values = [tuple(few), pytest.param(tuple(others), marks=pytest.mark.slow)]
    return pytest.mark.parametrize(name, values, ids=["few", "others"])


def some(values: Iterable[Any], often: Iterable[Any]) -> list[Any]:
    """Values of a parameter: some in every run of the tests, the others in `make slow`."""
    kept = list(often)
    return [one if one in kept else _slow(one) for one in values]


def spread(values: Iterable[Any], often: int) -> list[Any]:
    """Values of a parameter: so many of them, evenly spread, in every run of the tests, the others in `make slow`."""
    all_of = list(values)
    kept = {k * len(all_of) // often for k in range(often)}
    return [one if k in kept else _slow(one) for k, one in enumerate(all_of)]


def _slow(value: Any) -> Any:
    """A value of a parameter, perhaps one with an id, as a case of `make slow`."""
    known = value if isinstance(value, type(pytest.param())) else pytest.param(value)
    return pytest.param(*known.values, marks=(*known.marks, pytest.mark.slow), id=known.id)


def asked(session: pytest.Session, *names: str) -> set[Any]:
    """The values of these parameters that a test of this run has."""
    cases = [
        item.callspec.params
        for item in session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    return {params[name] for params in cases for name in names if name in params}


def local_binding(workload: Workload, cuts: tuple[int, ...], num_layers: int) -> Binding:
    """Stages cut there, one for each core of this machine in turn, without asking any search."""
    bounds = (0, *cuts, num_layers)
    core = StageConfiguration("core")
    stages = tuple(Stage(a, b, core) for a, b in itertools.pairwise(bounds))
    plan = Plan(stages, workload.searched_schedule, workload.num_microbatches)
    placements = tuple(
        Placement(s, 0, 0, Device(type_name="core", group="here", host="localhost", node_index=0, index=s))
        for s in range(len(stages))
    )
    return Binding(plan, placements, 0.0, 0.0)
