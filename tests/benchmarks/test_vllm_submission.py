"""What a job costs vLLM's scheduler to submit to one of our tiers, over the baseline.

The baseline is a job object made of what vLLM gives: the same keys, a copy of the slots. Both sides
alternate in one process, so the ratio hardly depends on the machine: about 3, and 14 with a check
of each key and a conversion of each slot. Nothing is asserted about time.

    pytest tests/benchmarks/test_vllm_submission.py --benchmark-enable -s

Collected where vLLM is installed.
"""

import importlib.util
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvoffload_async.types import JobMetadata, ReqContext

pytestmark = [
    pytest.mark.bench,
    pytest.mark.filterwarnings("ignore"),  # vLLM's and torch's own, when they are imported
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
NUM_KEYS = 256


@pytest.fixture
def serving(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "under_vllm"))
    from vllm_world import Serving

    tier = {
        "type": "SlabTier",
        "module_path": "kvoffload_async.integrations.vllm",
        "root_dir": str(tmp_path),
        "capacity_bytes": "16 MiB",
        "segment_bytes": "1 MiB",
        "fingerprint": "made up",
    }
    serving = Serving([tier], f"kvoffload-bench-{tmp_path.name}", slots=NUM_KEYS)
    yield serving
    serving.shutdown()


def seconds(call, *args):
    begun_s = time.perf_counter()
    call(*args)
    return time.perf_counter() - begun_s


@pytest.mark.parametrize("is_promotion", [False, True], ids=["store", "load"])
def test_submitting_a_job_of_256_keys_over_the_floor(serving, request, is_promotion):
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm_world import keys_of

    tier, ours = serving.tier, ReqContext("baseline")
    keys, slots = tuple(keys_of(*range(NUM_KEYS))), np.arange(NUM_KEYS, dtype=np.int32)
    context = serving.request()
    submit = tier.submit_load if is_promotion else tier.submit_store

    def baseline(job):
        JobMetadata(job.job_id, job.keys, job.chunk_ids.copy(), job.is_promotion, ours, 1.0)

    if is_promotion:
        tier.submit_store(TransferJob(0, keys, slots, False, context, time.monotonic()))
    pairs, rounds = [], 300 if request.config.getoption("benchmark_enable") else 1
    for number in range(1, 1 + rounds):
        tier.drain_jobs()
        assert all(result.success for result in tier.get_finished_jobs())
        job = TransferJob(number, keys, slots, is_promotion, context, time.monotonic())
        calls = (submit, baseline) if number % 2 else (baseline, submit)
        took = {call: seconds(call, job) for call in calls}
        pairs.append((took[submit], took[baseline]))
        tier.on_schedule_end(None)
    tier.drain_jobs()
    (last,) = tier.get_finished_jobs()
    assert last.success
    submitted, least = (statistics.median(side) * 1e6 for side in zip(*pairs, strict=True))
    print(  # noqa: T201 - the figures are what this is for
        f"\n{request.node.name}: {submitted:.1f} us, the job alone {least:.1f} us, "
        f"ratio {statistics.median(mine / other for mine, other in pairs):.1f}"
    )
