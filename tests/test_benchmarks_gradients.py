"""The table of rules with faulty replicas: its cases, one training of it, and how seeds become a row."""

from __future__ import annotations

import torch

from benchmarks.gradients.__main__ import steps_of, table
from benchmarks.gradients.campaign import MOST_STEPS, NONE, PRINTED, Case, cases, rules, settings_of, together, trained
from benchmarks.gradients.in_process import by_class
from dejavu.runtime.gradients.faults import FAULTS
from dejavu.runtime.gradients.rules import RULES


def test_every_fault_meets_every_rule() -> None:
    found = list(cases())
    assert len(set(found)) == len(found)
    for replicas, faulty in ((8, 1), (8, 2), (4, 1)):
        usable = {name for name, one in rules(faulty).items() if one.least_replicas <= replicas}
        met = {
            (one.fault, one.rule) for one in found if (one.replicas, one.faulty, one.layer) == (replicas, faulty, "")
        }
        assert {(fault, name) for fault in FAULTS for name in usable} <= met
    assert {settings_of(one).rule for one in found} == set(RULES)
    assert all(settings_of(one).num_suspected >= one.faulty for one in found if "suspicion" in one.rule)


def test_garbage_ends_the_mean_and_not_suspicion() -> None:
    threads = torch.get_num_threads()
    try:
        mean, suspicion = (trained((Case("equal data", rule, 4, 1, "nan"), 0)) for rule in ("mean", "suspicion"))
    finally:
        torch.set_num_threads(threads)
    assert mean["steps"] is None and suspicion["steps"] is not None
    assert (suspicion["named_faulty"], suspicion["named_honest"]) == (1, 0)


def test_the_median_of_seeds_is_none_where_most_do_not_arrive() -> None:
    def run(steps: int | None) -> dict[str, object]:
        return {"steps": steps, "accuracy": 0.5, "named_faulty": 1, "named_honest": 0}

    case = Case("equal data", "median", 8, 2, "noise")
    assert together(case, [run(40), run(None), run(50)])["steps_to_target"] == 50
    assert together(case, [run(40), run(None), run(None)])["steps_to_target"] is None
    rows = [together(case, [run(40)]), together(Case("equal data", PRINTED, 8, 0), [run(MOST_STEPS)])]
    assert table(rows, 8, 2) == {"noise": {"median": 40}, NONE: {PRINTED: MOST_STEPS}}
    assert steps_of(rows, "equal data") == {"median": 40, PRINTED: MOST_STEPS}


def test_examples_by_class_are_all_given_out_once() -> None:
    targets = torch.randint(10, (48,), generator=torch.Generator().manual_seed(0))
    for share in (0.0, 0.5, 1.0):
        order = by_class(targets, share, 4)
        assert sorted(order.tolist()) == list(range(48))
        kinds = [len(set(targets[order].reshape(4, -1)[n, : round(share * 12)].tolist())) for n in range(4)]
        assert all(kind <= 5 for kind in kinds)
    assert torch.equal(by_class(targets, 0.0, 4), torch.arange(48))
