"""The options that tiers share, and what their values mean: whose blocks, where, and for whom."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypedDict

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.config import (
    OffloadConfig,
    Parser,
    at_least,
    nearest,
    or_none,
    parse_bool,
    parse_label,
    parse_name,
    parse_rate,
    parse_seconds,
    shown,
)
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.errors import ConfigError
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.tiers.files.digests import IntegrityKey, read_key_file
from kvoffload_async.tiers.files.modes import Modes


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


_OCTAL: Final = re.compile(r"(?:0o)?[0-7]{3,5}")
_FILE_BITS: Final = 0o600, 0o666
_DIR_BITS: Final = 0o700, 0o2777
"""Bits that a mode must have, and those that it may have."""


def parse_modes(options: Mapping[str, Any]) -> Modes:
    """Return the permissions that `file_mode` and `dir_mode` ask for; raises ConfigError."""
    return Modes(
        _parse(options["file_mode"], "file_mode", *_FILE_BITS),
        _parse(options["dir_mode"], "dir_mode", *_DIR_BITS),
    )


def _parse(value: object, key: str, least: int, most: int) -> int | None:
    if value is None:
        return None
    mode = -1
    if isinstance(value, str) and _OCTAL.fullmatch(value):
        mode = int(value, 8)
    elif type(value) is int:
        mode = value
    if mode < 0 or mode & least != least or mode & ~most:
        raise ConfigError(
            f"{key}: {shown(value)} is not valid; give octal digits as text, with all bits of "
            f'"{least:04o}" and none that "{most:04o}" has not, such as "{least | 0o060:04o}"'
        )
    return mode


_FIELDS: Final = {
    "model": "model_name",
    "fingerprint": "fingerprint",
    "namespace": "namespace",
}
"""Options of a tier -> what they are called in its run configuration."""


def parse_directory(root_dir: object) -> str:
    """Return the absolute path of a directory, given as text or path; raises ConfigError."""
    path = os.fspath(root_dir) if isinstance(root_dir, os.PathLike) else root_dir
    if not isinstance(path, str) or not path or "\0" in path or not _is_encodable(path):
        raise ConfigError(f"root_dir: {shown(root_dir)} is not valid; it must be an absolute path")
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
        hint = nearest(value, names) if isinstance(value, str) else ""
        raise ConfigError(f"{key}: {shown(value)} is unknown{hint}; allowed: {', '.join(names)}")
    return value


def parse_run_config(given: object) -> dict[str, Any]:
    """Return a given run configuration, checked: it becomes a digest, by way of JSON."""
    try:
        if given is None:
            return {}
        if isinstance(given, Mapping) and given:
            json.dumps(dict(given), sort_keys=True)
            if "model_name" in given:
                parse_name(given["model_name"], "run_config: model_name")
            return dict(given)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"run_config: {shown(given)} cannot be written as JSON ({error})"
        ) from error
    raise ConfigError(f"run_config: {shown(given)} is not valid; it must be an object with a key")


def config_of(spec: object) -> OffloadConfig | None:
    """Return a spec's configuration, where it has one of this package's."""
    config = getattr(spec, "config", None)
    return config if isinstance(config, OffloadConfig) else None


def identity_of(
    options: Mapping[str, Any], config: OffloadConfig | None, block_bytes: int
) -> KVIdentity:
    """Return whose blocks a tier keeps, and how they are laid out.

    An option of the tier counts before the spec's, and so does what its `run_config` says.

    Args:
        options: The tier's.
        config: The spec's, where there is one.
        block_bytes: Bytes of a row of the primary; 0 if not known.

    Raises:
        ConfigError: An option is unusable, or two options of the tier disagree.
    """
    given = parse_run_config(options.get("run_config"))
    num_workers = 1 if config is None else config.num_workers
    fields = given or {
        "inference_engine": "kvoffload_async",
        "block_bytes": block_bytes,
        "tokens_per_hash": config.block_size if config else 0,
        "blocks_per_file": config.blocks_per_chunk if config else 0,
        "num_workers": num_workers,
    }
    for key, name in _FIELDS.items():
        own, other = options.get(key), given.get(name)
        if own is not None and other is not None and own != other:
            raise ConfigError(
                f"{key}: {own!r} contradicts run_config, in which {name} is {other!r}; "
                "leave one of them out"
            )
        value = next((v for v in (own, other, getattr(config, key, None)) if v is not None), None)
        if value is not None:
            fields[name] = value
    return KVIdentity(
        model=fields.get("model_name"),
        fingerprint=fields.get("fingerprint"),
        namespace=fields.get("namespace"),
        block_bytes=block_bytes,
        rank=at_least(0)(options.get("rank", 0), "rank"),
        num_workers=num_workers,
        run_config=fields,
        generation=getattr(config, "generation", None),
    )


def named_layout(identity: KVIdentity) -> Mapping[str, Any]:
    """Return the run configuration of blocks that outlive the process.

    Raises:
        ConfigError: It does not say what the model is.
    """
    if identity.model is None:
        raise ConfigError(
            "model: missing; blocks on disk outlive the process, and without the name of their "
            "model those of another with equal sizes would be served as its own: "
            'add "model": "org/name" to the tier, or to the whole configuration, or '
            '"run_config": {"model_name": "org/name", ...} to the tier'
        )
    return identity.run_config


MAX_THREADS: Final = 1024
"""More of one tier's than this are a mistake: each takes memory, and most would wait."""


class TierOptions(TypedDict, total=False):
    """The options that every tier takes; times in seconds."""

    runtime: Bridge | None
    io_timeout_s: float
    probe_timeout_s: float
    open_timeout_s: float
    close_timeout_s: float
    n_read_threads: int | None
    n_write_threads: int
    enable_kv_events: bool
    min_blocks: int
    prefill_blocks_per_s: float | None
    backpressure_detector: Backpressure | None
    model: str | None
    fingerprint: str | None
    namespace: str | None
    rank: int
    run_config: Mapping[str, Any] | None


_PARSERS: Final[Mapping[str, Parser]] = {
    "io_timeout_s": parse_seconds,
    "probe_timeout_s": parse_seconds,
    "open_timeout_s": parse_seconds,
    "close_timeout_s": parse_seconds,
    "n_read_threads": or_none(at_least(1, MAX_THREADS)),
    "n_write_threads": at_least(1, MAX_THREADS),
    "enable_kv_events": parse_bool,
    "min_blocks": at_least(1),
    "prefill_blocks_per_s": or_none(parse_rate),
    "model": or_none(parse_name),
    "fingerprint": or_none(parse_label),
    "namespace": or_none(parse_label),
    "rank": at_least(0),
    "run_config": lambda value, _key: parse_run_config(value),
}


def check_tier_options(options: Mapping[str, Any]) -> None:
    """Check those of `TierOptions` that a configuration can give; others are ignored.

    Raises:
        ConfigError: A value is of the wrong type, or impossible.
    """
    for name in options.keys() & _PARSERS.keys():
        _PARSERS[name](options[name], name)


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the defaults of a constructor's own parameters, by name."""
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
