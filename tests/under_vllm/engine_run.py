"""One run of a real vLLM engine, as a process of its own: its settings and steps come in as JSON.

    python engine_run.py '{"model": "...", "connector": {...} | null, "steps": ["generate", ...]}'

The last line of its output is a JSON object with what was found, or, after the step "wait", the
word "waiting" while it does just that.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32  # what vLLM's attention on the CPU is made for
DEVICE_BLOCKS = 200


def main(run: dict[str, Any]) -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",  # block hashes are the same in the next process
        "VLLM_ALLOW_INSECURE_SERIALIZATION": str(int("pages" in run["steps"])),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if run.get("ranks", 1) > 1 else "auto",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(run.get("processes", False))),
    }
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVEventsConfig, KVTransferConfig

    connector = run.get("connector")
    settings = {
        "model": run["model"],
        "block_size": BLOCK_TOKENS,
        "disable_log_stats": False,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if run.get("events")
        else None,
        "kv_transfer_config": None if connector is None else KVTransferConfig(**connector),
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "seed": 0,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": run.get("ranks", 1),
    }
    llm = LLM(**settings | run.get("llm", {}))
    batches: list[Any] = []
    if run.get("events"):  # in this process, so that they can be listened to
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.kv_event_publisher.publish = batches.append
    greedy = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    prompts = [
        TokensPrompt(prompt_token_ids=prompt, **({} if salt is None else {"cache_salt": salt}))
        for prompt in prompts_of(run.get("requests", 1), run.get("prompt_tokens", 500))
        for salt in run.get("salts", [None])
    ]
    found: dict[str, Any] = {"tokens": [], "hits": []}
    for step in run["steps"]:
        if step == "generate":
            before = counter(llm, "vllm:external_prefix_cache_hits")
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            found["tokens"].append([list(output.outputs[0].token_ids) for output in outputs])
            found["hits"].append(counter(llm, "vllm:external_prefix_cache_hits") - before)
        elif step == "reset device":
            assert llm.reset_prefix_cache()
        elif step == "reset primary":
            assert llm.reset_prefix_cache(reset_connector=True)
        elif step == "pages":
            found["pages"] = canonical_pages(llm)
        elif step == "wait":
            say("waiting")
            sys.stdin.read()
        else:
            raise ValueError(step)
    found["counters"] = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if "kv" in metric.name and hasattr(metric, "value")
    }
    if run.get("events"):
        found["events"] = replayed(batches, scheduler.connector.connector_scheduler)
    found["shared_files"] = [path.name for path in Path("/dev/shm").iterdir()]
    llm.llm_engine.engine_core.shutdown()
    say(json.dumps(found))


def replayed(batches: list[Any], scheduler: Any) -> dict[str, Any]:
    """Return, by location, the hashes that events tell of, and those of the blocks that are there.

    What a chunk consists of is taken from the device's events: each names the hash before it.
    """
    from vllm.distributed.kv_events import AllBlocksCleared, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
    from vllm.v1.kv_offload.base import get_offload_block_hash

    from kvoffload_async.facade.tenants import untagged

    parents: dict[Any, Any] = {}
    told: dict[str, Counter[Any]] = {}
    for event in (event for batch in batches for event in batch.events):
        if isinstance(event, AllBlocksCleared):
            continue  # the device's
        location = told.setdefault(f"{event.medium} {event.ownership}", Counter())
        change = 1 if isinstance(event, BlockStored) else -1
        for block_hash in event.block_hashes:
            location[block_hash] += change
        if event.medium == "GPU" and isinstance(event, BlockStored):
            chain = [event.parent_block_hash, *event.block_hashes]
            parents |= dict(zip(chain[1:], chain, strict=False))

    has_tenants = scheduler.manager.manager.tenants is not None

    def hashes(keys: Any) -> list[Any]:
        found = []
        for key in map(untagged, keys) if has_tenants else keys:
            block_hash = maybe_convert_block_hash(get_offload_block_hash(key))
            for _ in range(scheduler.config.blocks_per_chunk):
                found.append(block_hash)
                block_hash = parents[block_hash]
        return sorted(found)

    engine = scheduler.manager.manager.planner
    blocks = {"CPU None": [key for key, _, refs in engine.primary.resident() if refs >= 0]}
    for tier in scheduler.manager.manager.secondary_tiers:
        blocks[f"STORAGE {tier.ownership}"] = list(tier.tier._store.catalog.keys())
    return {
        "told": {location: sorted(told.get(location, Counter()).elements()) for location in blocks},
        "there": {location: hashes(keys) for location, keys in blocks.items()},
        "removed": {location: any(n == 0 for n in told[location].values()) for location in blocks},
        "tracked": len(scheduler._events_tracker._pending_event_metadata),
        "blocks": len({key for keys in blocks.values() for key in keys}),
    }


def canonical_pages(llm: Any) -> list[str]:
    """Return the digest of each device block: layer after layer, the heads of all ranks in order.

    A page of the CPU's attention holds head after head, so it is that of one rank.
    """
    ranks = llm.collective_rpc(pages_of_rank)
    return [
        hashlib.sha256(
            b"".join(ranks[rank][layer][block] for layer in layers for rank in range(len(ranks)))
        ).hexdigest()
        for layers in [sorted(ranks[0])]
        for block in range(len(ranks[0][layers[0]]))
    ]


def pages_of_rank(worker: Any) -> dict[str, list[bytes]]:
    """Return the pages of a worker's layers, by name. Runs in the worker's process."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    return {
        name: [page.numpy().tobytes() for page in layer.kv_cache] for name, layer in layers.items()
    }


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def prompts_of(count: int, tokens: int) -> list[list[int]]:
    """Return prompts that have nothing in common."""
    return [
        [random.Random(seed).randrange(3, 500) for seed in range(first, first + tokens)]
        for first in range(0, count * 100_000, 100_000)
    ]


def counter(llm: Any, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
