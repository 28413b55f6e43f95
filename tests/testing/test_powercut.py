"""What a disk may have after a power cut, as recorded."""

import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from power_cut import PAGE_BYTES, MetadataOrder, PowerCuts, RecordingFileOps

ORDERED, UNORDERED = MetadataOrder.JOURNALLED, MetadataOrder.UNORDERED


@pytest.fixture
def ops(tmp_path) -> RecordingFileOps:
    return RecordingFileOps(str(tmp_path / "work"))


def put(ops, name: str, content: bytes, *, sync: bool = False) -> None:
    fd = ops.open(f"{ops._root}/{name}", os.O_RDWR | os.O_CREAT)
    ops.pwrite(fd, memoryview(content), 0)
    if sync:
        ops.fdatasync(fd)
    ops.close(fd)


def sync(ops, name: str = "") -> None:
    path = Path(ops._root, name)
    fd = ops.open(str(path), os.O_RDONLY | (os.O_DIRECTORY if path.is_dir() else 0))
    ops.fdatasync(fd)
    ops.close(fd)


def after(ops, order, *, limit: int = 4096) -> list[dict[str, bytes]]:
    """Return every state after the last step, as name -> content."""
    cuts = PowerCuts(ops.recording, order)
    found = []
    for state in cuts.all_states(ops.recording.num_steps, limit, random.Random(1)):
        folder = Path(tempfile.mkdtemp(dir=Path(ops._root).parent)) / "state"
        state.build(folder)
        found.append(tree(folder))
    return found


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"/"
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("order", MetadataOrder)
def test_a_file_that_nobody_waited_for_may_be_absent_empty_or_whole(ops, order):
    put(ops, "a", b"x" * 100)
    assert {state.get("a") for state in after(ops, order)} >= {None, b"", b"x" * 100}


def test_a_file_that_was_waited_for_is_whole_and_has_a_name_only_with_one_log(ops):
    put(ops, "a", b"x" * 100, sync=True)
    assert {state.get("a") for state in after(ops, ORDERED)} == {b"x" * 100}
    assert {state.get("a") for state in after(ops, UNORDERED)} == {None, b"x" * 100}
    sync(ops)
    assert {state.get("a") for state in after(ops, UNORDERED)} == {b"x" * 100}


@pytest.mark.parametrize("order", MetadataOrder)
def test_a_name_may_come_before_the_bytes(ops, order):
    put(ops, "a.tmp", b"x" * 100)
    ops.rename(f"{ops._root}/a.tmp", f"{ops._root}/a")
    assert {state.get("a") for state in after(ops, order)} >= {None, b"", b"x" * 100}


def test_pages_come_in_any_order_and_may_be_torn_between_sectors(ops):
    put(ops, "a", bytes(2 * PAGE_BYTES), sync=True)
    put(ops, "a", b"x" * 2 * PAGE_BYTES)
    found = {state["a"] for state in after(ops, ORDERED)}
    none, whole = bytes(PAGE_BYTES), b"x" * PAGE_BYTES
    torn = b"x" * 512 + bytes(PAGE_BYTES - 512)
    assert found >= {none + none, none + whole, whole + none, whole + whole, whole + torn}


@pytest.mark.parametrize("order", MetadataOrder)
def test_what_is_written_twice_is_there_as_it_was_at_some_moment(ops, order):
    put(ops, "a", b"0" * 600, sync=True)
    sync(ops)
    put(ops, "a", b"1" * 100)
    put(ops, "a", b"2" * 50)
    moments = [b"0" * 600, b"1" * 100 + b"0" * 500, b"2" * 50 + b"1" * 50 + b"0" * 500]
    assert {state["a"] for state in after(ops, order)} >= set(moments)
    assert not any(b"2" in state["a"] and b"1" not in state["a"] for state in after(ops, order))


def test_names_of_one_log_are_a_prefix_and_others_are_not(ops):
    for name in ("a", "b"):
        ops.mkdir(f"{ops._root}/{name}")
    assert not any("b" in state and "a" not in state for state in after(ops, ORDERED))
    assert any("b" in state and "a" not in state for state in after(ops, UNORDERED))


@pytest.mark.parametrize("order", MetadataOrder)
def test_a_rename_is_whole_or_not_at_all(ops, order):
    put(ops, "a", b"1", sync=True)
    put(ops, "b", b"2", sync=True)
    sync(ops)
    ops.rename(f"{ops._root}/a", f"{ops._root}/b")
    found = after(ops, order)
    assert all(state in ({"a": b"1", "b": b"2"}, {"b": b"1"}) for state in found)
    assert len(found) == 2


