"""The native engine's own functions; `engine.Engine` calls them, and says what they mean.

They refuse whatever could make a thread touch memory wrongly, and what leads out of a root. Thread:
one at a time.
"""

from typing import Any, TypeAlias, final

from typing_extensions import Buffer

_Memory: TypeAlias = tuple[Buffer | None, int, int]
"""A buffer, bytes of a row, and bytes of a slot."""

_Files: TypeAlias = tuple[
    int, bytes, bytes, str, bytes, tuple[bytes | None, ...], bytes, bytes, int, bool, bool
]
"""The root's descriptor and path; names, joined by NUL; the attribute's name, and what precedes the
digest in it; known values of it; temporary names, joined; a byte for each that is recycled;
permissions; whether to flush; whether sizes on disk are wanted."""

@final
class Engine:
    """A pool of threads.

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
        /,
    ) -> Engine:
        """Start the threads.

        See `engine.Engine`. `hashes` is `struct hashes` of block_io.h; `call` the address of a
        `file_caller` in place of the system's calls, or 0; `callable_` has to live as long.

        Raises:
            OSError: No memory, thread or descriptor.
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
        /,
    ) -> int:
        """Submit a batch of a kind, as `enum batch_kind` has them; return its ticket.

        Args:
            kind: Says which of the arguments are looked at.
            is_store: Whose threads prefer it, and whether `memory` is only read.
            count: Of blocks, names or copies.
            memory: Is held until the batch is taken.
            rows: Of the blocks.
            keys: Of the blocks; None: no digests are wanted.
            prefix: See `engine.Engine.extents`.
            places: Runs; or copies, packed.
            other: Files; or the buffer that is copied from.
        """

    def take(self) -> list[tuple[int, Any]]:
        """Return (ticket, outcome) of what has ended, in no order, and clear `fd`."""

    def withdraw(self, ticket: int, /) -> None: ...
    def replace_hung(self, hung_after_ns: int, /) -> int: ...
    def close(self, timeout_ns: int, /) -> int: ...
    def counters(self) -> tuple[int, ...]: ...
