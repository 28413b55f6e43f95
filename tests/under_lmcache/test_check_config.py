"""`check-config` and LMCache, whose own parser and factory read the same JSON, agree."""

import argparse
import json

import host_configs
import pytest
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry

pytestmark = pytest.mark.filterwarnings("ignore")  # of LMCache's dependencies


def start(given):
    """Create the adapter as `lmcache server` does."""
    arguments = argparse.Namespace(l2_adapter=[json.dumps(given)])
    (adapter,) = parse_args_to_l2_adapters_config(arguments).adapters
    create_l2_adapter_from_registry(adapter).close()


@pytest.mark.parametrize("case", host_configs.OF_LMCACHE, ids=lambda case: case.name)
def test_check_config_and_lmcache_agree(tmp_path, case):
    given = host_configs.placed(case.config, tmp_path)
    assert host_configs.is_refused(start, given) is not case.is_accepted_by_host
    assert host_configs.is_accepted(given) is (case.why is None)
