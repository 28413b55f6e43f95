"""Pinning the primary's memory during copies outside of tier jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class HoldablePages(Protocol):
    """Memory that is returned to the system only after every hold on it has been released."""

    def hold(self, who: str) -> Callable[[], None]:
        """See `hold_pages`."""
        ...


def hold_pages(view: memoryview, who: str) -> Callable[[], None]:
    """Keep the pages under a view mapped until the returned function is called.

    For transports and other background copies: a view reserves the address range, but does not keep
    its pages. Has no effect on memory that is not `HoldablePages`, such as an external mapping.

    Args:
        view: The primary's buffer, or a part of it.
        who: Name of the holder, for messages.

    Returns:
        The release function; call it when no byte moves any more and nothing is pinned. Idempotent
        and thread-safe.
    """
    if isinstance(view.obj, HoldablePages):
        return view.obj.hold(who)
    return _nothing


def _nothing() -> None:
    """Release nothing: the memory was not held."""
