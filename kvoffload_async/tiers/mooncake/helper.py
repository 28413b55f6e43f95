"""The process that runs the Mooncake client, to isolate hangs and aborts of the library.

    python -P helper.py PARENT SOCKET

It runs as a script that imports only the standard library and Mooncake's, so that it starts
quickly. Both sides send frames: a length of four bytes, then that many bytes of JSON. The first
frame has the parameters for joining, each further one a library call. A reply has the id of its
call, and a status for each name or an error text. The process ends with its parent: the kernel
kills it, or else the closed socket ends it.
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
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final

LENGTH: Final = struct.Struct("<I")
JOIN: Final = 0
"""Id of the first call, which joins the store."""

_LIBRARY_BUFFER_BYTES: Final = 16 << 20
"""Size of the library's staging buffer, which the tier does not use."""
_REACH_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
_NO_CORE: Final = (1, 1)
"""Resource limits that disable core dumps, which would write KV blocks to disk. A limit of 1, not
0, also disables dumps to a core_pattern program."""


class JoinError(Exception):
    """The store could not be joined."""

    def __init__(self, text: str, *, is_config: bool) -> None:
        super().__init__(text)
        self.is_config = is_config


class Library:
    """The client of a joined store, with the registered buffer. Thread: any, several at once."""

    def __init__(self, how: Mapping[str, Any]) -> None:
        """Join the store and register the buffer.

        Raises:
            JoinError: The store cannot be joined.
        """
        try:
            from mooncake import store  # noqa: PLC0415 - converts its error to a message
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
            raise JoinError(f"{how['master']} cannot be joined (status {status})", is_config=False)
        self._replication: Any = store.ReplicateConfig()
        self._replication.replica_num = how["replicas"]
        self._size: int = how["buffer_bytes"]
        self._buffer = mmap.mmap(how["buffer_fd"], self._size)
        os.close(how["buffer_fd"])
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        if status := self._store.register_buffer(self._address, self._size):
            text = (
                f"buffer_bytes: registering {self._size} bytes of memory failed (status {status}); "
                "raise the limit of locked memory (ulimit -l), or use less"
            )
            raise JoinError(text, is_config=True)

    def exist(self, names: list[str], _at: Sequence[int], _sizes: Sequence[int]) -> list[int]:
        """Return 1 for each value that exists, and 0 for the others."""
        return list(self._store.batch_is_exist(names))

    def put(self, names: list[str], at: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Store values that do not exist yet."""
        memory = self._memory(at, sizes)
        return list(self._store.batch_put_from_multi_buffers(names, *memory, self._replication))

    def get(self, names: list[str], at: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read stored values into the buffer."""
        return list(self._store.batch_get_into_multi_buffers(names, *self._memory(at, sizes)))

    def remove(self, names: list[str], _at: Sequence[int], _sizes: Sequence[int]) -> list[int]:
        """Remove values, even if they were just read."""
        return list(self._store.batch_remove(names, True))

    def close(self) -> None:
        """Leave the store."""
        self._store.close()

    def _memory(self, at: Sequence[int], sizes: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Return the addresses and sizes of values in the library's format, a list per value."""
        for offset, size in zip(at, sizes, strict=True):
            if offset < 0 or size < 0 or offset + size > self._size:
                raise ValueError(f"{size} bytes at {offset} are outside the buffer")
        return [[self._address + offset] for offset in at], [[size] for size in sizes]


def frame(message: Mapping[str, Any]) -> bytes:
    """Encode a message as JSON, preceded by its length."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def receive(stream: BinaryIO) -> dict[str, Any] | None:
    """Receive the next message; None if the other side has closed the connection."""
    head = stream.read(LENGTH.size)
    (size,) = LENGTH.unpack(head) if len(head) == LENGTH.size else (0,)
    body = stream.read(size)
    return json.loads(body) if size and len(body) == size else None


class Attendance:
    """Executes the engine's calls on several threads of the helper process."""

    def __init__(self, link: socket.socket, stream: BinaryIO, library: Library) -> None:
        self._link, self._stream = link, stream
        self._library = library
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def attend(self) -> None:
        """Execute calls until the connection closes or an error occurs, then end the process.

        The thread that reads a call also executes it, while another one reads: no call changes
        threads.
        """
        try:
            while (request := self._next()) is not None:
                if request["call"] == "close":
                    self._library.close()
                    break
                self._perform(request)
        except OSError:  # the parent is gone
            pass
        except BaseException:  # noqa: BLE001 - a lost thread would let its call time out
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _next(self) -> dict[str, Any] | None:
        with self._reading:
            return receive(self._stream)

    def _perform(self, request: Mapping[str, Any]) -> None:
        call = getattr(self._library, request["call"])
        outcome: dict[str, Any]
        try:
            outcome = {"statuses": call(request["names"], request["at"], request["sizes"])}
        except Exception as error:  # noqa: BLE001 - any exception of the library
            outcome = {"error": f"{type(error).__name__}: {error}"}
        with self._writing:
            self._link.sendall(frame({"id": request["id"], **outcome}))


def serve(link: socket.socket) -> None:
    """Join a store and execute library calls, until the parent closes the store or disconnects."""
    stream = link.makefile("rb")
    how = receive(stream)
    if how is None:
        return
    try:
        attendance = Attendance(link, stream, Library(how))
    except JoinError as error:
        link.sendall(frame({"id": JOIN, "error": str(error), "is_config": error.is_config}))
        return
    link.sendall(frame({"id": JOIN, "statuses": []}))
    for _ in range(how["calls"]):  # one more thread than concurrent calls, so that one always reads
        threading.Thread(target=attendance.attend, daemon=True).start()
    attendance.attend()


def main() -> None:
    """Serve the parent process; exit without waiting for threads or destructors."""
    parent, descriptor = map(int, sys.argv[1:3])
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, _NO_CORE)
    if os.getppid() == parent:  # else the parent had died before PR_SET_PDEATHSIG was set
        with contextlib.suppress(OSError):  # the parent is gone
            serve(socket.socket(fileno=descriptor))
    os._exit(0)


def _check_reachable(master: str) -> None:
    """Check quickly that the master is reachable; the library needs 90 s to fail.

    Raises:
        JoinError: It is not reachable.
    """
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise JoinError(f"{master} cannot be reached ({error})", is_config=False) from None


if __name__ == "__main__":
    main()
