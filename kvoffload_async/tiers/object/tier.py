"""The `object` tier, and its search for the longest stored prefixes of chains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import KVIdentity, TierEnvironment
from kvoffload_async.errors import CorruptBlockError, TierFullError, Trouble
from kvoffload_async.tiers.object.settings import ObjectOptions
from kvoffload_async.tiers.remote.client import RemoteClient
from kvoffload_async.tiers.remote.lookups import Lookups
from kvoffload_async.tiers.remote.settings import REMEDIES, RemoteSettings
from kvoffload_async.tiers.remote.tier import RemoteTier
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    from kvoffload_async.tiers.object.client import ObjectConnection


async def bisect_prefixes(
    chains: Sequence[Sequence[OffloadKey]],
    ask: Callable[[Sequence[OffloadKey]], Awaitable[Collection[OffloadKey]]],
) -> list[int]:
    """Return how many keys at the head of each chain are stored, with few keys asked for.

    Keys are chained hashes, so all blocks before a stored one are assumed to be stored; a wrong
    assumption costs a failed load, never wrong bytes. Each round asks for one key of every chain:
    the first, the last, since most chains are stored as a whole or not at all, and then the middle
    of the rest. These are at most 2 + ceil(log2(n - 1)) rounds for chains of n keys.

    Args:
        chains: The key chains, head to tail.
        ask: Returns those of the keys that are stored; called without duplicates.
    """
    found, limits, rounds = [0] * len(chains), [len(chain) for chain in chains], 0
    while True:
        wanted = {
            number: (low, limit - 1, (low + limit) // 2)[min(rounds, 2)]
            for number, (low, limit) in enumerate(zip(found, limits, strict=True))
            if low < limit
        }
        if not wanted:
            return found
        present = await ask(list(dict.fromkeys(chains[n][index] for n, index in wanted.items())))
        for number, index in wanted.items():
            if chains[number][index] in present:
                found[number] = index + 1
            else:
                limits[number] = index
        rounds += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """Settings of an `object` tier, made from its options.

    Attributes:
        connection: Connection to the object store.
        remote: Settings common to all remote tiers.
    """

    connection: ObjectConnection
    remote: RemoteSettings = field(default_factory=RemoteSettings)


class ObjectTier(RemoteTier):
    """Blocks as objects in S3, Google Cloud Storage or Azure, shared by all hosts that use it.

    Credentials that are not configured come from the environment or from the machine's role. Only a
    lifecycle rule of the bucket limits its size; see docs/howto/object.md.
    """

    declares = ObjectOptions
    requires: ClassVar = {"obstore": "install kvoffload-async[object]"}
    remedies: ClassVar = {
        **REMEDIES,
        CorruptBlockError: "not served; if this recurs, check the store: kvoffload store verify",
        TierFullError: "no blocks are stored until there is space: raise the quota of the bucket, "
        "or let a lifecycle rule delete old objects",
        Trouble.TOO_SLOW: "raise cpu_bytes_to_use, set write_back to wait, or make the tier "
        "faster: raise connections and bytes_in_flight",
    }

    def __init__(self, settings: ObjectSettings) -> None:
        """Configure the tier; nothing is connected before `open`."""
        self._connection = settings.connection
        self._description: Mapping[str, Any] = {}
        place = settings.connection.url
        super().__init__(settings.remote, self._client_of, place, probes_prefixes=True)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        own = ObjectOptions.of(options, identity)
        connection, redact = own.connect()
        remote = replace(own, redact=redact)
        return cls(ObjectSettings(connection=connection, remote=remote))

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Imported on demand, because the library is an extra.
        from kvoffload_async.tiers.object.maintenance import (  # noqa: PLC0415
            ObjectMaintenance,
        )

        return ObjectMaintenance

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

    async def longest_prefixes(self, chains: Sequence[Sequence[OffloadKey]]) -> Sequence[int]:
        """Return the number of keys at the head of each chain that probably are stored."""
        self._opened()
        deadline_s = self._deadline(self._settings.probe_timeout_s)
        return await bisect_prefixes(chains, lambda keys: self._questions.ask(keys, deadline_s))

    def _client_of(
        self, namespace: str, block_bytes: int, emptied: Callable[[], None]
    ) -> RemoteClient:
        # Imported here because the library is an optional dependency.
        from kvoffload_async.tiers.object.client import (  # noqa: PLC0415
            ObjectClient,
            claim_library,
        )

        claim_library()
        del block_bytes, emptied  # an object store keeps its contents over a restart
        lookups = Lookups(self._settings.probe_timeout_s)
        reopen = partial(lookups.run, "credentials", self._connection.open)
        return ObjectClient(self._connection.open(), namespace, self._description, reopen=reopen)
