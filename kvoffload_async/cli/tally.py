"""What a replay has come to so far."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

PRIMARY: Final = "primary"
"""What the primary tier is called among the tiers."""


@dataclass(slots=True)
class Tally:
    """What a replay has come to; of requests that have ended.

    Attributes:
        hits: Block references found, by the tier they came from.
        owner_ns: Nanoseconds in the manager's calls, a step.
    """

    requests: int = 0
    block_refs: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    stored_blocks: int = 0
    loaded_blocks: int = 0
    verified_blocks: int = 0
    corrupt_blocks: int = 0
    stores_refused: int = 0
    owner_ns: array[int] = field(default_factory=lambda: array("q"))
