"""Plans priced from measured layers and links, and messages that block."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks.plans.__main__ import run
from dejavu.foundation.errors import InputError
from dejavu.measured_plans import BadPlan, MeasuredPlan, MissingProfileError, price_plan, read_folder
from dejavu.measured_plans.network import Bandwidth, Link, Network
from dejavu.plans.schedule import Pass, actions
from dejavu.simulation import BlockingMessages, Sending, StageSeconds, simulate_blocking

DEVICES = ("fast", "slow", "mixed-in")
MODEL, LAYERS, HIDDEN_BYTES = "toy", 6, 1e6


def stages_of(rng: np.random.Generator, count: int) -> list[StageSeconds]:
    return [StageSeconds(*map(float, rng.uniform(0.1, 1.0, 2)), per_step_seconds=0.0) for _ in range(count)]


def messages_of(rng: np.random.Generator, count: int) -> list[BlockingMessages]:
    return [BlockingMessages(*map(float, rng.uniform(0.01, 1.0, 2))) for _ in range(count)]


# Messages that block


@pytest.mark.parametrize("sending", Sending)
@pytest.mark.parametrize("seed", range(20))
def test_a_blocked_step_runs_every_pass_once_in_torchs_order(seed: int, sending: Sending) -> None:
    rng = np.random.default_rng(seed)
    S, B = (int(rng.integers(1, high)) for high in (6, 9))
    step = simulate_blocking(stages_of(rng, S), messages_of(rng, S - 1), B, sending=sending)
    assert len(step.messages) == 2 * B * (S - 1)
    for s in range(S):
        own = [event.name for event in step.events if event.stage == s and event.name[0] in "FB"]
        assert sorted(own) == sorted(f"{letter}{m}" for letter in "FB" for m in range(B))
        if B >= S:  # torch lists no fewer
            letters = {Pass.FORWARD: "F", Pass.BACKWARD: "B"}
            assert own == [f"{letters[one.direction]}{one.microbatch}" for one in actions("1f1b", S, B)[s]]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_of_a_rank_overlaps(seed: int) -> None:
    """Under a rendezvous a rank computes, sends and receives in turn."""
    rng = np.random.default_rng(seed)
    S, B = (int(rng.integers(2, high)) for high in (6, 9))
    step = simulate_blocking(stages_of(rng, S), messages_of(rng, S - 1), B)
    for s in range(S):
        own = [event for event in (*step.events, *step.messages) if s in (event.rank, event.to_rank)]
        own.sort(key=lambda event: (event.start_seconds, event.stop_seconds))
        assert all(a.stop_seconds <= b.start_seconds + 1e-12 for a, b in pairwise(own))


@pytest.mark.parametrize("seed", range(20))
def test_more_of_anything_takes_no_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    S, B = (int(rng.integers(2, high)) for high in (6, 9))
    stages, messages = stages_of(rng, S), messages_of(rng, S - 1)
    step = simulate_blocking(stages, messages, B)
    eager = simulate_blocking(stages, messages, B, sending=Sending.EAGER)
    longer = [BlockingMessages(one.activation_seconds + 0.1, one.gradient_seconds) for one in messages]
    assert eager.step_seconds <= step.step_seconds + 1e-12
    assert step.step_seconds <= simulate_blocking(stages, longer, B).step_seconds + 1e-12
    assert step.step_seconds <= simulate_blocking(stages, messages, B + 1).step_seconds + 1e-12
    busiest = max(B * (stage.forward_seconds + stage.backward_seconds) for stage in stages)
    assert busiest <= step.step_seconds + 1e-12


def test_one_microbatch_goes_there_and_back() -> None:
    stages = [StageSeconds(1.0, 2.0, 0.0), StageSeconds(3.0, 4.0, 0.0), StageSeconds(5.0, 6.0, 0.0)]
    messages = [BlockingMessages(0.1, 0.2), BlockingMessages(0.3, 0.4)]
    assert simulate_blocking(stages, messages, 1).step_seconds == pytest.approx(21.0 + 1.0)


def test_inner_stages_wait_for_four_messages_of_each_microbatch() -> None:
    """Equal stages of 1 + 2 s, messages of 0.5 s: in the middle of a long step a microbatch takes 3 + 4 × 0.5."""
    stages, messages = [StageSeconds(1.0, 2.0, 0.0)] * 4, [BlockingMessages(0.5, 0.5)] * 3
    few, many = (simulate_blocking(stages, messages, B).step_seconds for B in (20, 60))
    assert (many - few) / 40 == pytest.approx(5.0)


def test_stages_may_begin_their_work_of_a_step_together() -> None:
    stages = [StageSeconds(1.0, 1.0, 3.0), StageSeconds(1.0, 1.0, 0.5)]
    apart, together = (
        simulate_blocking(stages, [BlockingMessages(0.0, 0.0)], 2, is_synchronized=same) for same in (False, True)
    )
    assert together.step_seconds == max(together.passes_stop_seconds_S) + 3.0
    assert apart.stop_seconds_S == tuple(
        stop + stage.per_step_seconds for stop, stage in zip(apart.passes_stop_seconds_S, stages, strict=True)
    )


def test_what_cannot_be_simulated_is_said() -> None:
    with pytest.raises(InputError, match="2 stages, messages across 0 cuts"):
        simulate_blocking([StageSeconds(1.0, 1.0, 0.0)] * 2, [], 1)
    with pytest.raises(InputError, match="activation_seconds of messages across cut 0 is nan"):
        simulate_blocking([StageSeconds(1.0, 1.0, 0.0)] * 2, [BlockingMessages(math.nan, 0.0)], 1)


# Links


@pytest.mark.parametrize("c2", [-0.5, 0.0, 0.4])
def test_a_larger_message_takes_no_less(c2: float) -> None:
    """Also where the polynomial is negative, or falls."""
    curve = Bandwidth(c2, 2.0, 5.0, 12e9)
    times = [curve.seconds(size) for size in np.geomspace(1.0, 1e11, 60)]
    assert all(0.0 < a <= b * (1 + 1e-12) for a, b in pairwise(times))
    assert curve.seconds(12e9) >= 1.0  # its peak holds


def test_a_pair_that_was_not_measured_is_said() -> None:
    slow, fast = Bandwidth(0.0, 0.0, 1.0), Bandwidth(0.0, 0.0, 10.0)
    network = Network({Link("a", 1, "a", 1): fast, Link("b", 1, "b", 1): slow}, {("c", 2): fast})
    notes: set[str] = set()
    assert network.message_seconds(("a", "a"), (2, 2), 1e9, notes) == pytest.approx(0.2) and not notes
    assert network.message_seconds(("a", "b"), (1, 1), 1e9, notes) == pytest.approx(1.0)
    assert notes == {"no bandwidth from a to b: the slower of their own"}
    assert network.message_seconds(("c", "c"), (2, 2), 1e9, notes) == pytest.approx(0.1)  # each has its own
    assert network.message_seconds(("d", "d"), (1, 1), 1e9, notes) == pytest.approx(1.0)
    assert "no bandwidth from d to d: the slowest measured" in notes
    # Two chunks of 1/3 for each of the two others, over the ring's slowest link.
    assert network.ring_seconds("aab", 1, 3e9, set()) == pytest.approx(2 * 2 * 1.0)


# Folders of the form


def layer_rows() -> list[dict[str, Any]]:
    """A toy model on three devices: an inner layer takes 10 ms forward and 20 ms backward an example on `fast`."""
    rows = []
    for speed, device in enumerate(DEVICES, start=1):
        for degree in (1, 2):
            for layer in range(LAYERS):
                kind = {0: "embedding", LAYERS - 1: "head"}.get(layer, "transformer")
                for size in (1, 2, 4):
                    seconds = {"embedding": 0.001, "transformer": 0.010, "head": 0.005}[kind] * speed * size / degree
                    rows.append(
                        {
                            "device_type": device,
                            "model": MODEL,
                            "layer": layer,
                            "kind": kind,
                            "tensor_parallel": degree,
                            "microbatch_size": size,
                            "forward_s": seconds,
                            "backward_s": 2 * seconds,
                            "update_s": 0.004 / degree,
                            "parameter_bytes": 4e6 / degree,
                            "output_bytes_mb1": HIDDEN_BYTES,
                        }
                    )
    return rows


def network_rows(between: float = 1.0) -> list[dict[str, Any]]:
    """Every pair at so many GB/s, whatever the size; inside a node 10 GB/s."""
    curve = {"c2": 0.0, "c1": 0.0, "peak_bytes_per_s": None}
    rows = [
        {**curve, "scope": "between nodes", "from_zone": "z", "from_device": a, "from_count": count}
        | {"to_zone": "z", "to_device": b, "to_count": count, "c0": between}
        for a in DEVICES
        for b in DEVICES
        for count in (1, 2)
    ]
    inside = {**curve, "scope": "within a node", "from_zone": None, "to_zone": None, "c0": 10.0}
    return rows + [inside | {"from_device": a, "from_count": 2, "to_device": a, "to_count": 2} for a in DEVICES]


def plan_row(stages: list[list[tuple[str, int]]], cuts: list[int], **facts: Any) -> dict[str, Any]:
    """A line of plans.jsonl; a stage is its replicas' (device type, tensor-parallel degree)."""
    edges = [0, *cuts, LAYERS]
    rows = [
        {
            "first_layer": edges[s],
            "last_layer": edges[s + 1] - 1,
            "replicas": [{"device_type": d, "num_devices": t, "tensor_parallel": t} for d, t in replicas],
        }
        for s, replicas in enumerate(stages)
    ]
    basic = {"id": "plan", "site": "here", "model": MODEL, "num_layers": LAYERS, "sequence_length": 8}
    basic |= {"microbatch_size": 1, "num_microbatches": 4, "measured_s": 1.0, "sailor_s": 1.1, "doubt": None}
    return {**basic, "stages": rows, **facts}


