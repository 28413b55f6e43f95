import json
from pathlib import Path

import numpy as np
import pytest
from faulty_files import FaultyFileOps
from fs.places import BLOCK

from kvoffload_async import (
    ConfigError,
    FileSystemTierManager,
    OffloadConfig,
    SecondaryTierFactory,
    TieringOffloadingSpec,
)
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.tiers.fs.outcome import Verify
from kvoffload_async.types import Locality


@pytest.fixture
def view():
    buffer = PrimaryBuffer(4, BLOCK)
    yield buffer.view
    assert buffer.release()


def make(view, config: dict, spec: object = None):
    return SecondaryTierFactory.create_secondary_tier(
        {"type": "fs", "model": "test", **config}, view, spec
    )


# option, value, what the message must say besides the option and the value
BAD = [
    ("root_dir", "relative/path", "absolute path; write '/"),
    ("root_dir", "", "absolute path"),
    ("root_dir", "a\0b", "absolute path"),
    ("root_dir", 7, "absolute path"),
    ("root_dir", None, "absolute path"),
    ("root_dir", "/\ud800", "absolute path"),
    ("verify", "requird", "did you mean 'required'"),
    ("verify", "", "when_present"),
    ("verify", None, "when_present"),
    ("verify", ["off"], "when_present"),
    ("capacity_bytes", 0, "positive"),
    ("capacity_bytes", "12 parsec", "number of bytes"),
    ("capacity_bytes", 1, "give at least"),
    ("capacity_bytes", True, "positive"),
    ("eviction_policy", "lrru", "did you mean 'lru'"),
    ("eviction_policy", 3, "a name"),
    ("high_watermark", 1.5, "at most 1"),
    ("high_watermark", "x", "at most 1"),
    ("low_watermark", 0, "above 0"),
    ("direct_io", "yes", "true or false"),
    ("fsync", 1, "true or false"),
    ("reuse_inodes", None, "true or false"),
    ("rescan_interval_s", 0, "positive number of seconds"),
    ("rescan_interval_s", "1s", "positive number of seconds"),
    ("io_timeout_s", -1, "positive number of seconds"),
    ("n_read_threads", 0, "at least 1"),
    ("n_write_threads", "two", "at least 1"),
    ("locality", "REMOT", "did you mean 'REMOTE'"),
    ("rank", -1, "at least 0"),
    ("model", "", "a name"),
    ("run_config", "text", "an object"),
    ("run_config", {}, "an object"),
    ("run_config", {"a": object()}, "cannot be written as JSON"),
    ("run_config", {"a": 1, 2: 1}, "cannot be written as JSON"),
]


@pytest.mark.parametrize(("option", "value", "remedy"), BAD)
def test_a_bad_option_is_refused_with_key_value_and_remedy(view, tmp_path, option, value, remedy):
    config = {"root_dir": str(tmp_path), option: value}
    with pytest.raises(ConfigError) as raised:
        make(view, config)
    message = str(raised.value)
    assert option in message
    assert remedy in message
    if value:
        shown = message.replace("\\\\", "\\")
        assert repr(value) in message or str(value) in shown


def test_an_unknown_option_is_refused_with_the_nearest(view, tmp_path):
    with pytest.raises(ConfigError, match=r"'capacity_byte' \(did you mean 'capacity_bytes'\?\)"):
        make(view, {"root_dir": str(tmp_path), "capacity_byte": 1})
    with pytest.raises(ConfigError) as raised:
        make(view, {"root_dir": str(tmp_path), "xyz": 1})
    assert "rescan_interval_s" in str(raised.value)
    assert "ops" not in str(raised.value).split(": ")[-1].split(", ")


def test_watermarks_in_the_wrong_order_are_refused(view, tmp_path):
    with pytest.raises(ConfigError, match=r"low_watermark: 0\.9 is above high_watermark=0\.8"):
        make(view, {"root_dir": str(tmp_path), "low_watermark": 0.9, "high_watermark": 0.8})


def test_watermarks_that_are_the_same_are_fine(view, tmp_path):
    options = {"capacity_bytes": "1MiB", "low_watermark": 0.9, "high_watermark": 0.9}
    make(view, {"root_dir": str(tmp_path), **options}).shutdown()


@pytest.mark.parametrize(
    "option", [{"n_write_threads": "two"}, {"n_read_threads": 0}, {"io_timeout_s": -1}]
)
def test_what_every_tier_takes_is_checked_before_anything_is_made(view, tmp_path, option):
    root = tmp_path / "new"
    with pytest.raises(ConfigError, match=f"^{next(iter(option))}: "):
        FileSystemTierManager(None, view, model="test", root_dir=str(root), **option)
    assert not root.exists()


@pytest.mark.parametrize("call", ["make_folders", "mkdir", "open"])
def test_a_directory_that_cannot_be_written_is_refused(view, tmp_path, call):
    ops = FaultyFileOps()
    ops.fail(13, on=call)
    with pytest.raises(ConfigError) as raised:
        FileSystemTierManager(None, view, model="test", root_dir=str(tmp_path / "r"), ops=ops)
    assert "root_dir" in str(raised.value)
    assert str(tmp_path / "r") in str(raised.value)
    assert "may write" in str(raised.value)
    assert not ops.open_fds


def test_a_root_that_is_a_file_is_refused(view, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="root_dir"):
        make(view, {"root_dir": str(tmp_path / "file")})


