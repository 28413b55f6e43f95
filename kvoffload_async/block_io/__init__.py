"""Transfers between files and the primary: one interface, a native and a Python implementation.

A batch is submitted and awaited. The native implementation copies and hashes on threads that never
take the GIL. The Python one uses the threads of an `IoRunner`; it is used if the extension module
is missing, or if checksums are keyed with an integrity key.
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