def write_folder(
    folder: Path, plans: list[dict[str, Any]], layers: list[dict[str, Any]] | None = None, between: float = 1.0
) -> Path:
    folder.mkdir(exist_ok=True)
    pd.DataFrame(layer_rows() if layers is None else layers).to_parquet(folder / "layers.parquet")
    pd.DataFrame(network_rows(between)).to_parquet(folder / "network.parquet")
    (folder / "plans.jsonl").write_text("".join(json.dumps(plan) + "\n" for plan in plans))
    return folder


def only_plan(folder: Path) -> tuple[MeasuredPlan, Any]:
    found = read_folder(folder)
    plan = found.plans[0]
    assert isinstance(plan, MeasuredPlan)
    return plan, found


def test_the_formula_and_the_simulation_by_hand(tmp_path: Path) -> None:
    """Two stages on `fast` and `slow`, tp 1, 3 microbatches of one example; messages of 1 MB at 1 GB/s: 1 ms."""
    plan, found = only_plan(
        write_folder(tmp_path / "f", [plan_row([[("fast", 1)], [("slow", 1)]], [3], num_microbatches=3)])
    )
    price = price_plan(plan, found.layers, found.network)
    start = 256e-9  # the message's form
    message = 1e-3 + start
    first, second = 3 * (0.001 + 2 * 0.010), 3 * 2 * (2 * 0.010 + 0.005)  # forward and backward
    once = 0.004 * 3 / 4  # three of the four layers whose step was timed, no replica to reduce with
    formula = first + second + 2 * message + 2 * second + once
    assert price.formula_seconds == pytest.approx(formula)
    # The second stage is the slower one: it never waits but for its messages. Its first forward begins after the
    # first stage's and a message; each microbatch costs it both passes and two messages; the last gradient goes back.
    passes = first / 3 + message + 3 * second + 2 * message * 2 + message + 2 * first / 3
    assert price.passes_seconds == pytest.approx(passes)
    assert price.simulated_seconds == pytest.approx(passes + once)
    assert price.notes == ()


