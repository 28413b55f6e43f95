"""What vLLM's hashes of blocks hold already: requests that differ in it never share a block."""

import itertools

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from kvoffload_async.facade.commands import PromptTokens
from kvoffload_async.integrations.vllm.token_hashes import token_hasher

TOKENS = list(range(64))
BLOCK_TOKENS = 16


def image(identifier, offset=4):
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=8),
    )


def embeddings(value):
    return {"prompt_embeds": torch.full((64, 4), value)}


REQUESTS = {
    "plain": {},
    "salt a": {"cache_salt": "a"},
    "salt b": {"cache_salt": "b"},
    "adapter x": {"lora_request": LoRARequest("x", 1, "/adapters/x")},
    "adapter y": {"lora_request": LoRARequest("y", 2, "/adapters/y")},
    "adapter x of another path": {"lora_request": LoRARequest("x", 1, "/adapters/z")},
    "salt a, adapter x": {"cache_salt": "a", "lora_request": LoRARequest("x", 1, "/adapters/x")},
    "image 1": {"mm_features": [image("1")]},
    "image 2": {"mm_features": [image("2")]},
    "image 1 elsewhere": {"mm_features": [image("1", offset=5)]},
    "embeddings 0": embeddings(0.0),
    "embeddings 1": embeddings(1.0),
}


@pytest.fixture(params=["sha256", "sha256_cbor"])
def keys_of_request(request, monkeypatch):
    """Return what makes the keys of a request with these properties."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    hash_function = get_hash_fn_by_name(request.param)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)

    def keys(properties):
        made = Request("r", TOKENS, SamplingParams(), None, block_hasher=hasher, **properties)
        return [make_offload_key(one, 0) for one in made.block_hashes]

    return keys


def test_requests_that_differ_never_share_a_block(keys_of_request):
    keys = {name: set(keys_of_request(properties)) for name, properties in REQUESTS.items()}
    assert all(len(found) == len(TOKENS) // BLOCK_TOKENS for found in keys.values())
    for (one, first), (another, second) in itertools.combinations(keys.items(), 2):
        assert not first & second, f"{one} and {another}"


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_equal_requests_share_every_block(keys_of_request, name):
    assert keys_of_request(REQUESTS[name]) == keys_of_request(REQUESTS[name])


ADAPTER = ("x", "/adapters/x")
BY_TOKENS = {
    "plain": {},
    "salt a": {"cache_salt": "a"},
    "adapter x": {"lora": ADAPTER},
    "salt a, adapter x": {"cache_salt": "a", "lora": ADAPTER},
}


@pytest.mark.parametrize("name", sorted(BY_TOKENS))
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("seed", ["0", None])
def test_token_ids_alone_give_the_hashes_that_a_request_has(name, algorithm, seed, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    hasher = get_request_block_hasher(BLOCK_TOKENS, function)
    properties = REQUESTS[name]
    hashes = Request(
        "r", TOKENS, SamplingParams(), None, block_hasher=hasher, **properties
    ).block_hashes
    hash_tokens = token_hasher(algorithm, BLOCK_TOKENS, {0: BLOCK_TOKENS, 1: 2 * BLOCK_TOKENS})
    whole = hash_tokens(PromptTokens(TOKENS[:63], **BY_TOKENS[name]))
    assert whole.hashes == {0: hashes[:3], 1: hashes[1:2]}
    assert (whole.num_tokens, whole.parent) == (32, hashes[1])
    rest = hash_tokens(PromptTokens(TOKENS[32:], whole.parent, **BY_TOKENS[name]))
    assert rest.hashes == {0: hashes[2:], 1: hashes[3:]}
    assert hash_tokens(PromptTokens(TOKENS[:15])).hashes == {0: [], 1: []}
