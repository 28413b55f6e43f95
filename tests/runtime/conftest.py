"""A loop and I/O pools that are gone after the test."""

from contextlib import closing

import pytest
from runtime.beside import Beside, participate
from runtime.gates import DEADLINE_S

from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.runtime.loop import LoopThread


@pytest.fixture
def loop():
    with closing(LoopThread()) as thread:
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


@pytest.fixture
def run_beside():
    """Run functions in other processes, which end with the test."""
    made = []

    def run(function, *args, uid=None):
        made.append(Beside(function, *args, uid=uid))
        return made[-1]

    yield run
    for one in made:
        one.close()


@pytest.fixture
def started(run_beside):
    """Start a participant as a process, and wait until it has come to a point."""

    def start(directory, participant, point):
        process = run_beside(participate, directory, participant, point)
        assert process.reported() == point
        return process

    return start
