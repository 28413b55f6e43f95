"""Configuration of an engine, parsed and validated before anything starts.

Keys shared with vLLM's offloading specs keep vLLM's names. Sizes are in bytes, as an integer or as
text with a unit (`"4GiB"`, `"512 MB"`).
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, Final, NoReturn, Self, TypeVar

from kvoffload_async.errors import ConfigError, UnknownNameError

_UNITS: Final = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGTPE", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGTPE", 1)},
}
_MAX_SECONDS: Final = 1e9
_MAX_RATE: Final = 1e12
_MAX_DIGITS: Final = 64
_MAX_INTEGER: Final = (1 << 63) - 1
"""Largest size or number that fits a signed 64-bit integer."""
MAX_THREADS: Final = 1024
"""Maximum I/O threads of one tier: each takes memory, and most would wait."""
_MAX_LABEL_CHARS: Final = 200
_MAX_EXPLAINED: Final = 100_000
"""Maximum number of timelines kept; each takes up to 30 KiB."""
_MAX_SOCKET_PATH_BYTES: Final = 107
"""Maximum path length of a `sockaddr_un`."""
_MOST_FILES: Final = 4
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


HIDDEN: Final = "***"
"""Replacement for secrets."""

_USER_INFO: Final = re.compile(r"(?<=://)[^\s'\"]*@")
"""Matches a URL's user information, up to the last @: passwords may contain unescaped slashes."""
_SECRET_NAME: Final = re.compile(
    "secret|password|token|credential|key(?!_id)|service_account|(?<!skip_)signature", re.IGNORECASE
)


class _SecretlessRepr(reprlib.Repr):
    """Shortens values for messages, and masks secrets, recognised by their key."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        masked = {
            key: HIDDEN if isinstance(value, str) and is_secret(str(key)) else value
            for key, value in x.items()
        }
        return super().repr_dict(masked, level)

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python prints no number of thousands of digits
            return f"an integer of {x.bit_length()} bits"


_REPR: Final = _SecretlessRepr()
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
        # Python parses no number of thousands of digits.
        value = int(Fraction(match[1]) * unit) if len(match[1]) <= _MAX_DIGITS else 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_INTEGER:
        _reject(key, given, "a positive number of bytes, below 8 EiB")
    return value


def shown(value: object) -> str:
    """Return a user's value for a message, without secrets, truncated if it is long or deep."""
    return without_user_info(_REPR.repr(value))


def without_user_info(text: str) -> str:
    """Return a text with user names and passwords in URLs masked."""
    return _USER_INFO.sub(f"{HIDDEN}@", text)


def without_secrets(value: object, key: str = "") -> object:
    """Return an option's value with secrets masked, recognised by their key or in a URL."""
    if isinstance(value, Mapping):
        return {name: without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner, key) for inner in value]
    if isinstance(value, str):
        return HIDDEN if is_secret(key) else without_user_info(value)
    return value


def is_secret(name: str) -> bool:
    """Return whether an option or environment variable of this name has a secret as its value."""
    return _SECRET_NAME.search(name) is not None and not name.lower().endswith("_file")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a hint with the valid name closest to an unknown one, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def reject_unknown(
    given: Iterable[str],
    allowed: Iterable[str],
    where: str,
    error: type[UnknownNameError] = UnknownNameError,
) -> None:
    """Raise an UnknownNameError for the first given key that is not allowed."""
    names = sorted(allowed)
    for key in given:
        if key not in names:
            hint = nearest(str(key), names)
            raise error(f"{where}: unknown key {shown(key)}{hint}; allowed: {', '.join(names)}")


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


