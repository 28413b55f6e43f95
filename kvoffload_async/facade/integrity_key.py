"""What the option `integrity_key_file` means, and what it does not go with."""

from __future__ import annotations

import os
from pathlib import Path

from kvoffload_async.config import shown
from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.integrity import IntegrityKey, read_key_file


def parse_key_file(value: object) -> IntegrityKey | None:
    """Return the key in a file, given by its absolute path; None stays None.

    Raises:
        ConfigError: It is no such path, or the file is unusable.
    """
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not Path(path).is_absolute():
        # The value is not shown: somebody may have taken the option for the key itself.
        raise ConfigError("integrity_key_file: it must be the absolute path of a file with the key")
    return read_key_file(path)


def check_verifies(verify: object, *, does: bool) -> None:
    """Check that a tier with a key verifies; `verify` is the option as given.

    Raises:
        ConfigError: It does not, and so would serve what was made without the key.
    """
    if not does:
        raise ConfigError(
            f"verify: {shown(verify)} does not go with integrity_key_file: it serves blocks that "
            "anybody may have made; leave one of them out"
        )
