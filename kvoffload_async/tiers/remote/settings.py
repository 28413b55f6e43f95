"""How a remote tier works, what it counts, and the secrets that no text of it may contain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, quote_plus

from kvoffload_async.config import HIDDEN, without_user_info
from kvoffload_async.tiers.files.digests import IntegrityKey

_LEAST_CHARS: Final = 3


class Redactor:
    """Hides known secrets in texts; its own `repr` has none. Thread: any."""

    __slots__ = ("_secrets",)

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Hide these, as they are and as a URL would quote them.

        Shorter ones than three characters hide nothing: they would be found in every other word.
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
        """Return a text, or what an error says, without the secrets."""
        shown = without_user_info(str(text))
        for secret in self._secrets:
            shown = shown.replace(secret, HIDDEN)
        return shown


_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """How a remote tier works; seconds, and bytes.

    Attributes:
        ttl_s: How long a block lives unused; None: as long as the store keeps it.
        connections: Calls with payload at once, in each direction.
        bytes_in_flight: Payload on the way at once, in each direction.
        call_timeout_s: Deadline of one call.
        job_timeout_s: Deadline of all calls of a job.
        probe_timeout_s: Deadline of all calls of a probe.
        max_retries: How often a call is repeated.
        remember_present_s: How long a positive answer is believed.
        negative_cache_ttl_s: How long a negative answer is believed.
        integrity_key: What checksums are made with.
        redact: Hides the secrets of the configuration.
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
    """What a remote tier has seen, beside its calls.

    Attributes:
        probed_keys: Keys that the server was asked about.
        unanswered_keys: Of these, keys that got no answer.
        remembered_keys: Keys that needed no question.
        read_again: Blocks that did not verify, and so were read once more.
        corrupt: Blocks that did not verify then either.
        removed: Those of them that were removed.
        unremoved: Those that could not be, as the call failed.
        emptied: How often the server was found to have lost its contents.
        present_blocks: Blocks to be stored that were there already.
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
