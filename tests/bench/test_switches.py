"""Counting how often Python threads waited."""

import threading

from kvoffload_async.bench.rounds import count_switches, switches_since


def test_each_wait_of_another_thread_counts_and_those_of_the_own_thread_do_not():
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)

    def answer():
        for _ in range(50):
            asked.acquire()
            answered.release()

    thread = threading.Thread(target=answer)
    thread.start()
    before = count_switches()
    assert thread.native_id in before
    assert threading.get_native_id() not in before
    for _ in range(50):
        asked.release()
        answered.acquire()
        threading.Event().wait(0.0005)  # so that it waits for each
    thread.join()
    assert switches_since({}) >= switches_since(before) >= 0


def test_threads_that_began_in_between_count_from_zero_and_ended_ones_not_at_all(monkeypatch):
    counts = iter([{1: 10, 2: 5}, {1: 13, 3: 4}])
    monkeypatch.setattr("kvoffload_async.bench.rounds.count_switches", lambda: next(counts))
    assert switches_since(next(counts)) == 3 + 4
