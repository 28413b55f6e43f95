"""The bound that the hosts of a namespace keep together: records, last uses and grants; no I/O.

Each host writes a *record* per period: the bytes that it has written, the blocks that it has
stored, and those that it has used, whether they are stored or not. One host, the *leader*, reads
the records, deletes the blocks that were not used for longest, and writes the *word*: for each host
the total of bytes up to which it may write. A total is absolute, so a host that reads it late or
twice writes no more. A host without a word spends what it was granted, and then declines to store.

The leader keeps the sum of the bytes used and of all bytes granted but not yet reported within the
bound. Each tenant has a bound of its own, so an object holds a record or word for each tenant, in
their order, behind its length in 4 bytes. All integers are little-endian.

| bytes | record | word |
|---|---|---|
| 4 | `KVOR` | `KVOW` |
| 2, 2 | version of the format, 1; zeros | the same |
| 8 | host | leader |
| 8 | its bound | bytes used |
| 8 | bytes that it has written | the bound |
| 8 | bytes up to which it may write | the largest bound of a host |
| 8 | bytes that it wanted to write since the last record | number of the word |
| 8 | number of the record | bytes used, and those that hosts may still write |
| 2, 2 | number of stored blocks, of used ones | number of hosts; zeros |
| each | 2 bytes: length, and the key | 8 bytes: host, 8 bytes: its total |
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, Self

from kvoffload_async.tables.keymap import LEAST_KEY_BYTES
from kvoffload_async.types import OffloadKey

VERSION: Final = 1
HOST_BYTES: Final = 8
MOST_HOSTS: Final = 1024
MOST_BLOCKS: Final = 1 << 22
"""Maximum blocks within a bound: the leader holds about 300 bytes for each."""
MOST_KEYS: Final = 1 << 13
"""Maximum keys of a host's records: half are stored blocks, and half were used."""
MOST_KEY_BYTES: Final = 120
MOST_RECORD_BYTES: Final = 1 << 20
SHORTEST_KEY: Final = OffloadKey(bytes(LEAST_KEY_BYTES))
RECORDS_A_HOST: Final = 4
"""Records that exist of a host: each replaces the fourth before, which the leader has read."""
MOST_RECORDS: Final = RECORDS_A_HOST * MOST_HOSTS
MOST_TENANTS: Final = 32
"""Maximum tenants with bounds of their own; a word names each host for each of them."""
FRESH_PERIODS: Final = 3
"""Age in periods up to which a record shows that its host is alive, and a word its leader."""

_RECORD: Final = b"KVOR"
_WORD: Final = b"KVOW"
_HEAD: Final = struct.Struct("<4sHH8s5QHH")
_LENGTH: Final = struct.Struct("<H")
_LIMIT: Final = struct.Struct("<8sQ")
_MOST_BYTES: Final = (1 << 64) - 1
_AHEAD: Final = 2
"""Periods of a host's demand that it is granted: it reads a word that answers a record, and spends
the grant, until the word that answers the next record."""
_LEAST_AHEAD, _MOST_AHEAD = 1 / 32, 1 / 4
"""Parts of the bound: the least that is free for sudden demand, and the most that is freed."""


class Record(NamedTuple):
    """The report of one host about one period; see the module."""

    host: bytes
    capacity_bytes: int
    written_bytes: int
    limit_bytes: int
    wanted_bytes: int
    number: int
    stored: Sequence[OffloadKey] = ()
    used: Sequence[OffloadKey] = ()

    def encode(self) -> bytes:
        """Return the record as bytes."""
        head = _HEAD.pack(_RECORD, VERSION, 0, *self[:-2], len(self.stored), len(self.used))
        keys = (*self.stored, *self.used)
        return head + b"".join(_LENGTH.pack(len(key)) + key for key in keys)

    @classmethod
    def parse(cls, data: bytes, host: bytes, least_bytes: int) -> Self | None:
        """Return a host's record; None if it is another's, unknown, or of a smaller bound."""
        if (head := _head_of(data, _RECORD)) is None:
            return None
        keys: list[OffloadKey] = []
        at = _HEAD.size
        while at + _LENGTH.size <= len(data) and len(keys) < MOST_KEYS:
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + length
            if not LEAST_KEY_BYTES <= length <= MOST_KEY_BYTES:
                return None
            keys.append(OffloadKey(data[at - length : at]))
        *fields, num_stored, num_used = head
        record = cls._make((*fields, keys[:num_stored], keys[num_stored:]))
        is_whole = (at, len(keys)) == (len(data), num_stored + num_used)
        is_meant = record.host == host and record.capacity_bytes >= least_bytes
        return record if is_whole and is_meant else None