def test_replicas_make_pipelines_of_their_own(tmp_path: Path) -> None:
    """A slow replica of each stage in two pipelines is less slow than two in one: the formula sees no difference."""
    apart = plan_row([[("fast", 1), ("slow", 1)], [("slow", 1), ("fast", 1)]], [3], num_microbatches=8)
    same = plan_row([[("fast", 1), ("slow", 1)], [("fast", 1), ("slow", 1)]], [3], num_microbatches=8)
    prices = []
    for name, row in (("apart", apart), ("same", same)):
        plan, found = only_plan(write_folder(tmp_path / name, [row]))
        prices.append(price_plan(plan, found.layers, found.network))
    assert prices[0].formula_seconds == pytest.approx(prices[1].formula_seconds, rel=1e-3)
    assert prices[0].simulated_seconds < prices[1].simulated_seconds
    assert prices[0].reduction_seconds == pytest.approx(12e6 / 1e9)  # 2 × 1/2 of three layers' 4 MB


@pytest.mark.parametrize("shared", [0, 1])
def test_a_replica_of_two_pipelines_does_the_work_of_both(tmp_path: Path, shared: int) -> None:
    """Two replicas beside a stage of one: that one has 16 microbatches to do, not 8."""
    counts = [2, 2]
    counts[shared] = 1
    prices = []
    for name, numbers in (("shared", counts), ("apart", [2, 2])):
        row = plan_row([[("fast", 1)] * number for number in numbers], [3], num_microbatches=8)
        plan, found = only_plan(write_folder(tmp_path / name, [row]))
        prices.append(price_plan(plan, found.layers, found.network))
    each = 3 * (0.001 + 2 * 0.010, 2 * 0.010 + 0.005)[shared]  # forward and backward
    both, apart = prices
    assert both.passes_seconds >= 16 * each and both.formula_seconds >= 16 * each
    assert apart.passes_seconds < 16 * each and apart.notes == ()
    assert "2 pipelines of 8 microbatches, and a replica of several does theirs in turn" in both.notes[0]


