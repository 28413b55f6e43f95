"""What the tests of vLLM's integration share; they are collected where vLLM is installed."""

import importlib.util
import itertools
import os
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # vllm_world and upstream_plugin


_numbers = itertools.count()
_HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if _HAS_VLLM else ["test_*.py"]

if _HAS_VLLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's and torch's own, when they are imported
        import vllm.v1.kv_offload.tiering.spec  # noqa: F401 - for the tests that import from it


@pytest.fixture
def serving():
    """Return what makes a `Serving`; all of them are shut down at the end."""
    from vllm_world import Serving

    made = []

    def make(*tiers, **config):
        engine_id = f"kvoffload-test-{os.getpid()}-{next(_numbers)}"  # names a file in /dev/shm
        made.append(Serving([dict(tier) for tier in tiers], engine_id, **config))
        return made[-1]

    yield make
    for one in reversed(made):
        one.shutdown()


@pytest.fixture
def pair(request):
    """Return what makes a `Pair`; all of them are closed at the end, and leave nothing behind."""
    from engine_world import Pair
    from vllm_world import own_id, shared_files

    made = []

    def make(tiers=(), **options):
        made.append(Pair(own_id(f"kvoffload-test-{id(request)}-{len(made)}"), tiers, **options))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()
    assert shared_files() == []


@pytest.fixture
def fs(tmp_path):
    """The JSON of our tier."""
    return {
        "type": "FsTier",
        "module_path": "kvoffload_async.integrations.vllm",
        "root_dir": str(tmp_path),
        "fingerprint": "made up",  # there is no model whose content could be known
    }


@pytest.fixture
def slab(tmp_path):
    """The JSON of our bounded tier."""
    return {
        "type": "SlabTier",
        "module_path": "kvoffload_async.integrations.vllm",
        "root_dir": str(tmp_path),
        "capacity_bytes": "8 MiB",
        "fingerprint": "made up",
        "segment_bytes": "1 MiB",
    }


@pytest.fixture(params=["fs", "slab"])
def tier(request):
    """The JSON of each of our tiers."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def trusting(fs):
    """The JSON of our tier where vLLM's own tier keeps its blocks."""
    del fs["fingerprint"]
    return {**fs, "trust_vllm_directory": True}


@pytest.fixture
def theirs(tmp_path):
    """The JSON of vLLM's own tier, on the same directory."""
    return {"type": "fs", "root_dir": str(tmp_path), "n_read_threads": 2, "n_write_threads": 2}


@pytest.fixture
def ops():
    """The system calls of `FaultyFsTier`; healed at the end."""
    from vllm_world import FaultyFsTier

    yield FaultyFsTier.ops
    FaultyFsTier.ops.heal()


@pytest.fixture
def faulty(fs, ops):
    """The JSON of our tier on those system calls."""
    return {**fs, "type": "FaultyFsTier", "module_path": "vllm_world"}
