"""One run of a real vLLM engine, as a process of its own: its settings and steps come in as JSON.

    python engine_run.py '{"model": "...", "connector": {...} | null, "steps": ["generate", ...]}'

The last line of its output is a JSON object with what was found, or, after the step "wait", the
word "waiting" while it does just that.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32  # what vLLM's attention on the CPU is made for
DEVICE_BLOCKS = 200


def main(run: dict[str, Any]) -> None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",  # block hashes are the same in the next process
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if run.get("ranks", 1) > 1 else "auto",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(run.get("processes", False))),
    }
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    connector = run.get("connector")
    settings = {
        "model": run["model"],
        "block_size": BLOCK_TOKENS,
        "disable_log_stats": False,
        "dtype": "float32",
        "enforce_eager": True,
        "kv_transfer_config": None if connector is None else KVTransferConfig(**connector),
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "seed": 0,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": run.get("ranks", 1),
    }
    llm = LLM(**settings | run.get("llm", {}))
    greedy = SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    prompts = [
        TokensPrompt(prompt_token_ids=prompt)
        for prompt in prompts_of(run.get("requests", 1), run.get("prompt_tokens", 500))
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
    found["shared_files"] = [path.name for path in Path("/dev/shm").iterdir()]
    llm.llm_engine.engine_core.shutdown()
    say(json.dumps(found))


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
