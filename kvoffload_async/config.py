"""Configuration of an engine, parsed and validated before anything starts.

Keys shared with vLLM's offloading specs keep vLLM's names. Sizes are in bytes, as an integer or as
text with a unit (`"4GiB"`, `"512 MB"`).
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Final, NoReturn

from kvoffload_async.errors import ConfigError, UnknownNameError

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)},
}
_MAX_SECONDS: Final = 1e9
_MAX_RATE: Final = 1e12
_MAX_INTEGER: Final = (1 << 63) - 1
"""Largest size or number that fits a signed 64-bit integer."""
_MAX_LABEL_CHARS: Final = 200
_MAX_EXPLAINED: Final = 100_000
"""Maximum number of timelines kept; each takes up to 30 KiB."""
_MAX_SOCKET_PATH_BYTES: Final = 107
"""Maximum path length of a `sockaddr_un`."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


HIDDEN: Final = "***"
"""Replacement for secrets."""

_USER_INFO: Final = re.compile(r"(?<=://)[^\s'\"]*@")
"""Matches up to the last @, because a password may contain an unescaped slash."""
_SECRET_KEY: Final = re.compile(
    "secret|password|token|credential|key(?!_id)|service_account", re.IGNORECASE
)

_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 400
_REPR.maxlong = 60
_REPR.maxlist = _REPR.maxdict = 8


def parse_size_bytes(value: object, key: str) -> int:
    """Return a size in bytes from an integer or from text with a unit.

    Raises:
        ConfigError: The value has another form or is not positive.
    """
    given = value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            _reject(key, value, 'a number of bytes, or text such as "64KiB", "4GiB" or "512 MB"')
        value = int(Fraction(match[1]) * unit)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_INTEGER:
        _reject(key, given, "a positive number of bytes, below 8 EiB")
    return value


def shown(value: object) -> str:
    """Return a user's value for a message, truncated if it is long or deeply nested."""
    return without_user_info(_REPR.repr(value))


def without_user_info(text: str) -> str:
    """Return a text with user names and passwords in URLs masked."""
    return _USER_INFO.sub(f"{HIDDEN}@", text)


def without_secrets(value: object, key: str = "") -> object:
    """Return an option's value with secrets masked, recognised by their key or in a URL."""
    if isinstance(value, Mapping):
        return {name: without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, str):
        is_secret = _SECRET_KEY.search(key) is not None and not key.endswith("_file")
        return HIDDEN if is_secret else without_user_info(value)
    return value


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a hint with the valid name closest to an unknown one, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def reject_unknown(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raise UnknownNameError for the first given key that is not allowed."""
    names = sorted(allowed)
    for key in given:
        if key not in names:
            hint = nearest(str(key), names)
            raise UnknownNameError(
                f"{where}: unknown key {shown(key)}{hint}; allowed: {', '.join(names)}"
            )


def _reject(key: str, value: object, allowed: str) -> NoReturn:
    raise ConfigError(f"{key}: {shown(value)} is not valid; it must be {allowed}")


Parser = Callable[[object, str], Any]
"""Takes a value and its key; returns the parsed value or raises a ConfigError naming both."""


def at_least(minimum: int, maximum: int = _MAX_INTEGER) -> Parser:
    """Return a parser for integers within bounds."""

    def parse(value: object, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            _reject(key, value, f"an integer of at least {minimum}")
        if value > maximum:
            _reject(key, value, f"an integer of at least {minimum} and at most {maximum}")
        return value

    return parse


def or_none(parse: Parser) -> Parser:
    """Return a parser that also accepts None, meaning an automatic choice."""
    return lambda value, key: None if value is None else parse(value, key)


def parse_seconds(value: object, key: str) -> float:
    """Return a positive number of seconds; raises ConfigError."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value < _MAX_SECONDS
    ):
        _reject(key, value, "a positive number of seconds")
    return float(value)


def parse_rate(value: object, key: str) -> float:
    """Return a positive rate per second; raises ConfigError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MAX_RATE:
        _reject(key, value, f"a number above 0 and at most {_MAX_RATE:g}, or left out")
    return float(value)


def parse_fraction(value: object, key: str) -> float:
    """Return a number above 0 and at most 1; raises ConfigError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        _reject(key, value, "a number above 0 and at most 1")
    return float(value)


