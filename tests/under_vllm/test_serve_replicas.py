"""Two data-parallel replicas of a real server: they share files, and have a slab each."""

import os

import pytest
from test_serve import (
    BLOCK_BYTES,
    OPTIONS,
    PRIMARY_BLOCKS,
    REQUESTS,
    ask_all,
    expected,  # noqa: F401 - a fixture
    model,  # noqa: F401 - a fixture
    pool,  # noqa: F401 - a fixture
    server,
    tokens_of,
)
from vllm_world import shared_files_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REPLICAS = (*OPTIONS, "--data-parallel-size", "2")


@pytest.mark.parametrize("spec", ["HostTieringOffloadingSpec", "KVOffloadSpec"])
def test_two_replicas_start_share_files_and_have_a_slab_each(
    spec,
    model,  # noqa: F811 - the fixture
    expected,  # noqa: F811 - the fixture
    pool,  # noqa: F811 - the fixture
    tmp_path,
):
    names = ("fs", "slab") if spec == "KVOffloadSpec" else ("FsTier", "SlabTier")
    tiers = [{"type": name, "root_dir": str(tmp_path / name)} for name in names]
    tiers[1]["capacity_bytes"] = 512 << 20
    if spec != "KVOffloadSpec":
        tiers = [{**tier, "module_path": server.MODULE} for tier in tiers]
    transfer = server.transfer_config(spec, tiers[0], PRIMARY_BLOCKS * BLOCK_BYTES)
    transfer["kv_connector_extra_config"]["secondary_tiers"] = tiers
    transfer["engine_id"] = f"replicas-{os.getpid()}-{spec}"

    def start():
        return server.Server(model, tmp_path / "server.log", transfer, REPLICAS)

    with start() as running:
        for _ in range(2):
            assert tokens_of(ask_all(running, pool)) == expected
    files, slab = (tmp_path / name for name in names)
    assert len(list(files.glob("*_r0"))) == 1
    assert len([one for one in slab.iterdir() if (one / "journal").stat().st_size]) == 2
    with start() as running:
        assert tokens_of(ask_all(running, pool)) == expected
        assert running.counters()["external_prefix_cache_hits"] > 0
    assert REQUESTS > 2, "both replicas are asked"
    assert shared_files_of(transfer["engine_id"]) == []
