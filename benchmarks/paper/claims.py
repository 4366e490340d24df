"""The claims, each with the command of ours that it is held against, and how that command's answer is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Summary = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
DATA = "{data}"  # in a command: the folder of measurements that others made
MOST_POWER = 1.1  # of a size, for a time that is claimed to be in proportion to it: fits of timings scatter so much
FIGURES = "{figures}"  # in a command: where its drawings go


class Verdict(StrEnum):
    """What our measurement says of a claim."""

    HOLDS = "holds"
    IN_PART = "holds in part"
    DOES_NOT = "does not hold"


@dataclass(frozen=True)
class Finding:
    """What a command found, in a sentence, and what it says of the claim."""

    ours: str
    verdict: Verdict


@dataclass(frozen=True)
class Claim:
    """One table or figure.

    Attributes:
        name: of the claim, for `--only`.
        where: in which document.
        states: what it states, in figures.
        module, arguments: the command; `{data}` and `{figures}` are folders.
        judge: what the command found, by its summary and its rows.
    """

    name: str
    where: str
    states: str
    module: str
    arguments: tuple[str, ...]
    judge: Callable[[Summary, Rows], Finding]

    @property
    def needs_data(self) -> bool:
        return any(DATA in argument for argument in self.arguments)

    def command(self, data: str, figures: str) -> list[str]:
        """Return it as it is run, without the file for its results."""
        places = {"data": data, "figures": figures}
        return ["python", "-m", self.module, *(argument.format(**places) for argument in self.arguments)]


def _regressions(found: Summary, rows: Rows) -> Finding:
    r_squared = min(one["median_r_squared"] for one in found.values())
    line = [one["size_left_out"]["linear regression (paper)"] for one in found.values()]
    ours = [one["size_left_out"]["ours"] for one in found.values()]
    said = (
        f"R² of a line is {r_squared:.4f} or more (median of the groups of each collective), and on sizes left out the "
        f"same lines are off by {min(one['p90_percent'] for one in line):.0f} to "
        f"{max(one['p90_percent'] for one in line):.0f} % (90 % quantile); ours by "
        f"{min(one['p90_percent'] for one in ours):.1f} to {max(one['p90_percent'] for one in ours):.1f} %"
    )
    exact = r_squared > 0.99
    accurate = max(one["p90_percent"] for one in line) < 10.0
    return Finding(said, Verdict.HOLDS if exact and accurate else Verdict.IN_PART if exact else Verdict.DOES_NOT)


def _predictors(found: Summary, rows: Rows) -> Finding:
    methods = ("linear regression (paper)", "support vectors", "random forest", "two stages", "ours")
    worst = {name: max(one["size_left_out"][name]["p90_percent"] for one in found.values()) for name in methods}
    said = "worst collective's 90 % quantile: " + ", ".join(f"{name} {value:.0f} %" for name, value in worst.items())
    others = min(value for name, value in worst.items() if name not in (methods[0], "ours"))
    return Finding(said, Verdict.HOLDS if others < worst[methods[0]] else Verdict.DOES_NOT)


def _profiling(found: Summary, rows: Rows) -> Finding:
    predicted, profiled = found["predicted_in_cpu_seconds"], found["profiled_in_seconds_estimate"]
    layers = found["layers_profiled_in_seconds_estimate"]
    said = (
        f"T5-11B on 4 × 8 V100: predicted in {predicted:.1f} CPU s, every stage profiled in {profiled:.0f} s (an "
        f"estimate that favours the profiler); but each distinct layer once in {layers:.1f} s, which is all that a "
        "search by sums needs"
    )
    return Finding(said, Verdict.HOLDS if profiled > 10 * predicted and layers > predicted else Verdict.IN_PART)


def _knapsack(found: Summary, rows: Rows) -> Finding:
    ways = found["ways"]
    listing, program, greedy = ways["the paper's listing"], ways["numpy program"], ways["greedy"]
    said = (
        f"its listing keeps {listing['weight']:,} for a capacity of 100,000, and in what fits "
        f"{listing['fitting_percent_of_optimum']:.1f} % of the optimum, in {listing['cpu_seconds']:.1f} CPU s; the "
        f"program in numpy the optimum in {program['cpu_seconds']:.2f} s, greed "
        f"{greedy['fitting_percent_of_optimum']:.2f} % in {1e3 * greedy['cpu_seconds']:.1f} ms"
    )
    wins = listing["fits"] and listing["cpu_seconds"] < program["cpu_seconds"]
    return Finding(said, Verdict.HOLDS if wins else Verdict.DOES_NOT)


def _search(found: Summary, rows: Rows) -> Finding:
    gradient, exact = (
        (found[f"{name}_median_over_optimum"], found[f"{name}_median_cpu_seconds"])
        for name in ("differentiable", "exact")
    )
    said = (
        f"differentiable: {100 * gradient[0]:.2f} % above the stored optimum in {1e3 * gradient[1]:.1f} ms of CPU "
        f"(medians); the exact search {100 * exact[0]:.2f} % in {1e3 * exact[1]:.1f} ms, with its proof"
    )
    return Finding(said, Verdict.HOLDS if gradient[1] < exact[1] and gradient[0] <= 0.01 else Verdict.DOES_NOT)


def _program(found: Summary, rows: Rows) -> Finding:
    ratio = found["exact_median_alpa_loop_cpu_ratio"]
    same = f"{found['exact_at_alpa_loop_price']} of {found['exact_beside_alpa_loop']}"
    said = (
        f"Alpa's own loop takes {ratio:.0f} × the CPU time of the exact search (median; at most "
        f"{found['exact_largest_alpa_loop_cpu_ratio']:.0f} ×), for the same price in {same} problems"
    )
    return Finding(said, Verdict.HOLDS if ratio > 1 else Verdict.DOES_NOT)


def _joint(found: Summary, rows: Rows) -> Finding:
    """It holds if a step on A grows no faster than |V| N, makes trainings faster, and costs no more than a search."""
    medians = found["simulated_medians"]
    joint, search = medians["joint"], medians["search"]
    powers = [found[f"exponent_of_{name}"]["large"] for name in ("layers", "strategies")]
    said = (
        f"a step on A grows with |V|^{powers[0]:.2f} and N^{powers[1]:.2f}; trainings with wrong prices (simulated "
        f"clock) do {joint['speed_over_once']:.2f} × the steps a second of planning once, the exact search on the same "
        f"measurements {search['speed_over_once']:.2f} ×, in {joint['decided_cpu_ms']:.0f} and "
        f"{search['decided_cpu_ms']:.0f} ms of CPU"
    )
    if max(powers) > MOST_POWER or joint["speed_over_once"] <= 1:
        return Finding(said, Verdict.DOES_NOT)
    cheaper = joint["decided_cpu_ms"] <= search["decided_cpu_ms"]
    return Finding(said, Verdict.HOLDS if cheaper else Verdict.IN_PART)


def _initialization(found: Summary, rows: Rows) -> Finding:
    """With the most workers: it holds if every task's interval is above 0, and does not if one is below."""
    said, most = list[str](), list[tuple[float, float]]()
    for task, one in found["tasks"].items():
        by_count: Mapping[str, Sequence[float]] = one["by_count_percent"]
        most.append((by_count[max(by_count, key=int)][1], by_count[max(by_count, key=int)][2]))
        shown = ", ".join(
            f"{n} workers {of:.0f} % ({low:.0f} to {high:.0f})" for n, (of, low, high) in by_count.items()
        )
        said.append(
            f"{task}: fewer steps to the default's loss, mean of {one['repeats']} and its 95 % interval: {shown}"
        )
    sentence = "; ".join(said) + "; each worker has a draw of its own (the paper's shared one)"
    if all(low > 0 for low, _ in most):
        return Finding(sentence, Verdict.HOLDS)
    return Finding(sentence, Verdict.DOES_NOT if any(high < 0 for _, high in most) else Verdict.IN_PART)