class Word(NamedTuple):
    """What a leader has announced; see the module."""

    leader: bytes
    used_bytes: int
    bound_bytes: int
    largest_bytes: int
    number: int
    committed_bytes: int
    limits: Mapping[bytes, int]

    def encode(self) -> bytes:
        """Return the word as bytes."""
        head = _HEAD.pack(_WORD, VERSION, 0, *self[:-1], len(self.limits), 0)
        return head + b"".join(_LIMIT.pack(*item) for item in self.limits.items())

    @classmethod
    def parse(cls, data: bytes) -> Self | None:
        """Return the word; None if it is invalid or of another version."""
        head = _head_of(data, _WORD)
        if head is None or head[-1] or head[-2] > MOST_HOSTS:
            return None
        if len(data) != _HEAD.size + head[-2] * _LIMIT.size:
            return None
        return cls._make((*head[:-2], dict(_LIMIT.iter_unpack(data[_HEAD.size :]))))


def joined(items: Iterable[Record] | Iterable[Word]) -> bytes:
    """Return the bytes of an object with a record or word for each tenant."""
    parts = [item.encode() for item in items]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def split(data: bytes, count: int) -> list[bytes]:
    """Return the records or words of an object; empty unless there are `count`."""
    parts: list[bytes] = []
    while data and len(parts) < count:
        end = 4 + int.from_bytes(data[:4], "little")
        parts.append(data[4:end])
        data = data[end:]
    return parts if len(parts) == count and not data else []


def _head_of(data: bytes, magic: bytes) -> tuple[Any, ...] | None:
    if len(data) < _HEAD.size:
        return None
    found, version, zeros, *fields = _HEAD.unpack_from(data)
    return tuple(fields) if (found, version, zeros) == (magic, VERSION, 0) else None


class Account:
    """What one host has written of a tenant, and may write.

    Not thread-safe.

    Attributes:
        limit_bytes: Total of bytes up to which it may write.
        declined: Number of blocks that it declined to store.
        dropped: Number of uses that it could not report.
    """

    def __init__(self, host: bytes, capacity_bytes: int, num_tenants: int = 1) -> None:
        """Begin without a grant.

        Args:
            host: Identifies the host; 8 bytes.
            capacity_bytes: The tenant's bound that is configured here.
            num_tenants: Number of tenants.
        """
        self.host = host
        self.capacity_bytes = capacity_bytes
        self._most_stored = MOST_KEYS // 2 // num_tenants
        self.limit_bytes = self.declined = self.dropped = 0
        self._begun_bytes = self._written_bytes = self._wanted_bytes = self._number = 0
        self._stored: dict[OffloadKey, None] = {}
        self._used: dict[OffloadKey, None] = {}

    def admits(self, num_bytes: int) -> bool:
        """Return whether a block may be written now; if so, `ended` follows."""
        self._wanted_bytes += num_bytes
        if (
            self._begun_bytes + num_bytes > self.limit_bytes
            or len(self._stored) >= self._most_stored
        ):
            self.declined += 1
            return False
        self._begun_bytes += num_bytes
        return True

    def ended(self, key: OffloadKey, num_bytes: int, *, is_written: bool) -> None:
        """Record the end of an admitted write; one that may have succeeded counts as written."""
        if not is_written:
            self._begun_bytes -= num_bytes
            return
        self._written_bytes += num_bytes
        self._stored[key] = None  # beyond the most only by writes that were under way

    def used(self, keys: Iterable[OffloadKey]) -> None:
        """Record uses of blocks, of any tenant, that may be stored."""
        for key in keys:
            self._used.pop(key, None)
            if len(self._used) < MOST_KEYS // 2:
                self._used[key] = None
            else:
                self.dropped += 1

    def record(self) -> Record:
        """Return a report about all since the last one for which `sent` was called."""
        self._number += 1
        numbers = self._written_bytes, self.limit_bytes, self._wanted_bytes, self._number
        stored = tuple(islice(self._stored, self._most_stored))
        return Record(self.host, self.capacity_bytes, *numbers, stored, tuple(self._used))

    def sent(self, record: Record) -> None:
        """Leave what a report says out of the next one."""
        self._wanted_bytes -= record.wanted_bytes
        for reported, keys in (self._stored, record.stored), (self._used, record.used):
            for key in keys:
                reported.pop(key, None)


