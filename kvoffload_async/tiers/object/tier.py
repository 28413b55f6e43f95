"""The `object` tier, and its search for the longest stored prefix of chains.

An object of packed blocks is named after its first block, and its head lists all of its blocks. So
a negative answer for a block means only that no object *begins* with it. The block is absent if the
previous object ends there, or if every pack begins there (`chains.is_chunk_boundary`). The search
takes O(log n) requests for a chain. Keys are chained hashes, so all blocks before a present one are
assumed to be present; a wrong assumption costs a failed load, never wrong bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import starmap
from math import ceil, log2
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, cast

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import Direction, KVIdentity, TierEnvironment
from kvoffload_async.errors import (
    BlockMissingError,
    CorruptBlockError,
    TierError,
    TierFullError,
    TierUnavailableError,
    Trouble,
    drop_tracebacks,
)
from kvoffload_async.tiers.object.packs import (
    MOST_BLOCKS,
    Chains,
    Packs,
    is_chunk_boundary,
    is_pack,
)
from kvoffload_async.tiers.object.settings import ObjectOptions
from kvoffload_async.tiers.remote.calls import run_together
from kvoffload_async.tiers.remote.client import Bytes, RemoteClient, Value
from kvoffload_async.tiers.remote.lookups import Lookups
from kvoffload_async.tiers.remote.settings import REMEDIES, RemoteSettings
from kvoffload_async.tiers.remote.tier import Portion, RemoteTier
from kvoffload_async.types import JobMetadata, OffloadKey, block_text

if TYPE_CHECKING:
    from kvoffload_async.tiers.object.client import ObjectClient, ObjectConnection


_FEWEST: Final = 8
"""Maximum number of requests for a chain of up to 64 blocks."""
_MOST_STEPS: Final = 3
"""Maximum number of preceding objects to read for one that extends into the chain."""

Ask = Callable[[Sequence[OffloadKey]], Awaitable[Collection[OffloadKey]]]
"""Returns the keys that name an existing object, and records the objects' contents."""


def most_questions(num_keys: int) -> int:
    """Return the maximum number of requests for a chain.

    Few are needed if few jobs stored the chain; a short chain may follow many objects.
    """
    return max(_FEWEST, 2 + ceil(log2(num_keys))) if num_keys else 0


