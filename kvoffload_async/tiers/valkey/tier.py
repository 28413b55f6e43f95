"""The `valkey` tier."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvoffload_async.abc.tier import TierEnvironment
from kvoffload_async.errors import CorruptBlockError, TierError, TierFullError, Trouble
from kvoffload_async.tiers.remote.client import RemoteClient
from kvoffload_async.tiers.remote.settings import REMEDIES
from kvoffload_async.tiers.remote.tier import RemoteTier
from kvoffload_async.tiers.valkey.address import ValkeySettings

logger = logging.getLogger(__name__)


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
        self._bounds: Sequence[tuple[int, str]] = ()

    async def open(self, env: TierEnvironment) -> None:
        await super().open(env)
        client: Any = self._client
        try:
            deadline_s = self._deadline(self._settings.probe_timeout_s)
            self._bounds = await self._calls.run(client.read_bounds, deadline_s, may_retry=False)
        except TierError as error:
            logger.info("%s: its maxmemory is unknown: %s", self._location, error)
        policies = {policy for max_bytes, policy in self._bounds if max_bytes}
        for policy in sorted(policy for policy in policies if not self._evicts(policy)):
            logger.warning("%s: maxmemory-policy is %s: set allkeys-lru", self._location, policy)
        if not all(max_bytes for max_bytes, _ in self._bounds):
            logger.info("%s: it has no maxmemory, so its memory is unbounded", self._location)

    def gauges(self) -> Mapping[str, float]:
        """As those of `RemoteTier`, with `maxmemory`, and whether all servers evict at it."""
        figures = dict(super().gauges())
        if self._bounds and all(max_bytes for max_bytes, _ in self._bounds):
            figures["capacity_bytes"] = sum(max_bytes for max_bytes, _ in self._bounds)
            figures["evicts"] = all(self._evicts(policy) for _, policy in self._bounds)
        return figures

    def _evicts(self, policy: str) -> bool:
        """Return whether a server with a `maxmemory-policy` evicts blocks."""
        has_ttl = self._settings.ttl_s is not None
        return policy.startswith("allkeys-") or (has_ttl and policy.startswith("volatile-"))

    def _create_client(self, namespace: str) -> RemoteClient:
        # Imported here because the library is an optional dependency.
        from kvoffload_async.tiers.valkey.client import ValkeyClient  # noqa: PLC0415

        return ValkeyClient(self._settings, namespace, self._emptied)
