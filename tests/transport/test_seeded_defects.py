"""Defects seeded into the transport, its staging and the worker: each one is found.

What finds them passes for the code as it is: see `test_schedules`, `test_launch_errors` and
`tests/connector/test_worker_schedules`.
"""

import contextlib
import inspect
import logging
import types
from dataclasses import dataclass

import pytest
from connector import worker_programs
from hypothesis import HealthCheck, Phase, given, settings
from transport import programs
from transport.launches import (
    check_all_lost,
    check_devices,
    check_durations,
    check_errors,
    check_errors_for_good,
    check_lost,
    check_staging_bytes,
)
from transport.worlds import LOAD, STORE

from kvoffload_async.facade.connector import worker
from kvoffload_async.transport import cuda

pytestmark = [pytest.mark.slow, pytest.mark.stateful]

DEADLINE_S = 2.0
"""Some defects show as a wait that does not end."""
AT_MOST = 1000
"""Schedules within which a defect must be found."""


@dataclass(frozen=True)
class Defect:
    """A change to a module, whose original text occurs once."""

    name: str
    module: types.ModuleType
    original: str
    replacement: str

    def load(self):
        """Return the module's contents with the change."""
        source = inspect.getsource(self.module)
        assert source.count(self.original) == 1, "the code has changed: seed another defect"
        changed = types.ModuleType(self.module.__name__)
        code = source.replace(self.original, self.replacement)
        exec(compile(code, f"{self.module.__file__}: {self.name}", "exec"), changed.__dict__)  # noqa: S102
        return changed


IN_CUDA = [
    ("no wait for the compute event", "staged.stream.wait_event(transfer.after)\n", "pass\n"),
    (
        "the closing event is recorded early",
        ("            transfer.copied.record(staged.stream)\n\n"),
        "\n",
    ),
    (
        "the compute event is recorded on another stream",
        "event.record(self._runtime.current_stream(self._device))",
        "event.record(self._runtime.create_stream(self._device))",
    ),
    ("the end is not awaited", "self.copied.synchronize()", "self.copied.query()"),
    ("another event is awaited", "self.copied.synchronize()", "self.started.synchronize()"),
    ("the waiting thread spins", "timed=True, blocking=True", "timed=True"),
    (
        "the streams of a direction share staging memory",
        "staging = self._runtime.empty(shape, torch.uint8, self._device)",
        (
            "self.shared = getattr(self, 'shared', None)\n"
            "            if self.shared is None:\n"
            "                self.shared = self._runtime.empty(shape, torch.uint8, self._device)\n"
            "            staging = self.shared"
        ),
    ),
    (
        "rows of pinned memory are filled again before they were copied",
        "have ended.\n                staged.stream.synchronize()\n",
        "have ended.\n",
    ),
    (
        "rows of pinned memory are read before they were filled",
        "to_rows, staged)\n                staged.stream.synchronize()\n",
        "to_rows, staged)\n",
    ),
    (
        "copies are launched on the default stream",
        "with self._runtime.stream(staged.stream):",
        "with self._runtime.stream(self._runtime.default_stream):",
    ),
    (
        "the index is allocated on the default stream",
        "index = self._runtime.empty(pinned.shape, pinned.dtype, self._device)",
        (
            "with self._runtime.stream(self._runtime.default_stream):\n"
            "                    index = self._runtime.empty(pinned.shape, torch.int64)"
        ),
    ),
    (
        "the index is not pinned",
        "self._runtime.pin_memory(torch.from_numpy(plan.index))",
        "torch.from_numpy(plan.index)",
    ),
    ("the index is copied synchronously", "pinned, non_blocking=True", "pinned"),
    ("the slots are not pinned", "self._has_pinned = self._pin()", "self._has_pinned = False"),
    (
        "the slots are unpinned before the last copy",
        "        deadline_s = time.monotonic() + timeout_s\n",
        ("        deadline_s = time.monotonic() + timeout_s\n        self._unpin()\n"),
    ),
]
IN_ERRORS = [
    (
        "after an error, only the event is awaited",
        "stream.synchronize()  #",
        "self.copied.synchronize()  #",
    ),
    ("after an error, nothing is awaited", "stream.synchronize()  #", "pass  #"),
    ("an error of a launch is forgotten", "transfer.failure = error", "pass"),
    ("an error of a wait is forgotten", "self.failure = error\n", "pass\n"),
    ("a lost device is forgotten", "self._lost = text_of(error)", "pass"),
    (
        "a lost transfer has its outcome at once",
        "self._incomplete.append(transfer)",
        "transfer.fail(error)",
    ),
    ("a lost transfer has no outcome", "while self._incomplete:", "while False:"),
    (
        "the slots are released though copies may run",
        "if self._lost is not None or not self._unpin():",
        "if not self._unpin():",
    ),
]
IN_USES = [
    (
        "rows of staging memory are rounded up",
        "size_bytes // self._row_bytes",
        "-(-size_bytes // self._row_bytes)",
    ),
    (
        "after a loss the launching thread stops",
        "transfer.fail(self._lost_error())\n                continue",
        "transfer.fail(self._lost_error())\n                break",
    ),
    (
        "milliseconds are taken for seconds",
        "self.started.elapsed_time(self.copied) / 1000",
        "self.started.elapsed_time(self.copied)",
    ),
    (
        "the start is recorded before the wait for the compute event",
        (
            "            staged.stream.wait_event(transfer.after)\n"
            "            transfer.started.record(staged.stream)\n"
        ),
        (
            "            transfer.started.record(staged.stream)\n"
            "            staged.stream.wait_event(transfer.after)\n"
        ),
    ),
    (
        "the waiting threads use another device",
        'Thread: the stream\'s."""\n        self._use_device()\n',
        'Thread: the stream\'s."""\n',
    ),
]
IN_STAGING = [
    ("wrong part of the index", "begin += 3 * count", "begin += count"),
    ("partial chunks count as whole", "is_whole = count == len(mine)", "is_whole = 0 <= len(mine)"),
    (
        "the rest of a partial chunk is not read",
        "direction is Direction.LOAD or not extent.is_whole",
        "direction is Direction.LOAD",
    ),
    ("rows of another extent", "(rows - first)[chosen]", "rows[chosen]"),
    (
        "a group is as wide as another",
        ": self._group_bytes[extent.group]]",
        ": max(self._group_bytes)]",
    ),
    ("runs of slots that are not adjacent", "slots[end] != slots[end - 1] + 1", "False"),
    (
        "the cell of another worker",
        "begin, end = self._cell_offset_bytes, self._cell_offset_bytes + staging.shape[1]",
        "begin, end = 0, staging.shape[1]",
    ),
    ("runs skip padding", "len(slots) if is_joined else 1", "len(slots)"),
    (
        "copies to the host are synchronous",
        "host_rows.copy_(device_rows, non_blocking=True)",
        "host_rows.copy_(device_rows)",
    ),
    (
        "stores stay in staging memory",
        "self._copy_rows(used, extent.slots, to_host=True)",
        "pass",
    ),
]
IN_WORKER = [
    (
        "a flush waits for nothing",
        "self.wait(meta.jobs_to_flush, self._flush_timeout_s):",
        "True:",
    ),
    (
        "a late store counts as good",
        "self._overrun.update(stores)",
        "pass",
    ),
    (
        "a step goes on although a load is late",
        "return len(stores) == len(late)",
        "return True",
    ),
    (
        "stores of preempted requests start after the step",
        "            if job_id in meta.jobs_to_flush:\n                self.submit_store",
        "            if False:\n                self.submit_store",
    ),
    (
        "stores of the step start at once",
        "self._deferred[job_id] = spec",
        "self.submit_store(job_id, spec)",
    ),
    (
        "a shutdown forgets the deferred stores",
        "        deadline_s = time.monotonic() + timeout\n        self._submit_deferred()\n",
        "        deadline_s = time.monotonic() + timeout\n",
    ),
    ("an expedited load is not awaited", "        if expedited:\n", "        if False:\n"),
    (
        "jobs end when they are submitted",
        "self._loop.call_soon(self._follow, job_id, transfer, name)",
        "self._report(TransferResult(job_id, success=True))",
    ),
    (
        "all jobs wait for the first compute event",
        "BlockCopies(direction, spec.device, spec.host), self.transport.record_compute()",
        (
            "BlockCopies(direction, spec.device, spec.host),\n"
            "                self.__dict__.setdefault('first', self.transport.record_compute())"
        ),
    ),
    (
        "loads are submitted as stores",
        "self._submit(job_id, spec, Direction.LOAD)",
        "self._submit(job_id, spec, Direction.STORE)",
    ),
    (
        "a shutdown does not wait for the copies' results",
        "        jobs = list(self._running)\n",
        "        jobs = []\n",
    ),
]


