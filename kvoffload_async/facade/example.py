"""The reference tier behind plain calls."""

from __future__ import annotations

from typing import Unpack

from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_options import TierOptions
from kvoffload_async.tiers.example import ExampleTier


class ExampleSecondaryTierManager(SecondaryTierManager):
    """Keeps blocks in a dictionary: unlimited, real bytes, gone with the process.

    Its options are those of every tier, and `custom_param`, which is only logged: it shows how an
    option travels from the configuration to a tier.
    """

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str = "example",
        custom_param: int = 0,
        **options: Unpack[TierOptions],
    ) -> None:
        """See `SecondaryTierManager`."""
        self._example = ExampleTier(custom_param)
        super().__init__(offloading_spec, primary_kv_view, tier_type, self._example, **options)

    def get_num_blocks(self) -> int:
        """Return how many blocks are kept."""
        return self._example.get_num_blocks()
