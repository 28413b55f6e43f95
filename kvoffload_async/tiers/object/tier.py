"""The `object` tier itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvoffload_async.abc.tier import TierEnvironment
from kvoffload_async.tiers.remote.client import RemoteClient
from kvoffload_async.tiers.remote.settings import RemoteSettings
from kvoffload_async.tiers.remote.tier import RemoteTier

if TYPE_CHECKING:
    from kvoffload_async.tiers.object.client import ObjectConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """How an `object` tier works; see the facade's `ObjectTierManager`."""

    connection: ObjectConnection
    remote: RemoteSettings = field(default_factory=RemoteSettings)


class ObjectTier(RemoteTier):
    """Keeps each block as an object of S3, Google Cloud Storage, Azure, or a directory."""

    def __init__(self, settings: ObjectSettings) -> None:
        """Describe the tier; nothing is connected before `open`."""
        self._connection = settings.connection
        self._description: Mapping[str, Any] = {}
        place = settings.connection.url
        super().__init__(settings.remote, self._client_of, place, probes_prefixes=True)

    async def open(self, env: TierEnvironment) -> None:
        identity = env.identity
        self._description = {
            "model": identity.model,
            "namespace": identity.namespace,
            "block_bytes": identity.block_bytes,
            "rank": identity.rank,
            "run_config": dict(identity.run_config),
        }
        await super().open(env)

    def _client_of(
        self, namespace: str, block_bytes: int, emptied: Callable[[], None]
    ) -> RemoteClient:
        # Not before it is needed: the library is an extra.
        from kvoffload_async.tiers.object.client import ObjectClient  # noqa: PLC0415

        del block_bytes, emptied  # an object store is not emptied by a restart
        return ObjectClient(self._connection.open(), namespace, self._description)
