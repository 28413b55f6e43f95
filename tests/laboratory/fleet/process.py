"""Member processes of a fleet as seen by their parent: start, monitoring and termination.

Parent and members exchange one JSON object per line. The parent sends `start`, then the requests
one by one, and closes the pipe after the last one. A member answers each request when it is
finished, and once more after its shutdown. Each answer has all results so far, so those of a killed
member are known up to its last request.
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
from pathlib import Path
from typing import Any, Final

from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import InputError, OffloadError, StalledError
from kvoffload_async.replay.report import Report
from kvoffload_async.status.server import SOCKET_VARIABLE

READY: Final = "ready"
DONE: Final = "done"
ENDED: Final = "ended"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First message to a member.

    Attributes:
        config: The engine's settings, as for `OffloadConfig.parse`.
        most_blocks: Maximum blocks per request.
        verify: Whether to compare loaded blocks.
        layers: Tensors of the device memory.
    """

    config: Mapping[str, Any]
    most_blocks: int
    verify: bool
    layers: int


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message).encode() + b"\n"


def settings_of(config: OffloadConfig) -> dict[str, Any]:
    """Return the settings of a configuration, as for `OffloadConfig.parse`."""
    settings = {option.name: getattr(config, option.name) for option in fields(config)}
    return settings | {"secondary_tiers": [dict(tier) for tier in config.secondary_tiers]}


def answer(what: str, report: Report | None = None, **more: object) -> bytes:
    """Return a member's answer as a line."""
    figures = {} if report is None else {"report": asdict(report)}
    return encode({"what": what, **figures, **more})


_COMMAND: Final = (sys.executable, "-m", "laboratory.fleet.member")
_TESTS: Final = Path(__file__).parents[2]
_READ_BYTES: Final = 1 << 16
_REAP_S: Final = 10.0


def _environment() -> dict[str, str]:
    """Return the environment of a member, which finds this package and has no status socket."""
    inherited = {name: value for name, value in os.environ.items() if name != SOCKET_VARIABLE}
    paths = [str(_TESTS), *filter(None, [inherited.get("PYTHONPATH")])]
    return inherited | {"PYTHONPATH": os.pathsep.join(paths)}


class MemberProcess:
    """One member process.

    Attributes:
        report: Its results at its last answer.
    """

    def __init__(self, name: str, start: Start) -> None:
        """Start the process, without waiting for it."""
        self.name = name
        self.report: Report | None = None
        self._answers: deque[str] = deque()
        self._partial = b""
        self._unsent = encode(asdict(start))  # first: it may raise before the process is started
        # In its own session, so that Ctrl-C reaches only the parent, which ends the member.
        self._process = subprocess.Popen(
            [*_COMMAND, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin
        self._replies = self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        os.set_blocking(self._replies.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there are answers."""
        return self._replies.fileno()

    def send(self, block_ids: Sequence[int], timeout_s: float) -> None:
        """Send a request, after all unsent data.

        Raises:
            StalledError: The process does not accept it in time.
            OffloadError: The process has ended.
        """
        self._unsent += json.dumps(list(block_ids)).encode() + b"\n"
        self.flush(timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Send unsent data; raises the errors of `send`."""
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
        """Return the type of the next answer, if there is one, and update `report`.

        Raises:
            InputError: The process rejected its configuration.
            OffloadError: The process failed or ended.
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
        """Wait for an answer of this type; raises the errors of `take_answer`, and StalledError."""
        deadline_s = time.monotonic() + timeout_s
        while (said := self.take_answer()) != what:
            left_s = deadline_s - time.monotonic()
            if said is None and (left_s <= 0 or not select.select([self], [], [], left_s)[0]):
                raise StalledError(f"{self.name} was not {what} after {timeout_s:g} s")

    def end(self, timeout_s: float) -> None:
        """Close the request pipe and wait for the process's end; errors as in `wait_for`."""
        self._requests.close()
        self.wait_for(ENDED, timeout_s)

    def kill(self) -> None:
        """Kill it like a crash, unless it has ended; idempotent."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a system call
            self._process.wait(_REAP_S)
        for pipe in (self._requests, self._replies):
            pipe.close()

    def _take(self, message: Mapping[str, Any]) -> None:
        what = message["what"]
        if what == FAILED:
            kind = InputError if message["is_input"] else OffloadError
            raise kind(f"{self.name}: {message['error']}")
        if (figures := message.get("report")) is not None:
            self.report = Report(**figures)
        self._answers.append(what)

    def _has_ended(self) -> OffloadError:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs while exiting
            self._process.wait(_REAP_S)
        return OffloadError(f"{self.name} has ended with status {self._process.returncode}")
