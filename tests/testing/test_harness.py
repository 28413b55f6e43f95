"""The harness: what it finds left behind, and what it lets end."""

import threading

import pytest

from kvoffload_async.testing import harness as harness_module
from kvoffload_async.testing.harness import TierHarness
from kvoffload_async.tiers.example import ExampleTier


class Slow(threading.Thread):
    """A thread that ends once somebody waits for it."""

    def __init__(self, *, answers_join):
        super().__init__(name="slow", daemon=True)
        self._answers_join = answers_join
        self.may_end = threading.Event()

    def run(self):
        self.may_end.wait()

    def join(self, timeout=None):
        if self._answers_join:
            self.may_end.set()
        super().join(timeout)


def test_a_thread_that_is_about_to_end_is_waited_for():
    with TierHarness(ExampleTier()):
        thread = Slow(answers_join=True)
        thread.start()
    assert not thread.is_alive()


def test_a_thread_that_is_only_being_started_is_waited_for(monkeypatch):
    """`enumerate` lists it already, and `join` raised RuntimeError."""
    thread, list_threads = Slow(answers_join=True), threading.enumerate

    listed = []

    def while_it_starts():
        if not listed:
            listed.append(thread)
            return [*list_threads(), thread]
        if thread.ident is None:
            thread.start()
        return list_threads()

    with TierHarness(ExampleTier()):
        monkeypatch.setattr(threading, "enumerate", while_it_starts)
    assert thread.ident is not None
    assert not thread.is_alive()


def test_a_thread_that_does_not_end_is_an_error(monkeypatch):
    monkeypatch.setattr(harness_module, "_THREADS_END_S", 0.01)
    harness = TierHarness(ExampleTier())
    thread = Slow(answers_join=False)
    thread.start()
    with pytest.raises(AssertionError, match=r"threads were left: \['slow'"):
        harness.close()
    thread.may_end.set()
    thread.join()
