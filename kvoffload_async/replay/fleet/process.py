"""The processes of a fleet as their parent sees them: started, watched, ended for certain.

Parent and members exchange one JSON object a line. The parent sends a `start`, then requests one by
one, and closes the pipe after the last one. A member answers each of them when it has come to rest,
the last time after its shutdown, with all figures so far: so those of a member that is killed are
known up to then.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import InputError, OffloadError, StalledError
from kvoffload_async.facade.status import SOCKET_VARIABLE
from kvoffload_async.replay.report import Report

READY: Final = "ready"
DONE: Final = "done"
ENDED: Final = "ended"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a member is told first.

    Attributes:
        config: The engine's settings, as `OffloadConfig.parse` takes them.
        most_blocks: Blocks that a request has at most.
        verify: Whether to compare what is loaded.
        layers: Tensors of the device memory.
    """

    config: Mapping[str, Any]
    most_blocks: int
    verify: bool
    layers: int


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message's line."""
    return json.dumps(message).encode() + b"\n"


def encode_start(start: Start) -> bytes:
    """Return the first line."""
    return encode(asdict(start))


def settings_of(config: OffloadConfig) -> dict[str, Any]:
    """Return a configuration as it is parsed."""
    settings = {option.name: getattr(config, option.name) for option in fields(config)}
    return settings | {"secondary_tiers": [dict(tier) for tier in config.secondary_tiers]}


def answer(what: str, report: Report | None = None, **more: object) -> bytes:
    """Return a member's line."""
    figures = {} if report is None else {"report": asdict(report)}
    return encode({"what": what, **figures, **more})


def report_in(message: Mapping[str, Any]) -> Report | None:
    """Return the figures in a member's answer, if there are any."""
    figures = message.get("report")
    return None if figures is None else Report(**figures)


_COMMAND: Final = (sys.executable, "-m", "kvoffload_async.replay.fleet.member")
_READ_BYTES: Final = 1 << 16
_REAP_S: Final = 10.0


class MemberProcess:
    """One process of a fleet, from its start on.

    Attributes:
        report: Its figures when it last was at rest.
    """

    def __init__(self, name: str, start: Start) -> None:
        """Start it; waits for nothing."""
        self.name = name
        self.report: Report | None = None
        self._answers: deque[str] = deque()
        self._partial = b""
        self._unsent = encode_start(start)  # first: nothing runs yet if it cannot be written
        # In a session of its own: a Ctrl-C at the terminal is for the parent, which then ends it.
        self._process = subprocess.Popen(  # noqa: S603 - this package's own module
            [*_COMMAND, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # They would all listen on one path, of which only the first can have it.
            env={name: value for name, value in os.environ.items() if name != SOCKET_VARIABLE},
        )
        if self._process.stdin is None or self._process.stdout is None:  # pragma: no cover
            raise OffloadError(f"{name}: no pipes")  # what the type checker cannot know
        self._requests = self._process.stdin
        self._replies = self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        os.set_blocking(self._replies.fileno(), False)

    def fileno(self) -> int:
        """Return what becomes readable when there are answers."""
        return self._replies.fileno()

    def send(self, block_ids: Sequence[int], timeout_s: float) -> None:
        """Send a request, behind whatever has not been sent yet.

        Raises:
            StalledError: The process does not take it in time.
            OffloadError: The process has ended.
        """
        self._unsent += json.dumps(list(block_ids)).encode() + b"\n"
        self.flush(timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Send what has not been sent yet; raises what `send` does."""
        deadline_s = time.monotonic() + timeout_s
        fd = self._requests.fileno()
        while self._unsent:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise StalledError(f"{self.name} has taken nothing for {timeout_s:g} s")
            if not select.select([], [fd], [], left_s)[1]:
                continue
            try:
                self._unsent = self._unsent[os.write(fd, self._unsent) :]
            except BrokenPipeError:
                raise self._has_ended() from None

    def take_answer(self) -> str | None:
        """Return what it says next, if it has said something: its figures are in `report` then.

        Raises:
            InputError: It cannot work with its configuration.
            OffloadError: It has failed, or ended.
        """
        while not self._answers:
            try:
                data = os.read(self._replies.fileno(), _READ_BYTES)
            except BlockingIOError:
                return None
            if not data:
                raise self._has_ended()
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        return self._answers.popleft()

    def wait_for(self, what: str, timeout_s: float) -> None:
        """Wait until it says so; raises what `take_answer` does, and StalledError."""
        deadline_s = time.monotonic() + timeout_s
        while (said := self.take_answer()) != what:
            left_s = deadline_s - time.monotonic()
            if said is None and (left_s <= 0 or not select.select([self], [], [], left_s)[0]):
                raise StalledError(f"{self.name} was not {what} after {timeout_s:g} s")

    def end(self, timeout_s: float) -> None:
        """Let it end after its last request; raises what `wait_for` does."""
        self._requests.close()
        self.wait_for(ENDED, timeout_s)

    def kill(self) -> None:
        """End it as a crash would, unless it has ended; idempotent."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a call into the kernel hangs
            self._process.wait(_REAP_S)
        for pipe in (self._requests, self._replies):
            pipe.close()

    def _take(self, message: Mapping[str, Any]) -> None:
        what = message["what"]
        if what == FAILED:
            kind = InputError if message["is_input"] else OffloadError
            raise kind(f"{self.name}: {message['error']}")
        self.report = report_in(message) or self.report
        self._answers.append(what)

    def _has_ended(self) -> OffloadError:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in its end
            self._process.wait(_REAP_S)
        return OffloadError(f"{self.name} has ended with status {self._process.returncode}")
