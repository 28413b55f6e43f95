"""The manager of the reference tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.facade.secondary import DeclaredTierManager
from kvoffload_async.tiers.example import ExampleSettings, ExampleTier


class ExampleSecondaryTierManager(DeclaredTierManager[ExampleSettings]):
    """Keeps copies of blocks in a dictionary, without a limit, until the process ends.

    Its only option, besides those of every tier, is `custom_param`, which is logged.
    """

    kind = "example"
    declares = ExampleSettings
    tier: ExampleTier

    @classmethod
    def settings_of(cls, options: Mapping[str, Any], identity: KVIdentity) -> ExampleSettings:
        return ExampleSettings.take(options)

    @classmethod
    def create_tier(cls, settings: ExampleSettings) -> ExampleTier:
        return ExampleTier(settings.custom_param)

    def get_num_blocks(self) -> int:
        """Return how many blocks are kept."""
        return self.tier.get_num_blocks()
