"""Adapts a cache policy to blocks with keys but no slots, as in a bounded secondary tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.tables.keymap import KeyMap, KeyTable
from kvoffload_async.tables.lists import FreeNumbers
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PORTION: Final = 1 << 12
"""Keys admitted per step; bounds how long a step keeps the interpreter lock."""


class KeyRanking:
    """Ranks keys with a slot-based policy, by giving each resident key a slot.

    The operations are those of `CachePolicy`, by key. Access, discard and release ignore keys that
    are not resident.

    Thread: the policy's.
    """

    def __init__(self, policy: CachePolicy) -> None:
        """Start without keys, and take ownership of the policy."""
        self.policy = policy
        self.capacity_blocks = policy.capacity_blocks
        self._table = KeyTable(policy.capacity_blocks)
        self._free = FreeNumbers(policy.capacity_blocks)
        self.find: Callable[[Sequence[OffloadKey]], list[int | None]] = self._table.find
        """Returns each key's slot, or None for absent keys."""

    @property
    def map(self) -> KeyMap:
        """Maps key to slot; read-only."""
        return self._table.map

    def __len__(self) -> int:
        return self.capacity_blocks - self._free.count

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[OffloadKey]:
        return iter(self._table.map)

    def keys_of(self, slots: Sequence[int]) -> list[OffloadKey]:
        """Return the key of each slot; for a free slot, its last key."""
        return self._table.keys_of(slots)

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[OffloadKey], bool],
    ) -> list[OffloadKey] | None:
        """Choose and remove `count` resident keys so that `incoming` can be admitted."""
        key_of = self._table.key_of
        victims = self.policy.make_room(incoming, count, lambda slot: is_evictable(key_of(slot)))
        return None if victims is None else self.remove(victims)

    def released(self, keys: Sequence[OffloadKey]) -> None:
        """Mark keys as evictable again, after `make_room` may have skipped them."""
        self.policy.released([slot for slot in self._table.find(keys) if slot is not None])

    def admit(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Make absent keys resident, the last one most recent; return their slots."""
        slots = self._free.take(len(keys))
        self._table.add(keys, slots)
        self.policy.admit(keys, slots)
        return slots

    def fill(
        self, count: int, portions: Iterable[tuple[npt.NDArray[np.int64], Sequence[OffloadKey]]]
    ) -> None:
        """Fill an unused ranking with keys: the nth key gets slot n.

        Args:
            count: Number of keys; the last one is the most recent.
            portions: Positions and keys, in batches; fast if keys of the same part of `KeyMap` are
                adjacent.
        """
        for which, keys in portions:
            self._table.fill(keys, which)
        for start in range(0, count, _PORTION):
            slots = range(start, min(start + _PORTION, count))
            self._free.take(len(slots))
            self.policy.admit(self._table.keys_in(slots), slots)

    def access(
        self, keys: Iterable[OffloadKey], reused: Callable[[OffloadKey], bool] | None = None
    ) -> None:
        """Record one request's logical accesses, ordered from the prompt's head to its tail.

        None for `reused` means that the request found every key.
        """
        unique = list(dict.fromkeys(keys))
        found = self._table.find(unique)
        slots = [slot for slot in found if slot is not None]
        again = [True] * len(slots)
        if reused is not None:
            pairs = zip(unique, found, strict=True)
            again = [reused(key) for key, slot in pairs if slot is not None]
        self.policy.access(slots, again)

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Remove keys whose blocks have vanished."""
        found = self._table.find(list(dict.fromkeys(keys)))
        slots = [slot for slot in found if slot is not None]
        self.policy.discard(slots)
        self.remove(slots)

    def clear(self) -> None:
        """Remove all keys."""
        self.policy.clear()
        self._table.clear()
        self._free = FreeNumbers(self.capacity_blocks)

    def resident(self) -> Sequence[OffloadKey]:
        """Return every resident key, best victim first. For invariants and inspection."""
        return self._table.keys_of(list(self.policy.resident()))

    def skipped(self) -> Sequence[OffloadKey]:
        """Return the keys that the policy skips until they are released. For inspection."""
        return self._table.keys_of(list(self.policy.skipped()))

    def violations(self) -> Iterable[str]:
        """Return descriptions of the violated invariants."""
        yield from self.policy.violations()
        ranked = sorted(self.policy.resident())
        if ranked != sorted(slot for _, slot in self._table.items()):
            yield f"the policy ranks {len(ranked)} slots, not those of the {len(self)} keys"

    def remove(self, slots: Sequence[int]) -> list[OffloadKey]:
        """Free slots that the policy no longer ranks; return their keys."""
        self._free.give_back(slots)
        return self._table.remove(slots)


def placeholders(count: int) -> Iterator[OffloadKey]:
    """Yield keys that no real block has, for `make_room` calls without incoming blocks."""
    # Real block hashes are never 3 bytes long.
    return (OffloadKey(number.to_bytes(7, "big")) for number in range(count))
