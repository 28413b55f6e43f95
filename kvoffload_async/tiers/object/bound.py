"""Keeps a namespace within `capacity_bytes`, together with its other hosts; see `quota.py`."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvoffload_async.error_log import ErrorLog, LogRate
from kvoffload_async.errors import TierError, drop_tracebacks
from kvoffload_async.tiers.object import quota
from kvoffload_async.tiers.remote.calls import run_together
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    from kvoffload_async.tiers.object.client import ObjectClient

logger = logging.getLogger(__name__)

AT_ONCE: Final = 64
"""Deletions, or records read, at once."""
_WORD: Final = "word"
_NAME: Final = re.compile(rf"([0-9a-f]{{{2 * quota.HOST_BYTES}}})-[0-{quota.RECORDS_A_HOST - 1}]")
_PAGE_BLOCKS: Final = 1000
"""Objects in a page of S3's lists."""
_PLANNED_BLOCKS: Final = 1 << 13
_SWEEP_PART: Final = 3 / 4
"""Part of a period after which a scan or a sweep pauses, so that the word is written in time."""
_LEAVING_S: Final = 1.0
_MOST_WARNINGS: Final = 8
_Leaders = Sequence[quota.Leader]
T = TypeVar("T")
_Records = list[tuple[bytes, str, str]]
"""Host, name and version of records, the oldest first."""
_DIFFERENT: Final = (
    "hosts have different bounds, from {} to {} bytes; the smallest holds: give all the same"
)
_NO_RECORD: Final = "records of other releases, of other tenants or of strangers are ignored"