def test_plans_of_other_sequences_than_the_layers_are_said(tmp_path: Path) -> None:
    """Layers say nothing of their sequences: two plans that differ in them alone have one price."""
    plans = [plan_row([[("fast", 1)]], [], id=str(length), sequence_length=length) for length in (512, 2048)]
    _, alike, _ = run(write_folder(tmp_path / "one", plans[:1] * 2))
    _, rows, _ = run(write_folder(tmp_path / "two", plans))
    assert rows[0]["simulated_s"] == rows[1]["simulated_s"] and all(row["notes"] == "" for row in alike)
    assert all("sequences of 512 and 2,048 tokens, and its layers were measured at one" in r["notes"] for r in rows)


@pytest.mark.parametrize("seed", range(12))
def test_generated_folders_are_priced(tmp_path: Path, seed: int) -> None:
    """Mixed devices and degrees, slow links, fewer microbatches than stages, rows that are missing: never a crash."""
    rng = np.random.default_rng(seed)
    plans = []
    for number in range(6):
        S, D = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        cuts = sorted(rng.choice(np.arange(1, LAYERS), S - 1, replace=False).tolist())
        stages = [[(str(rng.choice(DEVICES)), int(rng.choice([1, 2]))) for _ in range(D)] for _ in range(S)]
        size, B = int(rng.choice([1, 2, 3, 8])), int(rng.integers(1, 7))
        plans.append(plan_row(stages, cuts, id=str(number), microbatch_size=size, num_microbatches=B))
    layers = [row for row in layer_rows() if rng.random() > 0.1]
    _, rows, summary = run(write_folder(tmp_path / "f", plans, layers, between=float(rng.uniform(0.01, 1.0))))
    assert summary["rows"] == len(rows) == len(plans) and summary["not_priced"] == 0
    for row in rows:
        assert 0.0 < row["formula_s"] < math.inf and 0.0 < row["simulated_s"] < math.inf
    assert set(summary) >= {"rows", "mape_percent", "formula_mape_percent", "peer_mape_percent", "by_site"}
    assert summary["peer_mape_percent"] == pytest.approx(10.0)
    json.dumps([rows, summary], allow_nan=False)
    assert any("was not measured" in row["notes"] for row in rows)


