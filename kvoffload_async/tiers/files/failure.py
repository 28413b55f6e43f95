"""A system call's error in the vocabulary of tiers."""

from __future__ import annotations

import errno

from kvoffload_async.errors import TierError, TierFullError, TierUnavailableError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def mapped(error: OSError) -> TierError:
    """Return the error as a tier reports it."""
    kind = TierFullError if error.errno in _NO_SPACE else TierUnavailableError
    tier_error = kind(str(error))
    tier_error.__cause__ = error.with_traceback(None)  # its frames hold the primary's memory
    error.__context__ = None
    return tier_error
