"""Remedies for what goes wrong with a tier, as one table: situation and type of tier -> text.

Log lines append these texts. A text names only options of the tier's type or of the engine, and
only those that help in the situation.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from kvoffload_async.errors import (
    CallTimeoutError,
    CorruptBlockError,
    JobNotStartedError,
    RepeatedKeyError,
    ServerHangError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
    UnknownSlotError,
)


class Trouble(enum.Enum):
    """Situations of a tier that are not the error of a job."""

    TOO_SLOW = enum.auto()
    """It is in order, but blocks were evicted from the primary before it had room for them."""
    SUSPENDED = enum.auto()
    """As above, while its stores were suspended."""
    NOT_OPEN = enum.auto()
    """As above, while the tier was not open."""
    HANGING = enum.auto()
    """As above, while copies past their deadline still ran."""
    STORES_FAILED = enum.auto()
    """Blocks were given up after failed stores."""
    CLOSED_TOO_SOON = enum.auto()
    """The shutdown ended before pending blocks were stored."""
    PROBE_TIMEOUT = enum.auto()
    """An existence probe was not answered before its deadline."""


Situation = Trouble | type[TierError]

ANY: Final = ""
"""Stands for every type of tier without an entry of its own, third parties' included."""

_BIGGER: Final = "raise cpu_bytes_to_use, set write_back to wait, or "
_WITHOUT: Final = "the engine continues without these blocks; fix the cause above"
_SERVER: Final = "check the server and the network; "

REMEDIES: Final[Mapping[Situation, Mapping[str, str]]] = {
    CorruptBlockError: {
        ANY: "not served; if this recurs, check the storage",
        "fs": "not served; if this recurs, check the disk: kvoffload store verify",
        "slab": "not served; if this recurs, check the disk: kvoffload store verify",
        "object": "not served; if this recurs, check the store: kvoffload store verify",
        "valkey": "not served; if this recurs, check the memory of the server",
        "mooncake": "not served; if this recurs, check the memory of the store's clients",
    },
    TierFullError: {
        ANY: "no blocks are stored until there is space: enlarge its storage",
        "fs": "no blocks are stored until there is space: free some on the disk, or lower "
        "capacity_bytes so that the tier evicts in time",
        "slab": "no blocks are stored until there is space: free some on the disk, or raise "
        "capacity_bytes",
        "object": "no blocks are stored until there is space: raise the quota of the bucket, or "
        "let a lifecycle rule delete old objects",
        "valkey": "no blocks are stored until there is space: raise the server's maxmemory, or "
        "set its maxmemory-policy to one that evicts",
        "mooncake": "no blocks are stored until there is space: raise segment_bytes on the hosts "
        "of the store",
    },
    CallTimeoutError: {
        ANY: _SERVER + "if it is only slow, raise the deadline of its calls",
        "object": _SERVER + "if it is only slow, raise call_timeout_s",
        "valkey": _SERVER + "if it is only slow, raise call_timeout_s",
        "mooncake": _SERVER + "if it is only slow, raise call_timeout_s",
    },
    ServerHangError: {
        ANY: _SERVER + "if it is only slow, raise probe_timeout_s",
    },
    TierTimeoutError: {
        ANY: "check its storage; if it is only slow, raise io_timeout_s",
        "fs": "check the disk or the mount; if it is only slow, raise io_timeout_s",
        "slab": "check the disk; if it is only slow, raise io_timeout_s",
        "object": _SERVER + "if it is only slow, raise io_timeout_s",
        "valkey": _SERVER + "if it is only slow, raise io_timeout_s",
        "mooncake": _SERVER + "if it is only slow, raise io_timeout_s",
    },
    JobNotStartedError: {
        ANY: "the tier works, but more slowly than jobs arrive: make it faster",
    },
    RepeatedKeyError: {ANY: "a bug of the caller: name each key once"},
    UnknownSlotError: {ANY: "a bug of the caller: name slots of the primary"},
    TierUnavailableError: {ANY: _WITHOUT},
    Trouble.TOO_SLOW: {
        ANY: _BIGGER + "make the tier faster",
        "example": "raise cpu_bytes_to_use, or set write_back to wait",
        "fs": _BIGGER + "make the tier faster: raise n_write_threads, use a faster disk, or slab",
        "slab": _BIGGER + "make the tier faster: raise io_threads, or use a faster disk",
        "object": _BIGGER + "make the tier faster: raise connections and bytes_in_flight",
        "valkey": _BIGGER + "make the tier faster: raise connections and bytes_in_flight, or add "
        "servers",
        "mooncake": _BIGGER + "make the tier faster: raise buffer_bytes",
    },
    Trouble.SUSPENDED: {
        ANY: "its stores are suspended: fix the error that the line of the suspension names",
    },
    Trouble.NOT_OPEN: {ANY: "it is not open: fix the error that its opening names"},
    Trouble.HANGING: {
        ANY: "copies past their deadline still run: check whether its storage answers",
    },
    Trouble.STORES_FAILED: {ANY: "fix the errors of its stores, which have lines of their own"},
    Trouble.CLOSED_TOO_SOON: {ANY: "to store more of them, raise shutdown_timeout_s"},
    Trouble.PROBE_TIMEOUT: {
        ANY: "its blocks count as absent; if the tier is only slow, raise probe_timeout_s",
    },
}
"""Situation -> type of tier -> remedy. Classes of errors precede their bases."""


def remedy(tier_type: str, situation: Trouble | TierError) -> str:
    """Return what helps a tier of a type in a situation; empty if nothing is known to.

    Args:
        tier_type: The `type` in the tier's configuration.
        situation: The situation; an error stands for its class.
    """
    for kind, texts in REMEDIES.items():
        if situation is kind or (isinstance(kind, type) and isinstance(situation, kind)):
            return texts.get(tier_type, texts[ANY])
    return ""
