"""A tier that the engine can do without: until it can be opened, it is tried in the background."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from kvoffload_async.abc.tier import CloseReport
from kvoffload_async.errors import TierTimeoutError, drop_tracebacks, text_of
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.runtime.bridge import Bridge

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0


def create_tier(
    tier_config: Mapping[str, Any], primary_kv_view: memoryview, offloading_spec: object
) -> SecondaryTierManager | UnopenedTier:
    """Create and open a tier; one that is not `required` may be opened later.

    Raises what `SecondaryTierFactory.create_secondary_tier` raises, if the tier is required.
    """
    create = partial(
        SecondaryTierFactory.create_secondary_tier, tier_config, primary_kv_view, offloading_spec
    )
    try:
        return create()
    except Exception as error:
        if tier_config.get("required", True):
            raise
        drop_tracebacks(error)  # before it is logged, as logs may be kept
        longest_s = tier_config.get("reopen_pause_s", _LONGEST_PAUSE_S)
        name = tier_config["type"]
        bridge: Bridge | None = getattr(offloading_spec, "runtime", None)
        hangs = partial(bridge.opening_hangs, name) if bridge is not None else bool
        return UnopenedTier(name, create, error, longest_s, hangs)


def pauses_s(longest_s: float) -> Iterator[float]:
    """Yield the seconds before each attempt."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield min(pause_s, longest_s)
        pause_s = min(2 * pause_s, longest_s)


class UnopenedTier:
    """Tries to open a tier, on a thread that the owner waits for in `shutdown` alone.

    Thread: owner, but for `_reopen`.

    Attributes:
        tier_type: The name under which the tier was configured.
    """

    def __init__(
        self,
        tier_type: str,
        create: Callable[[], SecondaryTierManager],
        error: Exception,
        longest_pause_s: float,
        hangs: Callable[[], bool] = bool,
    ) -> None:
        """Begin to try.

        Args:
            tier_type: The name under which the tier was configured.
            create: Creates and opens the tier; waits for that, on the thread.
            error: Why it could not be opened so far.
            longest_pause_s: Bound on the pauses between two attempts, which double from 1 s on.
            hangs: Returns whether a thread of the last attempt still hangs: then none is begun.
        """
        self.tier_type = tier_type
        self._create = create
        self._longest_pause_s = longest_pause_s
        self._hangs = hangs
        self._opened: deque[SecondaryTierManager] = deque()
        self._stop = threading.Event()
        self._failed_at_s = time.monotonic()
        why = text_of(error)
        logger.warning("tier %s cannot be opened, and is tried again: %s", tier_type, why)
        self._thread = threading.Thread(
            target=self._reopen, name=f"kvoffload-reopen:{tier_type}", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tier_type}>"

    def take_opened(self) -> SecondaryTierManager | None:
        """Return the tier once it is open, and from then on None."""
        if not self._opened:
            return None
        seconds = time.monotonic() - self._failed_at_s
        logger.warning("tier %s was opened after %.1f s", self.tier_type, seconds)
        return self._opened.popleft()

    def shutdown(self, timeout: float) -> CloseReport:
        """Stop trying, and close a tier that was not taken; waits, also for a running attempt."""
        self._stop.set()
        begun_s = time.monotonic()
        self._thread.join(timeout)
        with contextlib.suppress(IndexError):
            left_s = max(0.0, timeout - (time.monotonic() - begun_s))
            return self._opened.popleft().shutdown(left_s)
        if self._thread.is_alive():  # it closes what it opens; until then it may use the primary
            return CloseReport(error=TierTimeoutError(f"{self.tier_type} is still being opened"))
        return CloseReport()

    def _reopen(self) -> None:
        """Try until it works. Thread: its own."""
        for pause_s in pauses_s(self._longest_pause_s):
            if self._stop.wait(pause_s):
                return
            if self._hangs():
                continue
            try:
                tier = self._create()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is tried again
                drop_tracebacks(error)
                logger.debug("tier %s cannot be opened: %s", self.tier_type, text_of(error))
                continue
            self._opened.append(tier)
            if self._stop.is_set():
                with contextlib.suppress(IndexError):  # else `shutdown` has it
                    self._opened.popleft().shutdown()
            return
