"""A transport that finds device blocks which are overwritten while they are stored."""

import contextlib

import numpy as np
import xxhash

from kvoffload_async.abc.tier import Direction
from kvoffload_async.errors import TransportError
from kvoffload_async.transport.host import HostTransport


class WatchedTransport(HostTransport):
    """Hashes the source of each store before and after its copy.

    A source is complete when its compute event is reached: at the latest then it is hashed first.

    Attributes:
        violations: Descriptions of device blocks that changed during their store.
    """

    def __init__(self, layout, kv_view, **options):
        self.violations = []
        self._digests = {}
        super().__init__(layout, kv_view, **options)

    def submit(self, copies, after):
        if copies.direction is Direction.STORE and after.wait(0):
            with contextlib.suppress(TransportError):  # with which the transfer ends
                self._digests[id(copies)] = self._digest(copies)
        return super().submit(copies, after)

    def _perform(self, direction, transfer):
        copies, before = transfer.copies, None
        if direction is Direction.STORE and transfer.after.wait(self._compute_timeout_s):
            before = self._digests.pop(id(copies), None) or self._digest(copies)
        super()._perform(direction, transfer)
        if before is not None and before != self._digest(copies):
            blocks = copies.device.block_ids.tolist()
            self.violations.append(f"device blocks {blocks} changed during a store")

    def _digest(self, copies):
        hasher = xxhash.xxh3_64()
        parts = self._layout.resolve(copies, self._num_slots)
        for group, part in zip(self._layout.groups, parts, strict=True):
            for table in group:
                hasher.update(np.ascontiguousarray(table.pages.numpy()[part.blocks]).data)
        return hasher.intdigest()
