"""The steps of the owner's thread: how long they take, and what other threads see of them."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import threading
from collections.abc import Callable

from kvoffload_async.block_io import implementation
from kvoffload_async.core.histogram import Histogram
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.readings import Snapshot, take_snapshot
from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.statistics import HistogramStatistics, RuntimeStatistics


class OwnerSteps:
    """Measures what grows with the work of a step: taking in results, and the end of the step.

    At the end of a step it publishes a snapshot of the planner's figures, by one assignment: what
    another thread reads is of one moment, whatever the owner is doing, and waits for nothing.

    Thread: owner, but for `published` and `read`.
    """

    def __init__(self, clock: Callable[[], float], planner: Planner) -> None:
        self._clock = clock
        self._planner = planner
        self._durations = Histogram()
        self._longest_s = self._step_s = 0.0
        self._block_io = _block_io()
        self.publish()

    def spent(self, since_s: float) -> None:
        """Note that the step has kept the thread since then."""
        self._owner = threading.get_ident()
        self._step_s += self._clock() - since_s

    def ended(self, since_s: float) -> None:
        """Note the end of the step, which has kept the thread since then, and publish."""
        self.spent(since_s)
        self._durations.observe(self._step_s)
        self._longest_s = max(self._longest_s, self._step_s)
        self._step_s = 0.0
        self.publish()

    def publish(self) -> None:
        """Show other threads how it is now."""
        self._owner = threading.get_ident()
        self._published = take_snapshot(self._planner)

    def published(self) -> Snapshot:
        """Return how it is now; on another thread than the owner's, what was published last."""
        if threading.get_ident() == self._owner:
            self.publish()
        return self._published

    def read(self, bridge: Bridge | None) -> RuntimeStatistics:
        """Return what was measured here, and by the bridge, if the tiers share one."""
        version, python = _versions()
        return RuntimeStatistics(
            version=version,
            python=python,
            block_io=self._block_io,
            loop_lag_seconds=HistogramStatistics() if bridge is None else bridge.lag.read(),
            step_seconds=self._durations.read(),
            longest_step_s=self._longest_s,
            wake_ups=0 if bridge is None else bridge.wake_ups,
        )


def _block_io() -> str:
    """Return what moves payload; tiers refuse to begin where the environment is unclear."""
    try:
        return implementation().name
    except ConfigError:
        return "python"


@functools.cache
def _versions() -> tuple[str, str]:
    """Return the versions of this package and of the interpreter: read from files, once."""
    return importlib.metadata.version("kvoffload-async"), platform.python_version()
