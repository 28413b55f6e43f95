"""`check-config` and SGLang, whose own parser and factory read the same JSON, agree."""

import json

import host_configs
import pytest
import sglang_world  # noqa: F401 - its stand-ins are needed below
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

ONE_RANK = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0}
ONE_RANK |= {"attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False}
ONE_RANK |= {"is_page_first_layout": True, "model_name": "org/model"}


def start(given):
    """Create the backend as a rank's controller does."""
    extra, *_ = HybridCacheController.parse_storage_backend_extra_config(json.dumps(given))
    config = HiCacheStorageConfig(**ONE_RANK, extra_config=extra)
    StorageBackendFactory.create_backend("dynamic", config, None)


@pytest.mark.parametrize("case", host_configs.OF_SGLANG, ids=lambda case: case.name)
def test_check_config_and_sglang_agree(tmp_path, case):
    given = host_configs.placed(case.config, tmp_path)
    assert host_configs.is_refused(start, given) is not case.is_accepted_by_host
    assert host_configs.is_accepted(given) is (case.why is None)
