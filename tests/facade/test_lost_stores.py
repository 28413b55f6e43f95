"""A slab store that is taken away beneath a running engine, and what gets it going again."""

import itertools
import logging
import shutil
import time

import pytest
from facade.worlds import HIT, ks

from kvoffload_async import TieringOffloadingSpec
from kvoffload_async.facade import tier_group
from kvoffload_async.types import ReqContext

DEADLINE_S = 60.0


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def engine(root, monkeypatch):
    monkeypatch.setattr(tier_group, "_LONGEST_PAUSE_S", 0.001)

    def make():
        tier = {"type": "slab", "root_dir": str(root), "capacity_bytes": "1MiB"}
        tier["required"] = False
        return TieringOffloadingSpec(
            {
                "cpu_bytes_to_use": "64KiB",
                "block_bytes": 4096,
                "model": "m",
                "write_back": "drop",
                "breaker_fault_threshold": 1,
                "breaker_retry_s": 0.001,
                "secondary_tiers": [tier],
            }
        )

    return make


class Driver:
    """Stores a new block a call; one request."""

    def __init__(self, manager) -> None:
        self.manager = manager
        self.ctx = ReqContext("r")
        self.numbers = itertools.count()
        manager.on_new_request(self.ctx)

    @property
    def stored(self) -> int:
        return self.manager.stats().tiers[0].stored_blocks

    def store(self) -> int:
        """Store a block; return its number."""
        number = next(self.numbers)
        assert self.manager.prepare_store(ks(number), self.ctx) is not None
        self.manager.complete_store(ks(number), self.ctx)
        for tier in self.manager.secondary_tiers:
            self.manager.on_schedule_end()
            assert tier.drain_jobs(DEADLINE_S)
        self.manager.on_schedule_end()
        return number

    def store_until_it_is_kept(self) -> int:
        before = self.stored
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            number = self.store()
            if self.stored > before:
                return number
        raise AssertionError("the tier keeps nothing")


def test_a_store_that_comes_back_is_used_again_once_its_breaker_tries_it(engine, root, caplog):
    with engine() as spec:
        driver = Driver(spec.get_manager())
        driver.store_until_it_is_kept()
        root.rename(root.with_name("away"))
        before = driver.stored
        driver.store()
        assert driver.stored == before
        assert (
            "is not the opened directory any more (it was deleted): mount it again, "
            "or restart the engine" in (caplog.text)
        )
        assert any(record.levelno >= logging.WARNING for record in caplog.records)
        root.with_name("away").rename(root)
        driver.store_until_it_is_kept()


def test_a_store_that_was_deleted_is_begun_anew_by_a_restart(engine, root):
    with engine() as spec:
        driver = Driver(spec.get_manager())
        driver.store_until_it_is_kept()
        shutil.rmtree(root)
        before = driver.stored
        for _ in range(3):
            driver.store()
        assert driver.stored == before
    assert not root.exists()
    with engine() as spec:
        driver = Driver(spec.get_manager())
        number = driver.store_until_it_is_kept()
        assert driver.manager.lookup(ks(number)[0], driver.ctx) is HIT


def test_a_store_whose_place_is_not_there_yet_is_opened_when_it_is(engine, root):
    root.write_text("a file where the directory of the mount will be", encoding="ascii")
    with pytest.raises(ValueError, match="root_dir"):
        engine()
    root.unlink()
    with engine() as spec:
        root.write_text("as before", encoding="ascii")  # between the check and the opening
        driver = Driver(spec.get_manager())
        root.unlink()
        driver.store_until_it_is_kept()
