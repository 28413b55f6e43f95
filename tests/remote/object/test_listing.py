"""A server whose list does not end, or that refuses conditional writes without a reason."""

import asyncio
import threading

import pytest
from obstore.exceptions import GenericError
from remote.object.test_hostile_server import environment, s3_at  # noqa: F401 - a fixture
from remote.object.tiers import BLOCK_BYTES, QUICK, K, tier_on
from servers.scripted_http import ScriptedServer

from kvoffload_async.abc.maintenance import GcOptions, MaintenanceControl
from kvoffload_async.errors import InputError, TierUnavailableError
from kvoffload_async.testing import TierHarness
from kvoffload_async.tiers.object.client import ObjectClient
from kvoffload_async.tiers.object.maintenance import ObjectMaintenance

NAMESPACE = "0" * 32
MOST_REQUESTS = 10_000


class Impatient(ObjectMaintenance):
    listing_timeout_s = 0.1


def page_of(*names):
    objects = "".join(
        f"<Contents><Key>fleet/{name}</Key><Size>1</Size>"
        "<LastModified>2026-11-23T14:53:16.000Z</LastModified></Contents>"
        for name in names
    )
    return (
        f"<ListBucketResult><KeyCount>{len(names)}</KeyCount><IsTruncated>true</IsTruncated>"
        f"<NextContinuationToken>same</NextContinuationToken>{objects}</ListBucketResult>"
    ).encode()


def run(maintenance, operation):
    async def all_findings():
        control = MaintenanceControl()
        findings = {
            "inspect": lambda: maintenance.inspect(control),
            "verify": lambda: maintenance.verify(control),
            "gc": lambda: maintenance.gc(GcOptions(dry_run=True, keep_bytes=0), control),
        }[operation]()
        return [finding async for finding in findings]

    return asyncio.run(all_findings())


@pytest.mark.parametrize("operation", ["inspect", "verify", "gc"])
@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((f"{NAMESPACE}/000/00_g0", f"{NAMESPACE}/001/00_g0"), "it repeats a page"),
        ((f"{NAMESPACE}/001/00_g0", f"{NAMESPACE}/000/00_g0"), "does not list in order"),
        ((), "its list does not end"),
    ],
)
def test_a_list_that_makes_no_progress_ends_with_an_error_that_names_the_store(
    names, says, operation
):
    with ScriptedServer(lambda request: request.reply(200, page_of(*names))) as server:
        store = s3_at(server).open()
        kind = ObjectMaintenance if names else Impatient
        with pytest.raises(InputError, match=says) as raised:
            run(kind(store, "s3://bucket/fleet", NAMESPACE), operation)
        assert f"s3://bucket/fleet/{NAMESPACE}" in str(raised.value)
        assert len(server.requests) < MOST_REQUESTS


def test_a_list_of_namespaces_that_does_not_end_is_an_error(monkeypatch):
    with ScriptedServer(lambda request: request.reply(200, page_of())) as server:
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{server.port}")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        with pytest.raises(InputError, match=r"s3://bucket/fleet: .*does not end"):
            asyncio.run(Impatient.find("s3://bucket/fleet"))


def test_a_tier_whose_server_never_ends_its_list_opens_and_works():
    def answer(request):
        if "list-type" in request.path:
            request.reply(200, page_of())
        else:
            request.reply(200 if request.command == "PUT" else 404)

    with ScriptedServer(answer) as server:
        options = QUICK | {"call_timeout_s": 0.4, "job_timeout_s": 1.0}
        with TierHarness(tier_on(s3_at(server), **options), 4, BLOCK_BYTES) as harness:
            assert harness.store(K[:1]) == {}
        assert len(server.requests) < MOST_REQUESTS


@pytest.mark.parametrize("status", [200, 403])
def test_a_list_slower_than_a_call_may_be_delays_no_opening_and_goes_on(status, caplog):
    listed, may_list = threading.Event(), threading.Event()
    page = page_of(f"{NAMESPACE}/000/00_g0").replace(b"true", b"false")
    page = page.replace(b"<NextContinuationToken>same</NextContinuationToken>", b"")

    def answer(request):
        if "list-type" in request.path:
            may_list.wait(20.0)
            request.reply(status, page)
            listed.set()
        else:
            request.reply(200 if request.command == "PUT" else 404)

    with ScriptedServer(answer) as server:
        options = QUICK | {"call_timeout_s": 0.2, "max_retries": 0}
        with TierHarness(tier_on(s3_at(server), **options), 4, BLOCK_BYTES) as harness:
            assert harness.store(K[:1]) == {}
            first = harness.tier._client._listing
            assert not first.done()

            async def list_longer_than_a_call_may_take():
                listing = asyncio.get_running_loop().create_task(harness.tier.list_keys(None, 4))
                await asyncio.sleep(0.5)
                assert not listing.done()
                may_list.set()
                return await listing

            if status == 200:
                assert harness.run(list_longer_than_a_call_may_take()) == ([], None)
            else:
                with pytest.raises(TierUnavailableError):
                    harness.run(list_longer_than_a_call_may_take())
            assert listed.wait(20.0)
            harness.run(asyncio.wait({first}))
    assert caplog.text.count("a list request has failed") == (status != 200)


def test_a_list_that_fails_is_warned_of_once_however_often_the_tier_is_opened(caplog):
    fails = threading.Event()

    def answer(request):
        if "list-type" in request.path:
            fails.wait(20.0)
        request.reply(500)

    async def connect():
        client = ObjectClient(s3_at(server).open(), NAMESPACE, {}, patience_s=0.05)
        for _ in range(2):
            for _ in range(3):
                with pytest.raises(GenericError):
                    await client.connect()
            fails.set()
            await asyncio.wait({client._listing})
            fails.clear()
        await client.close()

    with ScriptedServer(answer) as server:
        asyncio.run(connect())
        fails.set()
    assert caplog.text.count("a list request has failed") == 1


@pytest.mark.parametrize("status", [409, 412])
def test_a_conditional_write_refused_for_an_object_that_is_not_there_blames_no_other_host(status):
    def answer(request):
        if request.command == "PUT" and request.path.endswith(".json"):
            request.reply(200)
        elif request.command == "PUT":
            request.reply(status, b"<Code>ConditionalRequestConflict</Code>")
        elif "list-type" in request.path:
            request.reply(200, b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
        else:
            request.reply(404)

    with ScriptedServer(answer) as server:
        tier = tier_on(s3_at(server), **QUICK | {"max_retries": 1})
        with TierHarness(tier, 4, BLOCK_BYTES) as harness:
            error = harness.store(K[:1])[0]
            assert "refused twice" in str(error)
            assert "there is none" in str(error)
            assert "another host" not in str(error)


def test_a_server_that_lists_from_the_start_again_ends_a_listing_in_pages():
    names = [f"{NAMESPACE}/000/00_g0", f"{NAMESPACE}/001/01_g0"]

    def answer(request):
        page = page_of(*names).replace(b"true", b"false")
        request.reply(
            200, page.replace(b"<NextContinuationToken>same</NextContinuationToken>", b"")
        )

    async def pages():
        client = ObjectClient(s3_at(server).open(), NAMESPACE, {})
        _, cursor = await client.list_keys(None, 2)
        return cursor, await client.list_keys(cursor, 2)

    with ScriptedServer(answer) as server:
        assert asyncio.run(pages()) == ("001/01_g0", ([], None))
