"""Options common to all tiers, manager signatures derived from options, and block identity."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvoffload_async.abc.tier import AsyncTier, KVIdentity
from kvoffload_async.config import (
    OffloadConfig,
    Options,
    TierOptions,
    instance_of,
    option,
    or_none,
    reject_unknown,
)
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.errors import ConfigError, UnknownNameError
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.tiers._sealed_names import NameKey, read_name_keys
from kvoffload_async.tiers.files.digests import TenantRings


class UnknownOptionError(UnknownNameError, TypeError):
    """A tier has no option of this name."""


@dataclass(frozen=True, kw_only=True)
class ManagerOptions(TierOptions):
    """The options of every tier, and those that only Python code can pass to a manager."""

    runtime: Bridge | None = option(or_none(instance_of(Bridge)), None, is_internal=True)
    """Runs the tier instead of the spec's runtime."""
    backpressure_detector: Backpressure | None = option(
        or_none(instance_of(Backpressure)), None, is_internal=True
    )
    """Skips some cascades to the tier while it is slow."""
    tenant_names: TenantRings[NameKey] | None = option(
        or_none(instance_of(TenantRings)), None, is_internal=True
    )
    """Keys that names are sealed with, by tenant, instead of `name_key_file`."""

    def read_name_keys(self) -> Sequence[NameKey] | TenantRings[NameKey] | None:
        """Return the keys that names are sealed with; raises ConfigError if a file is unusable."""
        if self.tenant_names is not None or self.name_key_files is None:
            return self.tenant_names
        return read_name_keys(self.name_key_files)


def reject_unknown_options(
    given: Iterable[str],
    names: Iterable[str],
    tier_class: type[AsyncTier] | None,
    tier_type: str,
) -> None:
    """Raise UnknownOptionError for the first given option that a tier does not have.

    Args:
        given: Keys of the given options.
        names: Keys of all options of the tier.
        tier_class: Class of the tier, if it is known; its internal options are accepted, but not
            shown in the message.
        tier_type: Name of the tier in the message.
    """
    fields = ManagerOptions.declared()
    if tier_class is not None and tier_class.declares is not None:
        fields |= tier_class.declares.declared()
    internal = {key for key, field in fields.items() if field.metadata["is_internal"]}
    public = [key for key in given if key not in internal]
    reject_unknown(
        public, set(names) - internal, f"secondary tier {tier_type!r}", UnknownOptionError
    )


_NO_OPTIONS: Final = {"offloading_spec", "primary_kv_view", "tier_type", "tier", "runtime", "ops"}
"""Constructor parameters that are not configuration options."""


def options_of(cls: type | None) -> dict[str, Any]:
    """Return the default, or `REQUIRED`, of each option of a tier's or a manager's class."""
    if cls is None:
        return {}
    if issubclass(cls, AsyncTier) and cls.declares is not None:
        return _defaults_of(cls.declares)
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        parameters = inspect.signature(base).parameters.values()
        for parameter in parameters:
            if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}:
                found.setdefault(parameter.name, parameter.default)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return {name: default for name, default in found.items() if name not in _NO_OPTIONS}


def arguments_for(tier_class: type[AsyncTier], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options to pass to a tier's class.

    Raises:
        ConfigError: A library that it requires is not installed.
    """
    for library, remedy in tier_class.requires.items():
        if not _is_installed(library):
            raise ConfigError(
                f"type: {tier_class.__name__} needs the library {library}, which is not "
                f"installed; {remedy}"
            )
    if tier_class.declares is not None:
        return options
    own = options_of(tier_class)
    return {key: options[key] for key in options if key in own}


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # the package that the library is a part of
        return False


def signature_of(cls: type, tier_class: type[AsyncTier] | None) -> inspect.Signature:
    """Return a manager's signature in which the options of its tier replace `**options`."""
    own = {
        parameter.name: parameter
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    for name, default in [*options_of(tier_class).items(), *_defaults_of(TierOptions).items()]:
        own.setdefault(
            name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        )
    return inspect.Signature(list(own.values()))


def _defaults_of(declared: type[Options]) -> dict[str, Any]:
    fields = declared.declared().items()
    return {k: f.metadata["default"] for k, f in fields if not f.metadata["is_internal"]}


@dataclass(frozen=True, slots=True)
class ManagerSpec:
    """The parts of a spec that a tier's manager reads, for callers without a spec."""

    runtime: Bridge
    config: OffloadConfig | None = None


def config_of(spec: object) -> OffloadConfig | None:
    """Return a spec's configuration; None if it has no `OffloadConfig`."""
    config = getattr(spec, "config", None)
    return config if isinstance(config, OffloadConfig) else None


_LABELS: Final = {"model": "model_name", "fingerprint": "fingerprint", "namespace": "namespace"}
"""Option of a tier -> its name in the tier's run configuration."""


def identity_of(options: TierOptions, config: OffloadConfig | None, block_bytes: int) -> KVIdentity:
    """Return the identity and layout of a tier's blocks.

    The tier's options, `run_config` included, take precedence over the spec's.

    Args:
        options: The tier's.
        config: The spec's configuration, if there is one.
        block_bytes: Bytes of a row of the primary; 0 if unknown.

    Raises:
        ConfigError: Two options of the tier contradict each other.
    """
    given = options.run_config or {}
    num_workers = 1 if config is None else config.num_workers
    fields = dict(given) or {
        "inference_engine": "kvoffload_async",
        "block_bytes": block_bytes,
        "tokens_per_hash": config.block_size if config else 0,
        "blocks_per_file": config.blocks_per_chunk if config else 0,
        "num_workers": num_workers,
    }
    for key, name in _LABELS.items():
        own, other = getattr(options, key), given.get(name)
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
        rank=options.rank,
        num_workers=num_workers,
        run_config=fields,
        generation=getattr(config, "generation", None),
    )
