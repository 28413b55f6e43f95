"""The options of remote tiers, their counters, and the masking of secrets in their messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import quote, quote_plus

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.config import (
    HIDDEN,
    TierOptions,
    at_least,
    number,
    option,
    or_none,
    parse_file,
    parse_seconds,
    without_user_info,
)
from kvoffload_async.errors import CallTimeoutError, ConfigError, Remedies, TierTimeoutError
from kvoffload_async.tiers.files.ops import read_given
from kvoffload_async.tiers.files.settings import SealingOptions

_LEAST_CHARS: Final = 3
_MOST_LATER: Final = 16
_MAX_RETRIES: Final = 10
_MAX_SECRET_BYTES: Final = 4096
MAX_CONNECTIONS: Final = 256
_MAX_CACHED_S: Final = 3600.0


class Redactor:
    """Hides known secrets in texts; its own `repr` contains none. Thread: any."""

    __slots__ = ("_later", "_secrets")

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Hide these secrets, verbatim and URL-quoted.

        Secrets shorter than three characters are not hidden: they would match inside many words.
        """
        self._secrets = tuple(secrets)
        self._later: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Redactor({len(self._secrets + self._later)} secrets)"

    def hide(self, secret: str) -> None:
        """Hide another secret; of the secrets added after creation, only the latest stay hidden."""
        if secret not in self._later:
            self._later = (*self._later, secret)[-_MOST_LATER:]

    def __call__(self, text: object) -> str:
        """Return a text, or an error's text, without the secrets."""
        shown = without_user_info(str(text))
        forms: set[str] = set()
        for secret in self._secrets + self._later:
            forms |= {secret, quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1]}
        for form in sorted(forms, key=len, reverse=True):  # a short one may be part of a long one
            if len(form) >= _LEAST_CHARS:
                shown = shown.replace(form, HIDDEN)
        return shown


def read_file(path: str, key: str, most_bytes: int) -> bytes:
    """Return the content of a file that an option names; raises ConfigError."""
    try:
        content = read_given(path, most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{key}: {path!r} cannot be read ({error.strerror})") from error
    if not content or len(content) > most_bytes:
        raise ConfigError(
            f"{key}: {path!r} is empty or has more than {most_bytes} bytes; give another file"
        )
    return content


@dataclass(frozen=True)
class ReplaceableFile(ABC):
    """A file with secrets, which may be replaced while the engine runs."""

    path: str
    key: str

    @classmethod
    def parse(cls, value: object, key: str) -> Self:
        """Return the file at an absolute path; raises ConfigError if it cannot be used now."""
        file = cls(parse_file(value, key), key)
        file.read(Redactor())
        return file

    @abstractmethod
    def read(self, redact: Redactor) -> object:
        """Return the content, whose secrets `redact` hides from now on; raises ConfigError."""


class SecretFile(ReplaceableFile):
    """A file with one secret, without the line ends after it."""

    def read(self, redact: Redactor) -> str:
        content = read_file(self.path, self.key, _MAX_SECRET_BYTES)
        try:
            secret = content.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigError(
                f"{self.key}: {self.path!r} is not text; give a file with a secret"
            ) from None
        if not secret:
            raise ConfigError(f"{self.key}: {self.path!r} is empty; give a file with a secret")
        redact.hide(secret)
        return secret


parse_ttl_s = number(
    lambda value: 0 <= value <= _MAX_CACHED_S, f"a number of seconds from 0 to {_MAX_CACHED_S:g}"
)


@dataclass(frozen=True, kw_only=True)
class RemoteSettings(SealingOptions):
    """The options of every remote tier, and values derived from others.

    Attributes:
        connections: Concurrent calls with payload, in each direction.
        job_timeout_s: Deadline in seconds of all calls of a job.
        probe_timeout_s: Deadline in seconds of all calls of a probe.
        redact: Masks the secrets of the configuration.
    """

    ttl_s: float | None = option(or_none(parse_seconds), None)
    """Seconds after which an unused block expires; give less than a lifecycle rule of the server
    does. None: only the server decides."""
    call_timeout_s: float = option(parse_seconds, 5.0)
    """Deadline in seconds of one call."""
    max_retries: int = option(at_least(0, _MAX_RETRIES), 2)
    """Retries of a failed call."""
    positive_cache_ttl_s: float = option(parse_ttl_s, 10.0)
    """Seconds for which a positive answer is cached; 0: not cached."""
    negative_cache_ttl_s: float = option(parse_ttl_s, 1.0)
    """Seconds for which a negative answer is cached; 0: not cached."""
    connections: int = 32
    job_timeout_s: float = 30.0
    probe_timeout_s: float = 2.0
    redact: Redactor = field(default_factory=Redactor)

    @classmethod
    def of(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        common = TierOptions.take(options)
        settings = cls.take(
            options, job_timeout_s=common.io_timeout_s, probe_timeout_s=common.probe_timeout_s
        )
        identity.require_model()
        return settings


_SLOW: Final = "check the server and the network; if it is only slow, raise "
REMEDIES: Final[Remedies] = {
    CallTimeoutError: _SLOW + "call_timeout_s",
    TierTimeoutError: _SLOW + "io_timeout_s",
}
"""Remedies common to all tiers that have a server and these options."""


@dataclass(slots=True)
class RemoteCounters:
    """Counters of a remote tier.

    Attributes:
        probed_keys: Keys that the server was asked for.
        unanswered_keys: Those of them without an answer.
        remembered_keys: Keys answered from the cache.
        read_again: Blocks read again because verification failed.
        corrupt: Blocks that failed verification twice.
        removed: Corrupt blocks that were removed.
        unremoved: Corrupt blocks whose removal failed.
        emptied: Number of times that the server had lost its contents.
        present_blocks: Blocks to be stored that existed already.
        unstarted_blocks: Blocks not begun in time, as they queued behind others.
        requests: Calls started, including retries.
        retries: Calls that repeated a failed one.
        failed: Failed calls.
        timeouts: Failed calls that timed out.
        slow_downs: Failed calls for which the server asked for fewer calls.
        health_checks: Calls that only checked a server.
    """

    probed_keys: int = 0
    unanswered_keys: int = 0
    remembered_keys: int = 0
    read_again: int = 0
    corrupt: int = 0
    removed: int = 0
    unremoved: int = 0
    emptied: int = 0
    present_blocks: int = 0
    unstarted_blocks: int = 0
    requests: int = 0
    retries: int = 0
    failed: int = 0
    timeouts: int = 0
    slow_downs: int = 0
    health_checks: int = 0
