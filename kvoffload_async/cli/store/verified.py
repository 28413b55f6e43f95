"""What reading every block has shown, whatever kind of store they are in."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any, Generic, TypeVar

Bad = TypeVar("Bad")


class Verdict(Enum):
    """What is found about one block."""

    SEALED = auto()
    """Its bytes are those that its checksum is of."""
    UNSEALED = auto()
    """It is all there, and has no checksum."""
    CORRUPT = auto()
    UNREADABLE = auto()
    GONE = auto()
    """It was removed or replaced meanwhile."""


@dataclass(slots=True)
class Verified(Generic[Bad]):
    """How many blocks are as they should be, and which are not.

    Attributes:
        checked: Blocks that were read.
        sealed: Those whose checksum is right.
        unsealed: Those of the right length that have none.
        corrupt: Those of a wrong length or with a wrong checksum.
        unreadable: Those that could not be read.
    """

    checked: int = 0
    sealed: int = 0
    unsealed: int = 0
    corrupt: list[Bad] = field(default_factory=list)
    unreadable: list[Bad] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @property
    def problems(self) -> list[str]:
        """What is wrong, a line each."""
        return [
            *(f"corrupt: {bad}" for bad in self.corrupt),
            *(f"unreadable: {bad}" for bad in self.unreadable),
        ]

    def count(self, verdict: Verdict, bad: Bad) -> None:
        """Take in a block that is not gone; `bad` names it, should it be one that is."""
        if verdict is Verdict.UNREADABLE:
            self.unreadable.append(bad)
            return
        self.checked += 1
        if verdict is Verdict.CORRUPT:
            self.corrupt.append(bad)
        elif verdict is Verdict.SEALED:
            self.sealed += 1
        else:
            self.unsealed += 1
