"""What an integrity key costs in CPU time: checksums with and without it, in turn, in one run.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round.
"""

import statistics
import time

import numpy as np
import pytest

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.digests import IntegrityKey, create_digester

KIB = 1024
MIB = 1024 * KIB
DIGESTERS = {
    "xxh3": create_digester("d:0:4096", None),
    "blake2b": create_digester("d:0:4096", IntegrityKey(bytes(32))),
}


def seconds(digester, blocks: np.ndarray) -> float:
    keys, rows = [key_of(number) for number in range(len(blocks))], list(map(memoryview, blocks))
    begun_s = time.thread_time()
    digester.digests(keys, rows)
    return time.thread_time() - begun_s


@pytest.mark.bench
@pytest.mark.parametrize("block_kib", [4, 64, 256, 1024])
def test_checksums_with_and_without_a_key(block_kib, request):
    is_measured = request.config.getoption("--benchmark-enable")
    rounds, total_bytes = (7, 32 * MIB) if is_measured else (1, 2 * MIB)
    shape = (total_bytes // (block_kib * KIB), block_kib * KIB)
    blocks = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    took_s = {name: [] for name in DIGESTERS}
    for _ in range(rounds):
        for name, digester in DIGESTERS.items():
            took_s[name].append(seconds(digester, blocks))
    rates = {name: total_bytes / MIB / statistics.median(s) for name, s in took_s.items()}
    shown = ", ".join(f"{name} {rate:,.0f} MiB/s" for name, rate in rates.items())
    print(f"\n{block_kib} KiB: {shown}")  # noqa: T201 - the figure that is asked for
    assert all(rate > 0 for rate in rates.values())
