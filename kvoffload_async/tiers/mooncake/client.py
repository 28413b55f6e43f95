"""Calls to a Mooncake Store. The only module that knows the library; all of them block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvoffload_async.errors import (
    BlockMissingError,
    ConfigError,
    TierError,
    TierFullError,
    TierUnavailableError,
)

_LOCAL_BUFFER_BYTES: Final = 16 << 20
"""What the library stages in; nothing of this tier's goes through it."""
_NO_HANDLE: Final = -200
_NOT_FOUND: Final = -704


@dataclass(frozen=True, slots=True)
class MooncakeConnection:
    """How to join a store.

    Attributes:
        master: Host and port of the master.
        metadata_url: Where the transfer engines of the store find each other.
        host: The name by which others reach this host.
        segment_bytes: Memory that this process gives to the store.
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

    def open(self) -> MooncakeClient:
        """Join the store; raises ConfigError, TierUnavailableError."""
        try:
            from mooncake import store  # noqa: PLC0415 - an extra, which loads much
        except ImportError as error:
            raise ConfigError(
                f"type: 'mooncake' cannot load its library ({error}); it needs the system's "
                "libibverbs1, libnl-3-200 and libnl-route-3-200"
            ) from None
        library: Any = store.MooncakeDistributedStore()
        status = library.setup(
            self.host,
            self.metadata_url,
            self.segment_bytes,
            _LOCAL_BUFFER_BYTES,
            self.protocol,
            self.rdma_devices,
            self.master,
        )
        if status:
            library.close()
            raise TierUnavailableError(f"mooncake: {self.master} cannot be joined ({status})")
        how: Any = store.ReplicateConfig()
        how.replica_num = self.replicas
        return MooncakeClient(library, how)


class MooncakeClient:
    """A joined store. Thread: any, several at once."""

    def __init__(self, library: Any, how: Any) -> None:  # noqa: ANN401 - it has no types
        """Own the library's client; `how` says what becomes of what is put."""
        self._library = library
        self._how = how

    def register(self, address: int, num_bytes: int) -> None:
        """Let the library read and write memory, until `close`; raises ConfigError."""
        status = self._library.register_buffer(address, num_bytes)
        if status:
            raise ConfigError(
                f"type: 'mooncake' cannot register {num_bytes} bytes of memory ({status}); give "
                "the process more locked memory (ulimit -l), or a smaller primary"
            )

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return which are there; raises TierUnavailableError."""
        answers: list[int] = self._library.batch_is_exist(list(names))
        for answer in answers:
            if answer < 0:
                raise _error_of(answer)
        return [answer == 1 for answer in answers]

    def put(
        self, names: Sequence[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[TierError | None]:
        """Store values where there are none yet; return for each why it could not be stored."""
        answers = self._library.batch_put_from_multi_buffers(
            list(names), addresses, sizes, self._how
        )
        return [_error_of(answer) if answer < 0 else None for answer in answers]

    def get(
        self, names: Sequence[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[TierError | None]:
        """Read values into memory; return for each why it could not be read."""
        answers = self._library.batch_get_into_multi_buffers(list(names), addresses, sizes)
        return [_error_of(answer) if answer < 0 else None for answer in answers]

    def remove(self, names: Sequence[str]) -> int:
        """Remove values, also those that somebody has just read; return how many were."""
        return sum(answer == 0 for answer in self._library.batch_remove(list(names), True))

    def close(self) -> None:
        """Leave the store."""
        self._library.close()


def _error_of(status: int) -> TierError:
    if status == _NOT_FOUND:
        return BlockMissingError("it is not there")
    if status == _NO_HANDLE:
        return TierFullError("the store has no room")
    return TierUnavailableError(f"mooncake: the store's answer is {status}")
