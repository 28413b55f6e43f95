"""The manager of the reference tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.facade.secondary import DeclaredTierManager
from kvoffload_async.tiers.example import ExampleSettings, ExampleTier


class ExampleSecondaryTierManager(DeclaredTierManager[ExampleSettings]):
    """Keeps blocks in a dictionary: unlimited, real bytes, gone with the process.

    Besides the options of every tier it takes `custom_param`, which is only logged.
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