def test_slower_links_and_more_microbatches_take_longer(tmp_path: Path) -> None:
    times = []
    for k, (between, B) in enumerate([(1.0, 2), (1.0, 4), (0.1, 4)]):
        row = plan_row([[("fast", 2)], [("slow", 1)], [("fast", 2)]], [2, 4], num_microbatches=B)
        plan, found = only_plan(write_folder(tmp_path / str(k), [row], between=between))
        times.append(price_plan(plan, found.layers, found.network).simulated_seconds)
    assert times == sorted(times) and len(set(times)) == 3


def test_a_microbatch_in_between_is_on_the_line(tmp_path: Path) -> None:
    plan, found = only_plan(write_folder(tmp_path / "f", [plan_row([[("fast", 1)]], [], microbatch_size=3)]))
    price = price_plan(plan, found.layers, found.network)
    assert price.passes_seconds == pytest.approx(4 * 3 * 3 * (0.001 + 4 * 0.010 + 0.005))
    assert price.notes == ("toy on fast tp 1 was not measured at microbatches of 3: from 2 and 4",)


def test_a_folder_without_a_plan_that_can_be_read_is_no_empty_table(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "f", [{"a": 1}])
    with pytest.raises(InputError, match=r"plans.jsonl: no line is a plan; line 1: it has no 'id'$"):
        run(folder)


def test_what_cannot_be_priced_says_why(tmp_path: Path) -> None:
    """One plan on a device of which nothing is known and one bad line leave the others as they are."""
    bad = plan_row([[("fast", 1)], [("fast", 1)]], [3], id="bad")
    bad["stages"][1]["first_layer"] = 2
    plans = [plan_row([[("fast", 1)]], [], id="good"), plan_row([[("unknown", 1)]], [], id="unknown"), bad]
    folder = write_folder(tmp_path / "f", plans)
    _, rows, summary = run(folder)
    assert [row["simulated_s"] is None for row in rows] == [False, True]
    assert "toy was not measured on unknown; it was on fast, mixed-in, slow" in rows[1]["notes"]
    assert summary["bad_lines"] == [
        "line 3: plan bad: stage 1 holds layers 2 to 5, after layer 2: layer 2 stands twice; "
        "wanted every layer once, in order"
    ]
    found = read_folder(folder)
    assert isinstance(found.plans[2], BadPlan) and isinstance(found.plans[1], MeasuredPlan)
    with pytest.raises(MissingProfileError, match="was not measured on unknown"):
        price_plan(found.plans[1], found.layers, found.network)


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_profiles_that_say_nothing_are_counted(tmp_path: Path, seed: int) -> None:
    """Numbers may be texts; a row with a cell that is none is left out, and plans are priced as without it."""
    rng = np.random.default_rng(seed)
    folder = write_folder(tmp_path / "f", [plan_row([[("fast", 1)], [("slow", 2)]], [3])])
    breaks = {
        "layers": {"forward_s": ["x", "-1", None, "inf"], "layer": ["x", "1.5", None], "tensor_parallel": ["0", "1.5"],
                   "microbatch_size": ["", "0", None], "device_type": [None, ""], "model": [None, ""]},
        "network": {"c0": ["x", None, "nan"], "from_count": ["0", "x", "1.5"], "to_device": [None, ""],
                    "to_count": ["-2", "x"]},
    }  # fmt: skip
    expected = 0
    wanted = {}
    for file, columns in breaks.items():
        path = folder / f"{file}.parquet"
        frame = pd.read_parquet(path)
        wanted[file] = frame.iloc[:0]
        texts = frame.astype(object).map(lambda cell: None if cell is None or cell != cell else str(cell))
        broken = texts.sample(8, random_state=seed, replace=True)
        for k in range(len(broken)):
            column = str(rng.choice(list(columns)))
            broken.iloc[k, broken.columns.get_loc(column)] = columns[column][int(rng.integers(len(columns[column])))]
        expected += len(broken)
        (folder / "sound").mkdir(exist_ok=True)
        frame.to_parquet(folder / "sound" / path.name)
        pd.concat([broken, texts]).sample(frac=1, random_state=seed).to_parquet(path)
    (folder / "sound" / "plans.jsonl").write_text((folder / "plans.jsonl").read_text())
    _, rows, summary = run(folder)
    _, alone, nothing = run(folder / "sound")
    assert sum(summary["left_out_rows"].values()) == expected and nothing["left_out_rows"] == {}
    assert all(reason.startswith(("layers.parquet: ", "network.parquet: ")) for reason in summary["left_out_rows"])
    assert rows == alone


