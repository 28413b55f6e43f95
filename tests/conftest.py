"""What every test gets: a hypothesis profile and a check for leaked threads."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path

import own_threads
import pytest
from hypothesis import Phase, settings

from kvoffload_async.tiers.fs import housekeeping

PROFILE_VARIABLE = "KVOFFLOAD_HYPOTHESIS_PROFILE"
SAYS_SO = "the primary stays mapped"

# Every profile starts from hypothesis' own defaults: under CI it loads a profile by itself, and a
# profile registered without a parent would silently inherit from that one. No deadline per example:
# on a shared machine it measures the neighbours.
_DEFAULTS = settings.get_profile("default")
PROFILES = {
    "dev": settings(_DEFAULTS, max_examples=30, deadline=None),
    "ci": settings(
        _DEFAULTS,
        max_examples=50,
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
    ),
    "nightly": settings(
        _DEFAULTS,
        max_examples=2000,
        stateful_step_count=100,
        deadline=None,
        print_blob=True,
    ),
    # Finds a mutant or does not; how to fail in few steps is of no interest.
    "mutation": settings(
        _DEFAULTS,
        max_examples=100,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
    ),
}


@pytest.fixture(autouse=True)
def _patient_openings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An `fs` tier that opens looks around to the end, in one step, however busy the machine is."""
    monkeypatch.setattr(housekeeping, "_OPENING_S", 30.0)
    monkeypatch.setattr(housekeeping, "_STEP_S", 30.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow or servers")


def pytest_configure(config: pytest.Config) -> None:
    if config.args_source is pytest.Config.ArgsSource.ARGS:  # also in a worker of pytest-xdist
        config.option.slow = True  # whoever names tests wants them
    name = os.environ.get(PROFILE_VARIABLE, "dev")
    if name not in PROFILES:
        allowed = ", ".join(PROFILES)
        raise pytest.UsageError(f"{PROFILE_VARIABLE}={name!r}: the profiles are {allowed}")
    for profile, values in PROFILES.items():
        settings.register_profile(profile, values)
    settings.load_profile(name)
    # Ctrl-C is what tests send to themselves and to their children, which inherit that it is
    # ignored: so a shell starts whatever a script runs in its background.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would walk over thousands of items each time.

    What is there afterwards stays, so no collection in a test walks over it either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests without --slow, and sweeps and the soak unless -m names their marker.

    State machines, benchmarks and slow tests are not part of the measured coverage: they reach
    lines by chance, or again, and run up to four times as long under measurement.
    """
    left_out = {"soak", "sweep"} | (set() if config.option.slow else {"slow", "servers"})
    left_out = {name for name in left_out if name not in config.option.markexpr}
    out = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if out:
        config.hook.pytest_deselected(items=out)
        kept = set(items) - set(out)
        items[:] = [item for item in items if item in kept]
    for item in items:
        is_long = any(map(item.get_closest_marker, ("stateful", "slow", "bench")))
        is_measured = item.get_closest_marker("measured") or item.get_closest_marker("servers")
        if is_long and not is_measured:
            item.add_marker("no_cover")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure no test marked `no_cover`, also not in a worker of pytest-xdist.

    There pytest-cov starts two measurements, and stops one for the test: the other would go on.
    """
    coverage = sys.modules.get("coverage")  # it need not be installed
    if coverage is None or item.get_closest_marker("no_cover") is None:
        return (yield)
    below = coverage.Coverage.current()
    if below is None:
        return (yield)
    below.stop()
    try:
        return (yield)
    finally:
        below.start()


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Keep what was imported out of what the collector and searches for referrers go through.

    Modules such as torch's are most of the heap: a collection costs 0.2 s with them.
    """
    gc.collect()
    gc.freeze()


def _tasks() -> set[int]:
    """Return the ids of all threads, also of those that Python does not know."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _native_threads(tasks: set[int]) -> list[str]:
    """Return the names of those that are a native engine's."""
    found = []
    for task in tasks - {thread.native_id for thread in threading.enumerate()}:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            found += [name] if name.startswith(own_threads.PREFIX) else []
    return sorted(found)


@pytest.fixture
def started_threads() -> Callable[[], list[str]]:
    """Return what names the package's threads that the test has started and that still run."""
    before = own_threads.running()
    return lambda: sorted(thread.name for thread in own_threads.running() - before)


@pytest.fixture
def threads_left() -> Callable[[], list[str]]:
    """Tells which of the package's threads, of those that the test has started, do not end."""
    return partial(own_threads.left, own_threads.running())


@pytest.fixture(autouse=True)
def no_leaked_threads(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test that leaves one of the package's threads running, daemon, native or not.

    Native ones are left, with the memory that they may touch, where a shutdown says so.
    """
    before, tasks_before = own_threads.running(), _tasks()  # which have no names yet, perhaps
    yield
    deadline = time.monotonic() + own_threads.GRACE_S
    # An engine that nobody could close ends its threads when it is collected.
    if own_threads.running() - before or _native_threads(_tasks() - tasks_before):
        gc.collect()
    leaked = own_threads.left(before)
    if not any(SAYS_SO in record.getMessage() for record in caplog.get_records("call")):
        # The kernel may list threads that were joined for a moment still.
        while (native := _native_threads(_tasks() - tasks_before)) and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        leaked += native
    if leaked:
        pytest.fail(f"threads still running {own_threads.GRACE_S:g} s after the test: {leaked}")
