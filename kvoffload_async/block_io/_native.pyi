"""The native engine's functions; `engine.Engine` calls and documents them.

They reject arguments that could cause invalid memory accesses, or paths outside a root. Not
thread-safe.
"""

from typing import Any, TypeAlias, final

from typing_extensions import Buffer

SOURCES: str
"""Digest of the C files from which the module was built."""

_Memory: TypeAlias = tuple[Buffer | None, int, int]
"""A buffer, bytes of a row, and bytes of a slot."""

_Files: TypeAlias = tuple[
    int,
    bytes,
    bytes,
    str,
    bytes,
    tuple[bytes | None, ...],
    bytes,
    bytes,
    bytes,
    str,
    int,
    int,
    bool,
    bool,
]
"""The root's descriptor and path; names, joined by NUL; the attribute's name, and the prefix of its
value; its known values; victims, joined by NUL, each possibly empty; the marker's name; a byte for
each name that may be written; the stem of temporary names, and the first serial number;
permissions; whether to sync; whether to return disk usage."""

@final
class Engine:
    """A pool of native threads.

    Attributes:
        fd: An eventfd, readable when a batch has ended since the last `take`.
    """

    @property
    def fd(self) -> int: ...
    def __new__(
        cls,
        load_threads: int,
        store_threads: int,
        spare_threads: int,
        queued: int,
        piece_bytes: int,
        part_bytes: int,
        hashes: bytes,
        call: int,
        callable_: object,
        name: str,
        sealing: tuple[bytes, bytes, bytes] | None,
        /,
    ) -> Engine:
        """Start the threads.

        See `engine.Engine`. `hashes` is `struct hashes` of block_io.h; `call` the address of a
        `file_caller` that replaces the system calls, or 0; `callable_` keeps it alive.
        `sealing` is how to encrypt: `struct ciphers`, `struct secret` of each key, info of HKDF.

        Raises:
            OSError: Memory, threads or descriptors are exhausted.
        """

    def submit(
        self,
        kind: int,
        is_store: bool,
        count: int,
        memory: _Memory,
        rows: tuple[int, ...],
        keys: tuple[bytes, ...] | None,
        prefix: bytes,
        places: tuple[tuple[int, int, int], ...] | bytes,
        other: _Files | Buffer | None,
        seals: bytes,
        /,
    ) -> int:
        """Submit a batch of a kind in `enum batch_kind`; return its ticket.

        Args:
            kind: Determines the arguments used.
            is_store: Selects the preferring threads; whether `memory` is only read.
            count: Number of blocks, names or copies.
            memory: Memory to hold until the outcome is taken.
            rows: Rows of the blocks.
            keys: Keys of the blocks; None: no digests.
            prefix: See `engine.Engine.extents`.
            places: Runs, or packed copies.
            other: Files, or the source buffer of copies.
            seals: For encrypted stores, the begin of each block's seal, up to the tag.
        """

    def take(self) -> list[tuple[int, Any]]:
        """Return (ticket, outcome) of ended batches, unordered, and clear `fd`."""

    def withdraw(self, ticket: int, /) -> None: ...
    def replace_hung(self, hung_after_ns: int, /) -> int: ...
    def close(self, timeout_ns: int, /) -> int: ...
    def counters(self) -> tuple[int, ...]: ...
