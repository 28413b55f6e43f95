"""Lookups of vLLM's scheduler in batches, instead of a call for each block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload import base

from kvoffload_async.integrations.vllm.manager import KVOffloadManager
from kvoffload_async.types import LookupResult, OffloadKey

_ABSENT = {LookupResult.MISS, LookupResult.RETRY}


class BatchedLookups:
    """Answers two methods of vLLM's scheduler, which ask its manager block by block.

    Call only from the scheduler's thread.
    """

    def __init__(self, manager: KVOffloadManager) -> None:
        """Look blocks up in `manager`."""
        self._manager = manager

    def replace_in(self, scheduler: Any) -> None:  # noqa: ANN401 - vLLM's scheduler of offloading
        """Answer for a scheduler from now on.

        Not if its events describe themselves: then vLLM records each block that is looked up.
        """
        if not scheduler._events_tracker.self_describing_enabled:  # noqa: SLF001 - see version.py
            scheduler._maximal_prefix_lookup = self.maximal_prefix  # noqa: SLF001
            scheduler._sliding_window_lookup = self.sliding_window  # noqa: SLF001

    def maximal_prefix(
        self,
        keys: Iterable[OffloadKey],
        req_context: base.ReqContext,
        req: Any,  # noqa: ANN401 - not used
        group_config: Any,  # noqa: ANN401 - not used
        start_chunk_idx: int,
    ) -> int | None:
        """Return how many blocks from the first on can be loaded; None: ask again."""
        blocks = keys if isinstance(keys, list) else list(keys)
        found, is_deferred = self._manager.lookup_prefix(blocks, req_context)
        return None if is_deferred else found

    def sliding_window(
        self,
        keys: Sequence[OffloadKey],
        sliding_window_size: int,
        req_context: base.ReqContext,
        initial_window_size: int | None = None,
    ) -> int | None:
        """Return where the last run ends that a window can be loaded from; None: ask again.

        A run at the start of `keys` may be shorter. Blocks are looked up from the right, up to the
        first one of the run. Behind the first gap, the run needs only `sliding_window_size` blocks.
        """
        needed = initial_window_size or sliding_window_size
        length, start = 0, len(keys)
        is_pending = is_deferred = False
        while start and length < needed:
            window = keys[max(0, start - needed + length) : start]
            for answer in self._manager.lookup_many(window[::-1], req_context):
                start -= 1
                if answer in _ABSENT:
                    is_deferred = is_deferred or answer is LookupResult.RETRY
                    length, is_pending, needed = 0, False, sliding_window_size
                    continue
                length += 1
                is_pending = is_pending or answer is LookupResult.HIT_PENDING
                if length == needed:
                    break
        return None if is_deferred or is_pending else start + length
