"""Maintenance of a real S3 store that is stopped at any page, and goes on where it was."""

import asyncio
import itertools
import json
import re
import signal
from contextlib import aclosing

import obstore
import pytest
from remote.object.tiers import names_in, set_environment, tier_on
from typer.testing import CliRunner

from kvoffload_async.abc.maintenance import GcOptions, MaintenanceControl, Removal, Summary
from kvoffload_async.cli.app import app
from kvoffload_async.facade.maintenance import find_stores
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.object import maintenance

K = [key_of(number) for number in range(10)]
PAGE_BLOCKS = 3

pytestmark = pytest.mark.servers


@pytest.fixture
def connection(server, prefix, monkeypatch):
    """Two namespaces of ten blocks each, which are listed in small pages."""
    monkeypatch.setattr(maintenance, "_PAGE_OBJECTS", PAGE_BLOCKS)
    connection = server.connection(prefix)
    for key in (None, IntegrityKey(b"k" * 32)):
        with TierHarness(tier_on(connection, integrity_key=key)) as harness:
            assert harness.store(K) == {}
    set_environment(monkeypatch, connection)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return connection


class Progress:
    """What a progress bar is told."""

    def __init__(self):
        self.expected = self.advanced = 0

    def expect(self, amount):
        self.expected += amount

    def advance(self, amount):
        self.advanced += amount


def run(url, call, pages, after):
    """Call every store until so many pages were read; return findings and the position."""
    answers = itertools.chain(itertools.repeat(False, pages), itertools.repeat(True))
    progress = Progress()
    stops = []
    control = MaintenanceControl(
        expect=progress.expect,
        advance=progress.advance,
        should_stop=lambda: stops.append(next(answers)) or stops[-1],
        resume_after=after,
    )

    async def run_all():
        found = []
        for store in await find_stores(url):
            async with aclosing(call(store, control)) as findings:
                found += [finding async for finding in findings]
            if found[-1].stopped_after or any(stops):
                break
        return found

    found = asyncio.run(run_all())
    assert progress.advanced <= progress.expected
    return found, found[-1].stopped_after if any(stops) else None


def run_in_parts(url, call, pages):
    """Run until nothing is left; return the findings of all parts, and how many there were."""
    found, after, parts = [], "", 0
    while after is not None:
        part, after = run(url, call, pages, after)
        found += part
        parts += 1
        assert parts < 50
    return found, parts


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_a_verification_in_parts_sees_every_block_once(connection, pages):
    found, parts = run_in_parts(connection.url, lambda store, c: store.verify(c), pages)
    figures = [finding.figures for finding in found if isinstance(finding, Summary)]
    assert sum(each["objects"] for each in figures) == 2 * len(K)
    assert sum(each["verification"]["verified"] for each in figures) == len(K)
    assert sum(each["verification"]["other_key"] for each in figures) == len(K)
    assert parts > 1


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_gc_in_parts_finds_every_block_once_and_a_dry_run_removes_none(connection, dry_run):
    options = GcOptions(max_age_s=0.0, dry_run=dry_run)
    before = names_in(connection)
    found, _ = run_in_parts(connection.url, lambda store, c: store.gc(options, c), 2)
    removed = [finding.what for finding in found if isinstance(finding, Removal)]
    blocks = {name for name in before if not name.endswith(".json")}
    assert set(removed) == blocks
    assert len(removed) == len(blocks) == 2 * len(K)
    assert set(names_in(connection)) == (set(before) if dry_run else set(before) - blocks)


def test_the_command_goes_on_behind_a_name(connection):
    blocks = sorted(name for name in names_in(connection) if not name.endswith(".json"))
    arguments = ["store", "verify", connection.url, "--json", "--after", blocks[12]]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    counts = [found["objects"] for found in json.loads(done.stdout)["object_namespaces"]]
    assert counts == [0, 7]


@pytest.fixture
def stopped(connection, monkeypatch):
    """Run the command, with Ctrl-C before a page of that number; return its result."""

    def run_command(verb, page, *options):
        pages, list_pages = itertools.count(), obstore.list

        async def listed(*arguments, **how):
            async for found in list_pages(*arguments, **how):
                if next(pages) == page:
                    signal.raise_signal(signal.SIGINT)
                yield found

        with monkeypatch.context() as patched:
            patched.setattr(maintenance.obstore, "list", listed)
            return CliRunner().invoke(app, ["store", verb, connection.url, "--json", *options])

    return run_command


def go_on(connection, verb, stopped_result, *options):
    (location,) = re.findall(r"resume with --after (\S+)\n", stopped_result.stderr)
    arguments = ["store", verb, connection.url, "--json", *options, "--after", location]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in {0, 1}, done.output
    return done


def blocks_of(result):
    return sum(found["objects"] for found in json.loads(result.stdout)["object_namespaces"])


@pytest.mark.parametrize("page", range(8))
def test_ctrl_c_at_any_page_of_a_verification_loses_neither_blocks_nor_what_is_wrong(
    connection, stopped, page
):
    first, *_ = sorted(name for name in names_in(connection) if not name.endswith(".json"))
    obstore.put(connection.open(), first, b"bad")
    result = stopped("verify", page)
    assert result.exit_code == 130
    rest = go_on(connection, "verify", result)
    assert blocks_of(result) + blocks_of(rest) == 2 * len(K)
    assert (result.stderr + rest.stderr).count(f"{first.partition('/')[2]}: its header") == 1


def test_ctrl_c_in_a_collection_says_where_to_go_on_and_what_was_removed(connection, stopped):
    result = stopped("gc", 2, "--max-age", "0")
    assert result.exit_code == 130
    rest = go_on(connection, "gc", result, "--max-age", "0")
    removed = [
        found["expired_objects"]
        for part in (result, rest)
        for found in json.loads(part.stdout)["object_namespaces"]
    ]
    assert sum(removed) == 2 * len(K)
    assert all(name.endswith(".json") for name in names_in(connection))
