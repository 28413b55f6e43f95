"""Look-ups that may hang: of names by name servers, of credentials in files.

asyncio resolves names in the loop's default executor, whose threads the application uses too and
the process joins at its end. These run in daemon threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

_MOST_RUNNING: Final = 64


class LookUpError(Exception):
    """A look-up failed, or has not ended in time."""


class Lookups:
    """Blocking look-ups in daemon threads; concurrent callers with the same name share a look-up.

    Thread: loop.
    """

    def __init__(self, patience_s: float) -> None:
        """Create the object; no look-up is running yet.

        Args:
            patience_s: Seconds after the start of a look-up until its callers give it up.
        """
        self._patience_s = patience_s
        self._running: dict[str, tuple[asyncio.Future[Any], float]] = {}
        """Name -> future result of the look-up, and loop time at which its callers time out."""

    async def run(self, name: str, look_up: Callable[[], T]) -> T:
        """Return the result of `look_up`; if it hangs, it keeps its thread and later callers fail.

        Args:
            name: What is looked up, for the error.
            look_up: Runs in another thread.

        Raises:
            LookUpError: It failed, or has not ended in time, or too many have not ended.
        """
        future, until_s = self._running.get(name) or self._start(name, look_up)
        try:
            async with asyncio.timeout_at(until_s):
                outcome = await asyncio.shield(future)
        except TimeoutError:
            raise LookUpError(f"{name}: no answer within {self._patience_s:.3g} s") from None
        if isinstance(outcome, Exception):  # not raised: its callers would share one traceback
            raise LookUpError(f"{name}: {outcome}")
        found: T = outcome
        return found

    def _start(self, name: str, look_up: Callable[[], object]) -> tuple[asyncio.Future[Any], float]:
        if len(self._running) >= _MOST_RUNNING:
            raise LookUpError(f"{name}: {_MOST_RUNNING} other look-ups have not been answered")
        loop = asyncio.get_running_loop()
        running = loop.create_future(), loop.time() + self._patience_s

        def run() -> None:
            outcome: object
            try:
                outcome = look_up()
            except Exception as error:  # noqa: BLE001 - returned to the callers
                outcome = error.with_traceback(None)
            with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(self._ended, name, outcome)

        threading.Thread(target=run, name="kvoffload-lookup", daemon=True).start()
        self._running[name] = running
        return running

    def _ended(self, name: str, outcome: object) -> None:
        self._running.pop(name)[0].set_result(outcome)
