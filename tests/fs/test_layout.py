import json
import os
from pathlib import Path

import pytest
from fs.directories import BLOCK, FIELDS, FsDirectory
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload_async.testing.harness import content_of, key_of
from kvoffload_async.tiers.files.ops import safe_name
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE, AttributeDigester
from kvoffload_async.tiers.fs.layout import Namespace
from kvoffload_async.types import make_offload_key

ROOT = "/base/root"
HOSTILE = ["..", "../..", "/", "/etc/passwd", "a\0b", ".", "", "x" * 5000, "模型" * 300, "a\nb"]
HOSTILE += ["\ud800", "\udcff", "~", "$HOME", "a/../../b", "-rf", "\x7f\x1b[2J"]

keys = st.builds(make_offload_key, st.binary(min_size=1, max_size=80), st.integers(0, 2**32 - 1))


def test_a_block_lies_in_the_folder_of_its_first_two_digits():
    namespace = Namespace(ROOT, {"model_name": "m", "b": 1}, rank=3)
    key = make_offload_key(bytes.fromhex("0123456789abcdef"), 2)
    # sha256 of '{"b":1,"fs_layout":2,"model_name":"m"}'
    assert namespace.digest == "d15448e18c54"
    assert namespace.folder == f"{ROOT}/m_{namespace.digest}_r3"
    assert namespace.get_file_name(key) == f"{namespace.folder}/01/0123456789abcdef_g2.bin"


def test_paths_in_a_shared_directory_are_those_of_vllm():
    fields = {"model_name": "org/model", "b": 1, "a": "x"}
    namespace = Namespace(ROOT, fields, rank=3, is_vllms=True)
    key = make_offload_key(bytes.fromhex("0123456789abcdef"), 2)
    # sha256 of '{"a":"x","b":1,"model_name":"org/model"}'
    assert namespace.digest == "a70438eb8d2c"
    assert namespace.folder == f"{ROOT}/org_model_{namespace.digest}_r3"
    assert namespace.config_path == f"{ROOT}/org_model_{namespace.digest}/config.json"
    assert namespace.get_file_name(key) == f"{namespace.folder}/012/34_g2/0123456789abcdef.bin"


@given(st.permutations(["model_name", "dtype", "tp"]))
def test_the_digest_does_not_depend_on_the_order_of_fields(names):
    fields = {"model_name": "m", "dtype": "bf16", "tp": "2"}
    assert (
        Namespace(ROOT, {name: fields[name] for name in names}).digest
        == Namespace(ROOT, fields).digest
    )


@pytest.mark.parametrize("name", ["model_name", "dtype", "new"])
def test_the_digest_depends_on_every_field(name):
    fields = {"model_name": "m", "dtype": "bf16"}
    assert Namespace(ROOT, fields).digest != Namespace(ROOT, fields | {name: "other"}).digest


@pytest.mark.parametrize("model", HOSTILE)
def test_hostile_model_names_stay_inside_the_root(model):
    namespace = Namespace(ROOT, {"model_name": model})
    for path in (namespace.folder, namespace.config_path, namespace.get_file_name(key_of(1))):
        parts = path.removeprefix(f"{ROOT}/").split("/")
        assert path.startswith(f"{ROOT}/")
        assert not {"", ".", ".."} & set(parts)
        assert "\0" not in path
        assert all(len(part.encode()) <= 255 for part in parts)


@given(st.text())
@example("\ud800")
def test_any_model_name_becomes_one_component_of_bounded_length(model):
    name = safe_name(model)
    assert "/" not in name
    assert "\0" not in name
    assert len(name.encode()) <= 200


@pytest.mark.parametrize("model", HOSTILE)
def test_a_tier_with_a_hostile_model_name_writes_below_its_root_only(tmp_path, model, monkeypatch):
    directory = FsDirectory(tmp_path / "deep" / "root")
    monkeypatch.setitem(FIELDS, "model_name", model)
    directory = FsDirectory(directory.root)
    with directory.open() as harness:
        assert harness.store([key_of(1)]) == {}
        assert harness.load([key_of(1)], [5]) == {}
    assert sorted(tmp_path.iterdir()) == [tmp_path / "deep"]
    assert sorted((tmp_path / "deep").iterdir()) == [directory.root]
    config = json.loads(Path(directory.namespace.config_path).read_text(encoding="utf-8"))
    assert config["model_name"] == model


def test_models_whose_names_flatten_alike_do_not_share_a_folder():
    assert (
        Namespace(ROOT, {"model_name": "a/b"}).folder
        != Namespace(ROOT, {"model_name": "a_b"}).folder
    )


@given(keys)
def test_a_blocks_path_names_its_key(key):
    for is_vllms in (False, True):
        namespace = Namespace(ROOT, FIELDS, is_vllms=is_vllms)
        assert namespace.key_of(namespace.get_file_name(key)) == key


@pytest.mark.parametrize(
    "name",
    [
        "012/34_g0/0123.tmp",
        "012/34_g0/0124.bin/x",
        "012/35_g0/0123.bin",
        "013/34_g0/0123.bin",
        "012/34_g0/01 23.bin",
        "012/34_g+0/0123.bin",
        "012/34_g-1/0123.bin",
        "012/34_g99999999999/0123.bin",
        "012/34/0123.bin",
        "012/3_g00/0123.bin",
        "012/34_g0/.bin",
        "012/3A_g0/0123A.bin",
        "config.json",
    ],
)
def test_other_paths_name_no_key_in_vllms_layout(name):
    namespace = Namespace(ROOT, FIELDS, is_vllms=True)
    assert namespace.key_of(f"{namespace.folder}/{name}") is None


@pytest.mark.parametrize(
    "name",
    [
        "01/0123_g0.tmp",
        "01/0123_g0.bin/x",
        "02/0123_g0.bin",
        "012/34_g0/0123.bin",
        "01/01 23_g0.bin",
        "01/0123_g+0.bin",
        "01/0123_g-1.bin",
        "01/0123_g99999999999.bin",
        "01/0123.bin",
        "01/0123_g00.bin",
        "01/_g0.bin",
        "01/0123A_g0.bin",
        "01/012A_g0.bin",
        "01/0123_g0",
        "0123_g0.bin",
        "config.json",
    ],
)
def test_other_paths_name_no_key(name):
    namespace = Namespace(ROOT, FIELDS)
    assert namespace.key_of(f"{namespace.folder}/{name}") is None


def test_a_seal_is_bound_to_bytes_key_and_layout():
    def digest(number=1, content=b"x" * 100, layout="a:0:100"):
        return AttributeDigester(layout).attribute_value(key_of(number), memoryview(content))

    assert digest() == digest()
    assert digest() != digest(number=2)
    assert digest() != digest(content=b"x" * 99 + b"y")
    assert digest() != digest(layout="a:0:101")
    assert len(digest()) == 17


def test_the_layout_names_digest_rank_and_length():
    layouts = {
        Namespace(ROOT, {"model_name": model}, rank).layout_of(length)
        for model in "ab"
        for rank in (0, 1)
        for length in (BLOCK, 2 * BLOCK)
    }
    assert len(layouts) == 8


def test_a_block_of_another_rank_does_not_verify(tmp_path):
    mine, other = FsDirectory(tmp_path), FsDirectory(tmp_path, rank=1)
    key = key_of(1)
    with mine.open() as harness:
        harness.store([key])
    with other.open() as harness:
        path = other.put(key, content_of(key, BLOCK).tobytes())
        os.setxattr(path, ATTRIBUTE, mine.attribute_of(key))
        assert sorted(harness.load([key])) == [0]