@pytest.mark.parametrize("seed", range(4))
def test_rows_may_stand_in_any_order(tmp_path: Path, seed: int) -> None:
    """Also where several say something of one layer or link, in other zones or measured again."""
    rng = np.random.default_rng(seed)
    spreads = [[[("fast", 1), ("slow", 2)], [("slow", 1), ("fast", 2)]], [[("mixed-in", 2)], [("fast", 4)]]]
    folder = write_folder(tmp_path / "f", [plan_row(spread, [3], microbatch_size=3) for spread in spreads])
    for file, column, by in (("layers", "forward_s", []), ("network", "c0", ["from_zone", "to_zone"])):
        frame = pd.read_parquet(folder / f"{file}.parquet")
        again = frame.assign(**{column: frame[column] * rng.uniform(0.2, 5.0, len(frame)), **dict.fromkeys(by, "a")})
        size = {"parameter_bytes": again["parameter_bytes"] * 1.5} if file == "layers" else {}
        pd.concat([frame, again.assign(**size)]).to_parquet(folder / f"{file}.parquet")
    _, rows, summary = run(folder)
    for file in ("layers", "network"):
        path = folder / f"{file}.parquet"
        frame = pd.read_parquet(path).sample(frac=1, random_state=seed)
        frame[list(rng.permutation(frame.columns))].assign(more=rng.uniform(size=len(frame))).to_parquet(path)
    assert run(folder)[1:] == (rows, summary)


@pytest.mark.parametrize("name", ["num_layers", "microbatch_size", "num_microbatches", "sequence_length"])
@pytest.mark.parametrize("value", [True, 2.5, "x", None, math.nan, "1e999"])
def test_a_size_of_a_plan_is_a_whole_number(tmp_path: Path, name: str, value: object) -> None:
    """The other plans stay, whatever marks and ends of lines the file has."""
    good = plan_row([[("fast", 1)]], [], id="go\u2028od")
    folder = write_folder(tmp_path / "f", [good])
    lines = [json.dumps(good, ensure_ascii=False), json.dumps(good | {name: value}), "[]", "3"]
    (folder / "plans.jsonl").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    found = read_folder(folder).plans
    assert isinstance(found[0], MeasuredPlan) and len(found) == 4
    assert [isinstance(bad, BadPlan) and bad.place for bad in found[1:]] == ["line 2", "line 3", "line 4"]
    assert all("wanted" in bad.problem or "could not convert" in bad.problem for bad in found[1:])


