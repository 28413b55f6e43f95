"""An eviction policy of your own, registered under a name that configurations use.

Least frequently used, the oldest first among equals: documents that many requests share outlive a
flood of prompts that come once. Shown against LRU on the same requests.
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
    """Evicts what was used least often. Counts are forgotten with their block: memory is bounded.

    One list per number of uses, so that no victim is searched for. `RankedLists` skips the blocks
    that must stay, until `released` says that they may go.
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
            # Tails first, so that the head ends most recent.
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
    """Serve two shared documents between prompts that come once; count the blocks found."""
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
