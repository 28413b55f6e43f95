"""Commands that manage the cache from another thread, and through the status socket."""

import asyncio
import hashlib
import json
import weakref

import pytest
import torch
from facade.worlds import HIT, World, k, ks
from typer.testing import CliRunner

from kvoffload_async import ConfigError, OffloadEngine, TieringOffloadingSpec
from kvoffload_async.abc.tier import TierCapabilities
from kvoffload_async.cli.app import app
from kvoffload_async.facade import commands as module
from kvoffload_async.facade.commands import (
    MOST_HASHES,
    CacheCommands,
    PromptHashes,
    PromptTokens,
)
from kvoffload_async.status.client import NoAnswerError, command
from kvoffload_async.status.server import SOCKET_VARIABLE
from kvoffload_async.types import get_offload_block_hash

EXACT = TierCapabilities(exclusive=True, deletes=True)
CONFIG = {"cpu_bytes_to_use": "64KiB", "block_bytes": 4096, "model": "m"}


def run(*arguments, text=None):
    return CliRunner().invoke(app, arguments, input=text)


class Large(dict):
    """A request that can be referred to weakly."""


def digits(*numbers):
    return [get_offload_block_hash(k(number)).hex() for number in numbers]


@pytest.fixture
def path(tmp_path_factory):
    return str(tmp_path_factory.mktemp("s") / "kv.sock")


@pytest.fixture
def world():
    world = World(EXACT)
    world.begin("r")
    world.store(1, 2, 3)
    world.rest()
    yield world
    world.end()


def execute(world, request):
    """Send a command as a client does, with the steps of a scheduler in between."""
    commands = world.manager.accept_commands()
    state = commands.answer(request)
    for _ in range(10):
        if "error" in state or state["is_done"]:
            break
        world.step()
        world.finish_all()
        state = commands.answer({"id": state["id"]})
    return state


def test_a_command_is_executed_at_a_steps_end_and_its_client_asks_for_the_report(world):
    commands = world.manager.accept_commands()
    state = commands.answer({"do": "delete", "hashes": digits(1, 2)})
    assert state == {"id": 1, "is_done": False}
    assert world.manager.has_pending_work()
    assert world.lookup(1) is HIT, "it has not been executed"
    world.rest()
    state = commands.answer({"id": 1})
    assert (state["is_done"], state["is_complete"]) == (True, True)
    assert state["report"]["done"] == {"primary": 2, "tier0": 2}
    assert world.tiers[0].blocks.keys() == {k(3)}


