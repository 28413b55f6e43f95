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

SLOTS = 32


class LfuPolicy(CachePolicy):
    """Evicts what was used least often. Counts are forgotten with their block: memory is bounded.

    A victim costs a look at every occupied slot; a serious one would keep them sorted.
    """

    name = "lfu"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._uses = [0] * capacity_blocks
        self._oldest_first: dict[int, None] = {}

    def make_room(
        self,
        incoming: Sequence[OffloadKey],
        count: int,
        is_evictable: Callable[[int], bool],
    ) -> list[int] | None:
        victims = [slot for slot in self.resident() if is_evictable(slot)][:count]
        if len(victims) < count:
            return None  # and nothing has changed
        self.discard(victims)
        return victims

    def admit(self, keys: Sequence[OffloadKey], slots: Sequence[int]) -> None:
        for slot in slots:
            self._oldest_first[slot] = None
            self._uses[slot] = 0

    def access(self, slots: Sequence[int], reused: Sequence[bool]) -> None:
        for slot, again in zip(reversed(slots), reversed(reused), strict=True):
            del self._oldest_first[slot]  # tails first, so that the head ends most recent
            self._oldest_first[slot] = None
            self._uses[slot] += again

    def discard(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self._oldest_first[slot]

    def clear(self) -> None:
        self._oldest_first.clear()

    def resident(self) -> Iterable[int]:
        return sorted(self._oldest_first, key=self._uses.__getitem__)  # stable: oldest first


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