class Listed(NamedTuple):
    """A block's object as the store lists it: key, bytes, and seconds since 1970."""

    key: OffloadKey
    num_bytes: int
    modified_s: float


class UseTable:
    """The blocks of a tenant in the order of their last use, at most `MOST_BLOCKS`.

    It follows from the records, and from repeated scans: lists of all objects. A scan adds blocks
    that no record named, as the oldest, and removes those that others have deleted.

    Attributes:
        used_bytes: Their bytes.
        is_complete: Whether a scan has ended.
    """

    def __init__(self) -> None:
        """Create an empty table."""
        self.used_bytes = 0
        self.is_complete = False
        self._found: dict[OffloadKey, Listed] = {}
        """Blocks that only scans have found, after a scan in the order of their times."""
        self._sizes: dict[OffloadKey, int] = {}
        """Blocks that records named; 0: used, but not found yet."""
        self._seen: set[OffloadKey] = set()
        """Blocks listed or stored since the scan began."""

    def use(self, key: OffloadKey, num_bytes: int) -> None:
        """Record that a block of this size was stored; 0: was used, if it is stored at all."""
        found = self._found.pop(key, None)
        size = self._sizes.pop(key, 0) if found is None else found.num_bytes
        if not size:
            if (self.is_complete and not num_bytes) or self._is_full():
                return
            size = num_bytes
            self.used_bytes += num_bytes
        self._sizes[key] = size
        if num_bytes:
            self._seen.add(key)

    def listed(self, blocks: Iterable[Listed]) -> None:
        """Take a part of a scan, before any block of it is deleted."""
        for block in blocks:
            known = self._found.get(block.key)
            if block.key in self._sizes:
                self.used_bytes -= self._sizes[block.key]
                self._sizes[block.key] = block.num_bytes
            elif known is None and self._is_full():
                continue
            else:
                self.used_bytes -= 0 if known is None else known.num_bytes
                self._found[block.key] = block
            self.used_bytes += block.num_bytes
            self._seen.add(block.key)

    def end_scan(self) -> list[OffloadKey]:
        """Begin the next scan; return the blocks that this one has not found."""
        gone = [key for key in (*self._found, *self._sizes) if key not in self._seen]
        self.deleted(gone)
        self._found = {block.key: block for block in sorted(self._found.values(), key=_time_of)}
        self._seen, self.is_complete = set(), True
        return gone

    def oldest(self, target_bytes: int) -> Iterator[OffloadKey]:
        """Return the blocks to delete, oldest use first, until at most `target_bytes` are used."""
        left = self.used_bytes - target_bytes
        found = ((key, block.num_bytes) for key, block in self._found.items())
        for key, size in chain(found, self._sizes.items()):
            if left <= 0:
                return
            left -= size
            yield key

    def deleted(self, keys: Iterable[OffloadKey]) -> None:
        """Record that blocks were deleted."""
        for key in keys:
            found = self._found.pop(key, None)
            self.used_bytes -= self._sizes.pop(key, 0) if found is None else found.num_bytes
            self._seen.discard(key)

    def _is_full(self) -> bool:
        return len(self._found) + len(self._sizes) >= MOST_BLOCKS


_time_of = attrgetter("modified_s")


class Claim(NamedTuple):
    """Bytes that a host has written in all, those it may write unreported, and those wanted."""

    written_bytes: int
    open_bytes: int
    wanted_bytes: int


def allot(claims: Mapping[bytes, Claim], free_bytes: int, block_bytes: int) -> dict[bytes, int]:
    """Return each host's new limit.

    Whichever of their limits they obey, the former or the new one, hosts may write `free_bytes` in
    all, or what they might by the former ones if that is more.

    Args:
        claims: Hosts and their claims.
        free_bytes: Bytes of the bound that are not used.
        block_bytes: Bytes of a block; each host wants at least one.
    """
    wanted = {host: _AHEAD * claim.wanted_bytes + block_bytes for host, claim in claims.items()}
    spare = max(0, free_bytes - sum(wanted.values())) // (2 * max(1, len(claims)))
    raises = {h: max(0, wanted[h] + spare - claim.open_bytes) for h, claim in claims.items()}
    unbound = max(0, free_bytes - sum(claim.open_bytes for claim in claims.values()))
    total = max(1, sum(raises.values()))
    granted = {
        h: min(wanted[h] + spare, claim.open_bytes) + raises[h] * min(unbound, total) // total
        for h, claim in claims.items()
    }
    return {h: min(claims[h].written_bytes + granted[h], _MOST_BYTES) for h in claims}


