"""The three shipped tiers below one manager, and a consumer that replays its events.

The directory of `fs` may be that of two hosts.
"""

import asyncio
import shutil
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

from facade.worlds import HIT, MISS, SLOT_BYTES, DeviceCopy, PooledScriptedIo, World, ks

from kvoffload_async.registry import create_policy
from kvoffload_async.testing.harness import content_of
from kvoffload_async.tiers.example import ExampleTier
from kvoffload_async.tiers.fs.settings import FsSettings
from kvoffload_async.tiers.fs.tier import FsTier
from kvoffload_async.tiers.slab.tier import SlabSettings, SlabTier
from kvoffload_async.types import Locality, Medium

KIB = 1024
FIELDS = {"model_name": "m"}
# The namespace and two hosts take 24 KiB, and a block 4.
FS_BYTES = 26 * KIB + 6 * 4 * KIB
SLAB_BYTES = 81 * KIB + 8 * 4 * KIB
"""The manifest, the journal, and 8 blocks, if the journal takes no more than for one."""
RESCAN_S = 600.0


class SwitchedIo(PooledScriptedIo):
    """Parks calls while `parks`, and runs them at once otherwise."""

    parks = False

    async def run(self, direction, call, **options):
        return await super().run(direction, call, **options) if self.parks else call()


class Replay:
    """A consumer of one host's events: the blocks that are announced, by location.

    Nothing is announced twice, and what is far away is in a store with a name of its own.
    """

    def __init__(self):
        self.present = {}

    def read(self, events):
        for event in events:
            is_shared = event.locality is Locality.REMOTE
            assert is_shared == ("@" in (event.ownership or ""))
            location = self.present.setdefault((event.medium, event.ownership), set())
            keys = set(event.keys)
            if event.metadata_only:
                assert location.isdisjoint(keys)
            elif event.removed:
                assert location >= keys
                location -= keys
            else:
                assert location.isdisjoint(keys)
                location |= keys

    def at(self, medium, ownership=None):
        return self.present.get((medium, ownership), set())


