"""Orders to agents: read as they were written, and only from who knows the launch's token."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from dejavu.launch.warm.board import Board, End, Probe, Run, Stop
from dejavu.runtime.snapshots import Part, Start


def test_orders_are_read_as_they_were_written_and_only_the_launcher_s() -> None:
    store = HashStore()
    launcher, agent, stranger = Board(store, "known"), Board(store, "known"), Board(store, "guessed")
    start = Start(0, 7, (Part(("a", "b"), ((0, "alpha"), (1, "beta"))),))
    run = Run(1, "job.json", {"alpha": ((0, (0, 3)),)}, {"alpha": "http://a"}, 1, {0: "beta"}, start)
    orders = [run, Stop(), Probe("alpha", {"beta": "http://b"}), End()]
    for number, order in enumerate(orders):
        launcher.order(number, order)
    assert [agent.ordered(number) for number in range(len(orders))] == orders
    assert run.num_ranks == 1 and agent.ordered(len(orders)) is None
    stranger.order(4, run)
    with pytest.raises(RuntimeError, match="order 4 is not signed by the launcher"):
        agent.ordered(4)
    launcher.order(5, Stop())
    launcher.store.set("order/6", launcher.store.get("order/5"))
    with pytest.raises(RuntimeError, match="not signed"):
        agent.ordered(6)