class FoundError(Exception):
    """A drawn program has an error."""


def search(strategy, run):
    """Return whether a drawn program has an error."""
    found = []

    @settings(
        max_examples=AT_MOST,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def attempt(program):
        found.extend(run(program))
        if found:
            raise FoundError

    with contextlib.suppress(FoundError):
        attempt()
    return found


def in_errors(create):
    """Return the check that an error at some call of a transfer fails."""
    try:
        check_lost(create, deadline_s=DEADLINE_S)
        for direction in (STORE, LOAD):
            check_errors_for_good(direction, create, deadline_s=DEADLINE_S)
            for is_performed in (True, False):
                check_errors(
                    direction, None, create, is_performed=is_performed, deadline_s=DEADLINE_S
                )
    except (AssertionError, ValueError) as error:
        return error
    return None


def in_uses(create):
    """Return the check that fails of those of a loss, of durations and of devices."""
    try:
        check_all_lost(create, deadline_s=DEADLINE_S)
        check_durations(create, deadline_s=DEADLINE_S)
        check_devices(create)
        check_staging_bytes(create)
    except AssertionError as error:
        return error
    return None


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def defects(module, listed):
    return [pytest.param(Defect(name, module, *texts), id=name) for name, *texts in listed]


@pytest.mark.parametrize("defect", defects(cuda, IN_CUDA + IN_STAGING))
def test_a_schedule_shows_a_defect_of_the_transport(defect):
    create = defect.load().CudaTransport
    assert search(programs.programs(), lambda p: programs.run(p, create, DEADLINE_S))


@pytest.mark.parametrize("defect", defects(cuda, IN_ERRORS))
def test_an_error_shows_a_defect_of_the_transport(defect):
    assert in_errors(defect.load().CudaTransport)


@pytest.mark.parametrize("defect", defects(cuda, IN_USES))
def test_a_use_shows_a_defect_of_the_transport(defect):
    assert in_uses(defect.load().CudaTransport)


@pytest.mark.parametrize("defect", defects(worker, IN_WORKER))
def test_a_schedule_shows_a_defect_of_the_worker(defect):
    create = defect.load().OffloadingConnectorWorker
    assert search(worker_programs.programs, lambda p: worker_programs.run(p, create, DEADLINE_S))
