import pytest
from faulty_files import FaultyFileOps
from fs.directories import BLOCK

from kvoffload_async import (
    ConfigError,
    FileSystemTierManager,
    SecondaryTierFactory,
)
from kvoffload_async.runtime.buffer import PrimaryBuffer


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
    assert "can write" in str(raised.value)
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
