"""Settings and counters of a remote tier, and redaction of secrets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, quote_plus

from kvoffload_async.config import HIDDEN, without_user_info
from kvoffload_async.tiers.files.digests import IntegrityKey

_LEAST_CHARS: Final = 3


class Redactor:
    """Hides known secrets in texts; its own `repr` contains none. Thread: any."""

    __slots__ = ("_secrets",)

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Hide these secrets, verbatim and URL-quoted.

        Secrets shorter than three characters are not hidden: they would match inside many words.
        """
        forms: set[str] = set()
        for secret in secrets:
            forms |= {secret, quote(secret, safe=""), quote_plus(secret), repr(secret)[1:-1]}
        self._secrets = sorted(
            (form for form in forms if len(form) >= _LEAST_CHARS), key=len, reverse=True
        )

    def __repr__(self) -> str:
        return f"Redactor({len(self._secrets)} secrets)"

    def __call__(self, text: object) -> str:
        """Return a text, or an error's text, without the secrets."""
        shown = without_user_info(str(text))
        for secret in self._secrets:
            shown = shown.replace(secret, HIDDEN)
        return shown


_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Settings of a remote tier, in seconds and bytes.

    Attributes:
        ttl_s: Lifetime of an unused block; None: as long as the store keeps it.
        connections: Maximum concurrent payload calls per direction.
        bytes_in_flight: Maximum payload in flight per direction.
        call_timeout_s: Timeout of one call.
        job_timeout_s: Timeout of all calls of a job.
        probe_timeout_s: Timeout of all calls of a probe.
        max_retries: Maximum retries of a call.
        remember_present_s: Lifetime of a cached positive answer.
        negative_cache_ttl_s: Lifetime of a cached negative answer.
        integrity_key: Key for the checksums.
        redact: Hides the configuration's secrets.
    """

    ttl_s: float | None = None
    connections: int = 8
    bytes_in_flight: int = 64 * _MIB
    call_timeout_s: float = 5.0
    job_timeout_s: float = 30.0
    probe_timeout_s: float = 2.0
    max_retries: int = 2
    remember_present_s: float = 10.0
    negative_cache_ttl_s: float = 1.0
    integrity_key: IntegrityKey | None = None
    redact: Redactor = field(default_factory=Redactor)


@dataclass(slots=True)
class RemoteCounters:
    """Counters of a remote tier; see also `CallCounters`.

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
