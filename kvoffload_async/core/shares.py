"""Shares: how much of the primary each tier's transfers may occupy, in each direction.

A slot counts against a tier from its reservation for a promotion until its block has landed or was
given up, and for each cascade of its block; in both directions until the copy has ended, however
long it is overdue. So what hangs keeps its own share and nothing else:

    primary = reserved | share of tier 0 | share of tier 1 | ...
    share   = left to the other direction | what this direction may occupy

The same fraction is kept from the tiers, and within a share from each direction; but one slot can
always be transferred. What is retained for requests that wait is nobody's share, but keeps out of
what is reserved as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload_async.core.tier_state import TierState


@dataclass(frozen=True, slots=True)
class PlannerLimits:
    """The planner's bounds.

    Attributes:
        promotion_slots: Primary slots that promotions may occupy until they are loaded, together
            with what is retained for requests that wait.
        cascade_blocks: Blocks in cascade to one tier at once; the others wait their turn.
        deferral_s: Seconds that a request may be deferred in all; then pending means missing.
        reserved_fraction: Part of the primary that tiers never occupy; see `Shares`.
    """

    promotion_slots: int
    cascade_blocks: int
    deferral_s: float
    reserved_fraction: float = 0.0


class Shares:
    """Bounds what tiers occupy, by what their states count.

    Thread: owner.

    Attributes:
        total: Slots that all tiers' transfers, and what is retained, may occupy together.
        each: Slots that one tier's transfers may occupy.
        promotions: Slots that one tier's promotions may occupy.
        cascades: Blocks that may be in cascade to one tier.
        retained_slots: What is retained for requests; written by `Retention`.
    """

    def __init__(
        self,
        num_slots: int,
        tiers: Sequence[TierState],
        *,
        promotion_slots: int,
        cascade_blocks: int,
        reserved_fraction: float,
    ) -> None:
        """Divide `num_slots` equally among the tiers; the two caps bound a direction further."""
        self._tiers = tiers
        self.total = num_slots - _part_of(num_slots, reserved_fraction)
        self.each = max(1, self.total // max(1, len(tiers)))
        self.retained_slots = 0
        one_direction = self.each - _part_of(self.each, reserved_fraction)
        self.promotions = min(promotion_slots, one_direction)
        self.cascades = min(cascade_blocks, one_direction)

    @property
    def occupied(self) -> int:
        """What tiers occupy and what is retained; a block with several uses counts for each."""
        used = (tier.promotion_slots + tier.cascading_blocks for tier in self._tiers)
        return self.retained_slots + sum(used)

    @property
    def spare_slots(self) -> int:
        """What is left of the total."""
        return self.total - self.occupied

    def room_to_load(self, tier: int) -> int:
        """Return how many more slots may be reserved for promotions from a tier."""
        state = self._tiers[tier]
        return self._room(state, self.promotions - state.promotion_slots)

    def room_to_store(self, tier: int) -> int:
        """Return how many more blocks may cascade to a tier."""
        state = self._tiers[tier]
        return self._room(state, self.cascades - state.cascading_blocks)

    def _room(self, state: TierState, in_direction: int) -> int:
        room = min(in_direction, self.each - state.promotion_slots - state.cascading_blocks)
        return max(0, min(room, self.spare_slots))


def _part_of(slots: int, fraction: float) -> int:
    """Return the slots that are kept back: the fraction, rounded up, but never all."""
    return min(slots - 1, math.ceil(slots * fraction))
