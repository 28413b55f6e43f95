"""What the tiers behind a network share: their options, the values of these, and their managers."""

from __future__ import annotations

import importlib.util
import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Unpack

from kvoffload_async.abc.tier import AsyncTier, KVIdentity
from kvoffload_async.config import (
    at_least,
    or_none,
    parse_seconds,
    parse_size_bytes,
    shown,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_options import (
    TierOptions,
    config_of,
    defaults_of,
    identity_of,
    parse_key_file,
)
from kvoffload_async.tiers.remote.settings import Redactor, RemoteSettings

MAX_CONNECTIONS: Final = 256

_MAX_RETRIES: Final = 10
_MOST_REMEMBERED_S: Final = 3600.0
_MAX_SECRET_BYTES: Final = 4096
MAX_CERTIFICATE_BYTES: Final = 1 << 20


def _span(value: object, key: str) -> float:
    """Return seconds that may be none; raises ConfigError."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 <= value <= _MOST_REMEMBERED_S
    ):
        raise ConfigError(
            f"{key}: {shown(value)} is not valid; it must be a number of seconds from 0 to "
            f"{_MOST_REMEMBERED_S:g}"
        )
    return float(value)


def parse_url(value: object, key: str = "url") -> str:
    """Return a URL; raises ConfigError, whose message does not show it."""
    if not isinstance(value, str) or not value.isprintable() or "://" not in value:
        raise ConfigError(f"{key}: it is not valid; it must be a URL, such as scheme://host/path")
    return value


def parse_file(value: object, key: str) -> str | None:
    """Return the absolute path of a file, or None if there is none; raises ConfigError."""
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not Path(path).is_absolute():
        raise ConfigError(f"{key}: it must be the absolute path of a file")
    return path


def read_secret(value: object, key: str) -> str | None:
    """Return the secret in a file, without line ends behind it; None: no file was given.

    Raises:
        ConfigError: It is no such file, or has nothing in it.
    """
    content = read_file(value, key, _MAX_SECRET_BYTES)
    if content is None:
        return None
    try:
        secret = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {value!r} is no text; give a file with a secret") from None
    if not secret:
        raise ConfigError(f"{key}: {value!r} is empty; give a file with a secret")
    return secret


def read_file(value: object, key: str, most_bytes: int) -> bytes | None:
    """Return what is in a file; None: no file was given.

    Raises:
        ConfigError: It cannot be read, or is empty or too long.
    """
    path = parse_file(value, key)
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{key}: {path!r} cannot be read ({error.strerror})") from error
    if not content or len(content) > most_bytes:
        raise ConfigError(
            f"{key}: {path!r} is empty or has more than {most_bytes} bytes; give another file"
        )
    return content


def check_installed(library: str, extra: str) -> None:
    """Check that a tier's client library is there; raises ConfigError."""
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"type: {extra!r} needs the library {library}, which is not installed; "
            f"run pip install 'kvoffload-async[{extra}]'"
        )


def remote_settings(options: Mapping[str, Any], secrets: Iterable[str]) -> RemoteSettings:
    """Return what the options mean, all of which are there; raises ConfigError."""
    return RemoteSettings(
        ttl_s=or_none(parse_seconds)(options["ttl_s"], "ttl_s"),
        connections=at_least(1, MAX_CONNECTIONS)(options["connections"], "connections"),
        bytes_in_flight=parse_size_bytes(options["bytes_in_flight"], "bytes_in_flight"),
        call_timeout_s=parse_seconds(options["call_timeout_s"], "call_timeout_s"),
        job_timeout_s=options.get("io_timeout_s", 30.0),
        probe_timeout_s=options.get("probe_timeout_s", 2.0),
        max_retries=at_least(0, _MAX_RETRIES)(options["max_retries"], "max_retries"),
        remember_present_s=_span(options["remember_present_s"], "remember_present_s"),
        negative_cache_ttl_s=_span(options["negative_cache_ttl_s"], "negative_cache_ttl_s"),
        integrity_key=parse_key_file(options["integrity_key_file"]),
        redact=Redactor(secrets),
    )


class RemoteOptions(TierOptions, total=False):
    """The options that every such tier takes; see `RemoteTierManager`."""

    ttl_s: float | None
    bytes_in_flight: int | str
    call_timeout_s: float
    max_retries: int
    remember_present_s: float
    negative_cache_ttl_s: float
    integrity_key_file: str | None


class RemoteTierManager(SecondaryTierManager):
    """Blocks behind a network, shared by all hosts that use the server."""

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str,
        own: Mapping[str, Any],
        /,
        *,
        ttl_s: float | None = None,
        bytes_in_flight: int | str = "64MiB",
        call_timeout_s: float = 5.0,
        max_retries: int = 2,
        remember_present_s: float = 10.0,
        negative_cache_ttl_s: float = 1.0,
        integrity_key_file: str | None = None,
        **options: Unpack[TierOptions],
    ) -> None:
        """Connect; see `SecondaryTierManager` for the options that every tier takes.

        Args:
            offloading_spec: See `SecondaryTierManager`.
            primary_kv_view: See `SecondaryTierManager`.
            tier_type: See `SecondaryTierManager`.
            own: The options of the kind of tier.
            ttl_s: Seconds that a block lives unused, fewer than a rule of the server's own allows;
                None: as long as the server keeps it.
            bytes_in_flight: Payload on the way at once, in each direction.
            call_timeout_s: Seconds for one call.
            max_retries: How often a call that failed is repeated.
            remember_present_s: Seconds that a positive answer is believed; 0: never.
            negative_cache_ttl_s: Seconds that a negative answer is believed; 0: never.
            integrity_key_file: Absolute path of a file with a key that checksums are made with.
            **options: The options that every tier takes.

        Raises:
            ConfigError: An option is unusable, or the server refuses the credentials.
            TierUnavailableError: The server cannot be reached.
        """
        given = {
            **own,
            "ttl_s": ttl_s,
            "bytes_in_flight": bytes_in_flight,
            "call_timeout_s": call_timeout_s,
            "max_retries": max_retries,
            "remember_present_s": remember_present_s,
            "negative_cache_ttl_s": negative_cache_ttl_s,
            "integrity_key_file": integrity_key_file,
            **options,
        }
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        identity = identity_of(options, config_of(offloading_spec), row_bytes)
        tier = self._create_tier(given, identity)
        super().__init__(offloading_spec, primary_kv_view, tier_type, tier, **options)

    @classmethod
    @abstractmethod
    def _create_tier(cls, options: Mapping[str, Any], identity: KVIdentity) -> AsyncTier:
        """Return the tier for options of which none is missing; raises ConfigError."""

    @classmethod
    def _with_defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with the defaults of those that are not given."""
        return {**defaults_of(RemoteTierManager), **defaults_of(cls), **options}
