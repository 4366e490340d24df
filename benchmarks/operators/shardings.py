"""Shardings found for Auto-MAP's models on a server of 8 V100, and for Llama-like decoders, with their times."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.operators import sharding_agents
from benchmarks.operators.solvers import Model, beside_tables, compared, rewarded
from dejavu.cluster import Cluster, Link, NodeGroup, catalogue
from dejavu.planning.shardings.prices import prices_on
from dejavu.profiles import ProfileDatabase
from dejavu.sharding.assembly import Sharded, assemble
from dejavu.sharding.capture import capture_operators
from dejavu.sharding.data_parallel import data_parallel
from dejavu.sharding.links import links_along
from dejavu.sharding.operator_graph import OperatorGraph
from dejavu.sharding.problem import Answer, ShardingError, Solver
from dejavu.sharding.solvers.elimination import Elimination
from dejavu.sharding.solvers.ilp import IntegerProgram
from dejavu.sharding.solvers.linkage import Linkage, Presolved
from dejavu.sharding.solvers.repeated import Repeated
from dejavu.sharding.strategies import without_rule
from dejavu.workload import Workload

T = TypeVar("T")
DEVICE, NODES, EACH = "V100-SXM2-16GB", 4, 8
NETWORK_BYTES_PER_SECOND, NVLINK_BYTES_PER_SECOND = 25e9 / 8, 150e9
MOST_REFEREED_PAIRS, MOST_BOUNDED_PAIRS = 1_000_000, 3_000_000  # of options of an edge: HiGHS takes 2 kB for each
MICROBATCH, MICROBATCHES = 16, 4  # Auto-MAP's: batches of 64


@dataclass(frozen=True)
class Published:
    """What Auto-MAP says of a model (its tables 5 and 6).

    Attributes:
        variables, partitioned: how many there are, and how many its DQN splits in the end.
        seconds: of both stages of its search.
        wanted_cpu_seconds: what is asked of us, capture included; None: nothing.
    """

    variables: int
    partitioned: int
    seconds: float
    wanted_cpu_seconds: float | None


def _text(classes: int, length: int) -> dict[str, Any]:
    return {"data": "synthetic", "synthetic": {"num_classes": classes}, "sequence_length": length}


def _t5(blocks: int, width: int, heads: int, head_width: int, feedforward: int) -> dict[str, Any]:
    options = {"num_blocks": blocks, "width": width, "num_heads": heads, "head_width": head_width}
    options |= {"feedforward": feedforward, "encoder_length": 512}
    return {"model": "t5", "model_options": options, **_text(32128, 1024)}


MODELS: Mapping[str, tuple[dict[str, Any], Published | None]] = {
    "vgg19": (
        {"model": "vgg", "data": "synthetic", "synthetic": {"num_classes": 1000, "image_shape": (3, 224, 224)}},
        Published(38, 5, 30.0, 2.0),
    ),
    "bert48": (
        {"model": "bert", "model_options": {"num_blocks": 48, "width": 1024, "num_heads": 16}, **_text(30522, 512)},
        None,
    ),
    "t5-base": (_t5(12, 768, 12, 64, 3072), Published(111, 111, 0.5 * 3600, 4.0)),
    "t5-3b": (_t5(24, 1024, 32, 128, 16384), Published(432, 432, 0.94 * 3600, 8.0)),
    "t5-11b": (_t5(24, 1024, 128, 128, 65536), Published(432, 432, 1.45 * 3600, 10.0)),
}
# (layers, devices of each mesh dimension) -> what meta-pytorch/autoparallel takes and what is asked of us, in seconds
LLAMA = {
    (8, (8,)): (45.0, 5.0),
    (32, (8,)): (130.0, 5.0),
    (2, (4, 8)): (410.0, 30.0),
    (8, (4, 8)): (None, 30.0),
    (32, (4, 8)): (None, 30.0),
}


def cluster() -> Cluster:
    """Return Auto-MAP's servers: 8 V100 each, NVLink inside, 25 Gbit/s between."""
    group = NodeGroup("servers", NODES, (), ((DEVICE, EACH),), Link(NVLINK_BYTES_PER_SECOND, 5e-6))
    between = {("servers", "servers"): Link(NETWORK_BYTES_PER_SECOND, 25e-6)}
    return Cluster("v100-servers", (group,), {DEVICE: catalogue()[DEVICE]}, between)


def llama(layers: int) -> Workload:
    """Return a decoder of Llama-3-8B's layers."""
    options = {"num_blocks": layers, "width": 4096, "num_heads": 32, "num_kv_heads": 8, "feedforward": 14336}
    return Workload.model_validate(
        {"model": "llama", "model_options": options, **_text(128256, 2048), "batch_size": 32, "num_microbatches": 4}
    )


def workload_of(name: str) -> Workload:
    given = {**MODELS[name][0], "batch_size": MICROBATCH * MICROBATCHES, "num_microbatches": MICROBATCHES}
    return Workload.model_validate(given)


