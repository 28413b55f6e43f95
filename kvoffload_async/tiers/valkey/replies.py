"""Replies of a server (RESP2), whose values are read straight into the rows of their blocks.

The length of a value is announced before its bytes, so the next bytes are received in the value's
own memory. hiredis parses everything else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import hiredis

from kvoffload_async.tiers.remote.client import Target

_READ_BYTES: Final = 64 << 10
"""Maximum bytes received at once, except in a value's own memory."""
_SHORT_BYTES: Final = 4096
"""Maximum bytes of a line, and of a reply without payload: an error, a status, a number."""
_ELEMENT_BYTES: Final = 16
"""Overhead counted for each array element, in addition to its bytes."""
_MOST_DEPTH: Final = 8
_LINES: Final = re.compile(rb"(?:[+:-][^\r\n]{0,256}\r\n)+")
"""Matches consecutive short replies, such as the replies to a probe."""
_LINE_TYPES: Final = b"+-:"
_END: Final = b"\r\n"


class ServerError(Exception):
    """An error reply, such as `READONLY You can't write against a read only replica.`."""

    @property
    def code(self) -> str:
        """The first word of the reply."""
        return str(self).partition(" ")[0]


class ReplyError(Exception):
    """A reply is larger than the maximum for its call, was not asked for, or is not RESP2."""


