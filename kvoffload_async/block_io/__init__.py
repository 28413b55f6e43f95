"""Moving bytes between files and the primary: one contract, a native and a Python implementation.

A batch is submitted and awaited. The native implementation moves and hashes bytes on threads that
never take the interpreter's lock; the Python one does the same on an `IoRunner`'s threads, where
the extension module was not built, or where checksums are made with an integrity key.
"""

from kvoffload_async.block_io.choice import (
    create_block_io,
    create_copies,
    create_file_io,
    implementation,
)
from kvoffload_async.block_io.contract import (
    ENDED_EARLY,
    FILE_NOT_BEGUN,
    FILE_PRESENT,
    FILE_WRITTEN,
    Attribute,
    BlockDigests,
    BlockIo,
    FileBatch,
    FileCalls,
    FileIo,
    FileStores,
    LoadedFiles,
    Moved,
    Run,
    StoredFiles,
)

__all__ = [
    "ENDED_EARLY",
    "FILE_NOT_BEGUN",
    "FILE_PRESENT",
    "FILE_WRITTEN",
    "Attribute",
    "BlockDigests",
    "BlockIo",
    "FileBatch",
    "FileCalls",
    "FileIo",
    "FileStores",
    "LoadedFiles",
    "Moved",
    "Run",
    "StoredFiles",
    "create_block_io",
    "create_copies",
    "create_file_io",
    "implementation",
]
