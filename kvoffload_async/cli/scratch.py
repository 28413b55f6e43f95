"""A directory for the tier of the built-in workload, gone with the replay."""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import Self


class ScratchFolder:
    """Made when it is first asked for, removed at the end, however that comes about."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def is_used(self) -> bool:
        """Whether somebody has asked for it."""
        return self._folder is not None

    @property
    def path(self) -> str:
        """Where it is."""
        if self._folder is None:
            # A copy that still hangs may write into it while it goes.
            self._folder = tempfile.TemporaryDirectory(
                prefix="kvoffload-replay-", ignore_cleanup_errors=True
            )
        return self._folder.name
