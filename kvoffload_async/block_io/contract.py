"""What both implementations do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple, Protocol

from kvoffload_async.abc.tier import Direction
from kvoffload_async.types import OffloadKey

ENDED_EARLY: Final = -1
"""In place of an error's number: the file had no more bytes."""

DIGEST_BYTES: Final = 16

FILE_WRITTEN: Final = 0
FILE_PRESENT: Final = 1
FILE_NOT_BEGUN: Final = 3


class Run(NamedTuple):
    """Slots of one file that lie one behind the other.

    Attributes:
        fd: The file.
        offset: Where the first slot begins.
        length: How many they are.
    """

    fd: int
    offset: int
    length: int


class Moved(NamedTuple):
    """What became of a batch.

    Attributes:
        errors: Index of each block that was not moved -> number of the error, or `ENDED_EARLY`.
        digests: The checksums, one behind the other; those of blocks that were not moved mean
            nothing. Empty where none was wanted.
    """

    errors: dict[int, int]
    digests: bytes


class Attribute(NamedTuple):
    """Where a file has the checksum of its bytes.

    Attributes:
        name: Of the extended attribute.
        prefix: What is before the checksum in its value.
    """

    name: str
    prefix: bytes


class FileBatch(NamedTuple):
    """Files of one block each; the sequences are parallel.

    Attributes:
        root: A directory: its descriptor, to be kept open meanwhile, and its path.
        names: The files, beneath it.
        keys: The blocks' keys.
        rows: Where they are in the buffer.
    """

    root: tuple[int, str]
    names: Sequence[str]
    keys: Sequence[OffloadKey]
    rows: Sequence[int]


class LoadedFiles(NamedTuple):
    """What became of files that were read.

    Attributes:
        statuses: A byte each: 0 if the row has the whole block, verified if that was wanted. Else
            whatever is in the row is not to be served, and whoever asked has to find out why.
        digests: The checksums of what was read; those of other statuses mean nothing. Empty where
            none was wanted.
    """

    statuses: bytes
    digests: bytes


class FileStores(NamedTuple):
    """How the files of a batch are written; the sequences are parallel to the batch's.

    Attributes:
        temps: What each is called until it is whole, in the same folder.
        recycled: A byte each: 1 if such a file is there, and is overwritten.
        attribute: Where the checksum is put; None: nowhere.
        file_mode: Permissions of new files; None: they follow from the folder.
        fsync: Whether a file must be on the device before it gets its name.
        wants_disk_bytes: Whether it is asked what each takes on disk.
    """

    temps: Sequence[str]
    recycled: bytes
    attribute: Attribute | None
    file_mode: int | None
    fsync: bool
    wants_disk_bytes: bool


class StoredFiles(NamedTuple):
    """What became of files that were to be written.

    Attributes:
        statuses: A byte each: `FILE_WRITTEN`, `FILE_PRESENT` if a file had the name already,
            `FILE_NOT_BEGUN` where the batch was taken back, or anything else: it was not written,
            a temporary file was removed if it could be, and whoever asked has to find out why.
        digests: The checksums of what was written; empty where none was wanted.
        disk_bytes: What those that were written take on disk.
    """

    statuses: bytes
    digests: bytes
    disk_bytes: Sequence[int]


class FileIo(Protocol):
    """Whole files in the plain good case; what is not that is the caller's. Thread: loop."""

    async def load_files(
        self, files: FileBatch, expected: Sequence[bytes | None], attribute: Attribute | None
    ) -> LoadedFiles:
        """Read files into rows; ends as `BlockIo.extents` does.

        Args:
            files: They.
            expected: The attribute's value for the bytes, where it is known: then it is not read.
            attribute: Where the checksum is; None: only lengths are looked at.

        Raises:
            BusyError: Too many batches wait.
        """
        ...

    async def store_files(
        self, files: FileBatch, how: FileStores, ended: list[StoredFiles]
    ) -> None:
        """Write rows to files that are not there yet; ends as `BlockIo.extents` does.

        Args:
            files: They.
            how: See `FileStores`.
            ended: What became of them is appended when the batch ends, also if this is cancelled.

        Raises:
            BusyError: Too many batches wait.
        """
        ...

    async def has_files(self, root: tuple[int, str], names: Sequence[str]) -> bytes:
        """Return a byte for each name: 1 for a regular file, 0 for what is none or cannot be asked.

        Raises:
            BusyError: Too many batches wait.
        """
        ...

    async def close(self) -> None:
        """See `BlockIo.close`."""
        ...


class BlockDigests(Protocol):
    """Computes checksums. Thread: any.

    Attributes:
        is_keyed: Whether they are made with an integrity key.
        prefix: What the seed of a checksum that is not is computed of, before the block's key.
    """

    @property
    def is_keyed(self) -> bool: ...

    @property
    def prefix(self) -> bytes: ...

    def digests(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview], /) -> list[bytes]:
        """Return the checksums of blocks, `DIGEST_BYTES` each."""
        ...


class FileCalls(Protocol):
    """The system calls for payload; they return how many bytes were moved. Thread: any."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...


class BlockIo(ABC):
    """Moves blocks between files and rows of one buffer. Thread: loop.

    Attributes:
        name: Which implementation it is.
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
        """Move rows to or from slots; returns when no byte of them moves any more.

        That holds as well when it is cancelled: what nobody has begun is not done then. Each run
        fails on its own, and in one that fails every block that is not known to be whole.

        Args:
            direction: LOAD or STORE.
            rows: The rows, in the order of the slots.
            runs: The slots; together as many as the rows.
            keys: The blocks' keys, if checksums are wanted: of what was read, or written.
            is_direct: Whether the files bypass the page cache.

        Raises:
            BusyError: Too many batches wait.
            TierError: A defect, and not the files.
        """

    @abstractmethod
    async def close(self) -> None:
        """Wait until no thread is at work, and let go of the buffer; idempotent.

        Every batch must have ended.
        """
