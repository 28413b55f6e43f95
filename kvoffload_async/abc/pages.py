"""Who moves bytes to or from the primary's memory, beside the jobs of tiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class HoldablePages(Protocol):
    """Memory that is given back to the system only when nobody holds it any more."""

    def hold(self, who: str) -> Callable[[], None]:
        """See `hold_pages`."""
        ...


def hold_pages(view: memoryview, who: str) -> Callable[[], None]:
    """Have the pages below a view stay as they are until the returned call is made.

    For transports, and whoever else copies in the background: a view alone keeps the range of
    addresses, not what lies there. Memory that pins no pages of its own accord, such as somebody
    else's mapping, is left alone.

    Args:
        view: The primary's buffer, or a part of it.
        who: For messages.

    Returns:
        To be called when no byte moves any more and nothing is pinned; idempotent. Thread: any.
    """
    if isinstance(view.obj, HoldablePages):
        return view.obj.hold(who)
    return _nothing


def _nothing() -> None:
    """Let go of memory that was never held."""
