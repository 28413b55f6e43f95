"""The options of every tier, signatures of managers made from options, and the blocks' identity."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.config import (
    MAX_THREADS,
    OffloadConfig,
    Options,
    at_least,
    instance_of,
    option,
    or_none,
    parse_bool,
    parse_label,
    parse_name,
    parse_rate,
    parse_seconds,
    reject_unknown,
    shown,
)
from kvoffload_async.core.backpressure import Backpressure
from kvoffload_async.errors import ConfigError, UnknownNameError
from kvoffload_async.runtime.bridge import Bridge


class UnknownOptionError(UnknownNameError, TypeError):
    """A tier has no option of this name."""


def parse_run_config(value: object, key: str) -> dict[str, Any]:
    """Return a copy of a run configuration; raises ConfigError if JSON cannot represent it."""
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"{key}: {shown(value)} is not valid; it must be an object with a key")
    try:
        json.dumps(dict(value), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {shown(value)} cannot be written as JSON ({error})") from error
    if "model_name" in value:
        parse_name(value["model_name"], f"{key}: model_name")
    return dict(value)


@dataclass(frozen=True, kw_only=True)
class TierOptions(Options):
    """The options that every tier takes."""

    io_timeout_s: float = option(parse_seconds, 30.0)
    """Seconds from the submission of a job until it is reported as failed."""
    probe_timeout_s: float = option(parse_seconds, 2.0)
    """Seconds until an unanswered existence probe counts as "absent"."""
    open_timeout_s: float = option(parse_seconds, 30.0)
    """Seconds for opening the tier; `slab` has 10 s more for each million blocks that fit."""
    close_timeout_s: float = option(parse_seconds, 30.0)
    """Seconds for `shutdown`, unless the call gives another timeout."""
    n_read_threads: int | None = option(or_none(at_least(1, MAX_THREADS)), None)
    """I/O threads that prefer loads; None: 3 for `fs`, else one less
    than the usable CPUs, 1 to 3."""
    n_write_threads: int = option(at_least(1, MAX_THREADS), 1)
    """I/O threads that prefer stores."""
    enable_kv_events: bool = option(parse_bool, default=False)
    """Record events for `take_events`."""
    min_blocks: int = option(at_least(1), 1)
    """Minimum number of blocks that a request must miss in the primary and in all nearer tiers for
    this tier to be asked. Raise it if loading fewer blocks takes longer than computing them."""
    prefill_blocks_per_s: float | None = option(or_none(parse_rate), None)
    """Blocks that the accelerator computes per second of prefill. If given, this tier is asked only
    for so many missed blocks that loading them, at recently measured latency and bandwidth, takes
    less time than computing them; None: only `min_blocks` decides."""
    model: str | None = option(or_none(parse_name), None)
    """Name of the model whose blocks these are; by default the engine's `model`."""
    fingerprint: str | None = option(or_none(parse_label), None)
    """Identifies the content of the model's weights and everything else that KV bytes depend on; by
    default the engine's `fingerprint`."""
    namespace: str | None = option(or_none(parse_label), None)
    """Separates blocks from those of other namespaces."""
    rank: int = option(at_least(0), 0)
    """Rank of the engine, if several engines have different bytes under the same key."""
    run_config: Mapping[str, Any] | None = option(or_none(parse_run_config), None)
    """Everything that the layout of a block's bytes depends on; by default the engine's geometry
    and the slot size. `model`, `fingerprint` and `namespace` are added to it."""
    runtime: Bridge | None = option(or_none(instance_of(Bridge)), None, is_internal=True)
    """Runs the tier instead of the spec's runtime."""
    backpressure_detector: Backpressure | None = option(
        or_none(instance_of(Backpressure)), None, is_internal=True
    )
    """Skips some cascades to the tier while it is slow."""


def reject_unknown_options(
    given: Iterable[str], names: Iterable[str], declared: type[Options], tier_type: str
) -> None:
    """Raise UnknownOptionError for the first given option that a tier does not have.

    Args:
        given: Keys of the given options.
        names: Keys of all options of the tier.
        declared: Declares the tier's own options; internal ones are accepted, but not shown in
            the message.
        tier_type: Name of the tier in the message.
    """
    fields = TierOptions.declared() | declared.declared()
    internal = {key for key, field in fields.items() if field.metadata["is_internal"]}
    public = [key for key in given if key not in internal]
    reject_unknown(
        public, set(names) - internal, f"secondary tier {tier_type!r}", UnknownOptionError
    )


def signature_of(cls: type, *declared: type[Options]) -> inspect.Signature:
    """Return a constructor's signature in which the declared options replace `**options`."""
    own = inspect.signature(cls).parameters.values()
    taken = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    for options in declared:
        for key, field in options.declared().items():
            if not field.metadata["is_internal"]:
                default = field.metadata["default"]
                taken.append(
                    inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default)
                )
    return inspect.Signature(taken)


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


def require_model(identity: KVIdentity) -> None:
    """Raise ConfigError if no model is named for blocks that outlive the process."""
    if identity.model is None:
        raise ConfigError(
            "model: missing; blocks on disk outlive the process, and without the name of their "
            "model those of another with equal sizes would be served as its own: "
            'add "model": "org/name" to the tier, or to the whole configuration, or '
            '"run_config": {"model_name": "org/name", ...} to the tier'
        )
