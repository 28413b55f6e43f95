"""The `valkey` tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvoffload_async.tiers.remote.client import RemoteClient
from kvoffload_async.tiers.remote.settings import RemoteSettings
from kvoffload_async.tiers.remote.tier import RemoteTier
from kvoffload_async.tiers.valkey.address import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeySettings:
    """Settings of a `valkey` tier; see the facade's `ValkeyTierManager`."""

    address: Address
    is_cluster: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    remote: RemoteSettings = field(default_factory=RemoteSettings)


class ValkeyTier(RemoteTier):
    """Stores each block as a string in a Valkey or Redis server or cluster."""

    def __init__(self, settings: ValkeySettings) -> None:
        """Configure the tier; nothing is connected before `open`."""
        self._valkey = settings
        super().__init__(
            settings.remote, self._client_of, settings.address.shown, probes_prefixes=False
        )

    def _client_of(
        self, namespace: str, block_bytes: int, emptied: Callable[[], None]
    ) -> RemoteClient:
        # Imported here because the library is an optional dependency.
        from kvoffload_async.tiers.valkey.client import ValkeyClient  # noqa: PLC0415
        from kvoffload_async.tiers.valkey.nodes import ValkeyConnection  # noqa: PLC0415

        del block_bytes
        settings, remote = self._valkey, self._valkey.remote
        connection = ValkeyConnection(
            settings.address,
            settings.is_cluster,
            remote.connections,
            remote.call_timeout_s,
            settings.ca_file,
            settings.cert_file,
            settings.key_file,
        )
        return ValkeyClient(connection, namespace, remote.ttl_s, emptied)
