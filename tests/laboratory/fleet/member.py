"""A member process of a fleet: replays the requests sent by its parent, one at a time.

    python -m laboratory.fleet.member PARENT

It ends with its parent: the kernel kills it or, where that is not supported, the closed pipe ends
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final

from kvoffload_async.errors import ConfigError, InputError, OffloadError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.replay.drivers import ReplayOptions
from kvoffload_async.replay.report import Report
from kvoffload_async.replay.run import replay
from kvoffload_async.replay.source import RequestSource
from laboratory.fleet.process import DONE, ENDED, FAILED, READY, Start, answer

_PR_SET_PDEATHSIG: Final = 1


class PipedRequests(RequestSource):
    """Requests from the parent. Taking the next one reports that the last one is finished."""

    def __init__(self, lines: BinaryIO, say: Callable[[bytes], None], most_blocks: int) -> None:
        super().__init__()
        self._lines = lines
        self._say = say
        self._most_blocks = most_blocks
        self.report_so_far: Callable[[], Report] | None = None

    def most_blocks(self) -> int:
        return self._most_blocks

    def _requests(self) -> Iterator[Sequence[int]]:
        self._say(answer(READY))
        for line in self._lines:
            yield json.loads(line)
            report = None if self.report_so_far is None else self.report_so_far()
            self._say(answer(DONE, report))


def serve(lines: BinaryIO, say: Callable[[bytes], None]) -> None:
    """Replay the requests in `lines` until the end; errors are reported, never raised."""
    try:
        start = Start(**json.loads(lines.readline()))
        source = PipedRequests(lines, say, start.most_blocks)

        def follow(report_so_far: Callable[[], Report]) -> None:
            source.report_so_far = report_so_far

        options = ReplayOptions(verify=start.verify, layers=start.layers, on_ready=follow)
        report = replay(TieringOffloadingSpec(start.config), source, options)
    except (InputError, ConfigError) as error:
        say(answer(FAILED, error=str(error), is_input=True))
    except (OffloadError, TimeoutError) as error:
        say(answer(FAILED, error=str(error), is_input=False))
    else:
        say(answer(ENDED, report))


def _end_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, if supported."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the closed pipe ends it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended")  # the parent had died before PR_SET_PDEATHSIG was set


def main() -> None:
    """Serve the parent on standard input and output; other output goes to standard error."""
    _end_with(int(sys.argv[1]))
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.suppress(BrokenPipeError):  # the parent has closed the pipe
            serve(sys.stdin.buffer, lambda line: _write_all(replies.fileno(), line))


def _write_all(fd: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    main()
