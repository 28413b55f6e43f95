import pytest
from faulty_files import FaultyFileOps
from slab.stores import BLOCK, KIB

from kvoffload_async import ConfigError, SecondaryTierFactory, SlabTierManager
from kvoffload_async.runtime.buffer import PrimaryBuffer
from kvoffload_async.tiers.slab.opening import OnMismatch
from kvoffload_async.types import Locality


@pytest.fixture
def view():
    buffer = PrimaryBuffer(4, BLOCK)
    yield buffer.view
    assert buffer.release()


def make(view, config: dict, spec: object = None):
    return SecondaryTierFactory.create_secondary_tier(
        {"type": "slab", "model": "test", **config}, view, spec
    )


# option, value, what the message must say besides the option and the value
BAD = [
    ("root_dir", "relative/path", "absolute path; write '/"),
    ("root_dir", "", "absolute path"),
    ("root_dir", 7, "absolute path"),
    ("capacity_bytes", 0, "positive"),
    ("capacity_bytes", "12 parsec", "number of bytes"),
    ("capacity_bytes", 1 << 60, "at most 268435456 blocks"),
    ("capacity_bytes", 20_000, "cannot hold one block of 4096 bytes and the journal; give at"),
    ("segment_bytes", 4095, "less than a slot of 4096 bytes; give at least that"),
    ("segment_bytes", -1, "positive"),
    ("eviction_policy", "lrru", "did you mean 'lru'"),
    ("on_mismatch", "new_name_space", "did you mean 'new_namespace'"),
    ("verify", False, "allowed: required, off"),
    ("direct_io", 1, "true or false"),
    ("fsync", None, "true or false"),
    ("io_threads", 1, "at least 2"),
    ("io_threads", "three", "at least 2"),
    ("n_read_threads", 4, "is not an option of this tier; use io_threads"),
    ("n_write_threads", 4, "is not an option of this tier; use io_threads"),
    ("locality", "REMOT", "did you mean 'REMOTE'"),
    ("rank", -1, "at least 0"),
    ("model", "", "a name"),
    ("run_config", {"a": object()}, "cannot be written as JSON"),
    ("io_timeout_s", -1, "positive number of seconds"),
]


@pytest.mark.parametrize(("option", "value", "remedy"), BAD)
def test_a_bad_option_is_refused_with_key_value_and_remedy(view, tmp_path, option, value, remedy):
    config = {"root_dir": str(tmp_path / "r"), "capacity_bytes": "1MiB", option: value}
    with pytest.raises(ConfigError) as raised:
        make(view, config)
    assert option in str(raised.value)
    assert remedy in str(raised.value)
    assert not (tmp_path / "r").exists(), "nothing is touched before everything is checked"


@pytest.mark.parametrize("option", [{"io_timeout_s": -1}, {"fingerprint": 3}, {"rank": "one"}])
def test_what_every_tier_takes_is_checked_before_anything_is_made(view, tmp_path, option):
    root = tmp_path / "new"
    with pytest.raises(ConfigError, match=f"^{next(iter(option))}: "):
        SlabTierManager(
            None, view, model="test", root_dir=str(root), capacity_bytes="1MiB", **option
        )
    assert not root.exists()


def test_the_least_capacity_that_an_error_names_is_enough(view, tmp_path):
    with pytest.raises(ConfigError) as raised:
        make(view, {"root_dir": str(tmp_path), "capacity_bytes": 1})
    least = int(str(raised.value).rpartition(" ")[2])
    make(view, {"root_dir": str(tmp_path), "capacity_bytes": least}).shutdown()
    with pytest.raises(ConfigError, match="cannot hold one block"):
        make(view, {"root_dir": str(tmp_path), "capacity_bytes": least - 1})


@pytest.mark.parametrize("missing", ["root_dir", "capacity_bytes"])
def test_an_option_without_a_default_must_be_given(missing):
    config = {"type": "slab", "root_dir": "/x", "capacity_bytes": "1GiB"}
    del config[missing]
    with pytest.raises(ConfigError, match=f"{missing}: missing"):
        SecondaryTierFactory.check_config(config)


def test_an_unknown_option_is_refused_with_the_nearest(view, tmp_path):
    with pytest.raises(ConfigError, match=r"'segment_byte' \(did you mean 'segment_bytes'\?\)"):
        make(view, {"root_dir": str(tmp_path), "capacity_bytes": "1MiB", "segment_byte": 1})


def test_every_option_reaches_the_tier(view, tmp_path):
    tier = make(
        view,
        {
            "root_dir": f"{tmp_path}/a/../b/",
            "capacity_bytes": "2MiB",
            "segment_bytes": "512KiB",
            "model": "org/model",
            "rank": 2,
            "run_config": {"dtype": "bf16"},
            "on_mismatch": "new_namespace",
            "eviction_policy": "arc",
            "verify": "off",
            "direct_io": True,
            "fsync": True,
            "io_threads": 5,
            "locality": "REMOTE",
        },
    )
    assert isinstance(tier, SlabTierManager)
    settings = tier.tier._settings
    assert settings.root_dir == f"{tmp_path}/b"
    assert settings.capacity_bytes == 2 << 20
    assert settings.segment_bytes == 512 * KIB
    assert settings.run_config == {"dtype": "bf16", "model_name": "org/model"}
    assert settings.rank == 2
    assert settings.on_mismatch is OnMismatch.NEW_NAMESPACE
    assert not settings.verifies
    assert settings.direct_io
    assert settings.fsync
    assert settings.io_threads == 5
    assert tier.locality is Locality.REMOTE
    assert tier.tier._store.catalog._ranking.policy.name == "arc"
    assert (tmp_path / "b" / "org_model_r2").is_dir()
    assert f"{tmp_path}/b" in tier.tier.describe()
    tier.shutdown()


def test_a_failed_constructor_leaves_nothing_open(view, tmp_path):
    ops = FaultyFileOps()
    ops.fail(13, on="lock")
    with pytest.raises(ConfigError, match="root_dir"):
        SlabTierManager(
            None, view, model="m", root_dir=str(tmp_path), capacity_bytes="1MiB", ops=ops
        )
    assert not ops.open_fds
