"""A system call's error in the vocabulary of tiers."""

from __future__ import annotations

import errno

from kvoffload_async.errors import ConfigError, TierError, TierFullError, TierUnavailableError
from kvoffload_async.tiers.files.roots import NotRegularFileError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def mapped(error: OSError) -> TierError:
    """Return the error as a tier reports it."""
    kind = TierFullError if error.errno in _NO_SPACE else TierUnavailableError
    tier_error = kind(str(error))
    tier_error.__cause__ = error.with_traceback(None)  # its frames hold the primary's memory
    error.__context__ = None
    return tier_error


def unusable(root_dir: str, error: OSError) -> ConfigError:
    """Return the error of a tier whose directory cannot be used."""
    remedy = "give a directory that this process may write"
    if isinstance(error, (NotRegularFileError, NotADirectoryError)):
        remedy = "remove that, or give another directory"
    failure = ConfigError(f"root_dir: {root_dir!r} cannot be used ({error}); {remedy}")
    failure.__cause__ = error
    return failure