def test_the_peer_is_compared_on_the_plans_of_which_it_says_something(tmp_path: Path) -> None:
    rows = [plan_row([[("fast", 1)]], [], id=str(k), measured_s=0.1 * (k + 1)) for k in range(4)]
    for row in rows[:2]:
        row["sailor_s"] = None
    _, table, summary = run(write_folder(tmp_path / "f", rows))
    assert (summary["compared_rows"], summary["peer_rows"]) == (4, 2)
    both = [abs(row["difference_percent"]) for row in table[2:]]
    assert summary["mape_beside_peer_percent"] == pytest.approx(np.mean(both)) != summary["mape_percent"]


def test_another_copy_stands_in_for_a_number_that_is_missing(tmp_path: Path) -> None:
    rows = [row | {"planner_forward_s": row["forward_s"], "forward_s": math.nan} for row in layer_rows()]
    prices = []
    for name, layers in (("own", None), ("copy", rows)):
        plan, found = only_plan(write_folder(tmp_path / name, [plan_row([[("fast", 1)]], [])], layers))
        prices.append(price_plan(plan, found.layers, found.network))
    assert prices[0] == prices[1]


@pytest.mark.parametrize("column", ["forward_s", "backward_s"])
def test_a_pass_that_took_no_time_was_not_measured(tmp_path: Path, column: str) -> None:
    """Layers of 0 s made plans faster; an embedding's backward pass alone may take 0. Another copy stands in."""
    inner = [row | {column: 0.0} if row["layer"] in (2, 3) else row for row in layer_rows()]
    copied = [row | {f"planner_{column}": sound[column]} for row, sound in zip(inner, layer_rows(), strict=True)]
    prices = {}
    for name, layers in (("sound", None), ("zero", inner), ("copied", copied)):
        plan, found = only_plan(write_folder(tmp_path / name, [plan_row([[("fast", 1)]], [])], layers))
        prices[name] = price_plan(plan, found.layers, found.network)
        assert sum(found.left_out.values()) == (36 if name == "zero" else 0)
    assert prices["zero"].passes_seconds == pytest.approx(prices["sound"].passes_seconds)
    assert any("as its other transformer layers" in note for note in prices["zero"].notes)
    assert prices["copied"] == prices["sound"]
    idle = [row | {"backward_s": 0.0} if row["kind"] == "embedding" else row for row in layer_rows()]
    assert not read_folder(write_folder(tmp_path / "idle", [plan_row([[("fast", 1)]], [])], idle)).left_out


def test_links_without_any_bandwidth_are_said(tmp_path: Path) -> None:
    plans = [plan_row([[("fast", 1)], [("fast", 1)]], [3]), plan_row([[("fast", 1), ("slow", 1)]], [])]
    _, rows, summary = run(write_folder(tmp_path / "f", plans, between=-1.0))
    assert all("not priced: the bandwidth from fast to " in row["notes"] for row in rows)
    assert summary["mape_percent"] is None
    json.dumps([rows, summary], allow_nan=False)


@pytest.mark.parametrize("file", ["layers.parquet", "network.parquet", "plans.jsonl"])
def test_a_file_that_is_no_such_file_is_named(tmp_path: Path, file: str) -> None:
    folder = write_folder(tmp_path / "f", [plan_row([[("fast", 1)]], [])])
    (folder / file).unlink()
    with pytest.raises(InputError, match=rf"{file}.*" if file.endswith("jsonl") else rf"there is no file .*{file}"):
        read_folder(folder)
    pd.DataFrame({"other": [1]}).to_parquet(folder / file)
    with pytest.raises(InputError, match=file):
        read_folder(folder)


def test_measured_plans_of_a_real_cluster(shared_data: Path) -> None:
    """26 plans on GH200: closer than the peer's simulator, whose own figure is the data's."""
    folder = shared_data / "sailor"
    if not folder.exists():
        pytest.skip("there is no ../shared/data/sailor")
    summary = run(folder)[2]
    assert summary["rows"] == 26 and summary["not_priced"] == 0 and summary["bad_lines"] == []
    assert summary["peer_mape_percent"] == pytest.approx(9.41, abs=0.01)
    assert summary["mape_percent"] < 8.0 < summary["formula_mape_percent"] < 10.3
