"""Which device blocks have the KV of the tokens that block tables give them."""

from __future__ import annotations

from collections.abc import Collection

from kvoffload_async.facade.connector.protocol import NULL_BLOCK, ConnectorGeometry
from kvoffload_async.facade.connector.requests import ConnectorRequest


class DeviceContents:
    """The device blocks whose content is known, so that they may be stored.

    A block loses its content when the scheduler allocates it, and has it again when a load has
    filled it or its request computes its tokens. Until then it stays unfilled, whichever request
    finds it in the device's prefix cache. Blocks found there are otherwise trusted.

    Attributes:
        unfilled: The blocks without known content; at most one entry per device block.
    """

    def __init__(self) -> None:
        self.unfilled: set[int] = set()

    def have_content(self, blocks: Collection[int]) -> bool:
        """Return whether all of the blocks, none of which is null, have known content."""
        return NULL_BLOCK not in blocks and self.unfilled.isdisjoint(blocks)

    def note_computed(
        self, state: ConnectorRequest, geometry: ConnectorGeometry, tokens: int
    ) -> None:
        """Record the next tokens of a request as computed in this step.

        What is computed from unfilled blocks is wrong, so a request that begins with such blocks
        within its windows fills no others.
        """
        start = state.request.num_computed_tokens
        shapes = list(zip(state.groups, geometry.groups, strict=True))
        if state.reads_content is None:
            known = min(start, state.local_tokens + state.loaded_tokens)
            state.reads_content = all(
                self.unfilled.isdisjoint(
                    group.block_ids[shape.first_block_read(start) : known // shape.tokens_per_block]
                )
                for group, shape in shapes
            )
        if not state.reads_content:
            return
        for group, shape in shapes:
            size = shape.tokens_per_block
            # The first tokens of a partly found block come from the device's prefix cache.
            first = start // size if start == state.local_tokens else -(-start // size)
            self.unfilled.difference_update(group.block_ids[first : -(-(start + tokens) // size)])