class HeadSearch:
    """The search for one chain; asks for one key per round.

    Attributes:
        found: Number of keys at the head of the chain believed present so far.
        wanted: Index, in `keys`, of the key to ask for next; None: the search has ended.
        keys: The preceding keys and the chain.
    """

    def __init__(
        self,
        before: Sequence[OffloadKey],
        chain: Sequence[OffloadKey],
        chains: Chains,
        *,
        mean_blocks: int,
        most: int,
    ) -> None:
        """Start the search.

        Args:
            before: Known keys right before the chain.
            chain: Keys, head to tail.
            chains: Known contents of objects, updated by each answer.
            mean_blocks: See `is_chunk_boundary`.
            most: Maximum length of `before`; if it is shorter, it starts at the prompt's beginning.
        """
        self.keys = (*before, *chain)
        self.found = 0
        self._chains = chains
        self._mean_blocks = mean_blocks
        self._begins_prompt = len(before) < most
        self._left = most_questions(len(chain))
        self._search = self._questions(len(before))
        self.wanted: int | None = None
        if chain:
            self._proceed(None)

    def learn(self, index: int, *, is_present: bool) -> None:
        """Process the answer whether an object is named after the wanted key."""
        self._left -= 1
        self._proceed(self._chains.length_at(self.keys, index) if is_present else 0)

    def _proceed(self, length: int | None) -> None:
        try:
            self.wanted = self._search.send(length)  # type: ignore[arg-type] # None begins it
        except StopIteration:
            self.wanted = None
        if not self._left:
            self.wanted = None

    def _questions(self, first: int) -> Generator[int, int, None]:
        low = yield from self._walk(self._known_place(first), first)
        if low == first:
            low += yield first
        if low == first:
            low = yield from self._walk(self._entrance(first), first)
        self.found = low - first
        if not self.found:
            return
        self._look_as_wide_as_packed(first, low)
        high = len(self.keys)
        leads = [i for i in range(low, high) if is_chunk_boundary(self.keys[i], self._mean_blocks)]
        begin, end = 0, len(leads)
        middle = end - 1  # last first: most chains are present as a whole, or end at once
        while begin < end:
            index = leads[middle]
            if length := (yield index):
                low, begin = index + length, middle + 1
                self.found = low - first
            else:
                high, end = index, middle
            middle = (begin + end) // 2
        yield from self._tail(first, low, high)

    def _walk(self, index: int, first: int) -> Generator[int, int, int]:
        """Follow the objects before the chain; return how far the last one extends into it."""
        for _ in range(_MOST_STEPS):
            length = (yield index) if index < first else 0
            if not length:
                break
            index += length
        return max(index, first)

    def _known_place(self, first: int) -> int:
        """Return the start of the object known to contain the chain's first block."""
        name = self._chains.first_of(self.keys[first])
        return self.keys.index(name) if name in self.keys[:first] else first

    def _entrance(self, first: int) -> int:
        """Return the last place before the chain where an object that extends into it may begin."""
        for index in range(first - 1, -1, -1):
            if self._chains.first_of(self.keys[index]) is not None:
                return index + 1  # the object's contents are known
            if is_chunk_boundary(self.keys[index], self._mean_blocks):
                return index
        return 0 if self._begins_prompt else first

    def _look_as_wide_as_packed(self, first: int, end: int) -> None:
        """Double the interval of boundaries while a known object contains one.

        The host that has stored the object uses larger packs.
        """
        for key in self.keys[max(0, first - MOST_BLOCKS) : end]:
            while self._mean_blocks < MOST_BLOCKS and is_chunk_boundary(key, self._mean_blocks):
                if self._chains.name_of(key) == key:
                    break
                self._mean_blocks *= 2

    def _tail(self, first: int, low: int, high: int) -> Generator[int, int, None]:
        """Follow objects behind the last boundary; bisect where they have one block each."""
        while low < high:
            length = yield low
            if not length:
                return
            low += length
            self.found = low - first
            top = high if length == 1 else low
            while low < top:
                middle = (low + top) // 2
                if length := (yield middle):
                    low = middle + length
                    self.found = low - first
                else:
                    top = middle
                if low == top < high:
                    return  # no object begins there


async def longest_prefixes(searches: Sequence[HeadSearch], ask: Ask) -> list[int]:
    """Run searches concurrently; return the number of keys believed present in each chain.

    Args:
        searches: One per chain.
        ask: Called with one key per chain in each round, without duplicates.
    """
    while True:
        open_ = [(search, search.wanted) for search in searches if search.wanted is not None]
        if not open_:
            return [search.found for search in searches]
        present = await ask(list(dict.fromkeys(search.keys[index] for search, index in open_)))
        for search, index in open_:
            search.learn(index, is_present=search.keys[index] in present)


_LONE_OBJECTS: Final = 2
"""After this many consecutive single-block objects, which may be missing, request each block
separately."""

