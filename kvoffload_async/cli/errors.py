"""What the command itself can find wrong."""

from __future__ import annotations

from kvoffload_async.errors import OffloadError


class InputError(OffloadError, ValueError):
    """What the user gave cannot be used; the message is the one line that the user sees."""


class StalledError(OffloadError):
    """Requests wait, and the engine has made no progress for too long: a defect, or a dead tier."""