def parse_part(value: object, key: str) -> float:
    """Return a number of at least 0 and below 1; raises ConfigError."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
        _reject(key, value, "a number of at least 0 and below 1")
    return float(value)


def parse_bool(value: object, key: str) -> bool:
    """Return a boolean; raises ConfigError."""
    if not isinstance(value, bool):
        _reject(key, value, "true or false")
    return value


def parse_name(value: object, key: str) -> str:
    """Return a non-empty text; raises ConfigError."""
    if not isinstance(value, str) or not value or not is_encodable(value):
        _reject(key, value, "a name")
    return value


def is_encodable(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8; JSON may contain lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_label(value: object, key: str) -> str:
    """Return a short printable label; raises ConfigError."""
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= _MAX_LABEL_CHARS
        or not value.isprintable()
    ):
        _reject(key, value, f"a text of 1 to {_MAX_LABEL_CHARS} printable characters")
    return value


def parse_generation(value: object, key: str) -> str:
    """Return a generation's label, given as text or as an integer; raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return parse_label(value, key)


def parse_write_back(value: object, key: str) -> str:
    """Return the mode of stores that overrun the tiers, "wait" or "drop"; raises ConfigError."""
    allowed = ("wait", "drop")
    if value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        _reject(key, value, f'"wait" or "drop"{hint}')
    return str(value)


def parse_socket_path(value: object, key: str) -> str:
    """Return the path of a Unix socket; raises ConfigError."""
    allowed = f"an absolute path of at most {_MAX_SOCKET_PATH_BYTES} bytes"
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        _reject(key, value, allowed)
    if not is_encodable(value) or len(value.encode()) > _MAX_SOCKET_PATH_BYTES:
        _reject(key, value, allowed)
    return value


def _tier_list(value: object, key: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list | tuple):
        _reject(key, value, 'a list of objects, each with a "type"')
    for index, tier in enumerate(value):
        if not isinstance(tier, Mapping):
            _reject(f"{key}[{index}]", tier, 'an object with a "type"')
    return tuple(value)


