"""The iteration price: its kernels do what the published formulas count, and it moves as pipelines do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.cost import iterations as table
from benchmarks.megatron import formulas as megatron
from benchmarks.megatron.a100_network import A100Network
from benchmarks.megatron.formulas import IterationError, MegatronIteration
from benchmarks.megatron.iteration import IterationPricer
from dejavu.foundation.errors import InputError

VTRAIN = Path(__file__).parents[2] / "shared" / "data" / "vtrain" / "a100_single_node.csv"
FORWARD = (megatron.attention_forward, megatron.mlp_forward)
BACKWARD = (megatron.mlp_backward, megatron.attention_backward)
HEAD = (megatron.head_forward, megatron.head_backward)
SMALL = MegatronIteration(
    hidden_size=1024,
    num_layers=8,
    num_heads=16,
    sequence_length=512,
    tensor_parallel=1,
    data_parallel=1,
    pipeline_parallel=1,
    microbatch_size=2,
    global_batch_size=16,
)
PRICER = IterationPricer()


def seconds(iteration: MegatronIteration, pricer: IterationPricer = PRICER) -> float:
    return pricer.price(iteration).seconds


def random_iteration(seed: int) -> MegatronIteration:
    rng = np.random.default_rng(seed)
    t, d, p = (int(2 ** rng.integers(0, 4)) for _ in range(3))
    microbatch, m = int(2 ** rng.integers(0, 3)), int(rng.integers(1, 9))
    heads = 8 * int(rng.integers(1, 5))
    return MegatronIteration(
        hidden_size=heads * int(rng.choice([32, 64, 128])),
        num_layers=p * int(rng.integers(1, 4)),
        num_heads=heads,
        sequence_length=int(2 ** rng.integers(7, 12)),
        tensor_parallel=t,
        data_parallel=d,
        pipeline_parallel=p,
        microbatch_size=microbatch,
        global_batch_size=microbatch * d * m,
        recompute=bool(rng.integers(2)),
    )


def products(iteration: MegatronIteration, parts: tuple) -> float:
    return sum(kernel.flops for part in parts for kernel in part(iteration) if kernel.family == "matmul")


@pytest.mark.parametrize("seed", range(30))
def test_kernels_do_the_published_flops(seed: int) -> None:
    it = random_iteration(seed)
    B, s, h, layers, V = (
        it.global_batch_size,
        it.sequence_length,
        it.hidden_size,
        it.num_layers,
        it.padded_vocabulary_size,
    )
    forward, backward, head = (products(it, parts) for parts in (FORWARD, BACKWARD, HEAD))
    layer = forward + backward + (forward if it.recompute else 0)
    counted = (layers * layer + head) * it.tensor_parallel * it.data_parallel * it.num_microbatches
    if it.recompute:  # Narayanan et al., SC 2021, eq. 3
        published = 96 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))
    else:
        published = 72 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (12 * layers * h))
    assert counted == pytest.approx(published, rel=1e-12)
    assert it.model_flops == pytest.approx(published, rel=1e-12)


def test_parameters_of_a_175b_model() -> None:
    gpt3 = replace(SMALL, hidden_size=12288, num_layers=96, num_heads=96)
    assert 96 * gpt3.layer_parameters + gpt3.embedding_parameters == pytest.approx(174.6e9, rel=1e-3)


@pytest.mark.parametrize("seed", range(30))
def test_no_iteration_beats_its_peak(seed: int) -> None:
    it = random_iteration(seed)
    peak = PRICER.device.peak_flops_per_second["float16"]
    assert it.model_flops / (it.num_devices * peak) < seconds(it) < float("inf")


@pytest.mark.parametrize("seed", range(30))
def test_more_work_takes_longer(seed: int) -> None:
    it = random_iteration(seed)
    base = seconds(it)
    assert seconds(replace(it, num_layers=2 * it.num_layers)) > base
    assert seconds(replace(it, global_batch_size=2 * it.global_batch_size)) > base
    assert seconds(replace(it, hidden_size=2 * it.hidden_size)) >= base
    assert seconds(replace(it, recompute=True)) >= base
    assert seconds(it, replace(PRICER, host_efficiency=0.5 * PRICER.host_efficiency)) >= base


def test_microbatches_amortize_the_bubble() -> None:
    it = replace(SMALL, pipeline_parallel=4)
    bubbles = [PRICER.price(replace(it, global_batch_size=2 * m)).bubble_fraction for m in (4, 8, 16, 32, 64)]
    assert bubbles == sorted(bubbles, reverse=True)
    # per sequence, a long iteration nears what its slowest stage needs
    assert seconds(replace(it, global_batch_size=256)) / 256 < seconds(replace(it, global_batch_size=8)) / 8


def test_interleaved_chunks_shorten_the_fill() -> None:
    it = replace(SMALL, pipeline_parallel=4, global_batch_size=8)
    two = seconds(replace(it, model_chunks=2))
    stage = PRICER.price(it).layer_seconds * it.num_layers / it.pipeline_parallel
    assert seconds(it) - two >= 1.5 * stage * 0.99  # half of three stages' fill


def test_tensor_parallelism_splits_what_the_device_computes() -> None:
    big = replace(SMALL, hidden_size=8192, num_heads=64, sequence_length=2048, num_layers=2)
    fast = replace(PRICER, host_efficiency=1e9)
    times = [fast.price(replace(big, tensor_parallel=t)).layer_seconds for t in (1, 2, 4, 8)]
    for one, half in pairwise(times):
        assert 0.5 * one < half < 0.75 * one


def test_a_slow_host_sets_the_pace_of_small_layers_only() -> None:
    assert PRICER.price(SMALL).host_bound == (True, True)
    big = replace(SMALL, hidden_size=8192, num_heads=64, sequence_length=2048)
    assert PRICER.price(big).host_bound == (False, False)


def test_an_unpadded_vocabulary_misses_the_tensor_cores() -> None:
    assert SMALL.padded_vocabulary_size == 50_304
    assert replace(SMALL, tensor_parallel=8).padded_vocabulary_size == 51_200
    odd = replace(SMALL, vocabulary_multiple=1)
    assert odd.padded_vocabulary_size == 50_257
    assert PRICER.price(odd).head_seconds > 1.3 * PRICER.price(SMALL).head_seconds


def test_replicas_across_nodes_share_the_cards() -> None:
    many = replace(SMALL, global_batch_size=64)
    inside = PRICER.price(replace(many, data_parallel=8)).per_step_seconds
    across = PRICER.price(replace(many, data_parallel=16)).per_step_seconds
    shared = PRICER.price(replace(many, tensor_parallel=8, data_parallel=2)).per_step_seconds
    alone = PRICER.price(replace(many, tensor_parallel=8)).per_step_seconds
    assert inside < across
    assert shared > alone
    links = A100Network().links
    slow = A100Network(replace(links, between=replace(links.between, bytes_per_second=1e9)))
    assert replace(PRICER, network=slow).price(replace(many, data_parallel=16)).per_step_seconds > 3 * across
    assert replace(PRICER, network=slow).price(replace(many, data_parallel=8)).per_step_seconds == inside


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 1000}, "hidden_size"),
        ({"tensor_parallel": 3}, "num_heads"),
        ({"pipeline_parallel": 3}, "num_layers"),
        ({"data_parallel": 3}, "global_batch_size"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"model_chunks": 16}, "model_chunks"),
    ],
)
def test_settings_that_cannot_run_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(IterationError, match=named):
        replace(SMALL, **change)


def write(path: Path, **changes: Any) -> Path:
    row: dict[str, Any] = dict.fromkeys(table.COLUMNS, 1) | {
        "global batch": 4,
        "hidden size": 1024,
        "attention heads": 16,
        "sequence length": 512,
        table.DEVICES: 1,
        table.MILLISECONDS: 30.0,
    }
    row |= changes
    path.write_text(",".join(row) + ",note\n" + ",".join(map(str, row.values())) + ",ignored\n")
    return path


@pytest.mark.parametrize("value", ["nan", "-1", "0", "1e12", "fast", ""])
def test_bad_times_are_named(tmp_path: Path, value: str) -> None:
    path = write(tmp_path / "times.csv", **{table.MILLISECONDS: value})
    with pytest.raises(InputError, match=r"row 2, 'iteration time \(ms\)'"):
        table.read(path)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no column"):
        (tmp_path / "other.csv").write_text("a,b\n1,2\n")
        table.read(tmp_path / "other.csv")
    with pytest.raises(InputError, match="product of the three degrees"):
        table.read(write(tmp_path / "wrong.csv", **{table.DEVICES: 2}))
    with pytest.raises(InputError, match=r"row 2: num_layers is 1"):
        table.read(write(tmp_path / "indivisible.csv", **{table.DEVICES: 2, "pipeline parallelism": 2}))
    path = write(tmp_path / "empty.csv")
    path.write_text(path.read_text().splitlines()[0] + "\n")
    with pytest.raises(InputError, match="no row"):
        table.read(path)


def test_times_in_seconds_are_refused(tmp_path: Path) -> None:
    """They were compared: an error of a hundred thousand percent."""
    sizes = {"hidden size": 8192, "# layers": 8, "sequence length": 2048}
    assert table.run(write(tmp_path / "times.csv", **sizes, **{table.MILLISECONDS: 600.0}))[2]["rows"] == 1
    with pytest.raises(
        InputError, match=r"seconds\.csv: half of the times .*is 'iteration time \(ms\)' in milliseconds"
    ):
        table.run(write(tmp_path / "seconds.csv", **sizes, **{table.MILLISECONDS: 0.6}))


@pytest.mark.parametrize("seed", range(6))
def test_however_a_file_is_written_it_says_the_same(tmp_path: Path, seed: int) -> None:
    """Marks, ends and blanks of lines, quotes, order of columns; and a bad cell is told with the line it stands in."""
    rng = np.random.default_rng(seed)
    iterations = [replace(SMALL, global_batch_size=2 * m) for m in (2, 4, 8, 16)]
    names = {**table.COLUMNS, table.DEVICES: "num_devices"}
    cells = [{column: str(getattr(it, name)) for column, name in names.items()} for it in iterations]
    columns = [str(name) for name in rng.permutation([*names, table.MILLISECONDS])]
    rows = [
        columns,
        *([(cell | {table.MILLISECONDS: f"{7 * k + 1}.5"})[c] for c in columns] for k, cell in enumerate(cells)),
    ]
    bad = int(rng.integers(1, len(rows)))
    broken = [list(row) for row in rows]
    broken[bad][int(rng.integers(len(columns)))] = str(rng.choice(["", "-1", "0", "many", "inf"]))
    comma, quote, end = ((a, b)[int(rng.integers(2))] for a, b in ((",", ", "), ("", '"'), ("\n", "\r\n")))
    blanks, tail, mark = (bool(rng.integers(2)) for _ in range(3))

    def text(of: list[list[str]]) -> str:
        lines = [
            comma.join(f"{quote}{cell}{quote}" for cell in row) + "," * (tail and k > 0) for k, row in enumerate(of)
        ]
        return "\ufeff" * mark + (end + end if blanks else end).join(lines) + end

    path = tmp_path / "times.csv"
    path.write_text(text(rows), newline="")
    found, times = table.read(path)
    assert found == iterations
    np.testing.assert_allclose(times, [1.5e-3, 8.5e-3, 15.5e-3, 22.5e-3])
    path.write_text(text(broken), newline="")
    with pytest.raises(InputError, match=rf"times\.csv: row {2 * bad + 1 if blanks else bad + 1}, '"):
        table.read(path)


@pytest.mark.parametrize("seed", range(3))
def test_rows_in_another_order_give_the_same_figures(tmp_path: Path, seed: int) -> None:
    """A tenth that is drawn to calibrate with is the same one."""
    path, rng = write(tmp_path / "times.csv"), np.random.default_rng(seed)
    head, row = path.read_text().splitlines()
    sizes = [4, 8, 8, *(4 * int(size) for size in rng.integers(1, 40, 17))]
    lines = [row.replace("4,", f"{size},", 1).replace("30.0", f"{rng.uniform(5, 80):.3f}") for size in sizes]
    found = []
    for order in (range(len(lines)), rng.permutation(len(lines))):
        path.write_text("\n".join([head, *(lines[at] for at in order)]) + "\n")
        found.append(table.run(path))
    assert found[0][1][0]["rows"] == len(sizes) and any(row.get("seeds") for row in found[0][1])
    assert found[1] == found[0]


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"a,b\n1,2,3\n1,2,3,4,5\n", "é,1\n".encode("latin1")])
def test_a_file_that_is_no_csv_is_told_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "times.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"times\.csv(: no column| is no CSV file)"):
        table.read(path)


def test_one_row_of_several_nodes_makes_a_table(tmp_path: Path) -> None:
    path = write(
        tmp_path / "big.csv",
        **{
            "# GPUs": 512,
            "hidden size": 12288,
            "attention heads": 96,
            "# layers": 96,
            "sequence length": 2048,
            "tensor parallelism": 8,
            "data parallelism": 8,
            "pipeline parallelism": 8,
            "global batch": 512,
            "iteration time (ms)": 20000.0,
        },
    )
    _, rows, summary = table.run(path)
    assert summary["rows"] == 1 and summary["recomputed_rows"] == 1
    assert summary["spearman"] is None and summary["times_look_computed"] is False
    assert rows[4]["mape_percent"] == table.VTRAIN_MAPE_PERCENT["several nodes"]


def test_measured_times_do_not_look_computed() -> None:
    its = [replace(SMALL, global_batch_size=2 * m) for m in (2, 4, 8, 16)]
    exact = np.array([seconds(it) for it in its])
    computed, measured = (
        table.line_spread(its, times)
        for times in (exact, exact * (1 + 1e-3 * np.random.default_rng(0).standard_normal(4)))
    )
    assert computed is not None and measured is not None
    assert computed < table.COMPUTED_SPREAD < measured


@pytest.mark.parametrize("seed", range(4))
def test_repeats_tell_nothing_of_a_line(seed: int) -> None:
    rng = np.random.default_rng(seed)
    its = [replace(SMALL, global_batch_size=2 * m) for m in (2, 4, 8, 16)]
    times = np.array([seconds(it) for it in its]) * (1 + 1e-2 * rng.standard_normal(4))
    spread = table.line_spread(its, times)
    for num_settings in range(1, 5):
        chosen = np.repeat(np.arange(num_settings), rng.integers(1, 6, num_settings))
        chosen = rng.permutation(np.concatenate([chosen, np.arange(num_settings)]))
        found = table.line_spread([its[at] for at in chosen], times[chosen])
        if num_settings < 3:
            assert found is None
        else:
            assert found is not None and found > table.COMPUTED_SPREAD
    assert found == pytest.approx(spread)


def test_the_best_scale_is_the_best() -> None:
    rng = np.random.default_rng(0)
    work, times = rng.random(99) + 0.1, rng.random(99) + 0.1
    best = table.best_scale(work, times)
    least = np.mean(np.abs(best * work / times - 1))
    assert all(least <= np.mean(np.abs(best * f * work / times - 1)) + 1e-12 for f in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


def test_published_measured_iterations_are_near() -> None:
    errors = [seconds(case.iteration) / case.seconds - 1 for case in table.PUBLISHED]
    assert np.abs(errors).max() < 0.16


@pytest.mark.skipif(not VTRAIN.exists(), reason="needs ../shared/data/vtrain")
def test_the_shared_file_is_near() -> None:
    its, times = table.read(VTRAIN)
    some = np.random.default_rng(0).permutation(len(its))[:180]
    settings = [table.as_run(its[i], PRICER) for i in some]
    assert not any(it.recompute for it in settings)
    found = table.errors(np.array([seconds(it) for it in settings]), times[some])
    assert found["mape_percent"] < 9.0 and found["spearman"] > 0.97