def _gradients(found: Summary, rows: Rows) -> Finding:
    """It holds if faults that keep the mean from its target do so for none of its, and it costs nothing without one."""
    steps = found["steps_to_target"]
    never = sorted(fault for fault, rules in steps.items() if rules["mean"] is None)
    kept = [fault for fault in never if steps[fault]["suspicion"] is not None]
    said = (
        f"suspicion reaches the target under {len(kept)} of the {len(never)} faults under which the mean never does; "
        f"without a fault in {steps['none']['suspicion']} steps, the mean in {steps['none']['mean']}"
    )
    free = (steps["none"]["suspicion"] or float("inf")) <= (steps["none"]["mean"] or 0)
    return Finding(said, Verdict.HOLDS if kept == never and free else Verdict.IN_PART if kept else Verdict.DOES_NOT)


def _partitioning(found: Summary, rows: Rows) -> Finding:
    """It would hold if their reward gave as many as they count; times are theirs on another machine."""
    models = found["partitioning"]
    said = "; ".join(
        f"{name}: {one['published_reward']['game_partitioned']} of {one['weights']} weights by their reward, "
        f"{one['partitioned']} in the proved cheapest, {one['cpu_seconds']:.1f} CPU s"
        + (f" (theirs {one['paper_seconds']:,.0f} s)" if one["paper_seconds"] else "")
        for name, one in models.items()
    )
    counted = [
        (one["published_reward"]["game_partitioned"], int(one["paper_partitioned"].split()[0]))
        for one in models.values()
        if one["paper_partitioned"]
    ]
    return Finding(said, Verdict.HOLDS if all(ours == theirs for ours, theirs in counted) else Verdict.IN_PART)


def _data_parallel(found: Summary, rows: Rows) -> Finding:
    models = found["data_parallel"]
    by_batch = all(one["input_dimension"] == 0 for one in models.values())
    slowest = max(one["cpu_seconds_after_capture"] for one in models.values())
    said = f"the batch dimension of all {len(models)} models, each within {slowest:.2f} CPU s after its capture"
    return Finding(said, Verdict.HOLDS if by_batch else Verdict.DOES_NOT)


