"""The clock of a search's budget, where one search works in several threads."""

from __future__ import annotations

from threading import Thread

from dejavu.search.shared.clock import SearchClock


def test_a_thread_that_waited_goes_on_at_the_time_of_the_others() -> None:
    clock, seen = SearchClock(), list[float]()

    def work() -> None:
        begin = clock.elapsed_seconds
        while (now := clock.elapsed_seconds) < begin + 0.05:  # of processor time
            pass
        seen.append(now)

    for _ in range(2):
        thread = Thread(target=work)
        thread.start()
        thread.join()
        clock.catch_up()
        assert clock.elapsed_seconds >= seen[-1]
    assert seen[1] >= seen[0] + 0.05  # the second thread began where the first one had come to


def test_who_is_ahead_stays_there() -> None:
    clock = SearchClock()
    times = [clock.elapsed_seconds]
    for _ in range(1000):
        clock.catch_up()
        times.append(clock.elapsed_seconds)
    assert times == sorted(times)
