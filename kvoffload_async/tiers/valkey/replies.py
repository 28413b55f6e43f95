"""Limits on the size of a server's replies, enforced before parsing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_SHORT_BYTES: Final = 4096
"""Maximum bytes of a line, and of a reply without payload: an error, a status, a number."""
_ELEMENT_BYTES: Final = 16
"""Overhead counted for each array element, in addition to its bytes."""
_MOST_DEPTH: Final = 8
_LINES: Final = re.compile(rb"(?:[+:-][^\r\n]{0,256}\r\n)+")
"""Consecutive short replies, as to a probe."""
_LINE_TYPES: Final = b"+-:"
_END: Final = b"\r\n"

_most_bytes: ContextVar[int] = ContextVar("most_bytes", default=0)


@contextmanager
def replies_up_to(most_bytes: int) -> Iterator[None]:
    """Allow each reply read by this task `most_bytes` beyond the limit of short replies."""
    token = _most_bytes.set(most_bytes)
    try:
        yield
    finally:
        _most_bytes.reset(token)


class ReplyError(Exception):
    """A reply is larger than the call can cause, or is not RESP2."""


class ReplyBounds:
    """Tracks the replies of one connection by their headers, without storing payload.

    A parser allocates the size announced by a header, such as `*2147483647` or `$536870912`, or
    buffers a line until it ends. So announced sizes are checked first.
    """

    def __init__(self) -> None:
        """Expect the first reply."""
        self._line = b""  # partial header
        self._payload_bytes = 0  # remaining bytes of a bulk string, including its line end
        self._arrays: list[int] = []  # remaining elements of each incomplete array
        self._reply_bytes = 0

    def feed(self, data: bytes) -> None:
        """Check the next bytes of the connection.

        Raises:
            ReplyError: They must not be parsed; close the connection.
        """
        bound = _SHORT_BYTES + _most_bytes.get()
        position = 0
        while position < len(data):
            if self._payload_bytes:
                step = min(self._payload_bytes, len(data) - position)
                self._payload_bytes -= step
                position += step
                continue
            if not self._line and not self._arrays and (lines := _LINES.match(data, position)):
                position = lines.end()
                continue
            end = data.find(_END, position)
            # The line end may be split, with its first byte already in `_line`.
            if self._line.endswith(b"\r") and data[position : position + 1] == b"\n":
                line, end = self._line[:-1], position - 1
            elif end >= 0:
                line = self._line + data[position:end]
            else:
                if len(self._line) + len(data) - position > _SHORT_BYTES:
                    raise ReplyError(f"a reply has a line of more than {_SHORT_BYTES} bytes")
                self._line += data[position:]
                return
            self._line, position = b"", end + len(_END)
            self._header(line, bound)

    def _header(self, line: bytes, bound: int) -> None:
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
        if self._reply_bytes > bound:
            raise ReplyError(f"a reply has more than {bound} bytes")
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
