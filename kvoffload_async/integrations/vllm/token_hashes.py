"""vLLM's block hashes of a prompt, computed from its token ids by vLLM's own functions.

They are those of this process, with its seed, so they are right even if the seed is random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from types import SimpleNamespace
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvoffload_async.facade.commands import HashTokens, PromptHashes, PromptTokens


def token_hasher(
    algorithm: str, tokens_per_hash: int, tokens_per_chunk: Mapping[int, int]
) -> HashTokens:
    """Return a function that hashes prompts as vLLM does in this process.

    Args:
        algorithm: vLLM's `prefix_caching_hash_algo`.
        tokens_per_hash: Tokens per hash.
        tokens_per_chunk: KV-cache group -> tokens per block of this package.
    """
    step = lcm(*tokens_per_chunk.values())

    def hash_tokens(prompt: PromptTokens) -> PromptHashes:
        hashes = _hashes(prompt, algorithm, tokens_per_hash)
        num_tokens = len(prompt.tokens) // step * step
        return PromptHashes(
            {
                group: hashes[tokens // tokens_per_hash - 1 :: tokens // tokens_per_hash]
                for group, tokens in tokens_per_chunk.items()
            },
            num_tokens,
            hashes[num_tokens // tokens_per_hash - 1] if num_tokens else None,
        )

    return hash_tokens


def _hashes(prompt: PromptTokens, algorithm: str, tokens_per_hash: int) -> Sequence[bytes]:
    function = get_hash_fn_by_name(algorithm)
    name, path = prompt.lora or (None, None)
    request: Any = SimpleNamespace(
        mm_features=[],
        prompt_embeds=None,
        cache_salt=prompt.cache_salt,
        lora_request=SimpleNamespace(lora_name=name, lora_path=path) if prompt.lora else None,
    )
    hashes: list[Any] = []
    parent: Any = prompt.parent
    skipped = 0 if parent is None else tokens_per_hash  # only a prompt's first block has the salt
    for first in range(0, len(prompt.tokens) - tokens_per_hash + 1, tokens_per_hash):
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(
            request, skipped + first, skipped + first + tokens_per_hash, 0
        )
        tokens = prompt.tokens[first : first + tokens_per_hash]
        parent = kv_cache_utils.hash_block_tokens(function, parent, tokens, keys)
        hashes.append(parent)
    return hashes