KEYS_BEFORE: Final = 4 * MOST_BLOCKS
"""A window of this many blocks contains a pack boundary at 98 % of all positions in a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSettings:
    """Settings of an `object` tier, made from its options.

    Attributes:
        connection: Connection to the object store.
        pack_bytes: Maximum payload of a pack, in bytes; 0: one object per block.
        remote: Settings common to all remote tiers.
    """

    connection: ObjectConnection
    pack_bytes: int = 0
    remote: RemoteSettings = field(default_factory=RemoteSettings)


Verdicts = dict[int, TierError | None]
"""Index in the job -> the error of loading the block, or None."""


@dataclass(slots=True)
class PackCounters:
    """Counters of packs.

    Attributes:
        stored_packs: Packs stored.
        packed_blocks: Blocks in these packs.
        lost_races: Puts that the store refused, usually because another host was first.
    """

    stored_packs: int = 0
    packed_blocks: int = 0
    lost_races: int = 0


class ObjectTier(RemoteTier):
    """Blocks as objects in S3, Google Cloud Storage or Azure, shared by all hosts that use it.

    Credentials that are not configured come from the environment or from the machine's role. Only a
    lifecycle rule of the bucket limits its size; see docs/howto/object.md.

    Blocks known to be consecutive are stored as one object, a pack, up to the next pack boundary.
    It is named after its first block; see docs/remote-tiers.md.
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
        self._pack_bytes = settings.pack_bytes
        self._pack_counters = PackCounters()
        self._description: Mapping[str, Any] = {}
        self._chains = Chains()
        place = settings.connection.url
        super().__init__(settings.remote, self._client_of, place, probes_prefixes=True)
        if self._pack_bytes:
            self.capabilities = replace(self.capabilities, keys_before=KEYS_BEFORE)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        own = ObjectOptions.of(options, identity)
        connection, redact = own.connect()
        remote = replace(own, redact=redact)
        return cls(ObjectSettings(connection=connection, pack_bytes=own.pack_bytes, remote=remote))

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
        block_bytes = env.kv_view.nbytes // len(env.kv_view)
        self._packs = Packs(identity.digest, block_bytes, self._settings.integrity_key)
        self._most_blocks = self._packs.most_blocks(self._pack_bytes)
        self._mean_blocks = 1 << self._most_blocks.bit_length() - 1
        self._chains = Chains()
        self._further_loads = asyncio.Semaphore(self._settings.connections)
        await super().open(env)

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys whose object exists, by the best known object name."""
        names = {key: self._chains.name_of(key) for key in keys}
        present = await super().contains(list(dict.fromkeys(names.values())))
        moved = [key for key, name in names.items() if self._chains.name_of(key) != name]
        if moved:  # the known object names were outdated
            names |= zip(moved, moved, strict=True)
            present |= await super().contains(moved)
        return frozenset(key for key, name in names.items() if name in present)

    async def longest_prefixes(
        self,
        chains: Sequence[Sequence[OffloadKey]],
        before: Sequence[Sequence[OffloadKey]] = (),
    ) -> Sequence[int]:
        """Return the number of keys at the head of each chain that probably are stored."""
        self._opened()
        deadline_s = self._deadline(self._settings.probe_timeout_s)
        searches = []
        for number, chain in enumerate(chains):
            if self._most_blocks > 1:
                self._chains.saw_chain(chain)
            # Without packs, preceding blocks give no information about a chain.
            preceding = before[number] if before and self._most_blocks > 1 else ()
            searches.append(
                HeadSearch(
                    preceding, chain, self._chains, mean_blocks=self._mean_blocks, most=KEYS_BEFORE
                )
            )
        return await longest_prefixes(searches, lambda keys: self._questions.ask(keys, deadline_s))

    def gauges(self) -> Mapping[str, float]:
        return {**super().gauges(), **asdict(self._pack_counters)}

    # -- stores ---------------------------------------------------------------------------------

    def _portions(self, client: RemoteClient, job: JobMetadata) -> Iterator[Portion]:
        return self._to_load(job) if job.is_promotion else self._to_store(job)

    def _to_store(self, job: JobMetadata) -> Iterator[Portion]:
        """Split a job into consecutive blocks, up to the next pack boundary."""
        keys, begin = job.keys, 0
        for i in range(1, len(keys) + 1):
            if (
                i == len(keys)
                or i - begin >= self._most_blocks
                or not self._chains.follows(keys[i - 1], keys[i])
                or len(keys[i]) != len(keys[begin])
                or is_chunk_boundary(keys[i], self._mean_blocks)
            ):
                yield range(begin, i)
                begin = i

    async def _store_portion(
        self, client: RemoteClient, job: JobMetadata, portion: Portion, deadline_s: float
    ) -> dict[int, TierError]:
        """Store the missing ones of some consecutive blocks as one object."""
        keys, chains = job.keys, self._chains
        failures: dict[int, TierError] = {}
        rest, lost_at = list(portion), None
        while rest:
            first = keys[rest[0]]
            name = chains.name_of(first)
            if self._memory.get(name) is not False and await self._questions.ask_anew(
                [name], deadline_s
            ):
                rest = self._missing(job, name, rest)
                continue
            if name != first:  # the block's object is gone
                chains.lost_object(name)
                continue
            stored = [keys[i] for i in rest]
            value = await self._wrapped(job, rest)
            create = partial(cast("ObjectClient", client).create, first, value)
            departure, num_bytes = self._stores.began(), value.nbytes
            is_new = await self._calls.run(create, deadline_s)
            self._stores.ended(departure, num_bytes if is_new else 0)  # perhaps it was not sent
            del value, create
            if not is_new:  # probably another host was first: ask for the object's contents
                self._pack_counters.lost_races += 1
                self._memory.appeared([first])
                if lost_at == first:
                    failures[rest.pop(0)] = TierUnavailableError(
                        f"{block_text(first)}: the store refused twice to create its object, as if "
                        "there were one (status 409 or 412), but said that there is none"
                    )
                lost_at = first
                continue
            self._memory.appeared([first])
            chains.saw_object(stored)
            if len(stored) > 1:
                self._pack_counters.stored_packs += 1
                self._pack_counters.packed_blocks += len(stored)
            if self._renewal is not None:
                self._renewal.written([first])
            break
        return failures

    def _missing(self, job: JobMetadata, name: OffloadKey, indices: Sequence[int]) -> list[int]:
        """Return the blocks that an object just probed does not have."""
        missing = [i for i in indices if self._chains.name_of(job.keys[i]) != name]
        self._counters.present_blocks += len(indices) - len(missing)
        return missing

    async def _wrapped(self, job: JobMetadata, indices: Sequence[int]) -> Bytes:
        """Encode blocks as one object."""
        keys = [job.keys[i] for i in indices]

        def wrap() -> Bytes:
            _, rows = self._opened()
            blocks = [rows[job.block_ids[i]] for i in indices]
            if len(keys) == 1:
                return self._envelopes.wrap(keys[0], blocks[0])
            return self._packs.wrap(keys, blocks)

        return await self._in_thread(Direction.STORE, wrap)

    # -- loads ----------------------------------------------------------------------------------

    def _to_load(self, job: JobMetadata) -> Iterator[Portion]:
        """Group a job's blocks by the objects that have them, or may have them."""
        keys, chains = job.keys, self._chains
        portions: dict[OffloadKey, list[int]] = {}
        before = name = OffloadKey(b"")
        known: OffloadKey | None = None
        for i, key in enumerate(keys):
            is_behind_known, known = known is not None, chains.first_of(key)
            if known is not None:
                name = known
            elif (
                is_behind_known
                or is_chunk_boundary(key, self._mean_blocks)
                or not chains.follows(before, key)
            ):
                name = key
            portions.setdefault(name, []).append(i)
            before = key
        return iter(portions.values())

    def _bytes_of(self, job: JobMetadata, portion: Portion) -> int:
        """Return the bytes to be transferred; a load transfers the whole object.

        An object not probed yet, from a host with larger packs, may be longer: at most 16 MiB for
        each of `connections`.
        """
        blocks = len(portion)
        if job.is_promotion:
            beside = self._chains.blocks_beside(job.keys[portion[0]])
            blocks = max(blocks, beside, self._most_blocks)
        return blocks * self._envelopes.block_bytes

    def _names_of(self, keys: Iterable[OffloadKey]) -> Iterable[OffloadKey]:
        return map(self._chains.name_of, keys)

    async def _load_portion(
        self, client: RemoteClient, job: JobMetadata, portion: Portion, deadline_s: float
    ) -> dict[int, TierError]:
        """Load blocks that may be in one object; blocks not in it are tried in the next one."""
        failures: dict[int, TierError] = {}
        rest, lone = list(portion), 0
        while rest:
            if lone < _LONE_OBJECTS:
                name = self._chains.name_of(job.keys[rest[0]])
                verdicts = await self._try_object(client, job, name, rest, deadline_s)
                lone = lone + 1 if len(verdicts) == 1 else 0
            else:
                verdicts = await self._load_each(client, job, rest, deadline_s)
                lone = 0
            failures |= {i: error for i, error in verdicts.items() if error is not None}
            rest = [i for i in rest if i not in verdicts]
        return failures

    async def _load_each(
        self, client: RemoteClient, job: JobMetadata, wanted: Sequence[int], deadline_s: float
    ) -> Verdicts:
        """Load blocks that probably have an object each, several concurrently."""
        chains, verdicts = self._chains, Verdicts()
        objects: dict[OffloadKey, list[int]] = {}
        for i in wanted:
            objects.setdefault(chains.name_of(job.keys[i]), []).append(i)

        async def load(name: OffloadKey, indices: Sequence[int]) -> None:
            async with self._further_loads:
                verdicts.update(await self._try_object(client, job, name, indices, deadline_s))

        await run_together(starmap(load, objects.items()), f"object:{job.job_id}")
        return {  # a block without its own object may be in one read meanwhile
            i: error
            for i, error in verdicts.items()
            if not isinstance(error, BlockMissingError) or chains.first_of(job.keys[i]) is None
        }

    async def _try_object(
        self,
        client: RemoteClient,
        job: JobMetadata,
        name: OffloadKey,
        wanted: Sequence[int],
        deadline_s: float,
    ) -> Verdicts:
        """Load blocks from an object; if it cannot be read, they fail."""
        try:
            return await self._load_object(client, job, name, wanted, deadline_s)
        except TierError as error:
            drop_tracebacks(error)  # their frames hold the rows
            return dict.fromkeys(wanted, error)

    async def _load_object(
        self,
        client: RemoteClient,
        job: JobMetadata,
        name: OffloadKey,
        wanted: Sequence[int],
        deadline_s: float,
    ) -> Verdicts:
        """Load the wanted blocks that an object contains; return a result for each."""
        counters = self._counters
        value, verdicts = await self._read_object(client, job, name, wanted, deadline_s)
        if corrupt := _corrupt(verdicts):
            counters.read_again += len(corrupt)  # perhaps damaged in transit
            value = None  # frees the first value before the second read
            value, again = await self._read_object(client, job, name, corrupt, deadline_s)
            # Blocks missing in the new object may be in another one.
            verdicts = {i: verdicts[i] for i in verdicts if i not in corrupt} | again
            corrupt = _corrupt(again)
        if value is not None and corrupt:
            counters.corrupt += len(corrupt)
            sha1 = await self._in_thread(Direction.METADATA, value.sha1)
            await self._remove(client, name, value, sha1, deadline_s)
        if value is None or corrupt:
            self._memory.vanished([name])
            self._chains.lost_object(name)
        elif verdicts:
            self._memory.appeared([name])
        return verdicts

    async def _read_object(
        self,
        client: RemoteClient,
        job: JobMetadata,
        name: OffloadKey,
        wanted: Sequence[int],
        deadline_s: float,
    ) -> tuple[Value | None, Verdicts]:
        """Read an object and copy its valid blocks; None if there is no such object."""
        most_bytes = max(self._packs.most_bytes(len(name)), self._envelopes.value_bytes(name))
        departure = self._loads.began()
        (value,) = await self._calls.run(partial(client.get, [name], most_bytes), deadline_s)
        self._loads.ended(departure, len(value.data) if isinstance(value, Value) else 0)
        indices = {job.keys[i]: i for i in wanted}
        if not isinstance(value, Value):
            missing = BlockMissingError(f"{block_text(name)} is not stored")
            return None, {indices[name]: missing} if name in indices else {}
        found = value

        def unwrap() -> tuple[Sequence[OffloadKey], Mapping[OffloadKey, TierError | None]]:
            """Return the object's keys, and the results of the wanted blocks."""
            _, rows = self._opened()
            into = {key: rows[job.block_ids[i]] for key, i in indices.items()}
            if not is_pack(found.data):
                row = into.get(name)
                error = None if row is None else self._envelopes.unwrap(name, found.data, row)
                return (name,), {} if row is None else {name: error}
            table = self._packs.table(name, found.data)
            if table is None:
                wrong = CorruptBlockError(f"{block_text(name)}: its pack has an invalid table")
                return (), dict.fromkeys(expected, wrong)
            bad = self._packs.unwrap(table, found.data, into)
            return table.keys, {key: bad.get(key) for key in table.keys if key in into}

        expected = [key for key in indices if self._chains.name_of(key) == name]
        contents, judged = await self._in_thread(Direction.LOAD, unwrap)
        if contents:
            self._chains.saw_object(contents)
        return value, {indices[key]: error for key, error in judged.items()}

    # -- internal -------------------------------------------------------------------------------

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
        packs = self._packs if self._most_blocks > 1 else None
        lookups = Lookups(self._settings.probe_timeout_s)
        reopen = partial(lookups.run, "credentials", self._connection.open)
        store = self._connection.open()
        return ObjectClient(store, namespace, self._description, packs, self._chains, reopen=reopen)


def _corrupt(verdicts: Verdicts) -> list[int]:
    return [i for i, error in verdicts.items() if isinstance(error, CorruptBlockError)]
