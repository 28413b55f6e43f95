"""The interface of block I/O, which the native and the Python implementation share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple, Protocol

from kvoffload_async.abc.tier import Direction
from kvoffload_async.types import OffloadKey

ENDED_EARLY: Final = -1
"""Instead of an errno: the file ended early."""

NOT_DECRYPTED: Final = -2
"""Instead of an errno: the block could not be decrypted."""

OTHER_KEY: Final = -3
"""Instead of an errno: the block is encrypted with a key that is not given."""

DIGEST_BYTES: Final = 16

FILE_WRITTEN: Final = 0
FILE_PRESENT: Final = 1
FILE_NOT_BEGUN: Final = 3
FILE_VICTIM_GONE: Final = 4


class Run(NamedTuple):
    """Consecutive slots of one file.

    Attributes:
        fd: Descriptor of the file.
        offset: Offset of the first slot.
        length: Number of slots.
    """

    fd: int
    offset: int
    length: int


class Moved(NamedTuple):
    """Result of copying a batch of blocks.

    Attributes:
        errors: Index of each failed block -> its errno, `ENDED_EARLY`, `NOT_DECRYPTED` or
            `OTHER_KEY`.
        digests: Concatenated checksums, undefined for failed blocks except the read ones that were
            not decrypted. Empty if not requested.
    """

    errors: dict[int, int]
    digests: bytes


class Attribute(NamedTuple):
    """Extended attribute for the checksum of a file.

    Attributes:
        name: Name of the attribute.
        prefix: Prefix of its value, before the checksum.
    """

    name: str
    prefix: bytes


class FileBatch(NamedTuple):
    """Files of one block each; the sequences are parallel.

    Attributes:
        root: A directory: its descriptor, to be kept open meanwhile, and its path. If that leads
            elsewhere, no file is loaded or stored.
        names: Paths of the files relative to it.
        keys: The blocks' keys.
        rows: Rows of the blocks in the buffer.
    """

    root: tuple[int, str]
    names: Sequence[str]
    keys: Sequence[OffloadKey]
    rows: Sequence[int]


class LoadedFiles(NamedTuple):
    """Result of reading a batch of files.

    Attributes:
        statuses: One byte per file; 0: the row has the whole block, verified if requested.
            Otherwise the row's content must not be used, and the caller must find the cause.
        digests: Concatenated checksums, undefined unless the status is 0. Empty if not requested.
    """

    statuses: bytes
    digests: bytes


class FileStores(NamedTuple):
    """How to write the files of a batch; the sequences are parallel to the batch's.

    Attributes:
        victims: Files to overwrite and rename, instead of creating one; empty: none. A victim that
            may not be overwritten is removed.
        marker: Path relative to the root; victims are not overwritten if it exists, or if it is
            empty.
        may_write: One byte per file; 0: it is only looked up.
        temp_stem: Between a file's name and the serial number in its temporary name, which ends
            with ".tmp".
        first_serial: Serial number of the first file.
        attribute: Attribute for the checksum.
        file_mode: Permissions of new files; None: derived from the folder.
        fsync: Whether to sync a file before it gets its final name.
        wants_disk_bytes: Whether to return each file's disk usage.
        has_digest: Whether to set the attribute.
    """

    victims: Sequence[str]
    marker: str
    may_write: bytes
    temp_stem: str
    first_serial: int
    attribute: Attribute
    file_mode: int | None
    fsync: bool
    wants_disk_bytes: bool
    has_digest: bool


class StoredFiles(NamedTuple):
    """Result of writing a batch of files.

    Attributes:
        statuses: One byte per file: `FILE_WRITTEN`; `FILE_PRESENT` if the name existed;
            `FILE_VICTIM_GONE`; `FILE_NOT_BEGUN` if the batch was withdrawn; otherwise it was not
            written, its temporary file was removed if possible, and the caller must find the cause.
        digests: Checksums of the written files; empty if not requested.
        disk_bytes: Disk usage of the written files; after these numbers, disk usage of the victims,
            -1 for those not taken.
    """

    statuses: bytes
    digests: bytes
    disk_bytes: Sequence[int]


class Seals(Protocol):
    """The seals of encrypted blocks, for code that encrypts them elsewhere. Thread: any.

    Attributes:
        info: Information of HKDF, followed by its counter, the byte 1.
        prefix: Associated data before the block's key, which is prefixed with its length.
        secrets: Id, length and bytes of each key, as packed for `Sealing`; empty if tenants have
            different keys, which native code does not tell apart.
    """

    @property
    def info(self) -> bytes: ...

    @property
    def prefix(self) -> bytes: ...

    @property
    def secrets(self) -> bytes: ...

    def begin(self, count: int, /) -> bytes:
        """Return new seals without their tags, `TAG_AT` bytes each, to encrypt one block each."""
        ...

    def has_key(self, seal: bytes, /) -> bool:
        """Return whether the seal's key is given here; the first other is logged."""
        ...


