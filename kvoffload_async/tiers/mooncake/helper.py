"""The process that joins a Mooncake Store. Where the library hangs or aborts, only it does.

    python -P helper.py PARENT SOCKET

It is run as a file and needs the standard library and Mooncake's alone, so that it starts in a
moment and knows nothing of the engine. Both sides send frames: a length of four bytes and as many
bytes of JSON. The first one says how to join, and each further one is a call of the library. An
answer has the number of its call, and a status for each name or the text of an error. It ends with
its parent: the kernel kills it, and a closed socket ends it where that cannot be had.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

LENGTH: Final = struct.Struct("<I")
JOIN: Final = 0
"""The number of the first call, which says how to join."""

_LIBRARY_BUFFER_BYTES: Final = 16 << 20
"""What the library stages in; nothing of the tier's goes through it."""
_REACH_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
_NO_CORE: Final = (1, 1)
"""A dump of the buffer and of the segment would be KV blocks on a disk. A limit of one byte is what
keeps the kernel from giving it to a program, too."""


class JoinError(Exception):
    """The store could not be joined."""

    def __init__(self, text: str, *, is_config: bool) -> None:
        super().__init__(text)
        self.is_config = is_config


class Library:
    """A joined store, and the buffer that it reads and writes. Thread: any, several at once."""

    def __init__(self, how: Mapping[str, Any]) -> None:
        """Join, and register the buffer; raises JoinError."""
        try:
            from mooncake import store  # noqa: PLC0415 - here a message can be made of its error
        except ImportError as error:
            text = (
                f"type: 'mooncake' cannot load its library ({error}); it needs the system's "
                "libibverbs1, libnl-3-200 and libnl-route-3-200"
            )
            raise JoinError(text, is_config=True) from None
        _check_reachable(how["master"])
        self._store: Any = store.MooncakeDistributedStore()
        status = self._store.setup(
            how["host"],
            how["metadata_url"],
            how["segment_bytes"],
            _LIBRARY_BUFFER_BYTES,
            how["protocol"],
            how["rdma_devices"],
            how["master"],
        )
        if status:
            raise JoinError(f"{how['master']} cannot be joined ({status})", is_config=False)
        self._replication: Any = store.ReplicateConfig()
        self._replication.replica_num = how["replicas"]
        self._size: int = how["buffer_bytes"]
        self._buffer = mmap.mmap(how["buffer_fd"], self._size)
        os.close(how["buffer_fd"])
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        if status := self._store.register_buffer(self._address, self._size):
            text = (
                f"buffer_bytes: {self._size} bytes of memory cannot be registered ({status}); give "
                "the process more locked memory (ulimit -l), or use less"
            )
            raise JoinError(text, is_config=True)

    def exist(self, names: list[str], _at: Sequence[int], _sizes: Sequence[int]) -> list[int]:
        """Return 1 for each value that is there, and 0 for the others."""
        return list(self._store.batch_is_exist(names))

    def put(self, names: list[str], at: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Store values where there are none yet."""
        memory = self._memory(at, sizes)
        return list(self._store.batch_put_from_multi_buffers(names, *memory, self._replication))

    def get(self, names: list[str], at: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read values into the buffer."""
        return list(self._store.batch_get_into_multi_buffers(names, *self._memory(at, sizes)))

    def remove(self, names: list[str], _at: Sequence[int], _sizes: Sequence[int]) -> list[int]:
        """Remove values, also those that somebody has just read."""
        return list(self._store.batch_remove(names, True))

    def close(self) -> None:
        """Leave the store."""
        self._store.close()

    def _memory(self, at: Sequence[int], sizes: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Return addresses and sizes as the library takes them: a list for each value."""
        for offset, size in zip(at, sizes, strict=True):
            if offset < 0 or size < 0 or offset + size > self._size:
                raise ValueError(f"{size} bytes at {offset} are not in the buffer")
        return [[self._address + offset] for offset in at], [[size] for size in sizes]


def frame(message: Mapping[str, Any]) -> bytes:
    """Return a message as it is sent."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def receive(link: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None: the other side has closed."""
    head = _exactly(link, LENGTH.size)
    body = head and _exactly(link, *LENGTH.unpack(head))
    return json.loads(body) if body else None


class Attendance:
    """Makes the calls that come in, on several threads."""

    def __init__(self, link: socket.socket, library: Library) -> None:
        self._link = link
        self._library = library
        self._calls = {
            "exist": library.exist,
            "put": library.put,
            "get": library.get,
            "remove": library.remove,
        }
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def attend(self) -> None:
        """Make one call after the other, and end the process behind the last one.

        Whoever reads a call makes it, and the next one reads: no call changes threads.
        """
        with contextlib.suppress(OSError):  # nobody is there any more
            while (request := self._next()) is not None:
                if request["call"] == "close":
                    self._library.close()
                    break
                self._perform(request)
        os._exit(0)

    def _next(self) -> dict[str, Any] | None:
        with self._reading:
            return receive(self._link)

    def _perform(self, request: Mapping[str, Any]) -> None:
        call = self._calls[request["call"]]
        outcome: dict[str, Any]
        try:
            outcome = {"statuses": call(request["names"], request["at"], request["sizes"])}
        except Exception as error:  # noqa: BLE001 - the library's own, of any kind
            outcome = {"error": f"{type(error).__name__}: {error}"}
        with self._writing:
            self._link.sendall(frame({"id": request["id"], **outcome}))


def serve(link: socket.socket) -> None:
    """Join a store and make calls of its library, until told to leave or left alone."""
    how = receive(link)
    if how is None:
        return
    try:
        attendance = Attendance(link, Library(how))
    except JoinError as error:
        link.sendall(frame({"id": JOIN, "error": str(error), "is_config": error.is_config}))
        return
    link.sendall(frame({"id": JOIN, "statuses": []}))
    for _ in range(how["calls"]):  # as many as its parent makes at once, so that this one reads
        threading.Thread(target=attendance.attend, daemon=True).start()
    attendance.attend()


def main() -> None:
    """Serve the parent to the end, which no thread and no destructor keeps from coming."""
    parent, descriptor = map(int, sys.argv[1:3])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, _NO_CORE)
    if os.getppid() == parent:  # else it has ended before the kernel knew that it matters
        with contextlib.suppress(OSError):  # nobody is there any more
            serve(socket.socket(fileno=descriptor))
    os._exit(0)


def _check_reachable(master: str) -> None:
    """Find in a moment what the library needs a minute and a half for; raises JoinError."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise JoinError(f"{master} cannot be joined ({error})", is_config=False) from None


def _exactly(link: socket.socket, size: int) -> bytes:
    """Return so many bytes; none where the other side has closed before."""
    content = bytearray()
    while len(content) < size:
        if not (part := link.recv(size - len(content))):
            return b""
        content += part
    return bytes(content)


if __name__ == "__main__":
    main()
