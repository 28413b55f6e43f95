"""What a set of tiers runs on: one loop thread, one I/O pool, one bridge; owned, never global."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.io_pool import IoPool
from kvoffload_async.runtime.loop_thread import LoopThread


class RuntimeHost:
    """Owns the threads; a context manager.

    Thread: owner.
    """

    def __init__(self, load_preferring_threads: int = 2, store_preferring_threads: int = 1) -> None:
        """Start a loop thread and an I/O pool."""
        self._pool = IoPool(load_preferring_threads, store_preferring_threads)
        self._loop_thread = LoopThread()
        self.bridge = Bridge(self._loop_thread, self._pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, timeout_s: float = 5.0) -> int:
        """Stop pool and loop; idempotent.

        Returns:
            I/O threads that are still in a call and were left behind.
        """
        left = self._pool.close(timeout_s)
        self._loop_thread.close(timeout_s)
        return left
