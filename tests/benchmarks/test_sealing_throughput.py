"""What encryption costs in CPU time: tiers with encrypted and with verified blocks, in one run.

Run with `--benchmark-enable -s` for the measured sizes; as a plain test it is one small round.
"""

import os
import statistics
import time

import pytest

from kvoffload_async.abc.tier import KVIdentity
from kvoffload_async.testing.harness import TierHarness, key_of
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE
from kvoffload_async.tiers.fs.tier import FsTier
from kvoffload_async.tiers.slab.tier import SlabTier

KIB = 1024
MIB = 1024 * KIB
TIERS = {"fs": FsTier, "slab": SlabTier}


def opened(kind, folder, key_file, num_slots, block_bytes) -> TierHarness:
    options = {"root_dir": str(folder), "verify": "required", "capacity_bytes": 2 << 30}
    if key_file is not None:
        options["encryption_key_file"] = str(key_file)
    settings = TIERS[kind].declares.of(options, KVIdentity("m", run_config={"model_name": "m"}))
    return TierHarness(TIERS[kind](settings), num_slots, block_bytes)


@pytest.mark.bench
@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("block_kib", [64, 1024])
def test_encrypted_and_verified_blocks(kind, block_kib, request, tmp_path):
    try:
        os.setxattr(tmp_path, ATTRIBUTE, b"")
    except OSError:
        pytest.skip("no extended attributes here")
    key_file = tmp_path / "key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    is_measured = request.config.getoption("--benchmark-enable")
    rounds, total_bytes = (9, 32 * MIB) if is_measured else (1, 2 * MIB)
    count = total_bytes // (block_kib * KIB)
    took_s = {}
    with (
        opened(kind, tmp_path / "verified", None, count, block_kib * KIB) as verified,
        opened(kind, tmp_path / "encrypted", key_file, count, block_kib * KIB) as encrypted,
    ):
        for number in range(rounds):
            keys = [key_of(number * count + i) for i in range(count)]
            for name, harness in (("verified", verified), ("encrypted", encrypted)):
                for what in ("stores", "loads"):
                    make = harness.store_job if what == "stores" else harness.load_job
                    move = harness.tier.store if what == "stores" else harness.tier.load
                    job = make(keys, range(count))
                    begun_s = time.process_time()
                    assert harness.run(move(job)) == {}
                    took_s.setdefault((name, what), []).append(time.process_time() - begun_s)
    for what in ("stores", "loads"):
        rates = {
            name: total_bytes / MIB / statistics.median(took_s[name, what])
            for name in ("verified", "encrypted")
        }
        share = rates["encrypted"] / rates["verified"]
        shown = ", ".join(f"{name} {rate:,.0f} MiB/s" for name, rate in rates.items())
        print(f"\n{kind}, {block_kib} KiB, {what}: {shown}: {share:.2f}")  # noqa: T201 - figures
        assert share > 0
