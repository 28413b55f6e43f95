"""Calls that wait, for the tests of the I/O pool."""

import asyncio
import threading

DEADLINE_S = 60.0


class Gate:
    """A call that waits until it is opened."""

    def __init__(self, result=None):
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.result = result

    def __call__(self):
        self.entered.set()
        if not self.opened.wait(DEADLINE_S):
            raise TimeoutError
        return self.result


def start(loop, coroutine):
    """Start a coroutine; return a future of its end, for another thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop._loop)