class Leader:
    """The decisions of the leader about one tenant. Not thread-safe.

    Attributes:
        table: Last uses.
    """

    def __init__(self, last: Word | None, size_of: Callable[[OffloadKey], int]) -> None:
        """Take over.

        Args:
            last: The last word, whose limits hosts may still obey.
            size_of: Returns the bytes of a block's object.
        """
        self.table = UseTable()
        self._last = last
        self._size_of = size_of
        self._records: dict[bytes, Record] = {}
        self._wanted: dict[bytes, int] = {}
        """What each host wanted in its last record, or in the one before if that was more."""

    def take(self, record: Record) -> None:
        """Take a host's next record; the table learns of its blocks apart."""
        before = self._records.get(record.host) or Record(record.host, 1, 0, 0, 0, -1)
        if record.number > before.number:
            self._wanted[record.host] = max(before.wanted_bytes, record.wanted_bytes)
            self._records[record.host] = record

    def keep(self, hosts: Container[bytes]) -> None:
        """Forget all hosts but these."""
        for host in [host for host in self._records if host not in hosts]:
            del self._records[host], self._wanted[host]

    @property
    def target_bytes(self) -> int:
        """Bytes down to which blocks are deleted, so that hosts can write until the next time."""
        wanted = sum(_AHEAD * self._wanted[host] + self.block_bytes for host in self._records)
        bound = min(record.capacity_bytes for record in self._records.values())
        most = max(int(_MOST_AHEAD * bound), self.block_bytes * len(self._records))
        return max(0, bound - min(max(wanted, int(_LEAST_AHEAD * bound)), most))

    def word(self, host: bytes) -> Word:
        """Return the next word of this leader.

        Until a scan has ended, all that hosts might have written by the last word counts as used,
        unless their records say that it is not.
        """
        bounds = [record.capacity_bytes for record in self._records.values()]
        before = {} if self._last is None else self._last.limits
        claims = {
            h: Claim(r.written_bytes, max(0, limit - r.written_bytes), self._wanted[h])
            for h, r in self._records.items()
            for limit in (max(r.limit_bytes, before.get(h, 0)),)
        }
        used, open_bytes = self.table.used_bytes, sum(claim.open_bytes for claim in claims.values())
        if not self.table.is_complete:
            last = self._last
            used = max(used, min(bounds) if last is None else last.committed_bytes - open_bytes)
        limits = allot(claims, min(bounds) - used, self.block_bytes)
        open_bytes = sum(max(c.open_bytes, limits[h] - c.written_bytes) for h, c in claims.items())
        number = 0 if self._last is None else self._last.number
        figures = used, min(bounds), max(bounds), (number + 1) & _MOST_BYTES, used + open_bytes
        word = Word._make((host, *(min(figure, _MOST_BYTES) for figure in figures), limits))
        self._last = word
        return word

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's object, at least."""
        return self._size_of(SHORTEST_KEY)


def fresh_hosts(
    modified_s: Mapping[bytes, float], word_s: float, now_s: float, period_s: float
) -> tuple[set[bytes], bytes | None]:
    """Return the hosts that are alive, and the one of them to lead now; None: there is a leader.

    At most `MOST_HOSTS` are, the youngest. Times of the future are as wrong as those long past.

    Args:
        modified_s: Host -> time of its newest record, by the store's clock.
        word_s: Time of the word, or -inf.
        now_s: Time of a record that was just written.
        period_s: Seconds between the records of a host.
    """
    most_s = FRESH_PERIODS * period_s
    hosts = sorted(modified_s, key=lambda host: abs(now_s - modified_s[host]))[:MOST_HOSTS]
    fresh = {host for host in hosts if abs(now_s - modified_s[host]) <= most_s}
    return fresh, None if abs(now_s - word_s) <= most_s else min(fresh, default=None)
