"""Reads every block of a namespace, and compares it with its seal."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any

import anyio
import anyio.to_thread

from kvoffload_async.cli.store.namespaces import FoundNamespace
from kvoffload_async.cli.store.survey import FoundBlock, Walker
from kvoffload_async.tiers.fs.ops import FileOps
from kvoffload_async.tiers.fs.seal import ATTRIBUTE, Sealer

BATCH_BYTES = 4 << 20
"""What a thread reads before it looks whether to go on."""

_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # it was a plain file a moment ago


class Verdict(Enum):
    """What is found about one block."""

    SEALED = auto()
    """Its bytes are those that its seal is of."""
    UNSEALED = auto()
    """It has the right length, and no seal."""
    CORRUPT = auto()
    UNREADABLE = auto()
    GONE = auto()
    """It was removed or replaced meanwhile."""


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that is not as it should be, why, and whether it was removed for that."""

    path: str
    reason: str
    is_removed: bool = False


@dataclass(slots=True)
class Verification:
    """What reading the blocks has shown.

    Attributes:
        checked: Blocks that were read.
        sealed: Those whose seal is right.
        unsealed: Those of the right length that have none.
        corrupt: Those of a wrong length or with a wrong seal.
        unreadable: Those that could not be read.
        gone: Blocks that vanished meanwhile.
    """

    checked: int = 0
    sealed: int = 0
    unsealed: int = 0
    corrupt: list[BadBlock] = field(default_factory=list)
    unreadable: list[BadBlock] = field(default_factory=list)
    gone: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)

    @property
    def problems(self) -> list[str]:
        """What is wrong, a line each."""
        return [
            *(f"corrupt: {bad.path}: {bad.reason}" for bad in self.corrupt),
            *(f"unreadable: {bad.path}: {bad.reason}" for bad in self.unreadable),
        ]


async def verify_blocks(
    walker: Walker,
    namespace: FoundNamespace,
    blocks: Sequence[FoundBlock],
    *,
    remove_corrupt: bool = False,
) -> Verification:
    """Read and judge blocks, several side by side; optionally remove the corrupt ones."""
    found = Verification()
    checker = BlockChecker(walker.ops, namespace, blocks, remove_corrupt=remove_corrupt)
    batches = _batches(blocks)
    walker.gauge.expect(sum(block.length_bytes for block in blocks))

    async def work() -> None:
        for batch in batches:  # shared by all: each batch goes to one
            if walker.should_stop():
                return
            for outcome in await anyio.to_thread.run_sync(
                checker.check, batch, limiter=walker.limiter
            ):
                _take_in(found, outcome)
            walker.gauge.advance(sum(block.length_bytes for block in batch))

    async with anyio.create_task_group() as group:
        for _ in range(int(walker.limiter.total_tokens)):
            group.start_soon(work)
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """One block's verdict, and whether its file was removed."""

    block: FoundBlock
    verdict: Verdict
    reason: str = ""
    is_removed: bool = False


class BlockChecker:
    """Judges single files. Thread: any."""

    def __init__(
        self,
        ops: FileOps,
        namespace: FoundNamespace,
        blocks: Sequence[FoundBlock],
        *,
        remove_corrupt: bool = False,
    ) -> None:
        """Note how long a block is: as the manifest says, else as most of `blocks` are."""
        self._ops = ops
        self._namespace = namespace
        self._remove_corrupt = remove_corrupt
        self._block_bytes = namespace.block_bytes
        lengths = Counter(block.length_bytes for block in blocks).most_common(1)
        self._usual_bytes = lengths[0][0] if lengths else 0

    def check(self, blocks: Sequence[FoundBlock]) -> list[Outcome]:
        """Judge blocks one after the other, each on its own."""
        return [self._check(block) for block in blocks]

    def _check(self, block: FoundBlock) -> Outcome:
        try:
            fd = self._ops.open(block.path, _OPEN_FLAGS)
        except FileNotFoundError:
            return Outcome(block, Verdict.GONE)
        except OSError as error:
            return Outcome(block, Verdict.UNREADABLE, error.strerror or str(error))
        try:
            verdict, reason = self._judge(fd, block)
            if verdict is not Verdict.CORRUPT:
                return Outcome(block, verdict, reason)
            return self._corrupt(fd, block, reason)
        except FileNotFoundError:
            return Outcome(block, Verdict.GONE)
        except OSError as error:
            return Outcome(block, Verdict.UNREADABLE, error.strerror or str(error))
        finally:
            self._ops.close(fd)

    def _judge(self, fd: int, block: FoundBlock) -> tuple[Verdict, str]:
        length = self._ops.fstat(fd).st_size
        # Before the bytes: of a file that is overwritten meanwhile, they must not match.
        seal = self._ops.get_xattr(fd, ATTRIBUTE)
        wanted = self._block_bytes
        if wanted is None and seal is None:
            wanted = self._usual_bytes
        if wanted is not None and length != wanted:
            return Verdict.CORRUPT, f"{length} bytes instead of {wanted}"
        data = memoryview(bytearray(length))
        done = 0
        while done < length:
            count = self._ops.pread_into(fd, data[done:], done)
            if count == 0:
                return Verdict.CORRUPT, f"ends after {done} bytes"
            done += count
        if seal is None:
            return Verdict.UNSEALED, ""
        sealer = Sealer(self._namespace.layout_of(length))
        if seal != sealer.seal(block.key, data):
            return Verdict.CORRUPT, "wrong checksum"
        return Verdict.SEALED, ""

    def _corrupt(self, fd: int, block: FoundBlock, reason: str) -> Outcome:
        """Make sure that the path still names the file that was read, and remove it if asked."""
        status = self._ops.fstat(fd)
        if not os.path.samestat(status, self._ops.stat(block.path)):
            return Outcome(block, Verdict.GONE)
        if not self._remove_corrupt:
            return Outcome(block, Verdict.CORRUPT, reason)
        try:
            self._ops.unlink(block.path)
        except FileNotFoundError:
            return Outcome(block, Verdict.GONE)
        except OSError as error:
            reason = f"{reason}, and cannot be removed: {error.strerror or error}"
            return Outcome(block, Verdict.CORRUPT, reason)
        return Outcome(block, Verdict.CORRUPT, reason, is_removed=True)


def _batches(blocks: Sequence[FoundBlock]) -> Iterator[Sequence[FoundBlock]]:
    first, size_bytes = 0, 0
    for index, block in enumerate(blocks, 1):
        size_bytes += block.length_bytes
        if size_bytes >= BATCH_BYTES:
            yield blocks[first:index]
            first, size_bytes = index, 0
    if first < len(blocks):
        yield blocks[first:]


def _take_in(found: Verification, outcome: Outcome) -> None:
    if outcome.verdict is Verdict.GONE:
        found.gone += 1
        return
    bad = BadBlock(outcome.block.path, outcome.reason, outcome.is_removed)
    if outcome.verdict is Verdict.UNREADABLE:
        found.unreadable.append(bad)
        return
    found.checked += 1
    if outcome.verdict is Verdict.CORRUPT:
        found.corrupt.append(bad)
    elif outcome.verdict is Verdict.SEALED:
        found.sealed += 1
    else:
        found.unsealed += 1
