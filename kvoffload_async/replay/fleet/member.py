"""One process of a fleet: replays the requests that its parent sends, one after the other.

    python -m kvoffload_async.replay.fleet.member PARENT

It ends with its parent: the kernel kills it, and a closed pipe ends it where that cannot be had.
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
from kvoffload_async.replay.fleet.process import DONE, ENDED, FAILED, READY, Start, answer
from kvoffload_async.replay.report import Report
from kvoffload_async.replay.run import ReplayOptions, replay
from kvoffload_async.replay.source import RequestSource

_PR_SET_PDEATHSIG: Final = 1


class PipedRequests(RequestSource):
    """The parent's requests. Asking for the next one says that the last one has come to rest."""

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

    def _fraction_of_all(self) -> float:
        return 0.0


def serve(lines: BinaryIO, say: Callable[[bytes], None]) -> None:
    """Replay what comes in `lines` until they end; every error is told, and none is raised."""
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
    """Have the kernel end this process with its parent, where it can."""
    with contextlib.suppress(OSError, AttributeError):  # not Linux: there is the pipe
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent has ended")  # before the kernel knew that it matters


def main() -> None:
    """Serve the parent on the standard streams; whatever else is printed goes to the error one."""
    _end_with(int(sys.argv[1]))
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more
            serve(sys.stdin.buffer, lambda line: _write_all(replies.fileno(), line))


def _write_all(fd: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(fd, rest) :]


if __name__ == "__main__":
    main()
