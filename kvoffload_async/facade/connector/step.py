"""What the adapter gathers between two ends of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvoffload_async.facade.connector.protocol import NULL_BLOCK, TransferJobSpec
from kvoffload_async.types import JobId


@dataclass(slots=True)
class Step:
    """What has gathered in the step under way.

    Attributes:
        load_jobs: Loads that were prepared in it.
        flush: Jobs to flush.
        allocated: Device blocks that somebody is about to write.
        placed_req_ids: Requests that were given their block tables in it.
        computed_req_ids: Requests that were given blocks to be computed, without a load.
    """

    load_jobs: dict[JobId, TransferJobSpec] = field(default_factory=dict)
    flush: set[JobId] = field(default_factory=set)
    allocated: set[int] = field(default_factory=set)
    placed_req_ids: set[str] = field(default_factory=set)
    computed_req_ids: set[str] = field(default_factory=set)

    def note_allocated(self, blocks: Iterable[int]) -> None:
        """Note that somebody is about to write device blocks."""
        self.allocated.update(blocks)
        self.allocated.discard(NULL_BLOCK)
