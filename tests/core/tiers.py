"""A tier that answers, and copies, as it is told."""

from core.terms import HIT, MISS, RETRY

from kvoffload_async.types import LookupResult, OffloadKey


class ScriptedTier:
    """Knows its blocks exactly, or answers RETRY while `is_probing`."""

    def __init__(self):
        self.contents: dict[OffloadKey, str] = {}
        self.is_probing = False
        self.stray: LookupResult | None = None

    def lookup(self, key, req_context):
        if self.stray is not None:
            return self.stray
        if self.is_probing:
            return RETRY
        return HIT if key in self.contents else MISS

    def copy(self, job, memory, failed):
        """Move a job's bytes; return the indices in `failed`, and those of what is not there."""
        failed = set(failed)
        for i, (key, slot) in enumerate(zip(job.keys, job.block_ids.tolist(), strict=True)):
            if not job.is_promotion:
                if i not in failed:
                    self.contents[key] = memory.slots[slot]
            elif i in failed or key not in self.contents:
                failed.add(i)
                memory.soil([slot])
            else:
                memory.slots[slot] = self.contents[key]
        return failed
