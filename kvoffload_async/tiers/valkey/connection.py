"""A connection to one server, which receives values in their rows and sends them from there.

Client libraries return a value as new bytes, and join a command's parts before they send it; so
only their parser is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

from hiredis import pack_command

from kvoffload_async.tiers.remote.client import Parts, Target, present_listener
from kvoffload_async.tiers.valkey.replies import ReplyError, ReplyReader
from kvoffload_async.waiting import LastingFuture, all_done

Command = tuple[bytes | str | int | Parts, ...]
"""A command; its third element may be a value in several parts."""

_VALUE: Final = 2
_COUNT_BYTES: Final = len(b"*2\r\n")
"""What the library puts before the arguments; there are less than ten."""
_BATCH_BYTES: Final = 1 << 20
"""Bytes sent at once, so that no transport keeps more: TLS copies them, and asyncio's own loop."""


class Connection(asyncio.BufferedProtocol):
    """Runs one call at a time: some commands, and one reply to each.

    A call that ends early cuts the connection, and ends only when the transport has let go of the
    call's memory: late replies are read by nobody, and nothing more is sent.

    Thread: loop.

    Attributes:
        generation: The route's, when this connection was made.
        is_open: Whether another call may be made.
    """

    def __init__(self, generation: int) -> None:
        """Create the protocol of a connection that is being made."""
        self.generation = generation
        self.is_open = True
        self._reader = ReplyReader()
        self._lost: LastingFuture[None] = LastingFuture()
        self._changed: asyncio.Future[None] | None = None
        """Done when the state of the present call has changed."""
        self._error: Exception | None = None
        self._is_paused = False
        self._on_answer: Callable[[], object] = present_listener()
        self._transport: asyncio.Transport

    async def call(
        self,
        commands: Sequence[Command],
        targets: Sequence[Target | None] = (),
        most_bytes: int = 0,
    ) -> list[Any]:
        """Send commands; return their replies, see `ReplyReader`.

        Args:
            commands: The commands. The parts of their values must not change meanwhile.
            targets: Where to read values, for the first replies; None: as any other reply.
            most_bytes: Maximum size of every other reply, beyond that of a short one.

        Raises:
            OSError: The connection is lost.
            ReplyError: The server does not keep to the protocol.
        """
        reader = self._reader
        reader.expect(len(commands), targets, most_bytes)
        self._on_answer = present_listener()
        has_ended = False
        try:
            for batch in _encoded(commands):
                self._raise_error()
                self._transport.writelines(batch)
                while self._is_paused:
                    await self._change()
            while not reader.is_complete():
                await self._change()
            has_ended = True
        finally:
            reader.detach()
            if not has_ended:
                self.close()
                await self.closed()
        return reader.replies

    def close(self) -> None:
        """Cut the connection; idempotent."""
        self.is_open = False
        self._transport.abort()

    async def closed(self) -> None:
        """Wait until the transport accesses no memory any more; delays a cancellation until then.

        Call it after `close`, after which that takes one iteration of the loop.
        """
        await all_done(self._lost)

    async def _change(self) -> None:
        """Wait for a change of the call's state; raises the error that has ended the connection."""
        self._raise_error()
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None  # its traceback holds this frame
            try:
                raise error
            finally:
                del error
        if not self.is_open:
            raise ConnectionError("the connection is closed")

    def _wake(self, error: Exception | None = None) -> None:
        if error is not None and self.is_open:
            self._error = error
            self._reader.detach()
            self.close()
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    # -- called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Limit the bytes that the transport keeps to less than a command has after its value."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=1, low=0)  # with 0, TLS would never resume

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the present call."""
        if error is None or isinstance(error, TimeoutError):  # a peer that died is no slow call
            error = ConnectionError(error or "the server closed the connection")
        self._wake(error)
        self._lost.set_result(None)

    def pause_writing(self) -> None:
        """Wait before the next write."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Write on: nothing is left in the transport."""
        self._is_paused = False
        self._wake()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory in which to receive the next bytes."""
        del sizehint
        return self._reader.memory()

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the bytes received."""
        if not self.is_open:
            return
        self._on_answer()
        try:
            self._reader.received(nbytes)
        except ReplyError as error:
            self._wake(error.with_traceback(None))
        else:
            if self._reader.is_complete():
                self._wake()


def _encoded(commands: Sequence[Command]) -> Iterator[list[bytes | memoryview]]:
    """Encode commands; return their buffers in batches. The parts of values are not copied."""
    batch: list[bytes | memoryview] = []
    num_bytes = 0
    for command in commands:
        for data in _buffers_of(command):
            for first in range(0, len(data), _BATCH_BYTES):
                batch.append(data[first : first + _BATCH_BYTES])
                num_bytes += len(batch[-1])
                if num_bytes >= _BATCH_BYTES:
                    yield batch
                    batch, num_bytes = [], 0
    if batch:
        yield batch


def _buffers_of(command: Command) -> Sequence[bytes | memoryview]:
    value = command[_VALUE] if len(command) > _VALUE else None
    rest: tuple[Any, ...] = command
    if not isinstance(value, tuple):
        return (pack_command(rest),)
    before = pack_command(rest[:_VALUE])[_COUNT_BYTES:]
    after = pack_command(rest[_VALUE + 1 :])[_COUNT_BYTES:]
    head = b"*%d\r\n%b$%d\r\n" % (len(command), before, sum(map(len, value)))
    return head, *value, b"\r\n" + after