class BucketBound:
    """Reports this host's writes and uses each period, and leads when it is elected. Thread: loop.

    Attributes:
        accounts: What this host has written and may write, by tenant.
    """

    def __init__(
        self,
        store: ObjectClient,
        call: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
        list_: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        *,
        capacities: Sequence[int],
        tenant_of: Callable[[OffloadKey], int],
        size_of: Callable[[OffloadKey], int],
        deleted: Callable[[Sequence[OffloadKey]], object],
        period_s: float,
    ) -> None:
        """Make no call before `start`.

        Args:
            store: Where blocks and records are.
            call: Runs a call of the store with a deadline; raises TierError.
            list_: As `call`, for list requests.
            in_thread: Runs long computations.
            capacities: The bound of each tenant in bytes.
            tenant_of: Returns the index of a block's tenant.
            size_of: Returns the bytes of a block's object.
            deleted: Called with blocks that this host has deleted, or found deleted.
            period_s: Seconds between two records.
        """
        self.host = secrets.token_bytes(quota.HOST_BYTES)
        self.accounts = [quota.Account(self.host, c, len(capacities)) for c in capacities]
        self._tenant_of = tenant_of
        self._store = store
        self._call = call
        self._list = list_
        self._in_thread = in_thread
        self._size_of = size_of
        self._deleted = deleted
        self._period_s = period_s
        self._words: Sequence[quota.Word] = ()
        self._heard_s = -math.inf
        """Loop time at which the word last changed."""
        self._leaders: Sequence[quota.Leader] = ()
        """By tenant; empty unless this host leads."""
        self._versions: dict[str, str] = {}
        """Name -> version of the records read."""
        self._until_s = 0.0
        """Loop time at which a scan or a sweep of this period pauses."""
        self._cursor: str | None = None
        self._passed_foreign = 0
        self._gauges = dict.fromkeys(("bound_failures", "bound_deletions", "foreign_objects"), 0)
        self._warned: set[str] = set()
        self._rate = LogRate()
        self._errors = ErrorLog(logger, "capacity_bytes: a turn")
        self._own: Sequence[quota.Record] = ()
        self._task: asyncio.Task[None] | None = None

    async def start(self, patience_s: float) -> None:
        """Begin, and wait for the first grant, but not longer than this."""
        loop = asyncio.get_running_loop()
        first = loop.create_future()
        self._task = loop.create_task(self._run(first), name="object:bound")
        await asyncio.wait({first}, timeout=patience_s)

    async def close(self) -> None:
        """Stop, and remove this host's records, so that no host waits for it."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        names = [f"{self.host.hex()}-{n}" for n in range(quota.RECORDS_A_HOST)]
        names += [_WORD] * bool(self._leaders)
        self._leaders = ()
        try:
            async with asyncio.timeout(_LEAVING_S):
                await self._call(partial(self._store.discard_records, names))
        except (TierError, TimeoutError) as error:
            self._failed(error)

    def gauges(self) -> Mapping[str, float]:
        """Return the bytes used and allowed, and counters."""
        words = self._words
        used = [word.used_bytes for word in words]
        by_tenant = {f"tenant_{n}_bytes": num for n, num in enumerate(used) if len(used) > 1}
        bounds = [w.bound_bytes for w in words] or [a.capacity_bytes for a in self.accounts]
        return self._gauges | {
            "bound_failures": self._gauges["bound_failures"] + self._errors.count,
            "used_bytes": sum(used),
            "capacity_bytes": sum(bounds),
            "declined_blocks": sum(account.declined for account in self.accounts),
            "dropped_uses": self.accounts[0].dropped,
            "leads": bool(self._leaders),
            **by_tenant,
        }

    async def _run(self, first: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            self._until_s = began_s + _SWEEP_PART * self._period_s
            with self._errors.survived():
                try:
                    await self._take_turn()
                except TierError as error:
                    self._failed(error)
            if not first.done():
                first.set_result(None)
            pause_s = self._period_s if self.accounts[0].limit_bytes else self._period_s / 4
            await asyncio.sleep(max(self._period_s / 8, began_s + pause_s - loop.time()))

    async def _take_turn(self) -> None:
        await self._hear()
        await self._report()
        silence_s = asyncio.get_running_loop().time() - self._heard_s
        if not self._leaders and silence_s < quota.FRESH_PERIODS * self._period_s:
            return
        own, word_s, newest_s = self.host, -math.inf, dict[bytes, float]()
        records: _Records = []
        listed = await self._list(self._store.list_records)
        for name, modified_s, version in sorted(listed, key=lambda item: item[1]):
            if match := _NAME.fullmatch(name):
                host = bytes.fromhex(match[1])
                newest_s[host] = modified_s
                records.append((host, name, version))
            elif name == _WORD:
                word_s = modified_s
            else:
                self._warn_once(_NO_RECORD)
        now_s = newest_s.setdefault(own, max(newest_s.values(), default=0.0))
        fresh, elected = quota.fresh_hosts(newest_s, word_s, now_s, self._period_s)
        if not self._leaders and elected == own:
            last: Sequence[quota.Word | None] = self._words or [None] * len(self.accounts)
            self._leaders = [quota.Leader(word, self._size_of) for word in last]
            self._versions, self._cursor, self._passed_foreign = {}, None, 0
        if self._leaders:
            await self._lead(self._leaders, fresh | {own}, records)

    async def _hear(self) -> None:
        """Read the word of the leader, and obey it."""
        data = await self._call(partial(self._store.read_record, _WORD))
        words = self._parsed(quota.Word.parse, data)
        if not words:
            self._heard_s = -math.inf
            return
        was, self._words = self._words, words
        if was and (was[0].leader, was[0].number) != (words[0].leader, words[0].number):
            self._heard_s = asyncio.get_running_loop().time()
            if words[0].leader < self.host:
                self._leaders = ()
        if not self._leaders:
            self._obey(words)

    def _parsed(self, parse: Callable[[bytes], T | None], data: bytes | None) -> list[T]:
        """Return the record or word for each tenant; empty, after a warning, if any is unknown."""
        parts = quota.split(data or b"", len(self.accounts))
        found = [item for item in map(parse, parts) if item is not None]
        if len(found) == len(self.accounts):
            return found
        if data is not None:
            self._warn_once(_NO_RECORD)
        return []

    def _obey(self, words: Sequence[quota.Word]) -> None:
        for account, word in zip(self.accounts, words, strict=True):
            account.limit_bytes = word.limits.get(self.host, account.limit_bytes)
        least, most = (sum(w.bound_bytes for w in words), sum(w.largest_bytes for w in words))
        if least != most:
            self._warn_once(_DIFFERENT.format(least, most))

    async def _report(self) -> None:
        records = [account.record() for account in self.accounts]
        name = f"{self.host.hex()}-{records[0].number % quota.RECORDS_A_HOST}"
        await self._call(partial(self._store.write_record, name, quota.joined(records)))
        for account, record in zip(self.accounts, records, strict=True):
            account.sent(record)
        self._own = records

    async def _lead(self, leaders: _Leaders, fresh: set[bytes], records: _Records) -> None:
        self._take(leaders, self._own)
        self._versions = {name: self._versions.get(name, "") for _, name, _ in records}
        others = fresh - {self.host}
        new = [(n, v) for host, n, v in records if host in others and self._versions[n] != v]
        for first in range(0, len(new), AT_ONCE):
            await self._read(leaders, dict(new[first : first + AT_ONCE]))
        for leader in leaders:
            leader.keep(fresh)
        if is_new := not leaders[0].table.is_complete:
            await self._scan(leaders)
        await self._sweep(leaders)
        self._words = [leader.word(self.host) for leader in leaders]
        await self._call(partial(self._store.write_record, _WORD, quota.joined(self._words)))
        self._obey(self._words)
        if dead := [name for host, name, _ in records if host not in fresh][:AT_ONCE]:
            await self._call(partial(self._store.discard_records, dead))
        if not is_new:  # last, as it may take longest
            await self._scan(leaders)

    def _take(self, leaders: _Leaders, records: Sequence[quota.Record]) -> None:
        for leader, record in zip(leaders, records, strict=True):
            leader.take(record)
            for key in record.used:
                leaders[self._tenant_of(key)].table.use(key, 0)
            for key in record.stored:
                leaders[self._tenant_of(key)].table.use(key, self._size_of(key))

    async def _read(self, leaders: _Leaders, names: Mapping[str, str]) -> None:
        found: dict[str, bytes | None] = {}

        async def read(name: str) -> None:
            try:
                found[name] = await self._call(partial(self._store.read_record, name))
            except TierError as error:
                self._failed(error)

        def take() -> None:
            for name in [name for name in names if name in found]:
                self._versions[name] = names[name]
                host, least_bytes = bytes.fromhex(name.partition("-")[0]), leaders[0].block_bytes
                parse = partial(quota.Record.parse, host=host, least_bytes=least_bytes)
                if records := self._parsed(parse, found[name]):
                    self._take(leaders, records)

        await run_together(map(read, names), "object:record")
        await self._in_thread(take)

    async def _scan(self, leaders: _Leaders) -> None:
        """List further objects: a page, or for a new leader as many as the time allows."""
        loop = asyncio.get_running_loop()
        while True:
            page = partial(self._store.list_blocks, self._cursor, _PAGE_BLOCKS)
            blocks, num_foreign, self._cursor = await self._list(page)
            for block in blocks:
                leaders[self._tenant_of(block.key)].table.listed([block])
            self._passed_foreign += num_foreign
            if self._cursor is None:
                for leader in leaders:
                    self._deleted(await self._in_thread(leader.table.end_scan))
                self._gauges["foreign_objects"], self._passed_foreign = self._passed_foreign, 0
                return
            if leaders[0].table.is_complete or loop.time() >= self._until_s:
                return

    async def _sweep(self, leaders: _Leaders) -> None:
        """Delete each tenant's blocks that were not used for longest, as the time allows."""
        now_s = asyncio.get_running_loop().time
        end_s = max(self._until_s, now_s() + self._period_s / 4)
        for number, leader in enumerate(leaders):
            until_s = now_s() + (end_s - now_s()) / (len(leaders) - number)
            is_over = not leader.table.is_complete
            while not is_over:
                planned = [*islice(leader.table.oldest(leader.target_bytes), _PLANNED_BLOCKS)]
                is_over = not planned
                for first in range(0, len(planned), AT_ONCE):
                    keys = planned[first : first + AT_ONCE]
                    if now_s() >= until_s or not await self._delete(leader.table, keys):
                        is_over = True
                        break

    async def _delete(self, table: quota.UseTable, keys: Sequence[OffloadKey]) -> bool:
        """Delete blocks; return whether any was deleted. The others are tried again last."""
        gone: list[OffloadKey] = []

        async def delete(key: OffloadKey) -> None:
            table.use(key, 0)
            try:
                await self._call(partial(self._store.remove, [key]))
            except TierError as error:
                self._failed(error)
            else:
                gone.append(key)

        try:
            await run_together(map(delete, keys), "object:delete")
        finally:
            table.deleted(gone)
            self._gauges["bound_deletions"] += len(gone)
            self._deleted(gone)
        return bool(gone)

    def _failed(self, error: Exception) -> None:
        drop_tracebacks(error)
        self._gauges["bound_failures"] += 1
        more = self._rate.note(asyncio.get_running_loop().time())
        if more is not None:
            logger.warning("capacity_bytes: records or deletions failed: %s%s", error, more)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(text)
            logger.warning("capacity_bytes: %s", text)