class ReplyReader:
    """Reads the replies to one call after another, however the network divides them.

    A parser allocates the size announced by a header, such as `*2147483647` or `$536870912`, or
    buffers a line until it ends. So headers are checked before anything is allocated or parsed.

    Attributes:
        replies: The replies to the present call: for a value that was read into its target its
            length, for an error reply a `ServerError`.
    """

    def __init__(self) -> None:
        """Read from a new connection; no reply is expected."""
        self.replies: list[Any] = []
        self._count = 0
        self._bound = 0
        self._targets: Sequence[Target | None] = ()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._next_bytes = _READ_BYTES
        """Bytes to receive at once: with targets, not much more than what precedes a row."""
        self._parser = hiredis.Reader(protocolError=ReplyError, replyError=ServerError)
        self._line = b""  # partial header, or partial line end of a value
        self._begin = 0  # of the bytes now received, these belong to values or are parsed
        self._value: Target | None = None  # the target being filled, until the value's line end
        self._parts: list[memoryview] = []  # its memory still to be filled, the last part first
        self._payload_bytes = 0  # remaining bytes of another bulk string, including its line end
        self._arrays: list[int] = []  # remaining elements of each incomplete array
        self._reply_bytes = 0

    def expect(
        self, count: int, targets: Sequence[Target | None] = (), most_bytes: int = 0
    ) -> None:
        """Expect the replies to a new call.

        Args:
            count: Number of replies.
            targets: Where to read values, for the first replies; None: as any other reply.
            most_bytes: Maximum size of every other reply, beyond that of a short one.
        """
        self.replies = []
        self._count, self._targets, self._bound = count, targets, _SHORT_BYTES + most_bytes
        before_row = (2 * len(_END) + len(f"${t.capacity}") + len(t.header) for t in targets if t)
        self._next_bytes = max(before_row, default=_READ_BYTES)

    def is_complete(self) -> bool:
        """Return whether all expected replies have been read."""
        return len(self.replies) == self._count

    def detach(self) -> None:
        """Drop all references to targets; nothing is written to them any more."""
        self._targets, self._value, self._parts = (), None, []

    def memory(self) -> memoryview:
        """Return the memory in which to receive the next bytes."""
        return self._parts[-1] if self._parts else self._buffer[: self._next_bytes]

    def received(self, num_bytes: int) -> None:
        """Take note of bytes that were received in `memory()`.

        Raises:
            ReplyError: Nothing more may be read; close the connection.
        """
        if self._parts:
            part = self._parts.pop()
            if num_bytes < len(part):
                self._parts.append(part[num_bytes:])
        else:
            self._parse(bytes(self._buffer[:num_bytes]))

    def _parse(self, data: bytes) -> None:
        data, self._line, self._begin = self._line + data, b"", 0
        position = 0
        while position < len(data):
            end = self._end_of_next(data, position)
            if end is None:
                break
            position = end
        self._pass_on(data, position)
        self._line = data[position:]
        has_more = self._line or self._value or self._payload_bytes or self._arrays
        if len(self.replies) >= self._count + (not has_more):
            raise ReplyError("the server sent more than was asked for")

    def _end_of_next(self, data: bytes, position: int) -> int | None:
        """Consume what begins at a position; return its end, or None if it is incomplete."""
        if self._value is not None:
            return self._end_value(data, position)
        if self._payload_bytes:
            step = min(self._payload_bytes, len(data) - position)
            self._payload_bytes -= step
            return position + step
        if not self._arrays and (lines := _LINES.match(data, position)):
            return lines.end()
        end = data.find(_END, position)
        if end < 0:
            if len(data) - position > _SHORT_BYTES:
                raise ReplyError(f"a reply has a line of more than {_SHORT_BYTES} bytes")
            return None
        line, after = data[position:end], end + len(_END)
        if self._targets and not self._arrays and line.startswith(b"$"):
            self._pass_on(data, position)
            if self._begin_value(_count_of(line[1:])):
                self._begin = self._fill(data, after)
                return self._begin
        self._header(line)
        return after

    def _pass_on(self, data: bytes, end: int) -> None:
        """Have the bytes before `end` parsed that are no part of a value; they are checked."""
        if self._begin < end:
            self._parser.feed(data[self._begin : end])
            self._begin = end
            while (reply := self._parser.gets()) is not False:
                self.replies.append(reply)

    def _begin_value(self, count: int) -> bool:
        """Begin to fill the next reply's target; False if it has none, or there is no value."""
        number = len(self.replies)
        target = self._targets[number] if number < len(self._targets) else None
        if target is None or count < 0:
            return False
        if count > target.capacity:
            raise ReplyError(f"a value has more than {target.capacity} bytes")
        self._value, target.num_bytes = target, count
        self._parts = target.parts()[::-1]
        return True

    def _end_value(self, data: bytes, position: int) -> int | None:
        if len(data) - position < len(_END):
            return None
        if self._value is None or not data.startswith(_END, position):
            raise ReplyError("a value does not end where its length says")
        self.replies.append(self._value.num_bytes)
        self._value, self._begin = None, position + len(_END)
        return self._begin

    def _fill(self, data: bytes, position: int) -> int:
        """Copy what has been received of a value to its target; return the end of that."""
        while self._parts and position < len(data):
            part = self._parts.pop()
            step = min(len(part), len(data) - position)
            part[:step] = data[position : position + step]
            position += step
            if step < len(part):
                self._parts.append(part[step:])
        return position

    def _header(self, line: bytes) -> None:
        kind, rest = line[:1], line[1:]
        self._reply_bytes += len(line)
        elements = 0
        if kind in (b"$", b"*"):
            count = _count_of(rest)
            if kind == b"$" and count >= 0:
                self._reply_bytes += count
                self._payload_bytes = count + len(_END)
            elif kind == b"*" and count > 0:
                elements = count
                self._reply_bytes += _ELEMENT_BYTES * count
        elif not kind or kind not in _LINE_TYPES:
            raise ReplyError(f"{kind!r} is not a valid reply type")
        if self._reply_bytes > self._bound:
            raise ReplyError(f"a reply has more than {self._bound} bytes")
        if elements:
            if len(self._arrays) >= _MOST_DEPTH:
                raise ReplyError(f"a reply has arrays {_MOST_DEPTH + 1} deep")
            self._arrays.append(elements)
            return
        while self._arrays:
            self._arrays[-1] -= 1
            if self._arrays[-1]:
                return
            self._arrays.pop()
        self._reply_bytes = 0


def _count_of(text: bytes) -> int:
    digits = text.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > len(str(1 << 63)):
        raise ReplyError("the length of a reply is not a number")
    return int(text)
