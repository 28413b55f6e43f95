"""Bounds on what a server replies, checked before the parser sees it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_SHORT_BYTES: Final = 4096
"""Bytes of any line, and of a reply where no more is expected: an error, a status, a number."""
_ELEMENT_BYTES: Final = 16
"""What an element of an array counts for, beside its own bytes."""
_MOST_DEPTH: Final = 8
_LINES: Final = re.compile(rb"(?:[+:-][^\r\n]{0,256}\r\n)+")
"""Short replies one after the other, as to a probe."""
_LINE_TYPES: Final = b"+-:"
_END: Final = b"\r\n"

_most_bytes: ContextVar[int] = ContextVar("most_bytes", default=0)


@contextmanager
def replies_up_to(most_bytes: int) -> Iterator[None]:
    """Allow each reply that this task reads so many bytes, beside those that any reply may have."""
    token = _most_bytes.set(most_bytes)
    try:
        yield
    finally:
        _most_bytes.reset(token)


class ReplyError(Exception):
    """A server replied with more than the call can have asked for, or not in RESP2."""


class ReplyBounds:
    """Follows the replies of one connection by their headers; keeps none of their bytes.

    A parser allocates what a header announces, `*2147483647` or `$536870912`, or keeps what comes
    for as long as no line ends. So what a header announces is compared with the bound first.
    """

    def __init__(self) -> None:
        """Expect the first reply."""
        self._line = b""  # the beginning of a header whose end has not come yet
        self._payload_bytes = 0  # still to come of a bulk string, with its line end
        self._arrays: list[int] = []  # elements still to come of each array that is not complete
        self._reply_bytes = 0

    def feed(self, data: bytes) -> None:
        """Check the next bytes of the connection.

        Raises:
            ReplyError: They are not to be parsed; the connection has to be closed.
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
            # The line end may be divided, too: its first byte is in what was kept then.
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
            raise ReplyError(f"{kind!r} is no type of a reply")
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