def number(is_valid: Callable[[float], bool], allowed: str) -> Callable[[object, str], float]:
    """Return a parser of numbers that satisfy `is_valid`; `allowed` describes them in errors."""

    def parse(value: object, key: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not is_valid(value):
            _reject(key, value, allowed)
        return float(value)

    return parse


parse_seconds = number(lambda value: 0 < value < _MAX_SECONDS, "a positive number of seconds")
parse_rate = number(
    lambda value: 0 < value <= _MAX_RATE, f"a number above 0 and at most {_MAX_RATE:g}, or left out"
)
parse_fraction = number(lambda value: 0 < value <= 1, "a number above 0 and at most 1")


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


E = TypeVar("E", bound=StrEnum)
T = TypeVar("T")


def one_of(allowed: type[E]) -> Callable[[object, str], E]:
    """Return a parser for the names of an enumeration; it returns the member."""
    names = [str(member) for member in allowed]

    def parse(value: object, key: str) -> E:
        if not isinstance(value, str) or value not in names:
            hint = nearest(value, names) if isinstance(value, str) else ""
            raise ConfigError(
                f"{key}: {shown(value)} is unknown{hint}; allowed: {', '.join(names)}"
            )
        return allowed(value)

    return parse


def instance_of(cls: type[T]) -> Callable[[object, str], T]:
    """Return a parser for objects of a class, which no configuration file can contain."""

    def parse(value: object, key: str) -> T:
        if not isinstance(value, cls):
            _reject(key, value, f"a {cls.__name__}")
        return value

    return parse


def parse_directory(value: object, key: str) -> str:
    """Return the normalized absolute path of a directory or file; raises ConfigError."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not _is_path(path):
        _reject(key, value, "an absolute path")
    if not Path(path).is_absolute():
        remedy = str(Path.cwd() / path)
        raise ConfigError(f"{key}: {path!r} is not an absolute path; write {remedy!r}")
    return os.path.normpath(path)


def _is_path(text: str) -> bool:
    try:
        return "\0" not in text and bool(os.fsencode(text))
    except UnicodeEncodeError:
        return False


def parse_url(value: object, key: str) -> str:
    """Return a URL; raises ConfigError, whose message does not show the URL."""
    if not isinstance(value, str) or not value.isprintable() or "://" not in value:
        raise ConfigError(f"{key}: it is not valid; it must be a URL, such as scheme://host/path")
    return value


def parse_file(value: object, key: str) -> str:
    """Return the absolute path of a file; raises ConfigError, whose message does not show it."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not Path(path).is_absolute() or not _is_path(path):
        raise ConfigError(f"{key}: it must be the absolute path of a file")
    return path


def parse_files(value: object, key: str) -> tuple[str, ...]:
    """Return the absolute paths of one file or of a list of them; raises as `parse_file`."""
    paths = value if isinstance(value, list | tuple) else (value,)
    if not 0 < len(paths) <= _MOST_FILES:
        raise ConfigError(f"{key}: a list of {len(paths)} paths; give 1 to {_MOST_FILES}")
    return tuple(parse_file(path, key) for path in paths)


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


REQUIRED: Final = inspect.Parameter.empty
"""Value of `default` that marks an option as required."""


def option(
    parse: Parser,
    default: Any = REQUIRED,  # noqa: ANN401 - a dataclass field of any type
    *,
    remedy: str = "",
    key: str = "",
    is_shown: bool = True,
    is_internal: bool = False,
) -> Any:  # noqa: ANN401 - the same
    """Declare a field of an `Options` class as an option.

    The string literal below the field is the option's description in the reference.

    Args:
        parse: Validates and converts a value.
        default: The default as a user would write it; without one the option is required.
        remedy: Of a required option: what to give, for the message that reports it missing.
        key: Name of the option, if the field has another name.
        is_shown: Whether `repr` shows the value.
        is_internal: Whether only Python code may set it: no signature, hint or reference has it.
    """
    is_given = default is not None and default is not REQUIRED
    value = parse(default, key) if is_given else default
    return field(
        default=MISSING if value is REQUIRED else value,
        repr=is_shown,
        metadata={
            "parse": parse,
            "default": default,
            "remedy": remedy,
            "key": key,
            "is_internal": is_internal,
        },
    )


@dataclass(frozen=True, slots=True)
class Option:
    """One option, as the reference and `kvoffload tiers` show it.

    Attributes:
        name: Its key in the configuration.
        default: Its default, or `REQUIRED`.
        summary: Its description on one line; empty if there is none.
    """

    name: str
    default: object
    summary: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of a class that declares options, each with a field made by `option`.

    Other fields are derived values, for `take` to pass on.
    """

    @classmethod
    def declared(cls) -> dict[str, Field[Any]]:
        """Return the options' fields by key, required options first."""
        options = [field for field in fields(cls) if "parse" in field.metadata]
        options.sort(key=lambda field: field.metadata["default"] is not REQUIRED)
        return {field.metadata["key"] or field.name: field for field in options}

    @classmethod
    def described(cls) -> list[Option]:
        """Return every option that is not internal, with its description.

        Raises:
            OSError: The source of the class is not installed.
        """
        texts: dict[str, str] = {}
        for base in reversed(cls.__mro__[:-1]):
            texts |= _strings_below_fields(base)
        return [
            Option(key, field.metadata["default"], texts.get(field.name, ""))
            for key, field in cls.declared().items()
            if not field.metadata["is_internal"]
        ]

    @classmethod
    def take(cls, given: Mapping[str, Any], **derived: Any) -> Self:  # noqa: ANN401 - of any type
        """Validate and convert the given values of this class's options; ignore other keys.

        Args:
            given: Values by key, as a user gave them.
            **derived: Values of the fields that are not options.

        Raises:
            ConfigError: A required option is missing, or a value is invalid.
        """
        declared = cls.declared()
        parsed = {
            declared[key].name: declared[key].metadata["parse"](given[key], key)
            for key in given
            if key in declared
        }
        for key, missing in declared.items():
            if missing.default is MISSING and key not in given:
                raise ConfigError(f"{key}: missing; give {missing.metadata['remedy']}")
        return cls(**parsed, **derived)


def _strings_below_fields(cls: type) -> dict[str, str]:
    """Return the string literals below the fields in a class's source, each on one line."""
    (source,) = ast.parse(dedent(inspect.getsource(cls))).body
    return {
        target.id: " ".join(text.split())
        for statement, following in pairwise(getattr(source, "body", ()))
        if isinstance(target := getattr(statement, "target", None), ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(text := getattr(following.value, "value", None), str)
    }


class WriteBack(StrEnum):
    """What a store does if it would evict blocks that tiers have not received yet."""

    WAIT = "wait"
    DROP = "drop"


DEFAULT_TENANT: Final = "default"
_MOST_TENANTS: Final = 255


class UnknownTenant(StrEnum):
    """What becomes of a request whose tenant is missing or unknown."""

    DEFAULT = "default"
    NO_STORE = "no_store"


@dataclass(frozen=True, kw_only=True)
class TenantOptions(Options):
    """The options of one tenant.

    Attributes:
        name: The tenant's name.
    """

    name: str
    encryption_key_files: tuple[str, ...] | None = option(
        or_none(parse_files), None, key="encryption_key_file"
    )
    """Absolute path of a file with the key that the tenant's blocks are encrypted with in every
    tier, or a list of up to 4 paths: the first key encrypts, and all decrypt. Without it, the
    tiers' own."""
    name_key_files: tuple[str, ...] | None = option(or_none(parse_files), None, key="name_key_file")
    """Absolute path of a file with the key that the names of the tenant's blocks are sealed with,
    or a list of up to 4 paths. Without it, the tiers' own."""
    quota_bytes: int | None = option(or_none(parse_size_bytes), None)
    """Maximum bytes of the tenant's blocks in the primary, and as many in each tier; None: an
    equal share of what the quotas of others leave."""


def parse_tenants(value: object, key: str) -> tuple[TenantOptions, ...]:
    """Return tenants by name with their options; raises ConfigError."""
    allowed = f"an object of 1 to {_MOST_TENANTS - 1} names of tenants, each with an object"
    if not isinstance(value, Mapping) or not 0 < len(value) < _MOST_TENANTS:
        _reject(key, value, allowed)
    tenants: list[TenantOptions] = []
    for name, given in value.items():
        place = f"{key}[{parse_label(name, key)!r}]"
        if not isinstance(given, Mapping):
            _reject(place, given, f"an object of {', '.join(TenantOptions.declared())}")
        try:
            reject_unknown(given, TenantOptions.declared(), "tenant")
            tenants.append(TenantOptions.take(given, name=name))
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
    return tuple(tenants)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(Options):
    """Every setting of an engine."""

    cpu_bytes_to_use: int = option(
        parse_size_bytes, remedy='the memory of the primary tier, such as "4GiB"'
    )
    """Size of the primary tier in bytes, for all workers together."""
    block_bytes: int = option(
        parse_size_bytes, remedy='the bytes of one offload unit on one worker, such as "256KiB"'
    )
    """Bytes of one offload unit (`blocks_per_chunk` device blocks) on one worker; `OffloadEngine`
    derives it from its `kv_caches`."""
    block_size: int = option(at_least(1), 16)
    """Tokens per device block."""
    blocks_per_chunk: int = option(at_least(1), 1)
    """Device blocks per offload unit."""
    num_workers: int = option(at_least(1), 1)
    """Workers that share the primary tier; a row holds one cell per worker."""
    model: str | None = option(or_none(parse_name), None)
    """Name of the model that the KV blocks belong to. `OffloadEngine` and tiers on disk require
    it."""
    fingerprint: str | None = option(or_none(parse_label), None)
    """Label of everything but the model's name that determines KV bytes, such as a hash of the
    weights and settings; see docs/kv-identity.md."""
    generation: str | None = option(or_none(parse_generation), None)
    """Version of the weights, an integer or a label; `invalidate` changes it."""
    eviction_policy: str = option(parse_name, "lru")
    """Name of the primary tier's eviction policy: "lru", "arc" or "hd"."""
    store_threshold: int = option(at_least(0), 0)
    """Store a block, in the primary and the tiers, only when it is offered for the n-th time."""
    enable_kv_cache_events: bool = option(parse_bool, default=False)
    """Record events for `take_events`."""
    write_back: str | None = option(or_none(one_of(WriteBack)), None)
    """Applies when a store can only evict blocks that a tier has not stored yet. "wait": it does
    not; `OffloadEngine` waits for the tiers, up to the store's deadline, and a scheduler's manager
    leaves the blocks out, which the scheduler offers again in the next step. "drop": the blocks are
    evicted. By default "wait", except for what a request offers at its end, which is not offered
    again: that is stored as with "drop"."""
    deferral_timeout_s: float = option(parse_seconds, 30.0)
    """Maximum total seconds for which a request's lookups are deferred."""
    breaker_fault_threshold: int = option(at_least(1), 3)
    """Consecutive faults after which a tier is suspended."""
    breaker_retry_s: float = option(parse_seconds, 5.0)
    """Seconds after which a suspended tier is tried again."""
    drain_timeout_s: float = option(parse_seconds, 30.0)
    """Seconds that `reset_cache` waits for running jobs."""
    shutdown_timeout_s: float = option(parse_seconds, 30.0)
    """Seconds that `shutdown` waits for running jobs."""
    prefault: bool = option(parse_bool, default=True)
    """Touch the primary tier's memory at startup."""
    explain_requests: int = option(at_least(0, _MAX_EXPLAINED), 0)
    """Number of recent requests whose timelines are kept for `explain` and tracing; 0: none."""
    check_invariants: bool = option(parse_bool, default=False)
    """Check all invariants at the end of every step; for debugging."""
    status_socket: str | None = option(or_none(parse_socket_path), None)
    """Path of the Unix socket that serves the engine's status to `kvoffload top`; only this user
    can connect. By default `KVOFFLOAD_STATUS_SOCKET`."""
    status_socket_commands: bool = option(parse_bool, default=False)
    """Whether the status socket accepts `kvoffload cache`, which deletes, pins and lists blocks.
    Otherwise nothing can be changed through it."""
    record_trace: str | None = option(or_none(parse_directory), None)
    """Absolute path of a file for a trace of all requests, which `kvoffload simulate` and `replay`
    read. Block ids are hashed with a secret of the run. The file is rotated at 256 MiB; a trace
    that is there is kept as `<path>.1`, and any other file is refused."""
    tenants: tuple[TenantOptions, ...] | None = option(or_none(parse_tenants), None)
    """Tenants by name, each with its options: they share the engine and no block. "default" is one
    of them, given or not. See docs/howto/tenants.md."""
    unknown_tenant: UnknownTenant = option(one_of(UnknownTenant), UnknownTenant.DEFAULT)
    """Tenant of a request that names none, or one that is not in `tenants`: "default", or with
    "no_store" none: its blocks are neither stored nor loaded."""
    secondary_tiers: tuple[Mapping[str, Any], ...] = option(_tier_list, (), is_shown=False)
    """Tier configurations, in lookup order; see `SecondaryTierFactory`."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> OffloadConfig:
        """Validate and convert a mapping, such as a parsed JSON object, without modifying it.

        Raises:
            ConfigError: A key is unknown or missing, or a value has the wrong type or is out of
                range; the message names the key, the value and the allowed values.
        """
        if not isinstance(raw, Mapping):
            _reject("config", raw, "an object of keys and values")
        reject_unknown(raw, cls.declared(), "config")
        return cls.take(raw)


_SUITABLE_THREADS: Final = 4


def suitable_threads(*, waits_for_device: bool = False) -> int:
    """Return the default number of a tier's copying threads, measured by `thread_counts.py`.

    If they often wait for the device, 4 on any number of CPUs: a thread that waits needs none.
    Otherwise one per usable CPU, but 2 to 4: while the page cache serves requests, more threads
    only contend with each other, and reading one file from the disk they break its read-ahead.
    Above 4 CPUs nothing changes: four calls at once keep a device busy, and four threads that copy
    and hash take as much of the memory's bandwidth as the host of a model can spare.
    """
    if waits_for_device:
        return _SUITABLE_THREADS
    try:
        usable = len(os.sched_getaffinity(0))
    except OSError:  # refused, see `system_calls`
        usable = os.cpu_count() or 1
    return max(2, min(_SUITABLE_THREADS, usable))


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
    """Seconds from the submission of a job until it is reported as failed. Blocks moved by `valkey`
    and `object` renew it, up to 16 times as long in total."""
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
    name_key_files: tuple[str, ...] | None = option(or_none(parse_files), None, key="name_key_file")
    """Absolute path of a file with the key that the names of blocks are sealed with, or a list of
    up to 4 paths: the first key names new blocks, and blocks are looked for under each. Engines
    share blocks only if they have the same key."""
    run_config: Mapping[str, Any] | None = option(or_none(parse_run_config), None)
    """Everything that the layout of a block's bytes depends on; by default the engine's geometry
    and the slot size. `model`, `fingerprint` and `namespace` are added to it."""

    def read_threads(self, *, waits_for_device: bool = False) -> int:
        """Return `n_read_threads` or its default: one thread less than `suitable_threads`."""
        return self.n_read_threads or suitable_threads(waits_for_device=waits_for_device) - 1
