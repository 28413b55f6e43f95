"""Which bytes are a block, and which block goes with which slot."""

import numpy as np
import pytest
import torch
from transport.worlds import LOAD, STORE, Device, Geometry, Shape, Wanted, copies_of, simple

from kvoffload_async.abc.transport import group_copies
from kvoffload_async.errors import ConfigError, TransportError
from kvoffload_async.transport.layout import register_kv_caches
from kvoffload_async.types import CPULoadStoreSpec, GPULoadStoreSpec, as_block_ids

# -- tensors ------------------------------------------------------------------------------------


def only_table(tensor, block_dim=0):
    ((table,),) = register_kv_caches({"l": tensor}, block_dim=block_dim).groups
    return table


@pytest.mark.parametrize(
    ("dtype", "item_bytes"),
    [(torch.bfloat16, 2), (torch.float8_e4m3fn, 1), (torch.int8, 1), (torch.float32, 4)],
)
def test_a_page_is_the_bytes_of_a_block_whatever_the_dtype(dtype, item_bytes):
    tensor = torch.zeros(5, 2, 3, dtype=dtype)
    table = only_table(tensor)
    assert table.pages.shape == (5, 6 * item_bytes)
    assert table.pages.dtype is torch.uint8
    assert table.page_bytes == 6 * item_bytes


def test_pages_are_views_of_the_callers_memory():
    tensor = torch.zeros(4, 8, dtype=torch.int8)
    table = only_table(tensor[1:])
    table.pages[0] = 7
    assert tensor[1].tolist() == [7] * 8
    assert tensor[0].tolist() == [0] * 8


def test_a_tensor_that_needs_gradients_is_only_looked_at():
    pages = only_table(torch.zeros(2, 4, requires_grad=True)).pages
    assert not pages.requires_grad


def test_what_comes_before_the_block_dimension_makes_tables_of_its_own():
    tensor = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4)
    ((keys, values),) = register_kv_caches({"l": tensor}, block_dim=1, blocks_per_chunk=2).groups
    assert keys.pages.tolist() == tensor[0].tolist()
    assert values.pages.tolist() == tensor[1].tolist()
    assert (keys.offset_bytes, values.offset_bytes) == (0, 8)


def test_rows_may_be_strided():
    wide = torch.arange(20, dtype=torch.uint8).view(4, 5)
    table = only_table(wide[:, 1:4])
    assert table.pages[2].tolist() == [11, 12, 13]
    table.pages[2] = 0
    assert wide[2].tolist() == [10, 0, 0, 0, 14]


@pytest.mark.parametrize(
    ("tensor", "block_dim", "message"),
    [
        (torch.zeros(4, 3, 5).transpose(1, 2), 0, "are not contiguous.*another block_dim"),
        (torch.zeros(3, 4, 5).transpose(0, 1), 0, "are not contiguous"),
        (torch.zeros(4, 4, dtype=torch.complex64).conj(), 0, "lazy conjugation.*is a view of"),
        (torch.zeros(4, 4, dtype=torch.complex64).conj().imag, 0, "lazy negation"),
        (torch.eye(4).to_sparse(), 0, "layout torch.sparse_coo.*dense"),
        (torch.zeros(1, 6).expand(4, 6), 0, "overlap"),
        (torch.zeros(8), 0, "no block pages"),
        (torch.zeros(2, 8), 1, "no block pages"),
        (torch.zeros(0, 8), 0, "no block pages"),
        (torch.zeros(4, 0), 0, "no block pages"),
        (torch.zeros(4, 8), -1, "block_dim=-1"),
    ],
)
def test_a_layout_that_cannot_be_addressed_by_block_is_refused(tensor, block_dim, message):
    with pytest.raises(ConfigError, match=message):
        only_table(tensor, block_dim)


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ([torch.zeros(4, 8)], r"kv_caches: list is not valid.*\{\"layer0\": tensor\}"),
        (torch.zeros(4, 8), "kv_caches: Tensor is not valid; give a mapping"),
        ({"l": np.zeros((4, 8))}, r"kv_caches\['l'\]: ndarray is not a tensor.*from_numpy"),
        ({"l": [torch.zeros(4, 8)] * 2}, r"kv_caches\['l'\]: list is.*name of its own.*'l\.0'"),
        ({"l": (torch.zeros(4, 8),)}, r"kv_caches\['l'\]: tuple is not a tensor"),
        ({"l": None}, r"kv_caches\['l'\]: NoneType is not a tensor; give a torch.Tensor"),
        (
            {"l": torch.zeros(2, 6, 16, 8)},
            r"kv_caches\['l'\]: shape \(2, 6, 16, 8\) looks like key and value.*block_dim=1",
        ),
        (
            {"a": torch.zeros(4, 8), "b": torch.zeros(6, 8)},
            r"layers differ in device blocks along dimension 0 \('a' has 4, 'b' has 6\).*block_dim",
        ),
    ],
)
def test_caches_that_are_no_tensors_by_block_are_refused_with_the_remedy(caches, message):
    with pytest.raises(ConfigError, match=message):
        register_kv_caches(caches)