def test_every_action_can_be_commanded(world):
    found = execute(world, {"do": "count", "hashes": digits(1, 9), "groups": [0, 1]})
    assert found["report"]["done"] == {"primary": 1, "tier0": 1}
    pinned = execute(world, {"do": "pin", "hashes": digits(1), "duration_s": 5})
    assert pinned["report"]["done"] == {"primary": 1}
    assert execute(world, {"do": "unpin", "hashes": digits(1)})["report"]["blocks"] == 1
    listed = execute(world, {"do": "list", "places": ["tier0"]})["report"]
    assert listed["cursor"] is None
    one = {"do": "delete", "hashes": listed["keys"][:1], "places": ["tier0"]}
    assert execute(world, one)["is_complete"]
    assert execute(world, {"do": "clear", "places": ["tier0"]})["report"]["done"] == {"tier0": 2}
    copied = execute(world, {"do": "copy", "hashes": digits(1), "places": ["tier0"]})
    assert copied["report"]["done"] == {"tier0": 1}
    both = {"do": "move", "hashes": digits(2), "places": ["primary", "tier0"]}
    assert execute(world, both)["report"]["done"] == {"tier0": 1, "primary": 1}
    assert "name the tier" in execute(world, {**both, "places": ["tier0"]})["error"]
    json.dumps(listed)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ("delete", 'give an object with "do"'),
        ({"do": "format"}, 'give an object with "do"'),
        ({"do": "delete", "force": True}, "force: it is unknown"),
        ({"do": "delete", "hashes": "ab"}, "hashes: it is unknown, or its value has the wrong"),
        ({"do": "delete", "hashes": ["ab"] * (MOST_HASHES + 1)}, "give at most 512"),
        ({"do": "delete", "hashes": ["ab"] * 300, "groups": [0, 1]}, "300 for 2 groups"),
        ({"do": "delete", "hashes": ["ab"] * 513, "groups": []}, "513 for 0 groups"),
        ({"do": "delete", "hashes": [], "groups": [0] * 513}, "0 for 513 groups"),
        ({"do": "count", "places": ["tier0"] * 65}, "places: it is not valid; give at most 64"),
        ({"do": "delete", "hashes": ["xy"]}, "hashes: one is not valid"),
        ({"do": "delete", "hashes": [1]}, "hashes: one is not valid"),
        ({"do": "delete", "hashes": [""]}, "hashes: one is not valid"),
        ({"do": "delete", "older_than_s": 5}, "older_than_s: only a list takes it"),
        ({"do": "list", "older_than_s": "5"}, "older_than_s: it is unknown, or its value has"),
        ({"do": "hash"}, "tokens: 0; give at most 4096"),
        ({"do": "hash", "tokens": [1] * 4097}, "tokens: 4097; give at most 4096"),
        ({"do": "hash", "tokens": [1 << 32]}, "tokens: one is not valid"),
        ({"do": "hash", "tokens": [True]}, "tokens: one is not valid"),
        ({"do": "hash", "tokens": [1], "parent": "xy"}, "hashes: one is not valid"),
        ({"do": "hash", "tokens": [1], "parent": "key:ab"}, "hashes: one is not valid"),
        ({"do": "delete", "hashes": ["ab"], "groups": []}, "groups: [] is not valid"),
        ({"do": "hash", "tokens": [1], "lora": ["name"]}, "lora: ['name'] is not valid"),
        ({"do": "hash", "tokens": [1]}, "only the engine's host can hash them"),
        ({"do": "delete", "tokens": [1]}, "tokens: 1; give at most 4096, to be hashed"),
        ({"do": "delete", "groups": [-1]}, "groups: "),
        ({"do": "delete", "places": [1]}, "places: "),
        ({"id": 7}, "there is no such command"),
        ({"id": []}, "there is no such command"),
    ],
)
def test_a_bad_command_is_refused_before_it_is_queued(world, request_, text):
    commands = world.manager.accept_commands()
    assert text in commands.answer(request_)["error"]
    assert not commands.has_work


