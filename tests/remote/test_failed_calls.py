"""After a failed call nothing keeps the primary's memory: the collector need not come for that."""

import asyncio
import gc
import weakref
from functools import partial, wraps

import pytest
from remote.fake_store import SLOT_BYTES, FakeClient, LibraryError, World
from remote.object.tiers import K
from virtual_runner import VirtualRunner

from kvoffload_async.errors import TierUnavailableError
from kvoffload_async.testing.harness import TierHarness
from kvoffload_async.tiers.object.tier import ObjectOptions, ObjectTier
from kvoffload_async.tiers.remote.calls import Calls, run_together
from kvoffload_async.tiers.remote.existence import ExistenceCache, ExistenceProber
from kvoffload_async.tiers.remote.settings import RemoteCounters, RemoteSettings

CALLS = ["check", "connect", "exist", "get", "put", "remove_if", "renew"]


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def cope():
    raise LibraryError(text="coped with")


def circular(call):
    """Return the call as of a library whose errors, caught ones too, hold its frames for ever.

    On Python 3.12 and 3.13 these hold the frames of whoever has awaited the call.
    """

    @wraps(call)
    async def made(*args):
        kept = []
        try:
            cope()
        except LibraryError as error:
            kept.append(error)
        try:
            return await call(*args)
        except BaseException as error:
            kept.append(error)
            raise

    return made


class CircularClient(FakeClient):
    """One of such a library."""

    def __init__(self, *, answers_many=True, portion=4):
        super().__init__(answers_many=answers_many, portion=portion)
        for name in CALLS:
            setattr(self, name, circular(getattr(self, name)))


# The harness says what is kept: memory that stays mapped is an AssertionError.


@pytest.mark.parametrize("portion", [1, 2, 16])
@pytest.mark.parametrize("error", [LibraryError(), TierUnavailableError("gone"), OSError("reset")])
@pytest.mark.parametrize("operation", ["store", "load"])
@pytest.mark.parametrize("max_retries", [0, 1])
def test_a_job_whose_calls_fail_keeps_no_memory(operation, portion, error, max_retries):
    client = CircularClient(portion=portion)
    client.mapped = lambda raised: (
        raised
        if isinstance(raised, TierUnavailableError)
        else TierUnavailableError(type(raised).__name__)
    )
    with World(client, max_retries=max_retries, connections=2) as world:
        world.store(K[:4])
        client.failures = [error] * 40
        assert set(getattr(world, operation)(K[2:8])) == set(range(6))
        client.failures = []
        assert world.load(K[:4]) == {}
    assert client.calls["check"]


@pytest.mark.parametrize("operation", ["store", "load", "heads"])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_stalls_keeps_no_memory(operation, is_cancelled):
    client = CircularClient(portion=2)
    with World(client, call_timeout_s=1.0, job_timeout_s=2.0, probe_timeout_s=2.0) as world:
        world.store(K[:4])
        client.is_stalled = True
        tier, job = world.tier, world.job(K[:8], is_promotion=operation == "load")
        call = tier.longest_prefixes([K[:8]]) if operation == "heads" else None
        call = call or getattr(tier, operation)(job)

        async def run():
            task = asyncio.get_running_loop().create_task(call)
            await asyncio.sleep(0.5)
            if is_cancelled:
                task.cancel()
            await asyncio.wait({task})
            return None if task.cancelled() else task.exception()

        failure = world.run(run())
        assert isinstance(failure, TierUnavailableError | None)
        client.is_stalled = False
        assert world.load(K[:4]) == {}


@pytest.mark.parametrize("answers_many", [True, False])
def test_questions_that_fail_keep_no_memory(answers_many):
    client = CircularClient(answers_many=answers_many)
    with World(client, max_retries=0) as world:
        for ask in (world.tier.contains, lambda keys: world.tier.longest_prefixes([keys])):
            client.failures = [LibraryError() for _ in range(40)]
            with pytest.raises(TierUnavailableError):
                world.run(ask(K[:8]))


def test_a_bad_block_that_cannot_be_removed_keeps_no_memory():
    client = CircularClient()
    with World(client, max_retries=0) as world:
        world.store(K[:2])
        client.values[K[0]] = b"x"
        client.failures = [None, None, LibraryError()]
        assert list(world.load(K[:2])) == [0]
        assert world.gauge("unremoved") == 1


