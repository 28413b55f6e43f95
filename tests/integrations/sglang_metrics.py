"""A rank that stores a few pages, and is asked for its metrics as by SGLang's scheduler.

Argument: the rank.
"""

import hashlib
import sys
from types import ModuleType, SimpleNamespace

from integrations import sglang_protocol
from integrations.sglang_protocol import HostPool

from kvoffload_async.observe import prometheus


def main(rank):
    prometheus._PERIOD_S = 0.0
    module_name = "sglang.srt.observability.metrics_collector"
    sys.modules[module_name] = metrics = ModuleType(module_name)
    lists = ("prefetch_pgs", "prefetch_bandwidth", "backup_pgs", "backup_bandwidth")
    metrics.StorageMetrics = lambda: SimpleNamespace(**{name: [] for name in lists})
    with sglang_protocol.sglang() as sglang:
        own = {"tier": {"type": "example"}, "interface_v1": 1}
        ranks = sglang_protocol.RANKS | {"tp_rank": rank, "tp_size": 2}
        ranks["enable_storage_metrics"] = True
        config = sglang.HiCacheStorageConfig(**ranks, extra_config=own)
        backend = sglang_protocol.backend_class()(config, {})
        pool = HostPool(8)
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        for number in range(2 + rank):  # counted from one reading to the next
            key = hashlib.sha256(b"%d" % number).hexdigest()
            assert backend.batch_set_v1([key], pool.indices([number])) == [True]
            assert backend.get_stats().backup_pgs == [1]
        backend.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
