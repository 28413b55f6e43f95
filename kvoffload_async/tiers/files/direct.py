"""Whether the page cache is bypassed: asked for, and given up where it does not work."""

from __future__ import annotations

import errno
import logging
import os

logger = logging.getLogger(__name__)


class DirectIo:
    """The flag for `open`. One of several threads may give up while others are in a call.

    Attributes:
        flag: `O_DIRECT`, or 0. Read it once an operation: `refused` is about that value.
    """

    def __init__(self, *, wanted: bool, where: str) -> None:
        """Start with what is wanted; `where` is for the warning."""
        self.flag = os.O_DIRECT if wanted else 0
        self._where = where

    def refused(self, flag: int, error: OSError) -> bool:
        """Tell whether an error means that `flag` does not work here; then it is given up.

        It can at the opening and at every transfer: alignment of memory and length is each
        filesystem's own.
        """
        if not flag or error.errno != errno.EINVAL:
            return False
        if self.flag:
            self.flag = 0
            logger.warning(
                "%s: direct I/O does not work here (%s); using the page cache",
                self._where,
                str(error),  # who keeps the log must not keep the frames
            )
        return True
