"""What the options mean that the tiers on disk share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.config import OffloadConfig, nearest, parse_name
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


def config_of(spec: object) -> OffloadConfig | None:
    """Return a spec's configuration, where it has one of this package's."""
    config = getattr(spec, "config", None)
    return config if isinstance(config, OffloadConfig) else None


def completed(own: KVIdentity, config: OffloadConfig | None) -> KVIdentity:
    """Return a tier's identity: what it leaves out is what its spec's configuration says."""
    if config is None:
        return own
    return replace(
        own, model=own.model or config.model, fingerprint=own.fingerprint or config.fingerprint
    )


def identity_fields(
    run_config: object, options: Mapping[str, Any], config: OffloadConfig | None
) -> dict[str, Any]:
    """Return what goes into a tier's run configuration to say whose blocks these are.

    An option of the tier counts before the spec's, and so does what `run_config` says.

    Args:
        run_config: The tier's, as given.
        options: The tier's.
        config: The spec's, where there is one.

    Raises:
        ConfigError: Nothing says what the model is, or two options of the tier disagree.
    """
    given = parse_run_config(run_config)
    if "model_name" in given:
        parse_name(given["model_name"], "run_config: model_name")
    fields: dict[str, Any] = {}
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
    if "model_name" not in fields:
        raise ConfigError(
            'model: missing; blocks on disk need the name of their model: add "model": "org/name" '
            "to the tier, or to the whole configuration"
        )
    return fields


def default_run_config(spec: object, kv_view: memoryview) -> dict[str, Any]:
    """Return what the layout of a block's bytes depends on, as far as this package knows."""
    known = config_of(spec)
    return {
        "inference_engine": "kvoffload_async",
        "block_bytes": kv_view.nbytes // len(kv_view),
        "tokens_per_hash": known.block_size if known else 0,
        "blocks_per_file": known.blocks_per_chunk if known else 0,
        "num_workers": known.num_workers if known else 1,
    }
