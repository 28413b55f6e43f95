"""Rows that hold the same numbers in the same order have one digest, and no others."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

from kvoffload_async.integrations.vllm.internals import ConnectorArguments, RegisteredLayer
from kvoffload_async.integrations.vllm.row_layout import (
    announced_layout,
    layout_of_layers,
    layout_of_ranks,
)

GROUPS = (("l0", "l1"),)


def layers(*, blocks=8, heads=2, tokens=16, content=8, dtype=torch.float16, kind="A", order=None):
    """Two layers of one buffer each: shape [blocks, heads, tokens, content]."""
    found = {}
    for name in ("l0", "l1"):
        tensor = torch.zeros(blocks, heads, tokens, content, dtype=dtype)
        found[name] = RegisteredLayer(kind, (tensor if order is None else order(tensor),))
    return found


def test_the_number_of_blocks_does_not_count():
    assert layout_of_layers(layers(), GROUPS) == layout_of_layers(layers(blocks=99), GROUPS)


@pytest.mark.parametrize(
    "other",
    [
        {"heads": 4, "content": 4},
        {"heads": 4, "tokens": 8},
        {"dtype": torch.bfloat16},
        {"kind": "B"},
        {"order": lambda tensor: tensor.view(8, 16, 2, 8).transpose(1, 2)},
    ],
)
def test_the_same_bytes_in_another_order_count(other):
    assert layout_of_layers(layers(), GROUPS) != layout_of_layers(layers(**other), GROUPS)


@pytest.mark.parametrize("groups", [(("l1", "l0"),), (("l0",), ("l1",)), (("l0", "l1", "l2"),)])
def test_the_order_of_layers_and_their_groups_count(groups):
    assert layout_of_layers(layers(), GROUPS) != layout_of_layers(layers(), groups)


def test_layers_that_share_a_tensor_are_told_from_those_that_do_not():
    apart = layers()
    shared = {"l0": apart["l0"], "l1": apart["l0"]}
    assert layout_of_layers(apart, GROUPS) != layout_of_layers(shared, GROUPS)


def test_one_rank_has_the_layout_of_its_row_and_several_have_an_order():
    assert layout_of_ranks(["aa"]) == "aa"
    assert len({layout_of_ranks(ranks) for ranks in (["a", "b"], ["b", "a"], ["a", "a"])}) == 3


def caches(*, blocks=8, heads=2, head_size=32, layout="LBHNC", packed=False):
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=heads, head_size=head_size, dtype=torch.float16
    )
    page = spec.page_size_bytes
    strides = (page, 2 * page) if packed else (page * blocks, page)
    placed = KVCacheTensor(2 * page * blocks, ["l0", "l1"], *strides)
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[placed],
        kv_cache_groups=[KVCacheGroupSpec(["l0", "l1"], spec)],
        kv_cache_layout=layout,
    )


def announced(**options):
    device = SimpleNamespace(device_type="cpu")
    return announced_layout(
        ConnectorArguments(SimpleNamespace(device_config=device), caches(**options))
    )


def test_what_is_announced_does_not_depend_on_the_number_of_blocks():
    assert announced() == announced(blocks=99)
    assert announced(packed=True) == announced(packed=True, blocks=99)


@pytest.mark.parametrize(
    "other", [{"heads": 4, "head_size": 16}, {"layout": "LBNHC"}, {"packed": True}]
)
def test_what_is_announced_tells_layouts_apart(other):
    assert announced() != announced(**other)


def test_layers_of_pipeline_ranks_count(monkeypatch):
    before = announced()
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "6,2,4")
    assert announced() != before