def _pipeline(found: Summary, rows: Rows) -> Finding:
    """It holds if the proved best cuts the devices where theirs did, in all of their configurations that we have."""
    exact = found["pipeline"]["exact"]
    compared = [(row["device_cuts"], row["their_device_cuts"]) for row in rows if row.get("their_device_cuts")]
    same = sum(ours == theirs for ours, theirs in compared)
    said = (
        f"the best cuts, proved, in {exact['most_boundaries_cpu_ms']:.0f} ms on servers' boundaries and "
        f"{exact['most_all_cpu_ms'] / 1e3:.1f} s over all cuts of devices at most (theirs: minutes); devices are cut "
        f"where theirs are in {same} of {len(compared)} configurations"
    )
    verdict = Verdict.HOLDS if compared and same == len(compared) else Verdict.IN_PART if same else Verdict.DOES_NOT
    return Finding(said, verdict)


PAPER, AUTO_MAP = "Pipe-Déjàvu", "Auto-MAP"
PROFILE = f"{DATA}/alpa/prof_database.parquet"
CLAIMS: tuple[Claim, ...] = (
    Claim(
        "regressions",
        f"{PAPER}, figures 6, 24–53",
        "collectives' costs are lines in their size, R² up to 1.0",
        "benchmarks.paper.regressions",
        (PROFILE, "--figures", FIGURES),
        _regressions,
    ),
    Claim(
        "predictors",
        f"{PAPER}, notes",
        "support vectors, random forests and two stages may predict better than a line",
        "benchmarks.paper.regressions",
        (PROFILE, "--figures", FIGURES),
        _predictors,
    ),
    Claim(
        "profiling",
        f"{PAPER}, table of profiling",
        "profiling is up to 30 % of compiling a large model; predicting takes seconds",
        "benchmarks.cost",
        ("--profiling-time",),
        _profiling,
    ),
    Claim(
        "program",
        f"{PAPER}, eq. 2",
        "Alpa's dynamic program costs O(K⁵NM(N + log M)²): a search should be cheaper",
        "benchmarks.search",
        ("--cases", f"{DATA}/dp_cases", "--microbatches", "16", "--repeats", "1"),
        _program,
    ),
    Claim(
        "knapsack",
        f"{PAPER}, figures 7, 8",
        "a relaxation by gradients reaches the dynamic program's value in half the time",
        "benchmarks.knapsack",
        ("--repeats", "1", "--figures", FIGURES),
        _knapsack,
    ),
    Claim(
        "search",
        f"{PAPER}, figure 9",
        'a differentiable search in place of the dynamic program (found "not clear")',
        "benchmarks.search",
        (
            "--cases",
            f"{DATA}/dp_cases",
            "--microbatches",
            "16",
            "--repeats",
            "1",
            "--searches",
            "exact,differentiable",
            "--budget-seconds",
            "5",
            "--alpa-up-to-layers",
            "0",
        ),
        _search,
    ),
    Claim(
        "joint",
        f"{PAPER}, eq. 4–6",
        "weights and strategy trained together by gradient steps on both, at O(I(2|V|N + 2C_θ))",
        "benchmarks.joint",
        ("--complexity", "--simulated"),
        _joint,
    ),
    Claim(
        "initialization",
        f"{PAPER}, figures 10–13",
        "about 1.5 % faster convergence with 40 workers than with one",
        "benchmarks.initialization",
        ("--gain", "--tasks", "cnn", "--repeats", "3", "--counts", "4,40", "--figures", FIGURES),
        _initialization,
    ),
    Claim(
        "gradients",
        f"{PAPER}, Algorithm 2",
        "gradients weighted by suspicion withstand faulty replicas",
        "benchmarks.gradients",
        ("--seeds", "1"),
        _gradients,
    ),
    Claim(
        "partitioning",
        f"{AUTO_MAP}, tables 3–5",
        "VGG-19 5 of 38, T5-base 111, T5-3B and T5-11B 432 variables partitioned, in 30 s to 1.45 h",
        "benchmarks.operators",
        ("--partitioning", "--seeds", "0", "--agents", "", "--figures", FIGURES),
        _partitioning,
    ),
    Claim(
        "data-parallel",
        f"{AUTO_MAP}, table 6",
        "the batch dimension is found: T5-base in 0.27 h, VGG-19 in 70 s",
        "benchmarks.operators",
        ("--data-parallel",),
        _data_parallel,
    ),
    Claim(
        "pipeline",
        f"{AUTO_MAP}, tables 7, 8",
        "cuts of 128 operators and of devices on two to four servers, each in up to 4–5 min",
        "benchmarks.operators",
        ("--pipeline", "--seeds", "0", "--figures", FIGURES),
        _pipeline,
    ),
)
