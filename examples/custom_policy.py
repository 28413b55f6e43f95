"""A custom eviction policy, registered under a name that configurations use.

The policy evicts the least frequently used block, the oldest first among equals. Documents that
many requests share survive a burst of prompts that are used once. The example compares it with LRU
on the same requests.
"""

from collections.abc import Callable, Iterable, Sequence

from kvoffload_async import (
    CachePolicy,
    CPUOffloadingSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    make_offload_key,
)
from kvoffload_async.registry import POLICIES
from kvoffload_async.tables.ranked import RankedLists

SLOTS = 32
MOST_USES = 7


class LfuPolicy(CachePolicy):
    """Evicts the least frequently used block. A count is dropped with its block, to bound memory.

    There is one list per use count, so finding a victim needs no search. `RankedLists` skips blocks
    that are not evictable, until `released` reports that they are.
    """

    name = "lfu"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.clear()

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        victims: list[int] = []
        for uses in range(MOST_USES + 1):
            victims += self._oldest_first.pick(count - len(victims), is_evictable, uses)
        if len(victims) < count:
            self.released(victims)
            return None  # and nothing has changed
        self.discard(victims)
        return victims

    def released(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._oldest_first.release([slot], self._uses[slot])

    def admit(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        self._oldest_first.append(slots, 0)
        for slot in slots:
            self._uses[slot] = 0

    def access(self, slots: Sequence[int], reused: Sequence[bool]) -> None:
        for slot, again in zip(reversed(slots), reversed(reused), strict=True):
            self._uses[slot] = min(self._uses[slot] + again, MOST_USES)
            # From the prompt's end to its start, so that the start is the most recent.
            self._oldest_first.move_to_end([slot], self._uses[slot])

    def discard(self, slots: Sequence[int]) -> None:
        self._oldest_first.remove(slots)

    def clear(self) -> None:
        self._oldest_first = RankedLists(self.capacity_blocks, MOST_USES + 1)
        self._uses = bytearray(self.capacity_blocks)

    def resident(self) -> Iterable[int]:
        every = range(MOST_USES + 1)
        return [slot for uses in every for slot in self._oldest_first.walk(uses)]

    def skipped(self) -> Iterable[int]:
        return list(self._oldest_first.skipped())

    def violations(self) -> Iterable[str]:
        return self._oldest_first.violations()


def hits_of(policy: str) -> int:
    """Serve two shared documents among prompts that are used once; count the hits."""
    config = {"cpu_bytes_to_use": SLOTS * 4096, "block_bytes": 4096, "eviction_policy": policy}
    manager = CPUOffloadingSpec(config).get_manager()
    hits = 0
    for number in range(60):
        is_shared = number < 4 or number % 5 < 2
        name = f"document-{number % 2}" if is_shared else f"once-{number}"
        keys = [make_offload_key(f"{name}/{block}".encode()) for block in range(8)]
        request = ReqContext(f"request-{number}")
        manager.on_new_request(request)
        found = 0
        while found < len(keys) and manager.lookup(keys[found], request) is LookupResult.HIT:
            found += 1
        manager.prepare_load(keys[:found], request)
        manager.complete_load(keys[:found], request)
        granted = manager.prepare_store(keys[found:], request)
        assert granted is not None
        manager.complete_store(granted.keys_to_store, request)
        manager.on_request_finished(request)
        hits += found
    manager.shutdown()
    return hits


def main() -> None:
    POLICIES.register("lfu", __name__, "LfuPolicy")
    hits = {policy: hits_of(policy) for policy in ("lru", "arc", "lfu")}
    for policy, count in hits.items():
        print(f"{policy}: {count} of 480 blocks found")
    assert hits["lfu"] > hits["lru"]


if __name__ == "__main__":
    main()
