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
from vllm.v1.kv_offload import base

from kvoffload_async.integrations.vllm.internals import ConnectorArguments, RegisteredLayer
from kvoffload_async.integrations.vllm.row_layout import (
    announced_layout,
    layout_of_canonical_pages,
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


def announced(canonical_format="", **options):
    device = SimpleNamespace(device_type="cpu")
    around = SimpleNamespace(device_config=device)
    return announced_layout(ConnectorArguments(around, caches(**options)), canonical_format)


def test_what_is_announced_does_not_depend_on_the_number_of_blocks():
    assert announced() == announced(blocks=99)
    assert announced(packed=True) == announced(packed=True, blocks=99)


@pytest.mark.parametrize(
    "other", [{"heads": 4, "head_size": 16}, {"layout": "LBNHC"}, {"packed": True}]
)
def test_what_is_announced_tells_layouts_apart(other):
    assert announced() != announced(**other)


@pytest.mark.parametrize("canonical_format", ["v1-nhd", "v1-hnd"])
def test_a_canonical_layout_is_announced_alike_for_all_numbers_of_ranks(canonical_format):
    expected = announced(canonical_format, heads=4)
    assert announced(canonical_format, heads=1) == expected
    assert announced(canonical_format, heads=4, head_size=16) != expected
    assert announced("v1-lhbnc", heads=4) != expected
    assert announced(heads=4) != expected


def canonical(layers=None, *, canonical_format="v1-nhd", page_bytes=128, tensors=(0, 1), heads=2):
    """The digest of two layers of a rank with some heads, of pages of the same bytes for all."""
    local = page_bytes // 8 * heads
    mapping = base.CanonicalPageMapping(page_bytes, local, (), 1, 0, True)
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(torch.zeros(4, local), local) for _ in range(2)],
        [[base.CanonicalKVCacheRef(index, local, mapping) for index in tensors]],
    )
    return layout_of_canonical_pages(caches, layers or {}, GROUPS, canonical_format)


def test_canonical_pages_have_one_digest_for_all_numbers_of_ranks():
    assert canonical() == canonical(heads=4)
    assert canonical(layers()) == canonical(layers(heads=4, blocks=99), heads=4)


@pytest.mark.parametrize(
    "other",
    [
        {"layers": layers(content=4)},
        {"layers": layers(dtype=torch.bfloat16)},
        {"layers": layers(kind="B")},
        {"layers": layers(order=lambda tensor: tensor.unflatten(3, (2, 4)))},
        {"layers": None},
        {"page_bytes": 256},
        {"tensors": (0, 0)},
        {"canonical_format": "v1-hnd"},
    ],
)
def test_canonical_pages_of_another_order_have_another_digest(other):
    assert canonical(**{"layers": layers(), **other}) != canonical(layers())


def test_layers_of_pipeline_ranks_count(monkeypatch):
    before = announced()
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "6,2,4")
    assert announced() != before