TAG_AT: Final = 36
SEAL_BYTES: Final = TAG_AT + DIGEST_BYTES
"""Length of a seal: key id (8 bytes), salt (16), nonce (12), tag."""


def not_opened(seals: Seals, seal: bytes) -> int:
    """Return why a block with this seal was not decrypted: `OTHER_KEY` or `NOT_DECRYPTED`."""
    return NOT_DECRYPTED if seals.has_key(seal) else OTHER_KEY


class Cipher(Protocol):
    """Encrypts and decrypts blocks between rows and slots. Thread: any.

    Attributes:
        tail_bytes: Bytes of a slot behind the block that the cipher uses.
        seals: Seals of the blocks, each of which is behind its block, with the tag as checksum.
    """

    @property
    def tail_bytes(self) -> int: ...

    @property
    def seals(self) -> Seals: ...

    def encrypt(self, key: OffloadKey, row: memoryview, slot: memoryview, /) -> bytes:
        """Encrypt a row into a slot, and return the checksum, `DIGEST_BYTES` long."""
        ...

    def decrypt(self, key: OffloadKey, slot: memoryview, row: memoryview, /) -> bytes | None:
        """Decrypt a slot into a row, and return the checksum; None if invalid, the row wiped."""
        ...


class BlockDigests(Protocol):
    """Computes the checksums of blocks. Thread: any.

    Attributes:
        is_keyed: Whether they are made with an integrity key.
        prefix: Hashed before the block's key to compute the seed of an unkeyed checksum.
        cipher: Encrypts the blocks; None: they are not encrypted.
    """

    @property
    def cipher(self) -> Cipher | None: ...

    @property
    def is_keyed(self) -> bool: ...

    @property
    def prefix(self) -> bytes: ...

    def digests(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], /) -> list[bytes]:
        """Return the checksums of blocks, `DIGEST_BYTES` each."""
        ...


class FileCalls(Protocol):
    """The system calls used by block I/O; they raise OSError. Thread: any."""

    def open(self, path: str, flags: int, /) -> int: ...
    def close(self, fd: int, /) -> None: ...
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...
    def get_xattr(self, fd: int, name: str, /) -> bytes | None: ...
    def set_xattr(self, fd: int, name: str, value: bytes, /) -> None: ...
    def truncate(self, fd: int, size_bytes: int, /) -> None: ...
    def fsync(self, fd: int, /) -> None: ...
    def stat(self, path: str, /) -> os.stat_result: ...
    def fstat(self, fd: int, /) -> os.stat_result: ...
    def publish(self, source: str, target: str, /) -> None: ...
    def unlink(self, path: str, /) -> None: ...
    def rename(self, source: str, target: str, /) -> None: ...
    def leads_to(self, path: str, /) -> os.stat_result: ...


class BlockIo(ABC):
    """Copies blocks between files and rows of one buffer. Thread: loop.

    Attributes:
        name: Name of the implementation.
    """

    name: ClassVar[str]

    @abstractmethod
    async def extents(
        self,
        direction: Direction,
        rows: Sequence[int],
        runs: Sequence[Run],
        keys: Sequence[OffloadKey] | None,
        *,
        is_direct: bool = False,
    ) -> Moved:
        """Copy rows to or from slots of files; return only after all copying has ended.

        Also if cancelled: then operations not begun are skipped. Each run fails separately; in a
        failed run, every block not known to be complete fails.

        Args:
            direction: LOAD or STORE.
            rows: The rows, in the order of the slots.
            runs: The slots; as many in total as rows.
            keys: The blocks' keys if checksums are requested, of the bytes read or written.
            is_direct: Whether the files bypass the page cache.

        Raises:
            BusyError: Too many batches are queued.
            TierError: An internal error, not one of the files.
        """

    @abstractmethod
    async def close(self) -> None:
        """Wait until no thread is working, and release the buffer; idempotent.

        All batches must have ended.
        """