def test_required_checksums_need_a_filesystem_with_attributes(view, tmp_path):
    ops = FaultyFileOps()
    ops.fail(95, on="set_xattr")
    with pytest.raises(ConfigError, match="verify: 'required' needs extended attributes"):
        FileSystemTierManager(
            None, view, model="test", root_dir=str(tmp_path), verify="required", ops=ops
        )
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_old_name_still_works_with_a_warning(view, tmp_path):
    with pytest.warns(DeprecationWarning, match="'fs_python' is called 'fs' now"):
        tier = SecondaryTierFactory.create_secondary_tier(
            {"type": "fs_python", "root_dir": str(tmp_path), "model": "test"}, view, None
        )
    assert isinstance(tier, FileSystemTierManager)
    assert tier.tier_type == "fs"
    tier.shutdown()


def test_every_option_reaches_the_tier(view, tmp_path):
    tier = make(
        view,
        {
            "root_dir": f"{tmp_path}/a/../b/",
            "model": "org/model",
            "rank": 2,
            "run_config": {"dtype": "bf16"},
            "verify": "required",
            "capacity_bytes": "1MiB",
            "eviction_policy": "arc",
            "high_watermark": 0.9,
            "low_watermark": 0.5,
            "direct_io": True,
            "fsync": True,
            "rescan_interval_s": 5,
            "locality": "REMOTE",
            "n_read_threads": 3,
            "n_write_threads": 2,
        },
    )
    settings = tier.tier._settings
    assert settings.root_dir == f"{tmp_path}/b"
    assert settings.run_config == {"dtype": "bf16", "model_name": "org/model"}
    assert settings.rank == 2
    assert settings.verify is Verify.REQUIRED
    assert settings.space.capacity_bytes == 1 << 20
    assert (settings.space.high_watermark, settings.space.low_watermark) == (0.9, 0.5)
    assert settings.direct_io
    assert settings.fsync
    assert not settings.reuse_inodes, "vLLM's readers of this namespace do not verify"
    assert settings.rescan_interval_s == 5
    assert settings.io_threads == 5
    assert tier.locality is Locality.REMOTE
    assert str(tmp_path) in tier.tier.describe()
    tier.shutdown()


def test_inodes_are_reused_in_namespaces_of_this_package_alone(view, tmp_path):
    tier = make(view, {"root_dir": str(tmp_path)})
    assert tier.tier._settings.reuse_inodes
    tier.shutdown()
    tier = make(view, {"root_dir": str(tmp_path), "reuse_inodes": False})
    assert not tier.tier._settings.reuse_inodes
    tier.shutdown()


def test_a_root_may_be_a_path_object(view, tmp_path):
    tier = FileSystemTierManager(None, view, model="test", root_dir=tmp_path)
    assert list(tmp_path.iterdir())
    tier.shutdown()


def test_the_configuration_lies_beside_the_blocks_for_people(tmp_path):
    config = {
        "cpu_bytes_to_use": 8 * BLOCK,
        "block_bytes": BLOCK,
        "block_size": 32,
        "blocks_per_chunk": 4,
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path), "model": "m"}],
    }
    with TieringOffloadingSpec(config) as spec:
        spec.get_manager()
        (path,) = tmp_path.glob("*/config.json")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written == {
        "inference_engine": "kvoffload_async",
        "model_name": "m",
        "block_bytes": BLOCK,
        "tokens_per_hash": 32,
        "blocks_per_file": 4,
        "num_workers": 1,
    }


@pytest.mark.parametrize(
    "change", [{"block_size": 64}, {"blocks_per_chunk": 2}, {"num_workers": 2}]
)
def test_another_layout_is_another_namespace(tmp_path, change):
    base = {"cpu_bytes_to_use": 16 * BLOCK, "block_bytes": BLOCK, "model": "test"}
    base["secondary_tiers"] = [{"type": "fs", "root_dir": str(tmp_path)}]
    for config in (base, base | change):
        with TieringOffloadingSpec(config) as spec:
            spec.get_manager()
    assert len(list(tmp_path.glob("*/config.json"))) == 2


@pytest.mark.parametrize("call", ["pwrite", "rename", "open", "make_folders"])
def test_a_configuration_that_cannot_be_written_down_stops_nothing(place, caplog, call):
    ops = FaultyFileOps()

    def is_config(called) -> bool:
        base = Path(place.namespace.config_path).parent
        return "config.json" in called.path or called.path == str(base)

    ops.fail(28, on=call, when=is_config)
    with place.open(ops) as harness:
        from kvoffload_async.testing.harness import key_of

        assert harness.store([key_of(1)]) == {}
    assert "is not written" in caplog.text
    assert not place.temps()


def test_a_configuration_is_written_whole_or_not_at_all(place):
    ops = FaultyFileOps()
    ops.shorten(3, on="pwrite")
    with place.open(ops):
        pass
    assert not Path(place.namespace.config_path).exists()
    with place.open():
        pass
    assert json.loads(Path(place.namespace.config_path).read_text(encoding="utf-8"))


def test_config_and_rows_need_no_spec(view, tmp_path):
    assert np.asarray(view).shape == (4, BLOCK)
    assert OffloadConfig
    tier = make(view, {"root_dir": str(tmp_path)}, spec=object())
    tier.shutdown()