def test_two_device_blocks_are_told_from_key_and_value_by_the_caller():
    tensor = torch.zeros(2, 6, 16, 8)
    ((pages,),) = register_kv_caches({"l": tensor}, block_dim=0).groups
    assert pages.pages.shape == (2, 6 * 16 * 8 * 4)
    ((only,),) = register_kv_caches({"l": tensor[:1]}).groups
    assert len(only.pages) == 1


def test_layers_and_key_and_value_may_lie_before_the_blocks():
    tensor = torch.arange(3 * 2 * 4 * 8, dtype=torch.uint8).reshape(3, 2, 4, 8)
    (tables,) = register_kv_caches({"l": tensor}, block_dim=2).groups
    assert [table.offset_bytes for table in tables] == [0, 8, 16, 24, 32, 40]
    assert torch.equal(tables[3].pages, tensor[1, 1])


def test_groups_may_have_different_numbers_of_blocks():
    caches = {"a": torch.zeros(4, 8), "b": torch.zeros(6, 8)}
    first, second = register_kv_caches(caches, [["a"], ["b"]]).groups
    assert (len(first[0].pages), len(second[0].pages)) == (4, 6)


def test_a_single_block_has_no_stride_to_be_wrong():
    assert only_table(torch.zeros(1, 6).expand(1, 6)).pages.shape == (1, 24)


def test_chunks_need_blocks():
    with pytest.raises(ConfigError, match="blocks_per_chunk=0"):
        register_kv_caches({"l": torch.zeros(4, 8)}, blocks_per_chunk=0)


def test_an_unknown_layer_is_named():
    with pytest.raises(ConfigError, match="'m'"):
        register_kv_caches({"l": torch.zeros(4, 8)}, [["l"], ["m"]])


@pytest.mark.parametrize("groups", [[], [[]]])
def test_there_must_be_a_tensor(groups):
    with pytest.raises(ConfigError, match="on 0"):
        register_kv_caches({"l": torch.zeros(4, 8)}, groups)


def test_all_tensors_are_on_one_device():
    caches = {"a": torch.zeros(4, 8), "b": torch.zeros(4, 8, device="meta")}
    with pytest.raises(ConfigError, match="on 2"):
        register_kv_caches(caches)
    layout = register_kv_caches(caches, [["a"]])
    assert layout.device == torch.device("cpu")


def test_groups_have_offsets_of_their_own_and_the_largest_decides_what_a_slot_must_hold():
    caches = {
        "a": torch.zeros(4, 8, dtype=torch.uint8),
        "b": torch.zeros(4, 2, dtype=torch.int16),
        "c": torch.zeros(6, 5, dtype=torch.uint8),
    }
    layout = register_kv_caches(caches, [["a", "b"], ["c"]], blocks_per_chunk=3)
    assert [[t.offset_bytes for t in group] for group in layout.groups] == [[0, 24], [0]]
    assert layout.chunk_bytes == 36
    layout.require_room(40, 4)
    for slot_bytes, offset in [(40, 5), (35, 0), (40, -1)]:
        with pytest.raises(ConfigError, match="does not hold a chunk of 36"):
            layout.require_room(slot_bytes, offset)


