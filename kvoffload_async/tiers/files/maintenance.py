"""What the maintenance of stores on disk shares: threads, and keys of a report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from kvoffload_async.abc.maintenance import MaintenanceControl
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.waiting import all_done

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

IO_THREADS: Final = 4
"""Threads that are in a system call at once; more lose on a local disk."""

_OLD_KEYS: Final = {
    "verified": "sealed",
    "with_digest": "sealed",
    "without_digest": "unsealed",
    "unknown_files": "strangers",
    "unknown_file_bytes": "stranger_bytes",
}
"""What figures were called before; deprecated, and reported beside the new names."""

Batch = TypeVar("Batch")
Checked = TypeVar("Checked")
Arguments = TypeVarTuple("Arguments")


class MaintenanceIo:
    """Runs the calls of one piece of maintenance in a few threads.

    Attributes:
        ops: The system calls.
        control: Whom to tell, and whom to ask whether to stop.
    """

    def __init__(self, ops: FileOps, control: MaintenanceControl) -> None:
        self.ops = ops
        self.control = control
        self._limiter = anyio.CapacityLimiter(IO_THREADS)

    async def run(self, call: Callable[[*Arguments], Checked], *arguments: *Arguments) -> Checked:
        """Return what a call returns that blocks; a cancellation is delivered when it has ended."""
        task = self._start(call, *arguments)
        await _settle([task])
        return task.result()

    async def share_out(
        self, batches: Iterator[Batch], check: Callable[[Batch], Checked]
    ) -> AsyncGenerator[tuple[Batch, Checked], None]:
        """Check batches in threads, several at once; yield each with its result, or until stopped.

        To be closed by whoever does not iterate to the end: no check runs any more after that.
        """
        running: dict[asyncio.Task[Checked], Batch] = {}
        try:
            while True:
                while len(running) < IO_THREADS and not self.control.should_stop():
                    batch = next(batches, None)
                    if batch is None:
                        break
                    running[self._start(check, batch)] = batch
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield running.pop(task), task.result()
        finally:
            await _settle(running)

    def _start(
        self, call: Callable[[*Arguments], Checked], *arguments: *Arguments
    ) -> asyncio.Task[Checked]:
        in_thread = anyio.to_thread.run_sync(call, *arguments, limiter=self._limiter)
        return asyncio.create_task(in_thread, name="kvoffload-maintenance")


async def _settle(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until tasks have ended, however often it is cancelled; then be cancelled."""
    with anyio.CancelScope(shield=True):
        await all_done(*tasks)


def figures_of(report: DataclassInstance) -> dict[str, Any]:
    """Return a report as a JSON object, with the keys that figures had before."""
    figures = asdict(report)
    old = {_OLD_KEYS[key]: value for key, value in figures.items() if key in _OLD_KEYS}
    return figures | old
