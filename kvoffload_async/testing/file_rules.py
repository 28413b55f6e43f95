"""What goes wrong in file calls: rules, and what they are asked about."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FileCall:
    """One call, as rules see it.

    Attributes:
        number: Counted over all methods, from 1.
        name: The method.
        path: What it is about; for a descriptor, what that was opened as.
        flags: The flags of `open`; for a descriptor, those that it was opened with.
        thread_id: Who called.
    """

    number: int
    name: str
    path: str
    flags: int
    thread_id: int


@dataclass(slots=True, eq=False)
class Hang:
    """Calls that do not return until they are released.

    Attributes:
        entered: Set when the first call hangs.
    """

    entered: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let the calls go on, now and from now on."""
        self._released.set()

    def wait(self) -> None:
        """Hang."""
        self.entered.set()
        self._released.wait()


@dataclass(slots=True, eq=False)
class Rule:
    """Which calls it takes, how many of them, and what it does to these."""

    on: frozenset[str] | None
    at: int | None
    when: Callable[[FileCall], bool] | None
    times: int | None
    act: Callable[[], None] | None = None
    max_bytes: int | None = None
    kills_torn: bool = False

    def takes(self, call: FileCall) -> bool:
        """Tell whether the rule is for a call; if so, that counts."""
        if self.times == 0 or (self.on is not None and call.name not in self.on):
            return False
        if self.at not in {None, call.number} or not (self.when is None or self.when(call)):
            return False
        if self.times is not None:
            self.times -= 1
        return True
