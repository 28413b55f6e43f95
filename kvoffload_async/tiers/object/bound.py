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
from typing import TYPE_CHECKING, Any, Final

from kvoffload_async.error_log import LogRate
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
_Records = list[tuple[bytes, str, str]]
"""Host, name and version of records, the oldest first."""
_NO_RECORD: Final = "objects among the records that this release does not know are ignored"


class BucketBound:
    """Reports this host's writes and uses each period, and leads when it is elected. Thread: loop.

    Attributes:
        account: What this host has written and may write.
    """

    def __init__(
        self,
        store: ObjectClient,
        call: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
        list_: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        *,
        capacity_bytes: int,
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
            capacity_bytes: The bound.
            size_of: Returns the bytes of a block's object.
            deleted: Called with blocks that this host has deleted, or found deleted.
            period_s: Seconds between two records.
        """
        self.account = quota.Account(secrets.token_bytes(quota.HOST_BYTES), capacity_bytes)
        self._store = store
        self._call = call
        self._list = list_
        self._in_thread = in_thread
        self._size_of = size_of
        self._deleted = deleted
        self._period_s = period_s
        self._word: quota.Word | None = None
        self._heard_s = -math.inf
        """Loop time at which the word last changed."""
        self._leader: quota.Leader | None = None
        self._versions: dict[str, str] = {}
        """Name -> version of the records read."""
        self._until_s = 0.0
        """Loop time at which a scan or a sweep of this period pauses."""
        self._cursor: str | None = None
        self._passed_foreign = 0
        self._gauges = dict.fromkeys(("bound_failures", "bound_deletions", "foreign_objects"), 0)
        self._warned: set[str] = set()
        self._rate = LogRate()
        self._own = self.account.record()
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
        names = [f"{self.account.host.hex()}-{n}" for n in range(quota.RECORDS_A_HOST)]
        names += [_WORD] * (self._leader is not None)
        self._leader = None
        try:
            async with asyncio.timeout(_LEAVING_S):
                await self._call(partial(self._store.discard_records, names))
        except (TierError, TimeoutError) as error:
            self._failed(error)

    def gauges(self) -> Mapping[str, float]:
        """Return the bytes used and allowed, and counters."""
        word = self._word
        return self._gauges | {
            "used_bytes": 0 if word is None else word.used_bytes,
            "capacity_bytes": self.account.capacity_bytes if word is None else word.bound_bytes,
            "declined_blocks": self.account.declined,
            "dropped_uses": self.account.dropped,
            "leads": self._leader is not None,
        }

    async def _run(self, first: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                self._until_s = began_s + _SWEEP_PART * self._period_s
                await self._take_turn()
            except TierError as error:
                self._failed(error)
            if not first.done():
                first.set_result(None)
            pause_s = self._period_s if self.account.limit_bytes else self._period_s / 4
            await asyncio.sleep(max(self._period_s / 8, began_s + pause_s - loop.time()))

    async def _take_turn(self) -> None:
        await self._hear()
        await self._report()
        silence_s = asyncio.get_running_loop().time() - self._heard_s
        if self._leader is None and silence_s < quota.FRESH_PERIODS * self._period_s:
            return
        own, word_s, newest_s = self.account.host, -math.inf, dict[bytes, float]()
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
        if self._leader is None and elected == own:
            self._leader = quota.Leader(self._word, self._size_of)
            self._versions, self._cursor, self._passed_foreign = {}, None, 0
        if self._leader is not None:
            await self._lead(self._leader, fresh | {own}, records)

    async def _hear(self) -> None:
        """Read the word of the leader, and obey it."""
        data = await self._call(partial(self._store.read_record, _WORD))
        word = quota.Word.parse(data or b"")
        if word is None:
            self._heard_s = -math.inf
            if data is not None:
                self._warn_once(_NO_RECORD)
            return
        was, self._word = self._word, word
        if was is not None and (was.leader, was.number) != (word.leader, word.number):
            self._heard_s = asyncio.get_running_loop().time()
            if word.leader < self.account.host:
                self._leader = None
        if self._leader is None:
            self._obey(word)

    def _obey(self, word: quota.Word) -> None:
        self.account.limit_bytes = word.limits.get(self.account.host, self.account.limit_bytes)
        if word.bound_bytes != word.largest_bytes:
            self._warn_once(
                f"hosts have different bounds, from {word.bound_bytes} to {word.largest_bytes} "
                "bytes; the smallest holds: give all the same"
            )

    async def _report(self) -> None:
        record = self.account.record()
        name = f"{record.host.hex()}-{record.number % quota.RECORDS_A_HOST}"
        await self._call(partial(self._store.write_record, name, record.encode()))
        self.account.sent(record)
        self._own = record

    async def _lead(self, leader: quota.Leader, fresh: set[bytes], records: _Records) -> None:
        leader.take(self._own)
        self._versions = {name: self._versions.get(name, "") for _, name, _ in records}
        others = fresh - {self.account.host}
        new = [(n, v) for host, n, v in records if host in others and self._versions[n] != v]
        for first in range(0, len(new), AT_ONCE):
            await self._read(leader, dict(new[first : first + AT_ONCE]))
        leader.keep(fresh)
        if is_new := not leader.table.is_complete:
            await self._scan(leader)
        await self._sweep(leader)
        self._word = leader.word(self.account.host)
        await self._call(partial(self._store.write_record, _WORD, self._word.encode()))
        self._obey(self._word)
        if dead := [name for host, name, _ in records if host not in fresh][:AT_ONCE]:
            await self._call(partial(self._store.discard_records, dead))
        if not is_new:  # last, as it may take longest
            await self._scan(leader)

    async def _read(self, leader: quota.Leader, names: Mapping[str, str]) -> None:
        found: dict[str, bytes | None] = {}

        async def read(name: str) -> None:
            try:
                found[name] = await self._call(partial(self._store.read_record, name))
            except TierError as error:
                self._failed(error)

        def take() -> None:
            for name in [name for name in names if name in found]:
                self._versions[name] = names[name]
                record = quota.Record.parse(found[name] or b"", leader.block_bytes)
                if record is not None and name.startswith(record.host.hex()):
                    leader.take(record)
                elif found[name] is not None:
                    self._warn_once(_NO_RECORD)

        await run_together(map(read, names), "object:record")
        await self._in_thread(take)

    async def _scan(self, leader: quota.Leader) -> None:
        """List further objects: a page, or for a new leader as many as the time allows."""
        table, loop = leader.table, asyncio.get_running_loop()
        while True:
            page = partial(self._store.list_blocks, self._cursor, _PAGE_BLOCKS)
            blocks, num_foreign, self._cursor = await self._list(page)
            table.listed(blocks)
            self._passed_foreign += num_foreign
            if self._cursor is None:
                self._deleted(await self._in_thread(table.end_scan))
                self._gauges["foreign_objects"], self._passed_foreign = self._passed_foreign, 0
                return
            if table.is_complete or loop.time() >= self._until_s:
                return

    async def _sweep(self, leader: quota.Leader) -> None:
        """Delete the blocks that were not used for longest, as many as the time allows."""
        table, loop = leader.table, asyncio.get_running_loop()
        until_s = max(self._until_s, loop.time() + self._period_s / 4)
        while table.is_complete:
            planned = [*islice(table.oldest(leader.target_bytes), _PLANNED_BLOCKS)]
            for first in range(0, len(planned), AT_ONCE):
                keys = planned[first : first + AT_ONCE]
                if loop.time() >= until_s or not await self._delete(table, keys):
                    return
            if not planned:
                return

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
