"""Capture of published models, each in a process of its own: seconds, memory, FLOPs and parameters.

    python -m benchmarks.capture --json capture.json
    python -m benchmarks.capture --models t5-11b,gpt3-175b --dtype bfloat16 --kind cuda

`kinds` is how many distinct layers there are, `untied` the weights that the source shares and that are captured apart;
`off_percent` compares the rest with the source, whose figure may be rounded. `counter_tflop` is what torch's counter
finds when the layers run on the meta device, attention written out: going backward it computes the scores once less.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks._report import report
from benchmarks.published import PUBLISHED

MOST_SECONDS = 600.0


def main(
    models: Annotated[str, typer.Option(help="names of published models, or all")] = "all",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    kind: Annotated[str, typer.Option(help="of the devices: cpu, cuda or rocm")] = "cpu",
    microbatch_size: Annotated[int, typer.Option(min=1)] = 1,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    flop_counter: Annotated[bool, typer.Option(help="run torch's own counter beside it")] = True,
    json_path: Annotated[Path | None, typer.Option("--json", help="where to write machine, rows and summary")] = None,
) -> None:
    """Every model, several times, in turn."""
    chosen = list(PUBLISHED) if models == "all" else models.split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for _ in range(repeats):
        for name in chosen:
            runs[name].append(_in_a_process("capture", name, dtype, kind, microbatch_size))
    rows = []
    for name in chosen:
        counted = _in_a_process("count", name, dtype, kind, microbatch_size) if flop_counter else {}
        rows.append(_row(name, runs[name], counted.get("flops")))
    summary = {
        "worst_seconds": max(row["seconds"] for row in rows),
        "worst_peak_mib": max(row["peak_mib"] for row in rows),
        "worst_parameters_off_percent": max((row["off_percent"] for row in rows), key=abs),
        "models": len(rows),
    }
    report(f"Capture, {dtype}, kind {kind}", rows, summary, json_path)


def _row(name: str, runs: list[dict[str, Any]], counted_flops: float | None) -> dict[str, Any]:
    runs = sorted(runs, key=lambda run: run["seconds"])
    middle = runs[len(runs) // 2]
    published = PUBLISHED[name].num_parameters
    return {
        "model": name,
        "layers": middle["layers"],
        "kinds": middle["signatures"],
        "parameters": middle["parameters"],
        "untied": middle["untied"],
        "published": published,
        "off_percent": 100 * ((middle["parameters"] - middle["untied"]) / published - 1),
        "step_tflop": middle["step_flops"] / 1e12,
        "counter_tflop": counted_flops / 1e12 if counted_flops is not None else None,
        "activation_mib": middle["activation_bytes"] / 2**20,
        "seconds": middle["seconds"],
        "process_seconds": middle["process_seconds"],
        "peak_mib": max(run["peak_mib"] for run in runs),
    }


def _in_a_process(what: str, *arguments: object) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.capture", "--child", what, *map(str, arguments)]
    started = time.perf_counter()
    child = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=MOST_SECONDS)
    return {**json.loads(child.stdout), "process_seconds": time.perf_counter() - started}


def _child(
    what: Literal["capture", "count"], name: str, dtype: Literal["float32", "bfloat16"], kind: Any, size: str
) -> dict[str, Any]:
    workload = PUBLISHED[name].workload(int(size), 1, dtype=dtype)
    return _capture(workload, kind) if what == "capture" else {"flops": _count(workload)}


def _capture(workload: Any, kind: Any) -> dict[str, Any]:
    from dejavu.graphs.capture import capture
    from dejavu.workload.data import dataset_of
    from dejavu.workload.models import model_of

    started = time.perf_counter()
    graph = capture(workload, kind)
    seconds = time.perf_counter() - started
    flops = {way: sum(layer.flops(way) for layer in graph.layers) for way in ("forward", "backward")}
    return {
        "layers": len(graph.layers),
        "signatures": len({layer.signature for layer in graph.layers}),
        "parameters": graph.num_parameters,
        "untied": model_of(workload).untied_parameters(dataset_of(workload).shape),
        "forward_flops": flops["forward"],
        "step_flops": sum(flops.values()),
        "activation_bytes": sum(layer.activation_bytes for layer in graph.layers),
        "seconds": seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


def _count(workload: Any) -> float:
    """Torch's FLOP counter over forward and backward of all layers on meta tensors, each kind of layer once."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from dejavu.graphs.graph import DTYPES
    from dejavu.workload.data import dataset_of
    from dejavu.workload.models import layers_of

    shape = dataset_of(workload).shape
    torch.set_default_dtype(DTYPES[workload.dtype])
    kind = torch.get_default_dtype() if shape.input_dtype.is_floating_point else shape.input_dtype
    x = torch.empty(workload.microbatch_size, *shape.input_shape, dtype=kind, device="meta")
    known: dict[Any, tuple[float, torch.Tensor]] = {}
    total = 0.0
    for builder in layers_of(workload):
        build = builder.build
        assert isinstance(build, partial)
        key = (build.func, build.args, tuple(build.keywords.items()), tuple(x.shape))
        if key not in known:
            with torch.device("meta"):
                module = build()
            x = x.detach().requires_grad_(x.is_floating_point())
            with FlopCounterMode(display=False) as counter:
                output = module(x)
                output.backward(torch.empty_like(output))
            known[key] = float(counter.get_total_flops()), output.detach()
        flops, x = known[key]
        total += flops
    return total


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(_child(*sys.argv[2:])))  # type: ignore[arg-type]
    else:
        typer.run(main)
