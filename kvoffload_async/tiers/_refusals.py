"""What the log says of a tier that has no room, or may not: that may be for a long time."""

from __future__ import annotations

from typing import Final

INTERVAL_S: Final = 60.0
"""How long nothing more is said."""


class Refusals:
    """Counts what a tier has refused for one reason. Thread: loop."""

    def __init__(self) -> None:
        self._said_s: float | None = None
        self._unsaid = 0

    def note(self, now_s: float) -> str | None:
        """Count one; return what its line in the log ends with, or None if there is to be none."""
        if self._said_s is not None and now_s < self._said_s + INTERVAL_S:
            self._unsaid += 1
            return None
        self._said_s, unsaid, self._unsaid = now_s, self._unsaid, 0
        return f" ({unsaid} more since the last time this was said)" if unsaid else ""
