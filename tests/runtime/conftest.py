"""A loop and I/O pools that are gone after the test."""

import pytest
from runtime.gates import DEADLINE_S

from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.runtime.loop import LoopThread


@pytest.fixture
def loop():
    with LoopThread() as thread:
        yield thread


@pytest.fixture
def pools():
    made = []

    def make(*args, **kwargs):
        made.append(IoPool(*args, **kwargs))
        return made[-1]

    yield make
    for pool in made:
        assert pool.close(DEADLINE_S) == 0
