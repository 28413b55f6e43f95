"""A client of a store in memory, whose every call a test can watch, delay and fail."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import ClassVar

from virtual_runner import VirtualRunner

from kvoffload_async.errors import TierFullError, TierUnavailableError
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.testing import InlineIo
from kvoffload_async.testing.harness import content_of, make_job
from kvoffload_async.tiers._environment import ActorEnvironment
from kvoffload_async.tiers.remote.client import RemoteClient, Value
from kvoffload_async.tiers.remote.settings import RemoteSettings
from kvoffload_async.tiers.remote.tier import RemoteTier

SLOT_BYTES = 4096


class LibraryError(Exception):
    """What the library raises; `kind` is what it means."""

    def __init__(self, kind=TierUnavailableError, text="broken"):
        super().__init__(text)
        self.kind = kind


class FakeClient(RemoteClient):
    """Answers at once, unless told otherwise.

    Attributes:
        values: Key -> bytes.
        calls: Name of a call -> how often it was made.
        failures: Errors that the next calls raise, in order; None: that call works.
        renewal_s: How long the renewal of each block takes.
        is_stalled: No call ends.
        read_s: How long each read takes.
        servers: How many servers share the keys, told by a key's first byte.
        down: Those of them whose calls fail.
        frozen: Those of them whose calls do not end.
        portion: Values a call.
    """

    location: ClassVar[str] = "fake"
    answers_many: ClassVar[bool] = True

    def __init__(self, values=None, *, answers_many=True, portion=4, servers=1):
        self.values = {} if values is None else values
        self.answers_many = answers_many
        self.portion = portion
        self.calls = Counter()
        self.sizes = []
        self.failures = []
        self.full = set()
        self.renewed = []
        self.renewal_s = 0.0
        self.is_stalled = False
        self.read_s = 0.0
        self.servers = servers
        self.down = set()
        self.frozen = set()
        self.is_closed = False
        self.emptied = None

    async def _begin(self, name, keys=()):
        self.calls[name] += 1
        self.sizes.append(len(keys))
        servers = {self.server_of(key) for key in keys}
        assert len(servers) <= 1, "a call to several servers"
        if self.is_stalled or servers & self.frozen:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(0)
        failure = self.failures.pop(0) if self.failures else None
        if servers & self.down:
            failure = LibraryError(text="one node is down")
        if failure is not None:
            raise failure

    async def connect(self):
        await self._begin("connect")

    async def check(self, server):
        await self._begin("check", () if server is None else [bytes([server])])

    def server_of(self, key):
        return key[0] % self.servers if self.servers > 1 else None

    async def exist(self, keys):
        await self._begin("exist", keys)
        return frozenset(key for key in keys if key in self.values)

    async def get(self, keys, targets):
        await self._begin("get", keys)
        await asyncio.sleep(self.read_s)
        found = [self.values.get(key) for key in keys]
        return [Value(memoryview(data)) if isinstance(data, bytes) else data for data in found]

    async def put(self, keys, values):
        await self._begin("put", keys)
        for key, value in zip(keys, values, strict=True):
            if key not in self.full:
                self.values.setdefault(key, b"".join(value))
        return [TierFullError("no room, says s3cret") if key in self.full else None for key in keys]

    async def remove_if(self, key, value, sha1):
        await self._begin("remove_if")
        is_same = self.values.get(key) == bytes(value.data)
        if is_same:
            del self.values[key]
        return is_same

    async def remove(self, keys):
        await self._begin("remove", keys)
        for key in keys:
            self.values.pop(key, None)

    async def renew(self, keys):
        await self._begin("renew", keys)
        await asyncio.sleep(self.renewal_s * len(keys))
        self.renewed += keys

    async def list_keys(self, cursor, count):
        await self._begin("list_keys")
        keys = sorted(key for key in self.values if key.hex() > (cursor or ""))[:count]
        return keys, keys[-1].hex() if len(keys) == count else None

    def mapped(self, error):
        return error.kind(str(error))

    async def close(self):
        self.is_closed = True

    def portion_blocks(self, value_bytes):
        return self.portion


class FakeTier(RemoteTier):
    """A tier over a given client."""

    def __init__(self, client, settings, first_bytes=RemoteTier.first_bytes):
        self.first_bytes = first_bytes
        super().__init__(settings, "fake://host")
        probes_prefixes = not client.answers_many
        self.capabilities = replace(self.capabilities, probes_prefixes=probes_prefixes)
        self._given = client

    def _create_client(self, namespace):
        self._given.emptied = self._emptied
        return self._given


class World:
    """A tier over such a client, on a loop with virtual time."""

    def __init__(self, client=None, *, num_slots=64, first_bytes=RemoteTier.first_bytes, **options):
        self.client = client or FakeClient()
        self.runner = VirtualRunner()
        self.buffer = PrimaryBuffer(num_slots, SLOT_BYTES)
        options = {"positive_cache_ttl_s": 0.0, "negative_cache_ttl_s": 0.0} | options
        self.tier = FakeTier(self.client, RemoteSettings(**options), first_bytes)
        self.env = ActorEnvironment(self.buffer.view, InlineIo(), lambda _event: None)
        self._job_id = 0

    def __enter__(self):
        self.run(self.tier.open(self.env))
        return self

    def __exit__(self, *_):
        self.run(self.tier.close())
        self.env.kv_view.release()
        self.runner.close()
        assert self.buffer.release(), "somebody still holds the primary's buffer"

    def run(self, coroutine, timeout_s=1000.0):
        return self.runner.run(coroutine, timeout_s)

    def job(self, keys, *, is_promotion):
        self._job_id += 1
        return make_job(self._job_id, keys, range(len(keys)), is_promotion=is_promotion)

    def store(self, keys):
        for slot, key in enumerate(keys):
            self._row(slot)[:] = content_of(key, SLOT_BYTES).tobytes()
        return self.run(self.tier.store(self.job(keys, is_promotion=False)))

    def load(self, keys):
        for slot in range(len(keys)):
            self._row(slot)[:] = bytes(SLOT_BYTES)
        return self.run(self.tier.load(self.job(keys, is_promotion=True)))

    def holds(self, key, slot):
        return bytes(self._row(slot)) == content_of(key, SLOT_BYTES).tobytes()

    def heads(self, *chains):
        return list(self.run(self.tier.longest_prefixes(chains)))

    def gauge(self, name):
        return self.tier.gauges()[name]

    def _row(self, slot):
        flat = memoryview(self.buffer.view).cast("B", (self.buffer.view.nbytes,))
        return flat[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
