"""Several `fs` tiers on one directory against a dictionary, with everything that can go wrong."""

import errno
import gc
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from faulty_files import FaultyFileOps, is_temp
from fs.directories import BLOCK, FsDirectory
from fs.spaces import rescan, room_for, trim
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvoffload_async.errors import (
    BlockMissingError,
    ConfigError,
    CorruptBlockError,
    TierError,
    TierFullError,
    drop_tracebacks,
)
from kvoffload_async.testing.harness import TierHarness, content_of, key_of
from kvoffload_async.tiers.fs.digest_attribute import ATTRIBUTE

pytestmark = pytest.mark.slow

K = [key_of(number) for number in range(12)]
SLOTS = 16

some_keys = st.lists(st.sampled_from(K), min_size=1, max_size=5, unique=True)
one_key = st.sampled_from(K)
policies = st.sampled_from(["lru", "arc"])


class Instance:
    """One tier of the machine, with its faults."""

    def __init__(self, harness: TierHarness, ops: FaultyFileOps, options: dict) -> None:
        self.harness = harness
        self.ops = ops
        self.options = options


class FsMachine(RuleBasedStateMachine):
    """A bounded namespace that several tiers share, against a dictionary of what each key's file
    is: right, wrong, or right without a digest. Rules of other writers and of faults change both.
    """

    capacity_bytes = room_for(10)

    instances = Bundle("instances")

    def __init__(self) -> None:
        super().__init__()
        self.root_dir = Path(tempfile.mkdtemp(prefix="fs-machine-"))
        self.directory = FsDirectory(self.root_dir)
        self.live: list[Instance] = []
        self.is_disturbed = False
        """Whether somebody has changed the disk behind the count's back since the last walk."""

    # -- instances ------------------------------------------------------------------------------

    def _open(self, options: dict) -> Instance:
        ops = FaultyFileOps()
        harness = TierHarness(
            self.directory.tier(
                ops,
                capacity_bytes=self.capacity_bytes,
                rescan_interval_s=3600.0,
                **options,
            ),
            SLOTS,
            BLOCK,
        )
        instance = Instance(harness, ops, options)
        self.live.append(instance)
        return instance

    def _close(self, instance: Instance) -> None:
        instance.ops.heal()
        self.live.remove(instance)
        gc.collect()
        # Tiers end in any order here; the test as a whole is checked for threads.
        instance.harness._threads_before = set(threading.enumerate())
        instance.harness.close()

    @initialize(target=instances, policy=policies)
    def first(self, policy):
        return self._open({"policy": policy})

    @precondition(lambda self: len(self.live) < 3)
    @rule(
        target=instances,
        policy=policies,
        verify=st.sampled_from(["when_present", "required"]),
        direct_io=st.booleans(),
        fsync=st.booleans(),
    )
    def start(self, policy, verify, direct_io, fsync):
        try:
            return self._open(
                {"policy": policy, "verify": verify, "direct_io": direct_io, "fsync": fsync}
            )
        except ConfigError:
            raise AssertionError("a healthy directory was refused") from None

    @rule(target=instances, instance=consumes(instances))
    def restart(self, instance):
        self._close(instance)
        return self._open(instance.options)

    @precondition(lambda self: len(self.live) > 1)
    @rule(target=instances, instance=consumes(instances))
    def stop(self, instance):
        self._close(instance)
        return multiple()

    def _model(self) -> dict:
        """Return key -> (whether its file's bytes are right, its checksum or None)."""
        model = {}
        for key in self.directory.blocks():
            path = self.directory.path(key)
            is_right = path.read_bytes() == content_of(key, BLOCK).tobytes()
            has_digest = ATTRIBUTE in os.listxattr(path)
            model[key] = (is_right, os.getxattr(path, ATTRIBUTE) if has_digest else None)
        return model

    # -- work -----------------------------------------------------------------------------------

    @rule(instance=instances, keys=some_keys)
    def store(self, instance, keys):
        failures = instance.harness.store(keys)
        for slot, key in enumerate(keys):
            if slot in failures:
                assert isinstance(failures[slot], TierFullError)
            else:
                assert self.directory.path(key).exists()
        assert not self.directory.temps()
        if not self.is_disturbed:
            assert self.directory.disk_bytes() <= self.capacity_bytes

    @rule(instance=instances, keys=some_keys)
    def load(self, instance, keys):
        model = self._model()
        requires = instance.options.get("verify") == "required"
        failures = instance.harness.load(keys, range(8, 8 + len(keys)))
        for number, key in enumerate(keys):
            is_right, digest = model.get(key, (False, None))
            if is_right and (
                digest == self.directory.attribute_of(key) or (digest is None and not requires)
            ):
                assert number not in failures, "a good block was refused"
            if number not in failures:
                assert instance.harness.holds(key, 8 + number), "wrong bytes were served"
                assert key in model
            elif isinstance(failures[number], CorruptBlockError):
                assert not self.directory.path(key).exists(), "a bad block stays"
            else:
                assert isinstance(failures[number], BlockMissingError)
                assert key not in model or (requires and digest is None)

    @rule(instance=instances, keys=some_keys)
    def probe(self, instance, keys):
        assert instance.harness.contains(keys) == set(keys) & self.directory.blocks()

    # -- what others do -------------------------------------------------------------------------

    @rule(key=one_key, has_digest=st.booleans())
    def others_file(self, key, has_digest):
        self.is_disturbed = True
        if not self.directory.path(key).exists():
            self.directory.put(key, has_digest=has_digest)

    @rule(name=st.sampled_from(["stranger", "000/file.txt", "x.bin", "y.tmp.txt"]))
    def unknown_file(self, name):
        self.is_disturbed = True
        path = self.directory.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"what is this")

    def _stored(self, key) -> Path | None:
        path = self.directory.path(key)
        return path if path.exists() else None

    @rule(key=one_key, length=st.sampled_from([0, 1, BLOCK - 1, BLOCK + 1, 3 * BLOCK]))
    def resize(self, key, length):
        self.is_disturbed = True
        if path := self._stored(key):
            os.truncate(path, length)

    @rule(key=one_key, bit=st.integers(0, BLOCK * 8 - 1))
    def flip(self, key, bit):
        # Without a checksum nobody could tell.
        if (path := self._stored(key)) and ATTRIBUTE in os.listxattr(path):
            content = bytearray(path.read_bytes())
            if len(content) * 8 > bit:
                content[bit // 8] ^= 1 << bit % 8
                with path.open("r+b") as file:
                    file.write(content)

    @rule(key=one_key, other=one_key)
    def swap_contents(self, key, other):
        """The right bytes, and checksum, of another block."""
        if (path := self._stored(key)) and ATTRIBUTE in os.listxattr(path):
            path.write_bytes(content_of(other, BLOCK).tobytes())
            os.setxattr(path, ATTRIBUTE, self.directory.attribute_of(other))

    @rule(key=one_key)
    def delete(self, key):
        self.is_disturbed = True
        self.directory.path(key).unlink(missing_ok=True)

    # -- trouble --------------------------------------------------------------------------------

    @rule(
        instance=instances,
        keys=some_keys,
        code=st.sampled_from([errno.EACCES, errno.EIO, errno.ENOSPC, errno.EROFS]),
        skip=st.integers(0, 60),
        is_load=st.booleans(),
    )
    def one_call_fails(self, instance, keys, code, skip, is_load):
        ops, harness = instance.ops, instance.harness
        ops.fail(code, at=len(ops.calls) + 1 + skip)
        self._try(harness, keys, is_load=is_load)
        ops.heal()

    @rule(
        instance=instances, keys=some_keys, on=st.sampled_from(["open", "mkdir", "rename publish"])
    )
    def permission_is_lost(self, instance, keys, on):
        instance.ops.fail(errno.EACCES, on=on, when=lambda c: ".writers" not in c.path)
        self._try(instance.harness, keys, is_load=False)
        self._try(instance.harness, keys, is_load=True)
        instance.ops.heal()

    @rule(instance=instances, keys=some_keys)
    def the_disk_is_full(self, instance, keys):
        instance.ops.fail(errno.ENOSPC, on="pwrite pwritev mkdir", when=lambda c: c.path != "")
        self._try(instance.harness, keys, is_load=False)
        instance.ops.heal()

    @rule(instance=instances, keys=some_keys, times=st.integers(1, 3))
    def the_disk_is_full_for_a_moment(self, instance, keys, times):
        instance.ops.fail(errno.ENOSPC, on="pwritev", when=is_temp, times=times)
        self._try(instance.harness, keys, is_load=False)
        instance.ops.heal()

    @rule(instance=instances, keys=some_keys, max_bytes=st.sampled_from([1000, BLOCK - 1]))
    def calls_are_short(self, instance, keys, max_bytes):
        instance.ops.shorten(max_bytes, on="pwrite pwritev")
        instance.ops.shorten(max_bytes, on="preadv")
        self._try(instance.harness, keys, is_load=False)
        self._try(instance.harness, keys, is_load=True)
        instance.ops.heal()

    def _try(self, harness: TierHarness, keys, *, is_load: bool) -> None:
        """Store or load in trouble: what is claimed must be true, everything else may fail."""
        self.is_disturbed = True
        try:
            failures = harness.load(keys) if is_load else harness.store(keys)
        except (OSError, TierError, ExceptionGroup) as error:
            drop_tracebacks(error)  # as the tier's actor does
            return
        for slot, key in enumerate(keys):
            if slot not in failures:
                if is_load:
                    assert harness.holds(key, slot), "wrong bytes were served"
                else:
                    assert self.directory.path(key).exists()

    # -- what always holds ----------------------------------------------------------------------

    @rule(instance=instances)
    def walk(self, instance):
        rescan(instance.harness)
        instance.harness.tier._files.sweep_leftover_temps()
        if len(self.live) == 1:
            assert self.directory.counted_bytes() == self.directory.disk_bytes()

    @rule()
    def all_keep_house(self):
        for instance in self.live:
            rescan(instance.harness)
            trim(instance.harness)
        assert self.directory.counted_bytes() == self.directory.disk_bytes()
        self.is_disturbed = False

    @invariant()
    def policies_know_what_spaces_know(self):
        for instance in self.live:
            space = instance.harness.tier._space
            assert set(space._policy.resident()) == set(space._policy)
            assert not space._busy

    @invariant()
    def nothing_is_set_aside_while_no_job_runs(self):
        for instance in self.live:
            assert not instance.harness.tier._housekeeping._usage._running

    def teardown(self):
        try:
            for instance in list(self.live):
                instance.ops.heal()
            if self.live:
                self.all_keep_house()
                assert not self.directory.usage().reserved_bytes
            for instance in list(self.live):
                self._close(instance)
            assert not self.directory.temps(), "a temporary file is left at the end"
        finally:
            for instance in list(self.live):
                self._close(instance)
            shutil.rmtree(self.root_dir, ignore_errors=True)


@pytest.mark.stateful
def test_tiers_that_share_a_directory_serve_right_bytes_whatever_happens():
    run_state_machine_as_test(
        FsMachine,
        settings=settings(
            max_examples=max(1, settings().max_examples // 6), stateful_step_count=30
        ),
    )
