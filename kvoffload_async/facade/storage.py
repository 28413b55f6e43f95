"""What the options mean that the tiers on disk share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvoffload_async.config import OffloadConfig, nearest
from kvoffload_async.errors import ConfigError


def parse_directory(root_dir: object) -> str:
    """Return the absolute path of a directory, given as text or path; raises ConfigError."""
    path = os.fspath(root_dir) if isinstance(root_dir, os.PathLike) else root_dir
    if not isinstance(path, str) or not path or "\0" in path or not _is_encodable(path):
        raise ConfigError(f"root_dir: {root_dir!r} is not valid; it must be an absolute path")
    if not Path(path).is_absolute():
        remedy = str(Path.cwd() / path)
        raise ConfigError(f"root_dir: {path!r} is not an absolute path; write {remedy!r}")
    return os.path.normpath(path)


def _is_encodable(path: str) -> bool:
    try:
        return bool(os.fsencode(path))
    except UnicodeEncodeError:
        return False


def parse_choice(value: object, allowed: type[StrEnum], key: str) -> str:
    """Return a value that is one of a few names; raises ConfigError."""
    names = [str(member) for member in allowed]
    if not isinstance(value, str) or value not in names:
        hint = nearest(str(value), names)
        raise ConfigError(f"{key}: {value!r} is unknown{hint}; allowed: {', '.join(names)}")
    return value


def parse_run_config(given: object) -> dict[str, Any]:
    """Return a given run configuration, checked: it becomes a digest, by way of JSON."""
    try:
        if given is None:
            return {}
        if isinstance(given, Mapping) and given:
            json.dumps(dict(given), sort_keys=True)
            return dict(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"run_config: {given!r} cannot be written as JSON ({error})") from error
    raise ConfigError(f"run_config: {given!r} is not valid; it must be an object with a key")


def default_run_config(spec: object, kv_view: memoryview) -> dict[str, Any]:
    """Return what the layout of a block's bytes depends on, as far as this package knows."""
    config = getattr(spec, "config", None)
    known = config if isinstance(config, OffloadConfig) else None
    return {
        "inference_engine": "kvoffload_async",
        "block_bytes": kv_view.nbytes // len(kv_view),
        "tokens_per_hash": known.block_size if known else 0,
        "blocks_per_file": known.blocks_per_chunk if known else 0,
        "num_workers": known.num_workers if known else 1,
    }
