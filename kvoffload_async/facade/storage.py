"""What the options mean that say whose blocks a tier keeps, and where those on disk keep them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.config import OffloadConfig, at_least, nearest, parse_name, shown
from kvoffload_async.errors import ConfigError

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
