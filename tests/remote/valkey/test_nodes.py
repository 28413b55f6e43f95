"""Nodes of a cluster that cannot be asked: each costs what depends on it alone."""

import asyncio

import numpy as np
import pytest

from kvoffload_async.errors import CallTimeoutError, TierUnavailableError
from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.remote.client import Target
from kvoffload_async.tiers.remote.lookups import LookUpError
from kvoffload_async.tiers.valkey.address import Address, ValkeySettings
from kvoffload_async.tiers.valkey.client import ValkeyClient
from kvoffload_async.tiers.valkey.nodes import ConnectionPool, slot_of
from kvoffload_async.tiers.valkey.replies import ServerError

ONE, TWO = ("one", 1), ("two", 2)
K = [key_of(number) for number in range(8)]
SIZE = 40
UNREACHABLE = [
    LookUpError("address of one: Name or service not known"),
    CallTimeoutError("one: no connection in time"),
    ConnectionRefusedError(),
]


@pytest.fixture
def answers(monkeypatch):
    """Node -> the reply to a command, or the error of every call."""
    answers = {}

    async def call(pool, commands, targets, most_bytes):
        answer = answers[pool.route.host, pool.route.port]
        if isinstance(answer, Exception):
            raise answer
        return [answer(command) for command in commands]

    monkeypatch.setattr(ConnectionPool, "call", call)
    return answers


def slots(command):
    assert command == ("CLUSTER", "SLOTS")
    return [[0, 16383, [b"two", 2]]]


def cluster():
    settings = ValkeySettings(address=Address(*ONE), is_cluster=True)
    return ValkeyClient(settings, "0" * 32, lambda: None)


@pytest.mark.parametrize("error", UNREACHABLE, ids=lambda error: type(error).__name__)
def test_another_node_is_asked_for_the_owners_if_the_first_cannot_be_reached(answers, error):
    async def refresh():
        nodes = cluster()._nodes
        answers[ONE] = answers[TWO] = slots
        await nodes.refresh()
        nodes._pools[TWO] = ConnectionPool(TWO, nodes._lookups, nodes.settings)
        answers[ONE] = error
        await nodes.refresh()
        return nodes._guide, nodes.owners

    assert asyncio.run(refresh()) == (TWO, [TWO])


@pytest.mark.parametrize("error", UNREACHABLE, ids=lambda error: type(error).__name__)
def test_a_block_moved_to_a_node_that_cannot_be_reached_fails_alone(answers, error):
    async def load():
        client = cluster()
        client._nodes._owners = [ONE] * 16384
        names = [client._prefix + key for key in K]
        moved = ServerError(f"MOVED {slot_of(names[3])} two:2")
        answers[ONE] = lambda command: moved if command[1] == names[3] else SIZE
        answers[TWO] = error
        row = np.zeros(SIZE, np.uint8)
        return await client.get(K, [Target(8, row) for _ in K])

    found = asyncio.run(load())
    assert isinstance(found.pop(3), TierUnavailableError)
    assert all(value.version == "-1" for value in found)


def test_an_error_for_every_block_is_that_of_the_call(answers):
    async def load():
        client = cluster()
        client._nodes._owners = [ONE] * 16384
        answers[ONE] = lambda _command: ServerError("NOPERM no permission")
        await client.get(K, [Target(8, np.zeros(SIZE, np.uint8)) for _ in K])

    with pytest.raises(ServerError, match="NOPERM"):
        asyncio.run(load())
