"""vLLM's settings that affect a block's bytes, in a comparable form.

`settings.toml` classifies each field, and `environment.toml` each environment variable;
docs/reference/vllm-settings.md lists those that are not neutral.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from types import FunctionType
from typing import Any, Final

import torch

from kvoffload_async.errors import ConfigError

_FOLDED: Final = "fingerprint"
_PROCESS: Final = "process"
_REFUSED: Final = "refused"
_NOT_CONTENT: Final = frozenset({"_commit_hash", "_name_or_path", "transformers_version"})
"""Fields of a model's configuration that are no content: its location, its reader's version."""

_OF_KUBERNETES: Final = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Matches the variables that Kubernetes sets for a service, here one named `vllm` or `vllm-*`."""


@cache
def classified_settings() -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """Return settings as class -> field -> (classification, reason); see settings.toml."""
    text = files(__package__).joinpath("settings.toml").read_text()
    classified: dict[str, dict[str, tuple[str, str]]] = {}
    for name, rows in tomllib.loads(text).items():
        fields = dict.fromkeys(rows.pop("neutral", "").split(), ("neutral", ""))
        classified[name] = fields | {field: (where, why) for field, (where, why) in rows.items()}
    return classified


@cache
def classified_environment() -> Mapping[str, frozenset[str]]:
    """Return the names of environment variables by list; see environment.toml."""
    text = files(__package__).joinpath("environment.toml").read_text()
    return {name: frozenset(names.split()) for name, names in tomllib.loads(text).items()}


def environment(environ: Mapping[str, str], declared: Collection[str]) -> dict[str, str]:
    """Return the environment variables that the fingerprint covers.

    Args:
        environ: The environment.
        declared: Names of the variables in `vllm.envs`. Others that begin with `VLLM_` count as
            well, because vLLM and its plugins read some that are not declared there.
    """
    classified = classified_environment()
    neutral = classified["neutral"] | classified["undeclared"]
    return {
        name: value
        for name, value in environ.items()
        if (name in declared or name.startswith("VLLM_"))
        and name not in neutral
        and not _OF_KUBERNETES.fullmatch(name)
    }


def folded(config: Any) -> dict[str, Any]:  # noqa: ANN401 - one of vLLM's classes
    """Return the configuration fields that the fingerprint covers, as nested JSON.

    Raises:
        ConfigError: A value cannot be serialised.
    """
    classified = classified_settings().get(type(config).__name__, {})
    return {
        field.name: _written(getattr(config, field.name), f"{type(config).__name__}.{field.name}")
        for field in dataclasses.fields(config)
        if classified.get(field.name, (_FOLDED, ""))[0] == _FOLDED
    }


def unknowable(config: Any) -> Iterator[str]:  # noqa: ANN401 - one of vLLM's classes
    """Yield why the model's content is unknown, one reason per field, nested fields included."""
    name = type(config).__name__
    classified = classified_settings().get(name, {})
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        where, why = classified.get(field.name, (_FOLDED, ""))
        if where == _PROCESS and value:
            yield f"{name}.{field.name} is set: {why}"
        elif where == _FOLDED and type(value).__name__ in classified_settings():
            yield from unknowable(value)


def refused(config: Any) -> Iterator[str]:  # noqa: ANN401 - vLLM's VllmConfig
    """Yield one error text per vLLM setting that allows weights to change at run time."""
    name = type(config).__name__
    for field, (where, why) in classified_settings().get(name, {}).items():
        if where == _REFUSED and getattr(config, field, None):
            yield f"{name}.{field} is set: {why}"


def _written(value: Any, where: str) -> Any:  # noqa: ANN401, C901, PLR0911 - one line a kind of value
    """Convert a setting's value to JSON; equal values give equal text in every process."""
    if isinstance(value, enum.Enum):  # first, because some enums are also str or int
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype | PurePath):
        return str(value)
    if isinstance(value, numbers.Rational):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        pairs = [(str(key), _written(value[key], f"{where}[{key!r}]")) for key in value]
        return dict(sorted(pair for pair in pairs if pair[0] not in _NOT_CONTENT))
    if isinstance(value, list | tuple):
        return [_written(one, where) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_written(one, where) for one in value), key=repr)
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        return folded(value)
    if callable(to_dict := getattr(value, "to_dict", None)):  # a model's configuration
        return _written(to_dict(), where)
    if callable(compute_hash := getattr(value, "compute_hash", None)):  # vLLM's SupportsHash
        return compute_hash()
    raise ConfigError(f"{where}: a {type(value).__qualname__} cannot be serialised")