@dataclass(frozen=True)
class Timed:
    """A model's operators and problem, and what making them took."""

    graphs: tuple[OperatorGraph, ...]
    sharded: Sharded
    capture_seconds: float
    assemble_seconds: float


def posed(workload: Workload, mesh: tuple[int, ...]) -> Timed:
    """Capture a model and pose its problem on a mesh, with a clock of CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="dejavu-no-rows-") as folder:
        prices = prices_on(cluster(), DEVICE, mesh, workload, ProfileDatabase(Path(folder)))
        graphs, captured = _timed(lambda: capture_operators(workload))
        sharded, assembled = _timed(lambda: assemble(graphs, prices))
    return Timed(graphs, sharded, captured, assembled)


def _timed(what: Callable[[], T]) -> tuple[T, float]:
    started = time.process_time()
    result = what()
    return result, time.process_time() - started


def _warm() -> None:
    """Load what every model needs once: torch's rules, compiled loops, the predictor."""
    small = {"num_blocks": 1, "width": 64, "num_heads": 8}
    known = Workload.model_validate({"model": "gpt", "model_options": small, **_text(64, 16), "batch_size": 8})
    small_problem = posed(known, (2,)).sharded.problem
    Elimination(easy_cells=0).run(small_problem)
    Linkage().run(small_problem)


@dataclass(frozen=True)
class Besides:
    """What is shown beside each model's cheapest sharding.

    Attributes:
        agents: models that agents are trained on, each with so many seeds and moves.
        referee_seconds: HiGHS's budget for each model; 0: none.
    """

    agents: tuple[str, ...]
    seeds: int
    moves: int
    referee_seconds: float
    figures: Path | None


Tables = dict[str, list[dict[str, Any]]]


def partitioning(models: list[str], besides: Besides) -> tuple[Tables, dict[str, Any]]:
    """Find each model's cheapest sharding over the 8 devices of a server, and what other solvers find."""
    _warm()
    rows, summary, curves = [], dict[str, Any](), dict[str, Any]()
    tables: Tables = {"solvers": [], "published reward": [], "Auto-MAP's tables": [], "agents": []}
    for name in models:
        published = MODELS[name][1]
        found = posed(workload_of(name), (EACH,))
        answer, solved = _timed(partial(Repeated(found.sharded.blocks).run, found.sharded.problem))
        seconds = found.capture_seconds + found.assemble_seconds + solved
        split, count = _split_weights(found, answer)
        whole = sum(float(own[0]) for own in found.sharded.problem.seconds)
        row = {
            "model": name,
            "operators": sum(len(graph.nodes) for graph in found.graphs),
            "capture_cpu_seconds": found.capture_seconds,
            "assemble_cpu_seconds": found.assemble_seconds,
            "solve_cpu_seconds": solved,
            "cpu_seconds": seconds,
            "wanted_cpu_seconds": published and published.wanted_cpu_seconds,
            "paper_seconds": published and published.seconds,
            "pass_seconds": answer.seconds,
            "whole_pass_seconds": whole,
            "gap_percent": answer.gap_percent,
            "partitioned": split,
            "weights": count,
            "without_rule": ", ".join(without_rule(found.graphs)) or "none",
            "paper_partitioned": published and f"{published.partitioned} of {published.variables}",
        }
        rows.append(row)
        keys = ("cpu_seconds", "gap_percent", "partitioned", "weights", "paper_partitioned", "paper_seconds")
        summary[name] = {key: row[key] for key in keys}
        model = Model(name, found.graphs, found.sharded)
        solved_rows, placed = compared(model, answer, besides.referee_seconds)
        reward_row, rewarded_weights = rewarded(model, answer)
        tables["solvers"] += solved_rows
        tables["published reward"].append(reward_row)
        tables["Auto-MAP's tables"] += beside_tables(model, placed | rewarded_weights)
        summary[name]["solvers"] = {str(one["solver"]): _without(one, "model", "solver") for one in solved_rows}
        summary[name]["published_reward"] = _without(reward_row, "model")
        smaller = [rewarded(*one)[0] for one in _smaller(name)]
        tables["published reward"] += smaller
        summary[name]["published_reward"] |= {str(one["model"]): _without(one, "model") for one in smaller}
        if name in besides.agents and besides.seeds:
            learned, own_curves = sharding_agents.trained(model, answer, besides.seeds, besides.moves)
            tables["agents"] += learned
            curves |= own_curves
            summary[name]["solvers"] |= sharding_agents.summary_of(learned)[name]
    if besides.figures is not None and curves:
        sharding_agents.draw_curves(curves, besides.figures)
    return {"": rows, **tables}, {"partitioning": summary, "curves": curves}