class ReplayWorld(World):
    """A host. Every call of a tier's I/O is parked.

    Attributes:
        copies: Stores from the device that the scheduler waits for.
        replay: The consumer.
        batch: Number of keys of each log that the consumer takes at once; None: all.
    """

    batch = None

    def __init__(self, folder=None, slab="slab"):
        self.folder = folder or Path(tempfile.mkdtemp(prefix="kvoffload-replay-"))
        self.owns_folder = folder is None
        self.fs = FsTier(
            FsSettings(
                root_dir=str(self.folder / "fs"),
                run_config=FIELDS,
                capacity_bytes=FS_BYTES,
                rescan_interval_s=RESCAN_S,
                locality=Locality.REMOTE,
            )
        )
        self.slab = SlabTier(
            SlabSettings(
                root_dir=str(self.folder / slab),
                run_config=FIELDS,
                capacity_bytes=SLAB_BYTES,
                segment_bytes=4 * KIB,
            ),
            partial(create_policy, "lru"),
        )
        self.example = ExampleTier()
        super().__init__(
            self.fs, self.slab, self.example, num_slots=6, pool=SwitchedIo, io_timeout_s=1e4
        )
        self.copies = []
        self.replay = Replay()
        self.park(True)

    def park(self, parks):
        for pool in self.host.pools:
            pool.parks = parks

    def calls(self):
        return [(pool, call) for pool in self.host.pools for call in pool.parked]

    def job_tasks(self):
        tasks = {task.get_name(): task for task in asyncio.all_tasks(self.runner.loop)}
        return {name: task for name, task in tasks.items() if ":store:" in name or ":load:" in name}

    def finish_all(self):
        self.runner.run_ready()
        while self.calls():
            for pool, call in self.calls():
                pool.finish(call)
            self.runner.run_ready()

    def begin_copy(self, numbers, req_id):
        ctx = self.contexts[req_id]
        output = self.manager.prepare_store(ks(*numbers), ctx)
        if output is not None and output.keys_to_store:
            slots = output.store_spec.block_ids.tolist()
            self.copies.append(DeviceCopy(ctx, dict(zip(output.keys_to_store, slots, strict=True))))

    def end_copy(self, copy, *, success):
        self.copies.remove(copy)
        if success:
            for key, slot in copy.slots.items():
                self.rows[slot] = content_of(key, SLOT_BYTES)
        self.manager.complete_store(list(copy.slots), copy.ctx, success)

    def take(self):
        """Replay what is told; of the primary, that is the whole truth at any time."""
        self.replay.read(self.manager.take_events(self.batch))
        while any(log.is_behind for log in self.logs()):
            assert self.manager.has_pending_work()
            self.replay.read(self.manager.take_events(self.batch))
        readable = {key for key, _, refs in self.primary.core.resident() if refs >= 0}
        assert self.replay.at(Medium.CPU) == readable

    def logs(self):
        planner = self.manager.planner
        return [planner.primary.event_log, *(tier.event_log for tier in planner.tiers)]

    def on_disk(self):
        """Return the blocks in the directory, whoever has written them."""
        return {key for key in ks(*range(40)) if self.fs._files.present([key])}

    @property
    def in_fs(self):
        """The blocks that the consumer believes in the directory."""
        return self.replay.at(Medium.STORAGE, self.secondaries[0].ownership)

    def come_to_rest(self):
        """Let everything end that ends in no time."""
        for copy in list(self.copies):
            self.end_copy(copy, success=True)
        # A copy that a reset has given up goes on, and what it stores is told when it has ended.
        planner = self.manager.planner
        while True:
            self.manager.on_schedule_end()
            self.finish_all()
            has_news = any(secondary.has_pending_work() for secondary in self.secondaries)
            if not (has_news or planner.jobs or planner.orphaned):
                return

    def check(self):
        """Compare what was told of each tier with what it has, and again with all that it owes.

        A tier whose store was cancelled is left alone for a moment before it is tried again: the
        first comparison is made before that can mend anything.
        """
        self.come_to_rest()
        self.compare()
        if self.manager.has_pending_work():
            while self.manager.has_pending_work():
                planner = self.manager.planner
                self.runner.advance(planner.cascades.wakes_in_s(planner.now_s))
                self.come_to_rest()
            self.compare()

    def compare(self):
        self.take()
        if self.owns_folder:
            assert self.in_fs == self.on_disk()
        assert self.replay.at(Medium.STORAGE, "tier1") == set(self.slab._store.catalog.keys())
        assert self.replay.at(Medium.CPU, "tier2") == set(self.example._blocks)
        self._check_index(1, set(self.slab._store.catalog.keys()))
        self._check_index(2, set(self.example._blocks))

    def _check_index(self, tier, contents):
        index = self.secondaries[tier].tier_state.index
        assert len(index) == len(contents)
        assert all(index.lookup(key, "") is HIT for key in contents)

    def settled_lookup(self, number, req_id):
        """Look a block up until every tier that is asked has answered."""
        for _ in range(20):
            answer = self.lookup(number, req_id)
            if answer in (HIT, MISS):
                break
            self.manager.on_schedule_end()
            self.finish_all()
        return answer

    def remove_a_file(self):
        """Do what another process may do to a shared directory."""
        files = sorted((self.folder / "fs").rglob("*.bin"))
        if files:
            files[0].unlink()

    def rescan(self):
        self.park(False)
        self.runner.advance(RESCAN_S + 1.0)
        walk = self.fs._housekeeping._walk
        while walk.is_in_cycle:  # a step takes so much processor time, and the machine may be slow
            self.runner.advance(1.0)
        self.park(True)
        self.manager.on_schedule_end()

    def end(self):
        self.park(False)
        self.finish_all()
        for copy in list(self.copies):
            self.end_copy(copy, success=False)
        super().end()
        if self.owns_folder:
            shutil.rmtree(self.folder)


class Fleet:
    """Two hosts with a directory of `fs` that they share, and a `slab` each.

    Attributes:
        hosts: The hosts.
        has_crashed: Whether a host has crashed since the last walks over the directory.
    """

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="kvoffload-fleet-"))
        self._slabs = count()
        self.hosts = [self._host(), self._host()]
        self.has_crashed = False

    def _host(self):
        return ReplayWorld(self.folder, f"slab{next(self._slabs)}")

    def crash(self, number):
        """Replace a host by one that finds what the old one had on its disk in this moment."""
        old, self.has_crashed = self.hosts[number], True
        new = f"slab{next(self._slabs)}"
        shutil.copytree(old.slab._settings.root_dir, self.folder / new)
        for pool, call in old.calls():
            pool.finish(call, OSError(5, "crashed"))
        old.end()
        self.hosts[number] = ReplayWorld(self.folder, new)

    def check(self):
        """Compare every consumer with its host, and both with the directory.

        A host learns of what the other removes or stores by a look-up or a walk. But whoever
        stored a block last has announced it, so all consumers together know all that is there.
        """
        for host in self.hosts:
            host.check()
        known = set().union(*(host.in_fs for host in self.hosts))
        assert self.has_crashed or self.hosts[0].on_disk() <= known
        assert len({host.secondaries[0].ownership for host in self.hosts}) == 1

    def walk(self):
        """Let every host see all that the other has done, and compare again."""
        while True:
            before = self.hosts[0].on_disk()
            for host in self.hosts:
                host.rescan()
                host.check()
            if self.hosts[0].on_disk() == before:
                break
        self.has_crashed = False
        for host in self.hosts:
            assert host.in_fs == self.hosts[0].on_disk()

    def end(self):
        for host in self.hosts:
            host.end()
        shutil.rmtree(self.folder)
