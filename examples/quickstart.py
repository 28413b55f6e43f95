"""Store four blocks, restart, and load them again: the example of the README, line by line."""

import tempfile

import numpy as np

from kvoffload_async import LookupResult, ReqContext, TieringOffloadingSpec, make_offload_key

UNDECIDED = {LookupResult.RETRY, LookupResult.HIT_PENDING}
folder = tempfile.TemporaryDirectory()
tier = {"type": "fs", "root_dir": folder.name, "model": "org/model"}
config = {"cpu_bytes_to_use": "1MiB", "block_bytes": "16KiB", "secondary_tiers": [tier]}
keys = [make_offload_key(bytes([number]) * 32) for number in range(4)]  # chained prefix hashes

with TieringOffloadingSpec(config) as spec:
    manager, request = spec.get_manager(), ReqContext("first")
    manager.on_new_request(request)
    granted = manager.prepare_store(keys, request)  # slots of the primary tier
    assert granted is not None, "no room"
    np.asarray(manager.get_primary_kv_view())[granted.store_spec.block_ids] = 7
    manager.complete_store(granted.keys_to_store, request)  # from here on they go to the files
    manager.on_request_finished(request)
    manager.on_schedule_end()  # the end of a scheduler's step; nothing above has waited

with TieringOffloadingSpec(config) as spec:  # started again: the primary tier is empty
    manager, request = spec.get_manager(), ReqContext("second")
    manager.on_new_request(request)
    while UNDECIDED & {manager.lookup(key, request) for key in keys}:
        manager.on_schedule_end()  # promotes what the lookups have found
        manager.wait_for_progress(0.1)  # a scheduler would do other work instead
    slots = manager.prepare_load(keys, request).block_ids  # pinned until complete_load
    print((np.asarray(manager.get_primary_kv_view())[slots] == 7).all())
    manager.complete_load(keys, request)
    manager.on_request_finished(request)
folder.cleanup()