def hash_tokens(prompt):
    """Hash every 4 tokens; group 1 has blocks of 8."""
    if prompt.lora == ("broken", "/x"):
        raise ZeroDivisionError
    parent, hashes = prompt.parent or repr((prompt.cache_salt, prompt.lora)).encode(), []
    for first in range(0, len(prompt.tokens) - 3, 4):
        text = parent + repr(prompt.tokens[first : first + 4]).encode()
        hashes.append(parent := hashlib.sha256(text).digest()[:16])
    step = len(prompt.tokens) // 8 * 8
    parent = hashes[step // 4 - 1] if step else None
    return PromptHashes({0: hashes, 1: hashes[1::2]}, step, parent)


@pytest.mark.parametrize("options", [(), ("--salt", "a"), ("--lora", "x", "/x")])
def test_the_blocks_of_a_prompt_are_managed_by_its_token_ids(path, tmp_path, options):
    tokens, file = list(range(9999)), tmp_path / "tokens.json"
    file.write_text(json.dumps(tokens))
    salt, lora = ("a", None) if "a" in options else (None, ("x", "/x") if options else None)
    names = hash_tokens(PromptTokens(tokens, None, salt, lora)).hashes[0]
    assert len(names) == 2499
    config = {**CONFIG, "status_socket": path, "status_socket_commands": True}

    async def manage():
        tensors = {"layer": torch.zeros(len(names), 4096, dtype=torch.uint8)}
        sized = {**config, "cpu_bytes_to_use": "16MiB"}
        async with OffloadEngine(sized, kv_caches=tensors) as engine:
            engine.driver.commands.hash_tokens = hash_tokens
            await stored(engine, names)
            call = (path, "count", "--tokens", str(file), *options, "--json")
            found = await asyncio.to_thread(run, "cache", *call)
            only = await asyncio.to_thread(run, "cache", *call, "--group", "1")
            other = await asyncio.to_thread(run, "cache", *call, "--salt", "other")
            broken = await asyncio.to_thread(run, "cache", *call, "--lora", "broken", "/x")
            return found, only, other, broken

    found, only, other, broken = asyncio.run(manage())
    assert json.loads(found.output)["done"] == {"primary": 2499}
    assert json.loads(only.output)["done"] == {}
    assert json.loads(other.output)["done"] == {}
    assert "tokens: the host cannot hash them: ZeroDivisionError" in broken.output


def test_a_file_without_token_ids_is_an_error(world, tmp_path, monkeypatch):
    commands = world.manager.accept_commands()
    commands.hash_tokens = hash_tokens
    monkeypatch.setattr(
        "kvoffload_async.cli.cache.command", lambda _path, request, _time: commands.answer(request)
    )
    file = tmp_path / "tokens"
    for text, arguments, says in [
        ("1, 2, x", (), "it has no list of token ids"),
        ("1 2 3", (), "the prompt has no full block"),
        ("1 2 3 4", ("ab",), "--tokens: give it instead of block hashes"),
    ]:
        file.write_text(text)
        result = run("cache", "socket", "count", *arguments, "--tokens", str(file))
        assert (result.exit_code, says in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    "answer", [{}, {"hashes": 5, "num_tokens": 8}, {"hashes": {"x": []}, "num_tokens": -1}]
)
def test_hashes_that_are_none_end_the_command(tmp_path, monkeypatch, answer):
    monkeypatch.setattr("kvoffload_async.cli.cache.command", lambda *_: answer)
    (file := tmp_path / "tokens").write_text("1 2 3 4")
    result = run("cache", "socket", "count", "--tokens", str(file))
    assert (result.exit_code, "not the answer of an engine" in result.output) == (2, True)


def test_what_the_cache_refuses_is_the_commands_error(world):
    refused = {"do": "delete", "hashes": digits(1), "places": ["disk"]}
    assert "places: ['disk'] is not valid" in execute(world, refused)["error"]
    assert "duration_s" in execute(world, {"do": "pin", "hashes": digits(1)})["error"]
    assert "give a list" in execute(world, {"do": "clear"})["error"]


def test_commands_are_bounded_in_number_and_time(world, monkeypatch):
    monkeypatch.setattr(module, "_MOST_QUEUED", 2)
    monkeypatch.setattr(module, "_MOST_KEPT", 2)
    now_s = 0.0
    commands = CacheCommands(
        *(world.manager.cache, lambda found, *_: found, None, lambda: None, lambda: now_s)
    )
    world.manager.commands = commands
    count = {"do": "count", "hashes": [k(1).hex()]}
    assert [commands.answer(count).get("id") for _ in range(3)] == [1, 2, None]
    now_s = 31.0
    world.rest()
    assert "made no step for 30 s; nothing was done" in commands.answer({"id": 1})["error"]
    for number in (3, 4, 5):
        assert commands.answer(count)["id"] == number
        world.rest()
    assert commands.answer({"id": 5})["is_complete"]
    assert "no such" in commands.answer({"id": 1})["error"], "its result is forgotten"


def test_a_command_that_has_ended_keeps_little_of_what_its_client_has_sent(world):
    commands = world.manager.accept_commands()
    request = {"do": "list", "cursor": "x" * 100_000}
    large = weakref.ref(held := Large(request))
    number = commands.answer(held)["id"]
    del held
    world.rest()
    assert len(commands.answer({"id": number})["error"]) <= 1000
    assert large() is None


def test_a_state_that_is_read_while_a_step_ends_is_never_done_with_an_old_report():
    class Ending:
        number, error, is_done = 1, "", False

        @property
        def report(self):
            self.is_done = True  # the owner ends the command after this was read

    assert module._state_of(Ending()) == {"id": 1, "is_done": False}


# -- the socket ---------------------------------------------------------------------------------


def test_a_socket_accepts_no_commands_unless_they_are_configured(path):
    with TieringOffloadingSpec({**CONFIG, "status_socket": path}) as spec:
        spec.get_manager()
        with pytest.raises(NoAnswerError, match="set status_socket_commands"):
            command(path, {"do": "count", "hashes": ["ab"]}, 1.0)


def test_commands_need_a_socket(monkeypatch):
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    with (
        TieringOffloadingSpec({**CONFIG, "status_socket_commands": True}) as spec,
        pytest.raises(ConfigError, match="status_socket_commands: true is not valid without"),
    ):
        spec.get_manager()


async def stored(engine, names, tenant=None):
    async with engine.request("r", names, tenant=tenant) as request:
        await engine.store(request, list(range(len(names))))
    while engine.driver.has_pending_work():
        await engine.wait_for_progress(1.0)


def test_the_command_line_manages_an_idle_engine(path):
    names = [bytes([number]) * 8 for number in range(3)]
    config = {
        **CONFIG,
        "secondary_tiers": [{"type": "example"}],
        "status_socket": path,
        "status_socket_commands": True,
    }

    async def manage():
        tensors = {"l": torch.zeros(8, 4096, dtype=torch.uint8)}
        async with OffloadEngine(config, kv_caches=tensors) as engine:
            await stored(engine, names)
            engine.invalidate("v2")  # keys that are listed have a generation, or none
            engine.invalidate("v1")
            await stored(engine, names)
            results = []
            for arguments, text in [
                (["count", names[0].hex(), "ab"], None),
                (["delete", names[0].hex(), "--json"], None),
                (["list", "--place", "example"], None),
                (["count", "-", "--place", "example", "--json"], "\n".join(n.hex() for n in names)),
                (["clear", "--place", "example"], None),
                (["list", "--place", "example"], None),
                (["delete", "-"], ""),
            ]:
                call = asyncio.to_thread(run, "cache", path, *arguments, text=text)
                results.append(await call)
            return results

    counted, deleted, listed, again, cleared, empty, none = asyncio.run(manage())
    assert [result.exit_code for result in (counted, deleted, listed, again, cleared)] == [0] * 5
    assert counted.stdout.split("\n")[3].split()[1] == "primary"
    assert json.loads(deleted.stdout)["done"] == {"primary": 1, "example": 1}
    assert len(listed.stdout.split()) == 5
    assert json.loads(again.stdout)["done"] == {"example": 2}
    assert "5" in cleared.stdout
    assert not empty.stdout.strip()
    assert none.exit_code == 0, "what a listing has piped into it may be nothing"


def test_the_command_line_deletes_the_blocks_of_one_tenant(path):
    names = [bytes([number]) * 8 for number in range(3)]
    config = {
        **CONFIG,
        "secondary_tiers": [{"type": "example"}],
        "tenants": {"a": {}, "b": {}},
        "cpu_bytes_to_use": "64KiB",
        "status_socket": path,
        "status_socket_commands": True,
    }

    async def manage():
        tensors = {"l": torch.zeros(8, 4096, dtype=torch.uint8)}
        async with OffloadEngine(config, kv_caches=tensors) as engine:
            for tenant in "ab":
                await stored(engine, names, tenant)
            calls = [
                ["delete", "-", "--tenant", "a"],
                ["count", names[0].hex(), "--tenant", "a", "--json"],
                ["count", names[0].hex(), "--json"],
                ["delete", "--tenant", "a", "--json"],
                ["list", "--place", "example", "--tenant", "a"],
                ["list", "--place", "example", "--tenant", "b"],
                ["delete", "--tenant", "c"],
            ]
            return [
                await asyncio.to_thread(run, "cache", path, *arguments, text="")
                for arguments in calls
            ]

    nothing, counted, default, deleted, gone, left, unknown = asyncio.run(manage())
    assert (nothing.exit_code, "3" in nothing.stdout) == (0, False)
    assert json.loads(counted.stdout)["done"] == {"primary": 1, "example": 1}
    assert not any(json.loads(default.stdout)["done"].values())
    assert json.loads(deleted.stdout)["done"] == {"primary": 3}
    assert [len(each.stdout.split()) for each in (gone, left)] == [0, 3]
    assert "tenant: 'c' is not valid" in unknown.output


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["destroy"], 2, "destroy: expected delete"),
        (["delete"], 2, "delete: needs block hashes"),
        (["list", "ab"], 2, "list: takes no block hashes"),
        (["count", "ab"], 1, "no engine answers"),
    ],
)
def test_a_command_line_that_cannot_work_is_one_line(path, arguments, status, text):
    result = run("cache", path, *arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


def test_keys_are_the_generations(world):
    keys = ks(1)
    world.manager.invalidate("v2")
    report = execute(world, {"do": "count", "hashes": digits(1)})["report"]
    assert report["done"] == {"primary": 0, "tier0": 0}
    named = [f"key:{key.hex()}" for key in keys]
    report = execute(world, {"do": "count", "hashes": named})["report"]
    assert report["done"] == {"primary": 1, "tier0": 1}