def _option(
    parse: Parser,
    default: Any,  # noqa: ANN401 - a dataclass field of any type
    *,
    is_shown: bool = True,
) -> Any:  # noqa: ANN401 - the same
    return field(default=default, repr=is_shown, metadata={"parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Every setting of an engine.

    Attributes:
        cpu_bytes_to_use: Size of the primary tier in bytes, for all workers together.
        block_bytes: Bytes of one offload unit (`blocks_per_chunk` device blocks) on one worker;
            `OffloadEngine` derives it from its `kv_caches`.
        block_size: Tokens per device block.
        blocks_per_chunk: Device blocks per offload unit.
        num_workers: Workers that share the primary tier; a row holds one cell per worker.
        model: Name of the model that the KV blocks belong to. `OffloadEngine` and tiers on disk
            require it.
        fingerprint: Label of everything beside the model's name that determines KV bytes, such as
            a hash of the weights and settings; see docs/kv-identity.md.
        generation: Version of the weights, an integer or a label; `invalidate` changes it.
        eviction_policy: Name of the primary tier's eviction policy, "lru" or "arc".
        store_threshold: Store a block only when it is offered for the n-th time; above 1 only
            without secondary tiers.
        max_tracker_size: Keys whose offers are counted for `store_threshold`.
        accept_prefix: If a batch does not fit, store its longest prefix that fits, over all
            KV-cache groups, instead of nothing; under vLLM only for models with one group.
        enable_kv_cache_events: Record events for `take_events`.
        reserved_fraction: Fraction of the primary that tier transfers and blocks retained for
            waiting requests never occupy. The rest is divided equally among the tiers. Within its
            share, a tier reserves this fraction for each direction.
        promotion_fraction: Fraction of the primary that one tier's promotions, and blocks retained
            for waiting requests, may occupy until they are loaded; also limited by the tier's
            share.
        cascade_fraction: Fraction of the primary that may be cascading to one tier at once, also
            limited by the tier's share; further blocks wait.
        write_back: Applies when a store can only evict blocks that a tier has not stored yet.
            "wait": the store waits for the tiers, up to its deadline. "drop": the blocks are
            evicted. By default, `OffloadEngine` waits and a scheduler's manager drops. A manager
            set to "wait" refuses the store, and the scheduler offers it again in the next step.
        deferral_timeout_s: Maximum total seconds for which a request's lookups are deferred.
        breaker_fault_threshold: Consecutive faults after which a tier is suspended.
        breaker_retry_s: Seconds after which a suspended tier is tried again.
        drain_timeout_s: Seconds that `reset_cache` waits for running jobs.
        shutdown_timeout_s: Seconds that `shutdown` waits for running jobs.
        prefault: Touch the primary tier's memory at startup.
        explain_requests: Number of recent requests whose timelines are kept for `explain` and
            tracing; 0: none.
        check_invariants: Check all invariants at the end of every step; for debugging.
        status_socket: Path of the Unix socket that serves the engine's status to `kvoffload top`;
            only this user can connect. By default `KVOFFLOAD_STATUS_SOCKET`.
        secondary_tiers: Tier configurations, in lookup order; see `SecondaryTierFactory`.
    """

    cpu_bytes_to_use: int = _option(parse_size_bytes, None)
    block_bytes: int = _option(parse_size_bytes, None)
    block_size: int = _option(at_least(1), 16)
    blocks_per_chunk: int = _option(at_least(1), 1)
    num_workers: int = _option(at_least(1), 1)
    model: str | None = _option(or_none(parse_name), None)
    fingerprint: str | None = _option(or_none(parse_label), None)
    generation: str | None = _option(or_none(parse_generation), None)
    eviction_policy: str = _option(parse_name, "lru")
    store_threshold: int = _option(at_least(0), 0)
    max_tracker_size: int = _option(at_least(1), 64_000)
    accept_prefix: bool = _option(parse_bool, default=True)
    enable_kv_cache_events: bool = _option(parse_bool, default=False)
    reserved_fraction: float = _option(parse_part, 0.25)
    promotion_fraction: float = _option(parse_fraction, 0.5)
    cascade_fraction: float = _option(parse_fraction, 0.5)
    write_back: str | None = _option(or_none(parse_write_back), None)
    deferral_timeout_s: float = _option(parse_seconds, 30.0)
    breaker_fault_threshold: int = _option(at_least(1), 3)
    breaker_retry_s: float = _option(parse_seconds, 5.0)
    drain_timeout_s: float = _option(parse_seconds, 30.0)
    shutdown_timeout_s: float = _option(parse_seconds, 30.0)
    prefault: bool = _option(parse_bool, default=True)
    explain_requests: int = _option(at_least(0, _MAX_EXPLAINED), 0)
    check_invariants: bool = _option(parse_bool, default=False)
    status_socket: str | None = _option(or_none(parse_socket_path), None)
    secondary_tiers: tuple[Mapping[str, Any], ...] = _option(_tier_list, (), is_shown=False)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> OffloadConfig:
        """Validate and convert a mapping, such as a parsed JSON object, without modifying it.

        Raises:
            ConfigError: A key is unknown or missing, or a value has the wrong type or is out of
                range; the message names the key, the value and the allowed values.
        """
        if not isinstance(raw, Mapping):
            _reject("config", raw, "an object of keys and values")
        parsers = {option.name: option.metadata["parse"] for option in fields(cls)}
        reject_unknown(raw, parsers, "config")
        config = cls(**{key: parsers[key](raw[key], key) for key in raw})
        for key in ("cpu_bytes_to_use", "block_bytes"):
            if getattr(config, key) is None:
                raise ConfigError(f"{key}: missing; give {_required_hint(key)}")
        if config.store_threshold > 1 and config.secondary_tiers:
            raise ConfigError(
                f"store_threshold: {config.store_threshold} cannot be combined with "
                "secondary_tiers; omit one of the two"
            )
        return config


def accepted_keys() -> set[str]:
    """Return the keys that `OffloadConfig.parse` accepts."""
    return {option.name for option in fields(OffloadConfig)}


def _required_hint(key: str) -> str:
    """Return the description of a required key for the message that reports it missing."""
    return {
        "cpu_bytes_to_use": 'the memory of the primary tier, such as "4GiB"',
        "block_bytes": 'the bytes of one offload unit on one worker, such as "256KiB"',
    }[key]
