"""What is reported of the locations of tiers before anything is made there."""

import errno
import os
import threading

import pytest

from kvoffload_async import ConfigError
from kvoffload_async.abc.tier import TierLocation
from kvoffload_async.errors import TierTimeoutError, TierUnavailableError
from kvoffload_async.facade import locations
from kvoffload_async.facade.locations import check_locations, examine
from kvoffload_async.runtime.machine import Limit


def check(*found):
    check_locations(
        [(f"secondary_tiers[{index}]: ", location) for index, location in enumerate(found)]
    )


def test_a_place_that_others_may_share_is_shared(tmp_path):
    shared = TierLocation(str(tmp_path), is_exclusive=False, key="socket_dir")
    check(shared, shared)
    with pytest.raises(ConfigError, match=r"\[2\]: root_dir: .* where secondary_tiers\[0\] keeps"):
        check(shared, shared, TierLocation(str(tmp_path / "below")))


def test_several_locations_of_one_tier_may_lie_in_each_other(tmp_path):
    outer, inner = TierLocation(str(tmp_path)), TierLocation(str(tmp_path / "index"))
    check_locations([("secondary_tiers[0]: ", outer), ("secondary_tiers[0]: ", inner)])


def test_a_place_that_is_no_directory_is_compared_by_its_name():
    here, there = (TierLocation(f"redis://host/{number}", key="url") for number in range(2))
    check(here, there)
    with pytest.raises(ConfigError, match=r"\[1\]: url: 'redis://host/0' is where secondary_tiers"):
        check(here, here)


@pytest.mark.parametrize("path", ["/a\0b", "/\ud800"])
def test_what_is_no_path_at_all_is_a_configuration_error(path):
    with pytest.raises(ConfigError, match="root_dir: "):
        check(TierLocation(path))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_a_mount_that_cannot_be_reached_is_no_fault_of_the_configuration(monkeypatch, code):
    def gone_away(_path, _what):
        raise OSError(code, "gone away")

    monkeypatch.setattr(locations, "_examine", gone_away)
    with pytest.raises(TierUnavailableError, match=r"\[0\]: root_dir: '/x' cannot be reached"):
        check(TierLocation("/x"))


def test_a_mount_that_hangs_is_unavailable_after_a_deadline(monkeypatch):
    hung = threading.Event()
    monkeypatch.setattr(locations, "_examine", lambda _path, _what: hung.wait())
    monkeypatch.setattr(locations, "ANSWER_S", 0.01)
    with pytest.raises(TierTimeoutError, match="root_dir: '/x': its filesystem does not answer"):
        examine(TierLocation("/x"))
    hung.set()


def test_a_loop_of_links_and_a_directory_without_permission_are_told(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="cannot be"):
        examine(TierLocation(str(tmp_path / "loop" / "x")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_writable_is_told(tmp_path):  # pragma: no cover - see above
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="is not writable for this process"):
        examine(TierLocation(str(tmp_path / "x")))


def warned(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_primary_and_tiers_in_memory_above_the_limit_are_warned_of_by_name(
    tmp_path, monkeypatch, caplog, kind
):
    monkeypatch.setattr(
        locations, "memory_limit", lambda: Limit(100, "the memory limit of its group")
    )
    monkeypatch.setattr(locations, "_kind_of", lambda _device: kind)
    slab = ("secondary_tiers[0]: ", TierLocation(str(tmp_path / "slab"), 30))
    pool = ("secondary_tiers[1]: ", TierLocation("mooncake://h", 11, key="master", is_memory=True))
    check_locations([slab, pool], 59)
    assert warned(caplog) == []
    check_locations([slab, pool], 60)
    (message,) = warned(caplog)
    assert "60 bytes of memory for cpu_bytes_to_use" in message
    assert f"30 bytes of memory for secondary_tiers[0]: {tmp_path}/slab" in message
    assert "11 bytes of memory for secondary_tiers[1]: mooncake://h" in message
    assert "the memory limit of its group, which is 100 bytes" in message


def test_a_tier_on_a_disk_takes_no_memory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        locations, "memory_limit", lambda: Limit(100, "the memory limit of its group")
    )
    monkeypatch.setattr(locations, "_kind_of", lambda _device: "ext4")
    check_locations([("secondary_tiers[0]: ", TierLocation(str(tmp_path), 1000))], 100)
    assert warned(caplog) == []
