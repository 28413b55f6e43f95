"""How to join a Mooncake Store, and what may be asked of the process that does."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from kvoffload_async.tiers.mooncake import helper

_COMMAND: Final = (sys.executable, "-P", helper.__file__)


@dataclass(frozen=True, slots=True)
class MooncakeConnection:
    """How to join a store.

    Attributes:
        master: Host and port of the master.
        metadata_url: Where the transfer engines of the store find each other.
        host: The name by which others reach this host.
        segment_bytes: Memory that the helper gives to the store.
        protocol: `"tcp"` or `"rdma"`.
        rdma_devices: Their names, joined by commas; for `"rdma"`.
        replicas: Copies of each block, in the memory of as many clients.
    """

    master: str
    metadata_url: str
    host: str = "127.0.0.1"
    segment_bytes: int = 0
    protocol: str = "tcp"
    rdma_devices: str = ""
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class HelperSettings:
    """What a helper process has, and how long it may take.

    Attributes:
        buffer_bytes: Memory that it shares with the engine.
        call_timeout_s: Seconds for one call; then it is killed.
        start_timeout_s: Seconds to start another one and to join with it.
        leave_timeout_s: Seconds to leave the store when the tier closes; then it is killed.
        command: What is run; the numbers of the parent and of the socket are added.
    """

    buffer_bytes: int = 64 << 20
    call_timeout_s: float = 10.0
    start_timeout_s: float = 30.0
    leave_timeout_s: float = 5.0
    command: tuple[str, ...] = _COMMAND