@pytest.mark.parametrize("order", MetadataOrder)
def test_nothing_that_was_cut_off_comes_back_with_a_longer_file(ops, order):
    put(ops, "a", b"x" * 600, sync=True)
    fd = ops.open(f"{ops._root}/a", os.O_RDWR)
    ops.truncate(fd, 100)
    ops.fallocate(fd, 600)
    ops.close(fd)
    sync(ops, "a")
    sync(ops)
    assert {state["a"] for state in after(ops, order)} == {b"x" * 100 + bytes(500)}


@pytest.mark.parametrize("order", MetadataOrder)
def test_an_attribute_is_not_covered_by_a_wait_for_the_bytes(ops, order):
    put(ops, "a", b"x", sync=True)
    sync(ops)
    fd = ops.open(f"{ops._root}/a", os.O_RDWR)
    ops.set_xattr(fd, "user.k", b"v")
    ops.fdatasync(fd)
    ops.close(fd)
    cuts = PowerCuts(ops.recording, order)
    assert len(cuts.pending(ops.recording.num_steps)) == 1


def test_what_was_there_at_the_beginning_stays(tmp_path):
    (tmp_path / "work/folder").mkdir(parents=True)
    (tmp_path / "work/folder/a").write_bytes(b"y" * 5000)
    os.setxattr(tmp_path / "work/folder/a", "user.k", b"v")
    ops = RecordingFileOps(str(tmp_path / "work"))
    assert after(ops, UNORDERED) == [{"folder": b"/", "folder/a": b"y" * 5000}]
    (made,) = tmp_path.glob("*/state/folder/a")
    assert os.getxattr(made, "user.k") == b"v"


def test_marks_are_those_before_the_cut(ops):
    ops.mark("before")
    ops.mkdir(f"{ops._root}/a")
    ops.mark("after")
    assert ops.recording.marked(0) == ["before"]
    assert ops.recording.marked(1) == ["before", "after"]


def test_where_there_are_too_many_states_some_are_drawn(ops):
    put(ops, "a", os.urandom(12 * PAGE_BYTES))
    found = after(ops, ORDERED, limit=100)
    assert 50 < len(found) <= 100
    assert {} in found
    assert max(len(state.get("a", b"")) for state in found) == 12 * PAGE_BYTES


names = st.sampled_from(["a", "b", "d/a", "d/b"])
changes = st.lists(
    st.one_of(
        st.tuples(st.just("put"), names, st.binary(min_size=1, max_size=40), st.integers(0, 5000)),
        st.tuples(st.just("cut"), names, st.integers(0, 6000)),
        st.tuples(st.just("allocate"), names, st.integers(1, 6000)),
        st.tuples(st.just("rename"), names, names),
        st.tuples(st.just("unlink"), names),
        st.tuples(st.just("sync"), st.sampled_from(["a", "d", ""])),
    ),
    max_size=12,
)


def change(ops, kind: str, name: str, *rest) -> None:
    path = f"{ops._root}/{name}".rstrip("/")
    if kind == "rename":
        ops.rename(path, f"{ops._root}/{rest[0]}")
    elif kind == "unlink":
        ops.unlink(path)
    elif kind == "sync":
        sync(ops, name)
    else:
        fd = ops.open(path, os.O_RDWR | os.O_CREAT)
        if kind == "put":
            ops.pwritev(fd, [memoryview(rest[0])], rest[1])
        elif kind == "cut":
            ops.truncate(fd, rest[0])
        else:
            ops.fallocate(fd, rest[0])
        ops.close(fd)


@given(changes, st.sampled_from(MetadataOrder), st.randoms(use_true_random=False))
def test_without_a_loss_a_state_is_what_was_really_there(tmp_path_factory, todo, order, draw):
    folder = tmp_path_factory.mktemp("cuts")
    ops = RecordingFileOps(str(folder / "work"))
    ops.make_folders(f"{ops._root}/d")
    for step in todo:
        try:
            change(ops, *step)
        except FileNotFoundError:
            continue
    cuts = PowerCuts(ops.recording, order)
    whole = next(iter(cuts.all_states(ops.recording.num_steps, 4, draw)))
    states = [whole, *(cuts.sample(ops.recording.num_steps, draw) for _ in range(3))]
    for number, state in enumerate(states):
        state.build(folder / str(number))
        if not state.lost:
            assert tree(folder / str(number)) == tree(folder / "work")
    assert any(not state.lost for state in states[:1])
