"""One of several TP ranks: stores a prompt, loads it, loses a page, and looks it up again.

Arguments: a file to meet at, the kind of pool, the tier as JSON, the rank, the number of ranks.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sglang_world import PAGE_SIZE, Rank, get_storage_hash_str

PAGES, LOST = 100, 40


def main(meeting, kind, tier, number, count):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=count)
    group = dist.new_group(list(range(count)))
    is_shared = kind == "mla"
    here = Rank(
        *(kind, "layer_first", "dynamic", {"tier": tier}),
        pages=3 * PAGES + 1,
        seed=0 if is_shared else number,  # ranks of an MLA model have the same pages
        tp_group=group,
        tp_rank=number,
        tp_size=count,
    )
    tokens = list(range(PAGES * PAGE_SIZE))
    stored, _ = here.store(tokens)
    dist.barrier()
    slots, found, loaded = here.load(tokens)
    pages = range(loaded)
    report = {
        "found": found,
        "equal": loaded == PAGES
        and all(torch.equal(here.page(stored, n), here.page(slots, n)) for n in pages),
        "stored_here": here.controller.storage_backend.stats().tiers[0].stored_blocks,
    }
    dist.barrier()
    if not is_shared and number == count - 1:
        lose(here, tier, tokens)
    dist.barrier()
    report["found_after_loss"] = here.load(tokens)[1]
    here.close()
    print(json.dumps(report), flush=True)  # noqa: T201 - read by the test
    os._exit(0)  # the end of an interpreter with SGLang's packages takes seconds


def lose(here, tier, tokens):
    """Remove this rank's file of one page."""
    key = get_storage_hash_str(tokens, None, page_size=PAGE_SIZE)[LOST]
    rank = here.controller.storage_config.tp_rank
    found = [path for path in Path(tier["root_dir"]).rglob(f"*{key}*") if f"_r{rank}" in str(path)]
    assert found
    for path in found:
        path.unlink()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
