"""The `valkey` tier."""

from __future__ import annotations

from typing import ClassVar

from kvoffload_async.errors import CorruptBlockError, TierFullError, Trouble
from kvoffload_async.tiers.remote.client import RemoteClient
from kvoffload_async.tiers.remote.settings import REMEDIES
from kvoffload_async.tiers.remote.tier import RemoteTier
from kvoffload_async.tiers.valkey.address import ValkeySettings


class ValkeyTier(RemoteTier):
    """Blocks in Valkey or Redis, shared by all hosts that use the server or cluster.

    Capacity and eviction are configured in the server (`maxmemory`, `maxmemory-policy`). A block
    for which it has no room is not stored, which does not count as a fault.
    """

    declares = ValkeySettings
    requires: ClassVar = {"hiredis": "install kvoffload-async[valkey]"}
    remedies: ClassVar = {
        **REMEDIES,
        CorruptBlockError: "not served; if this recurs, check the memory of the server",
        TierFullError: "no blocks are stored until there is space: raise the server's maxmemory, "
        "or set its maxmemory-policy to one that evicts",
        Trouble.TOO_SLOW: "raise cpu_bytes_to_use, set write_back to wait, or make the tier "
        "faster: raise connections, or add servers",
    }

    _settings: ValkeySettings

    def __init__(self, settings: ValkeySettings) -> None:
        """Configure the tier; nothing is connected before `open`."""
        super().__init__(settings, settings.address.shown)

    def _create_client(self, namespace: str) -> RemoteClient:
        # Imported here because the library is an optional dependency.
        from kvoffload_async.tiers.valkey.client import ValkeyClient  # noqa: PLC0415

        return ValkeyClient(self._settings, namespace, self._emptied)