# -- which block goes where ---------------------------------------------------------------------


def parts_of(wanted, per_chunk):
    return [
        (p.blocks.tolist(), p.slots.tolist(), p.positions.tolist())
        for p in group_copies(copies_of(LOAD, wanted), per_chunk)
    ]


def test_whole_chunks():
    assert parts_of([Wanted((5, 6, 7, 8), 0, (2, 9))], 2) == [
        ([5, 6, 7, 8], [2, 2, 9, 9], [0, 1, 0, 1])
    ]


def test_a_first_block_inside_a_chunk():
    # Logical blocks 5, 6, 7 of the request: the last position of a chunk of three, then two more.
    assert parts_of([Wanted((1, 2, 3), 5, (4, 0))], 3) == [([1, 2, 3], [4, 0, 0], [2, 0, 1])]


def test_a_last_chunk_that_is_cut_short():
    assert parts_of([Wanted((1, 2, 3), 0, (4, 0))], 2) == [([1, 2, 3], [4, 4, 0], [0, 1, 0])]


def test_several_groups_share_the_lists_one_after_the_other():
    wanted = [Wanted((1, 2), 1, (7, 3)), Wanted((), 0, ()), Wanted((9,), 2, (5,))]
    assert parts_of(wanted, 2) == [
        ([1, 2], [7, 3], [1, 0]),
        ([], [], []),
        ([9], [5], [0]),
    ]


def test_without_groups_it_is_one_that_begins_with_a_chunk():
    copies = simple(STORE, (3, 4), (1,))
    bare = GPULoadStoreSpec(copies.device.block_ids)
    (part,) = group_copies(type(copies)(STORE, bare, copies.host), 2)
    assert part.positions.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("blocks", "sizes", "firsts", "slots", "message"),
    [
        ((1, 2), (1,), (0,), (0,), "do not describe"),
        ((1, 2), (2,), (0, 0), (0,), "do not describe"),
        ((1, 2), (2,), (1,), (0,), "2 slots are needed for a group, 1"),
        ((1, 2), (2,), (0,), (0, 1), "2 slots are given, 1 are needed"),
    ],
)
def test_numbers_that_do_not_go_together_are_an_error(blocks, sizes, firsts, slots, message):
    copies = type(simple(STORE, (), ()))(
        STORE,
        GPULoadStoreSpec(as_block_ids(blocks), sizes, firsts),
        CPULoadStoreSpec(as_block_ids(slots)),
    )
    with pytest.raises(ValueError, match=message):
        group_copies(copies, 2)
    layout = register_kv_caches({"l": torch.zeros(4, 8)}, blocks_per_chunk=2)
    with pytest.raises(TransportError, match=message):
        layout.resolve(copies, 4)


@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        ((1, 12), (0, 1), r"no device block \[12\]: there are 12"),
        ((-1, 1), (0, 1), r"no device block \[-1\]"),
        ((0, 1), (0, 24), r"no slot \[24\]: there are 24"),
        ((0, 1), (-3, 0), r"no slot \[-3\]"),
    ],
)
def test_indices_are_checked_before_anything_is_copied(blocks, slots, message):
    device = Device(Geometry(((Shape(),),)))
    with pytest.raises(TransportError, match=message):
        device.layout.resolve(simple(STORE, blocks, slots), device.geometry.slots)


def test_the_groups_of_a_transfer_are_those_of_the_layout():
    device = Device()
    with pytest.raises(TransportError, match="1 groups are given, expected 2"):
        device.layout.resolve(simple(STORE, (0,), (0,)), 16)


def test_the_bytes_of_a_transfer_are_those_of_its_blocks():
    device = Device()
    parts = device.layout.resolve(
        copies_of(STORE, [Wanted((0, 1), 0, (0, 1)), Wanted((5,), 0, (2,))]), 16
    )
    assert device.layout.num_bytes(parts) == 2 * (6 + 10) + 4
    assert np.concatenate([p.blocks for p in parts]).tolist() == [0, 1, 5]
