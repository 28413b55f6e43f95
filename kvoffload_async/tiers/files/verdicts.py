"""What reading every block has shown, whatever kind of store they are in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from kvoffload_async.abc.maintenance import MAX_LISTED, Problem


class BadBlock(Protocol):
    """A block that is not as it should be; as text, which and why."""

    @property
    def what(self) -> str:
        """Which block."""
        ...


Bad = TypeVar("Bad", bound=BadBlock)


class Verdict(Enum):
    """What is found about one block."""

    VERIFIED = auto()
    """Its bytes are those that its digest is of."""
    WITHOUT_DIGEST = auto()
    """It is all there, and has no digest."""
    CORRUPT = auto()
    UNREADABLE = auto()
    NEWER = auto()
    """It is all there, and its digest is of a newer release."""
    OTHER_KEY = auto()
    """Nobody can tell without its integrity key, or it was not made with the one that is given."""
    GONE = auto()
    """It was removed or replaced meanwhile."""


def problem_of(verdict: Verdict, bad: BadBlock) -> Problem:
    """Return what is wrong with a block, by its verdict."""
    return Problem(f"{verdict.name.lower()}: {bad}", bad.what)


@dataclass(slots=True, kw_only=True)
class Verification(Generic[Bad]):
    """How many blocks are as they should be, and which are not.

    Attributes:
        max_listed: How many of the corrupt and of the unreadable ones are listed; None: all.
        checked: Blocks that were read.
        verified: Those whose digest is right.
        without_digest: Those of the right length that have none.
        newer: Those whose digest is of a newer release.
        other_key: Those whose digest cannot be compared with the integrity key that was given.
        corrupt_blocks: Those of a wrong length or with a wrong digest.
        unreadable_blocks: Those that could not be read.
        corrupt: The first of the corrupt ones, and `unreadable` of the unreadable ones.
    """

    max_listed: int | None = MAX_LISTED
    checked: int = 0
    verified: int = 0
    without_digest: int = 0
    newer: int = 0
    other_key: int = 0
    corrupt_blocks: int = 0
    unreadable_blocks: int = 0
    corrupt: list[Bad] = field(default_factory=list)
    unreadable: list[Bad] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The figures for people."""
        return [
            ("blocks read", f"{self.checked:,}"),
            ("verified", f"{self.verified:,}"),
            ("without a digest", f"{self.without_digest:,}"),
            ("of a newer release", f"{self.newer:,}"),
            ("of another integrity key", f"{self.other_key:,}"),
            ("corrupt", f"{self.corrupt_blocks:,}"),
            ("unreadable", f"{self.unreadable_blocks:,}"),
        ]

    def count(self, verdict: Verdict, bad: Bad) -> Problem | None:
        """Take in a block that is not gone; `bad` names it, should it be one that is a problem."""
        if verdict is Verdict.UNREADABLE:
            self.unreadable_blocks += 1
            self._list(self.unreadable, bad)
            return problem_of(verdict, bad)
        self.checked += 1
        if verdict is Verdict.CORRUPT:
            self.corrupt_blocks += 1
            self._list(self.corrupt, bad)
            return problem_of(verdict, bad)
        if verdict is Verdict.VERIFIED:
            self.verified += 1
        elif verdict is Verdict.NEWER:
            self.newer += 1
        elif verdict is Verdict.OTHER_KEY:
            self.other_key += 1
        else:
            self.without_digest += 1
        return None

    def _list(self, listed: list[Bad], bad: Bad) -> None:
        if self.max_listed is None or len(listed) < self.max_listed:
            listed.append(bad)
