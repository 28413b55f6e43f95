"""What a replay has come to so far."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvoffload_async.replay.prompt import Prompt

DEVICE: Final = "device"
"""What the device is called among the tiers."""
PRIMARY: Final = "primary"
"""What the primary tier is called among the tiers."""


@dataclass(slots=True)
class Tally:
    """What a replay has come to; of requests that have ended.

    Attributes:
        hits: Block references found, by the tier they came from.
        owner_ns: Nanoseconds of the owner's thread, a step.
    """

    requests: int = 0
    block_refs: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    stored_blocks: int = 0
    loaded_blocks: int = 0
    verified_blocks: int = 0
    corrupt_blocks: int = 0
    stores_refused: int = 0
    preemptions: int = 0
    owner_ns: array[int] = field(default_factory=lambda: array("q"))

    @classmethod
    def of_tiers(cls, names: Sequence[str], *, device_keeps: bool) -> Tally:
        """Return a tally that names every place where hits may come from."""
        places = (*((DEVICE,) if device_keeps else ()), PRIMARY, *names)
        return cls(hits=Counter(dict.fromkeys(places, 0)))

    def end(self, prompt: Prompt) -> None:
        """Count a request that has ended."""
        self.requests += 1
        self.block_refs += prompt.refs
        if prompt.found_on_device or prompt.found_beyond:
            prompt.count_hits(self.hits, DEVICE, PRIMARY)