def test_a_renewal_that_fails_keeps_no_memory():
    client = CircularClient()
    with World(client, ttl_s=16.0, max_retries=0) as world:
        world.store(K[:2])
        world.run(asyncio.sleep(8.0))
        client.failures = [None, LibraryError()]
        world.load(K[:2])
        world.run(asyncio.sleep(8.0))
        assert world.gauge("dropped_renewals") == 2


def test_an_opening_that_fails_keeps_no_memory():
    world = World(CircularClient(), max_retries=1)
    world.client.failures = [LibraryError(), LibraryError()]
    with pytest.raises(TierUnavailableError):
        world.__enter__()
    world.__exit__()


# -- what is inside, by itself ------------------------------------------------------------------


class Payload(list):
    """What a call was made with."""


async def fail(_payload):
    raise LibraryError


async def fail_in_a_circle(_payload):
    error = LibraryError()
    raise error


async def called(calls, payload):
    await calls.run(partial(fail_in_a_circle, payload), 100.0)


async def asked(calls, payload):
    client = FakeClient(answers_many=False)
    client.exist = fail_in_a_circle
    memory = ExistenceCache(0.0, 0.0, asyncio.get_running_loop().time)
    await ExistenceProber(client, calls, memory).ask_anew(payload, 100.0)


async def together(_calls, payload):
    await run_together([fail(payload), fail(payload)], "test")


@pytest.mark.parametrize("operation", [called, asked, together])
def test_what_has_failed_keeps_nothing_that_it_was_called_with(operation):
    runner = VirtualRunner()
    settings = RemoteSettings(call_timeout_s=1.0, probe_timeout_s=1.0)
    calls = Calls(FakeClient(), settings, RemoteCounters())

    async def failed():
        payload = Payload(K[:2])
        alive = weakref.ref(payload)
        try:
            await operation(calls, payload)
        except (TierUnavailableError, LibraryError):
            del payload
            return alive
        return None

    alive = runner.run(failed(), 100.0)
    runner.close()
    assert alive is not None
    assert alive() is None


# -- an object store ----------------------------------------------------------------------------


def test_a_server_that_answers_before_its_check_begins_is_checked_without_an_error():
    runner = VirtualRunner()
    client = FakeClient(servers=2)
    calls = Calls(client, RemoteSettings(), RemoteCounters())

    async def checked():
        loop = asyncio.get_running_loop()
        calls._suspects.update({0: 0.0, 1: 0.0})
        checking = loop.create_task(calls.check([0, 1], loop.time() + 1.0))
        loop.call_soon(calls._suspects.pop, 0)  # as a call to the server does when it succeeds
        return await checking

    assert runner.run(checked(), 10.0) == {}
    runner.close(10.0)


class CircularObjects(ObjectTier):
    """One whose library fails at what it is told to fail at."""

    failing = frozenset()

    def _create_client(self, namespace):
        client = super()._create_client(namespace)
        for name in CALLS:
            setattr(client, name, circular(self._spoilt(name, getattr(client, name))))
        return client

    def _spoilt(self, name, call):
        async def made(*args):
            if name in self.failing:
                raise LibraryError(text=name)
            return await call(*args)

        return made


@pytest.mark.parametrize("failing", [*CALLS, "a bit"])
def test_a_failed_call_of_an_object_store_keeps_no_memory(tmp_path, failing):
    options = {"positive_cache_ttl_s": 0.0, "negative_cache_ttl_s": 0.0, "max_retries": 1}
    tier = CircularObjects(ObjectOptions(url=(tmp_path / "objects").as_uri(), **options))
    with TierHarness(tier, 64, SLOT_BYTES) as harness:
        harness.run(tier.longest_prefixes([K[:8]]))
        harness.store(K[:8])
        if failing == "a bit":
            for file in (tmp_path / "objects").rglob("*_g*"):
                file.write_bytes(file.read_bytes()[:-1] + b"\1")
            tier.failing = {"remove_if"}
        else:
            tier.failing = {failing}
        harness.load(K[:12])
        harness.store(K[8:16])
        if failing == "exist":
            with pytest.raises(TierUnavailableError):
                harness.contains(K[:8])
        tier.failing = frozenset()
