"""The native engine: batches of transfers, in threads that never take the interpreter's lock.

A batch is submitted and gets a ticket; when it has ended, `fd` is readable, and `take` returns its
outcome. Every argument is checked when a batch is submitted: TypeError and ValueError name it.
BlockingIOError: as many batches wait as may; RuntimeError: the engine is closed, or was opened by a
parent of this process. Thread: one at a time.
"""

from collections.abc import Sequence
from typing import final

from typing_extensions import Buffer

PIECE_BYTES: int
"""What one system call moves at most, by default."""

@final
class Memory:
    """Rows of a buffer, which is held until `release` and until no batch uses it any more."""

    def release(self) -> None: ...

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
        hashes: tuple[int, ...],
        ops: object | None = None,
        name: str = "kvoffload",
        piece_bytes: int = ...,
        part_bytes: int = ...,
    ) -> Engine:
        """Start the threads.

        Args:
            load_threads: Those that prefer loads.
            store_threads: Those that prefer stores.
            spare_threads: How many more may stand for those that hang.
            queued: Batches of each direction of which something may wait.
            hashes: Addresses of XXH3's functions: 64bits, 128bits_withSeed, createState,
                128bits_reset_withSeed, 128bits_update, 128bits_digest, freeState.
            ops: The methods of `FileOps`, called in place of the system, with the interpreter's
                lock; for tests.
            name: Of the threads; 15 bytes of it count.
            piece_bytes: What one system call moves at most, where blocks are no smaller.
            part_bytes: What one thread moves before it looks what is next.

        Raises:
            OSError: No memory, thread or descriptor.
            RuntimeError: `hashes` do not compute XXH3.
        """

    def map(self, buffer: Buffer, row_bytes: int, slot_bytes: int) -> Memory:
        """Return the rows of a C-contiguous buffer.

        Args:
            buffer: Is held, and must be writable to load into it.
            row_bytes: Of a row.
            slot_bytes: From one row to the next in a file: a pad of zeros follows each row.
        """

    def extents(
        self,
        memory: Memory,
        is_store: bool,
        rows: Sequence[int],
        runs: Sequence[tuple[int, int, int]],
        keys: Sequence[bytes] | None,
        prefix: bytes,
    ) -> int:
        """Move rows to or from runs of slots: (descriptor, offset, number of rows), in order.

        Outcome: ({index: errno}, digests). -1 in place of an errno: the file ended early. If a
        call fails, so do the blocks of its run that are not known to be whole; other runs go on.
        Digests are there if `keys` are, 16 bytes each; that of a failed block means nothing.
        """

    def load_files(
        self,
        memory: Memory,
        root: tuple[int, str],
        names: Sequence[str],
        rows: Sequence[int],
        keys: Sequence[bytes],
        prefix: bytes,
        attribute: str,
        value_prefix: bytes,
        expected: Sequence[bytes | None],
        verify: bool,
        direct: bool,
    ) -> int:
        """Read a file into each row.

        Outcome: (statuses, digests). Status 0: it has the row's length and, with `verify`, the
        digest that is expected, or that its attribute has; 1: judge it yourself; 3: not begun.
        """

    def store_files(
        self,
        memory: Memory,
        root: tuple[int, str],
        temps: Sequence[str],
        names: Sequence[str],
        rows: Sequence[int],
        keys: Sequence[bytes],
        prefix: bytes,
        attribute: str,
        value_prefix: bytes,
        recycled: bytes,
        file_mode: int,
        direct: bool,
        fsync: bool,
        wants_disk_bytes: bool,
        has_digest: bool,
    ) -> int:
        """Write each row to a temporary file, and rename that, if its name is not there yet.

        `recycled` has 1 for each temporary file that is there, and is overwritten. `file_mode`
        is -1 where it follows from the folder. Outcome: (statuses, digests, disk_bytes). Status
        0: written; 1: a file is there already; 2: judge it yourself, the temporary file is
        removed, if it can be; 3: not begun.
        """

    def has_files(self, root: tuple[int, str], names: Sequence[str]) -> int:
        """Look for files. Outcome: a byte each, 1 for a regular file, 0 for all else."""

    def copies(self, target: Memory, source: Memory, parts: Buffer) -> int:
        """Copy bytes between memories: int64 triples (target offset, source offset, bytes).

        Outcome: None, or ECANCELED if some of it was not begun.
        """

    def take(self) -> list[tuple[int, object]]:
        """Return (ticket, outcome) of what has ended, and clear `fd`."""

    def withdraw(self, ticket: int) -> None:
        """Take back what of a batch nobody has begun, with ECANCELED; the rest ends as usual."""

    def tend(self, hung_after_s: float) -> int:
        """Start spare threads for those that hang in one call; return how many hang."""

    def close(self, timeout_s: float) -> int:
        """Cancel what waits, and wait for what runs; return how many threads are left behind.

        What these may touch is kept for ever. `take` returns what has ended.
        """

    def counters(self) -> dict[str, int]: ...