def _smaller(name: str) -> Iterator[tuple[Model, Answer]]:
    """Return a transformer with one block of each kind, T5 also at one example a microbatch, with the cheapest choices.

    T5's attention is captured with examples and heads as one dimension, which a mesh can split by examples only; of one
    example, by heads.
    """
    options = {**MODELS[name][0].get("model_options", {}), "num_blocks": 1}
    single = {"batch_size": MICROBATCHES}
    variants: dict[str, dict[str, Any]] = {}
    if name.startswith("t5"):
        variants = {"one example": single, "one example, one block": {"model_options": options, **single}}
    elif name.startswith("bert"):
        variants = {"one block": {"model_options": options}}
    for said, fields in variants.items():
        given = {**MODELS[name][0], "batch_size": MICROBATCH * MICROBATCHES, "num_microbatches": MICROBATCHES, **fields}
        found = posed(Workload.model_validate(given), (EACH,))
        best = Repeated(found.sharded.blocks).run(found.sharded.problem)
        yield Model(f"{name}, {said}", found.graphs, found.sharded), best


def _without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def data_parallelism(models: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Find which dimensions of the inputs can be split while every weight is whole."""
    _warm()
    rows = []
    for name in models:
        found = posed(workload_of(name), (EACH,))
        answer, solved = _timed(partial(Repeated(found.sharded.blocks).run, data_parallel(found.graphs, found.sharded)))
        cuts = [found.sharded.options[cut][answer.chosen[cut]].outputs[0][0] for cut, _ in found.sharded.cuts]
        rows.append(
            {
                "model": name,
                "input_dimension": cuts[0],
                "cuts_by_dimension": {str(d): cuts.count(d) for d in sorted(set(cuts))},
                "cpu_seconds_after_capture": found.assemble_seconds + solved,
                "wanted_cpu_seconds": 1.0,
                "pass_seconds": answer.seconds,
                "gap_percent": answer.gap_percent,
            }
        )
    return rows, {"data_parallel": {row["model"]: row for row in rows}}


def peers(most_layers: int, referee_seconds: float) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Find the shardings of Llama-like decoders; beside them the integer program, where it ends in its budget."""
    _warm()
    rows = []
    for (layers, mesh), (peer, wanted) in LLAMA.items():
        if layers > most_layers:
            continue
        found = posed(llama(layers), mesh)
        answer, solved = _timed(partial(Repeated(found.sharded.blocks).run, found.sharded.problem))
        rows.append(
            {
                "layers": layers,
                "mesh": " × ".join(map(str, mesh)),
                "capture_cpu_seconds": found.capture_seconds,
                "cpu_seconds": found.capture_seconds + found.assemble_seconds + solved,
                "wanted_seconds": wanted,
                "autoparallel_seconds": peer,
                "pass_seconds": answer.seconds,
                "gap_percent": answer.gap_percent,
                **_refereed(found.sharded, answer, referee_seconds),
                **_linked(found, answer),
            }
        )
    named = {f"{str(row['mesh']).replace(' × ', 'x')}x{row['layers']}": row for row in rows}
    return rows, {"llama": named}


def _refereed(sharded: Sharded, answer: Answer, budget_seconds: float) -> dict[str, float | None]:
    """Ask HiGHS: of the whole problem, and of the options that bounds do not exclude beside what was found."""
    pairs = sum(table.size for table in sharded.problem.edges.values())
    asked: dict[str, tuple[Solver, int]] = {
        "ilp": (IntegerProgram(budget_seconds), MOST_REFEREED_PAIRS),
        "ilp_of_rest": (
            Presolved(Repeated(sharded.blocks), IntegerProgram(budget_seconds)),
            MOST_BOUNDED_PAIRS,
        ),
    }
    row: dict[str, float | None] = {}
    for name, (solver, most) in asked.items():
        referee: Answer | None = None
        spent: float | None = None
        if budget_seconds > 0 and pairs <= most:
            try:
                referee, spent = _timed(partial(solver.run, sharded.problem))
            except ShardingError:
                spent = budget_seconds
        row |= {
            f"{name}_pass_seconds": referee.seconds if referee else None,
            f"{name}_above_percent": 100.0 * (referee.seconds / answer.seconds - 1.0) if referee else None,
            f"{name}_gap_percent": referee.gap_percent if referee else None,
            f"{name}_cpu_seconds": spent,
        }
    return row


def _linked(found: Timed, answer: Answer) -> dict[str, float]:
    """Return how far linkage groups alone come."""
    model = Model("", found.graphs, found.sharded)
    linkage = Linkage(links_along(found.sharded, with_sums=True), model.decided)
    linked, spent = _timed(partial(linkage.run, found.sharded.problem))
    return {"linkage_above_percent": 100.0 * (linked.seconds / answer.seconds - 1.0), "linkage_cpu_seconds": spent}


def _split_weights(found: Timed, answer: Answer) -> tuple[int, int]:
    """Count the weights that are split, and all."""
    split = count = 0
    for layer, graph in enumerate(found.graphs):
        for k in graph.weights.values():
            node = found.sharded.of_node[layer, k]
            placement = found.sharded.options[node][answer.chosen[node]].outputs[0]
            split, count = split + any(one >= 0 for one in placement), count + 1
    return split, count
