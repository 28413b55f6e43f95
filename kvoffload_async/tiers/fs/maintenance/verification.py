"""Verification: reads every block of a namespace and compares its digest."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from kvoffload_async.abc.maintenance import Problem
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.files.maintenance import MaintenanceIo, Verdict, Verification
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE, AttributeDigester, Origin
from kvoffload_async.tiers.fs.maintenance.namespaces import FoundNamespace
from kvoffload_async.tiers.fs.maintenance.scan import FoundBlock

BATCH_BYTES = 4 << 20
"""Bytes that a thread reads before it checks whether to stop."""


_NOT_COMPARED = {None: Verdict.WITHOUT_DIGEST, Origin.OTHER_KEY: Verdict.OTHER_KEY}


@dataclass(frozen=True, slots=True)
class BadFile:
    """A corrupt or unverifiable block, the reason, and whether it was removed."""

    path: str
    reason: str
    is_removed: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"

    @property
    def what(self) -> str:
        """Name of the block."""
        return self.path


@dataclass(slots=True, kw_only=True)
class FileVerification(Verification[BadFile]):
    """Result of reading the blocks; `gone` were removed by others meanwhile."""

    gone: int = 0

    def take_in(self, outcome: Outcome) -> Problem | None:
        """Count a block; return its problem, if any."""
        if outcome.verdict is not Verdict.GONE:
            return self.count(outcome.verdict, outcome.bad)
        self.gone += 1
        return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict on one block, and whether its file was removed."""

    block: FoundBlock
    verdict: Verdict
    reason: str = ""
    is_removed: bool = False

    @property
    def bad(self) -> BadFile:
        """The outcome as a bad file."""
        return BadFile(self.block.path, self.reason, self.is_removed)


async def verify_blocks(
    io: MaintenanceIo,
    namespace: FoundNamespace,
    blocks: Sequence[FoundBlock],
    key: IntegrityKey | None = None,
    *,
    remove_corrupt: bool = False,
) -> AsyncGenerator[Outcome, None]:
    """Read and verify blocks in parallel; optionally remove corrupt ones."""
    checker = BlockChecker(io.ops, namespace, blocks, key, remove_corrupt=remove_corrupt)
    io.control.expect(sum(block.length_bytes for block in blocks))
    async with aclosing(io.share_out(_batches(blocks), checker.check)) as checked:
        async for batch, outcomes in checked:
            io.control.advance(sum(block.length_bytes for block in batch))
            for outcome in outcomes:
                yield outcome


class BlockChecker:
    """Verifies single files. Thread-safe."""

    def __init__(
        self,
        ops: FileOps,
        namespace: FoundNamespace,
        blocks: Sequence[FoundBlock],
        key: IntegrityKey | None = None,
        *,
        remove_corrupt: bool = False,
    ) -> None:
        """Determine the block length from the manifest or, without one, from most of `blocks`.

        Args:
            ops: The system calls.
            namespace: The blocks' namespace.
            blocks: All its blocks.
            key: Integrity key of the checksums.
            remove_corrupt: Whether to remove the files of corrupt blocks.
        """
        self._key = key
        self._ops = ops
        self._namespace = namespace
        self._remove_corrupt = remove_corrupt
        self._block_bytes = namespace.block_bytes
        lengths = Counter(block.length_bytes for block in blocks).most_common(1)
        self._usual_bytes = lengths[0][0] if lengths else 0

    def check(self, blocks: Sequence[FoundBlock]) -> list[Outcome]:
        """Verify blocks one by one; a failure does not affect other blocks."""
        return [self._check(block) for block in blocks]

    def _check(self, block: FoundBlock) -> Outcome:
        try:
            fd = self._ops.open(block.path, os.O_RDONLY)
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
        except (OSError, MemoryError) as error:
            return Outcome(block, Verdict.UNREADABLE, _why(error))
        finally:
            self._ops.close(fd)

    def _judge(self, fd: int, block: FoundBlock) -> tuple[Verdict, str]:
        length = self._ops.fstat(fd).st_size
        # Read before the bytes, so that a file overwritten meanwhile does not match.
        digest = self._ops.get_xattr(fd, ATTRIBUTE)
        digester = AttributeDigester(self._namespace.layout_of(length), self._key)
        origin = None if digest is None else digester.origin_of(digest)
        if origin is Origin.NEWER:  # its blocks may have another length
            return Verdict.NEWER, ""
        wanted = self._block_bytes
        if wanted is None and digest is None:
            wanted = self._usual_bytes
        if wanted is not None and length != wanted:
            return Verdict.CORRUPT, f"{length} bytes instead of {wanted}"
        data = memoryview(bytearray(length))
        if (done := self._fill(fd, data)) < length:
            return Verdict.CORRUPT, f"ends after {done} bytes"
        if verdict := _NOT_COMPARED.get(origin):
            return verdict, ""
        if digest != digester.attribute_value(block.key, data):
            return Verdict.CORRUPT, "wrong checksum"
        return Verdict.VERIFIED, ""

    def _fill(self, fd: int, data: memoryview) -> int:
        """Read the beginning of a file; return the number of bytes read."""
        done = 0
        while done < len(data):
            count = self._ops.pread_into(fd, data[done:], done)
            if count == 0:
                break
            done += count
        return done

    def _corrupt(self, fd: int, block: FoundBlock, reason: str) -> Outcome:
        """Check that the path still names the file that was read, and remove it if requested."""
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


def _why(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):  # a sparse file can have any length
        return "more bytes than fit into memory"
    return error.strerror or str(error)


def _batches(blocks: Sequence[FoundBlock]) -> Iterator[Sequence[FoundBlock]]:
    first, size_bytes = 0, 0
    for index, block in enumerate(blocks, 1):
        size_bytes += block.length_bytes
        if size_bytes >= BATCH_BYTES:
            yield blocks[first:index]
            first, size_bytes = index, 0
    if first < len(blocks):
        yield blocks[first:]
