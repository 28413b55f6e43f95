"""Calls of two nodes of a cluster over a network that hypothesis draws.

A transport keeps what is written by reference, as uvloop's does, and still sends and receives
between `abort` and `connection_lost`. Each row belongs to one call; when the call has ended, the
row is given to somebody else, who fills it.
"""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

import hiredis
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from virtual_runner import VirtualRunner

from kvoffload_async.tiers.remote.client import Target
from kvoffload_async.tiers.valkey import connection as module
from kvoffload_async.tiers.valkey.address import Address, ValkeySettings
from kvoffload_async.tiers.valkey.connection import Connection
from kvoffload_async.tiers.valkey.nodes import ConnectionPool, Nodes, slot_of
from kvoffload_async.tiers.valkey.replies import ReplyError, ServerError

NODES = [("one", 1), ("two", 2)]
ROWS, ROW_BYTES, HEADER_BYTES = 8, 40, 6
VALUE_BYTES = HEADER_BYTES + ROW_BYTES
OTHERS = 0xEE
"""What somebody else fills a row with."""


def whole(key):
    return (key * VALUE_BYTES)[:VALUE_BYTES]


KINDS = {
    "value": whole,
    "longer": lambda key: whole(key) + b"!",
    "shorter": lambda key: whole(key)[:-7],
    "empty": lambda _key: b"",
    "too long": lambda key: whole(key) + b"!!",
}
"""Strings with which a server answers GETRANGE."""
OTHER_KINDS = {
    "nil": lambda _key, _node: b"$-1\r\n",
    "error": lambda key, _node: b"-ERR for %b\r\n" % key,
    "moved": lambda key, node: b"-MOVED %d %b\r\n" % (slot_of(key), other_than(node)),
    "asked": lambda key, node: b"-ASK %d %b\r\n" % (slot_of(key), other_than(node)),
    "a push": lambda _key, _node: b">2\r\n+a\r\n+b\r\n",
    "a status": lambda _key, _node: b"+OK\r\n",
    "no line end": lambda key, _node: b"$%d\r\n%bxx" % (VALUE_BYTES, whole(key)),
}


def other_than(node):
    host, port = NODES[1 - NODES.index(node)]
    return b"%b:%d" % (host.encode(), port)


class Link(asyncio.Transport):
    """A transport and the server behind it."""

    def __init__(self, protocol, node, world):
        super().__init__()
        self.protocol, self.node, self.world = protocol, node, world
        self.outgoing = deque()  # by reference
        self.incoming = b""  # to the client
        self.is_cut = self.is_paused = self.is_mute = False
        self.parser = hiredis.Reader()
        protocol.connection_made(self)

    def set_write_buffer_limits(self, high=None, low=None):
        assert (high, low) == (1, 0)

    def writelines(self, buffers):
        assert not self.is_cut
        self.outgoing += map(memoryview, buffers)
        self._control()

    def _control(self):
        left = sum(map(len, self.outgoing))
        if left > 1 and not self.is_paused:
            self.is_paused = True
            self.protocol.pause_writing()
        elif not left and self.is_paused:
            self.is_paused = False
            self.protocol.resume_writing()

    def send(self, count):
        """Send bytes from wherever they are now, and have the server answer what is complete."""
        while count and self.outgoing:
            data = self.outgoing.popleft()
            self.world.note_use(data)
            if count < len(data):
                self.outgoing.appendleft(data[count:])
            self.parser.feed(bytes(data[:count]))
            count -= min(count, len(data))
        for command in iter(self.parser.gets, False):
            self.incoming += b"" if self.is_mute else self.world.answer(self.node, command)
        if not self.is_cut:
            self._control()

    def deliver(self, count):
        while count and self.incoming:
            memory = self.protocol.get_buffer(-1)
            self.world.note_use(memory)
            step = min(count, len(memory), len(self.incoming))
            memory[:step] = self.incoming[:step]
            self.incoming = self.incoming[step:]
            self.protocol.buffer_updated(step)
            count -= step

    def abort(self):
        self.cut(None)

    def cut(self, error):
        if not self.is_cut:
            self.is_cut = True
            self.world.runner.loop.call_soon(self._lose, error)

    def _lose(self, error):
        self.send(self.world.late_bytes)
        self.deliver(self.world.late_bytes)
        self.protocol.connection_lost(error)
        self.outgoing.clear()
        self.world.links.remove(self)


@dataclass
class Call:
    """One call, and the rows that belong to it until it has ended."""

    keys: list
    rows: list
    targets: list = field(default_factory=list)
    values: list = field(default_factory=list)
    task: asyncio.Task = None


class Machine(RuleBasedStateMachine):
    """Rules are what the callers, the network and the servers do."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "_BATCH_BYTES", 24)

        async def connect(pool):
            return await self._connect(pool)

        self.patch.setattr(ConnectionPool, "_connect", connect)
        self.runner = VirtualRunner()
        self.nodes = Nodes(ValkeySettings(address=Address("one", 1), is_cluster=True))
        self.nodes._owners = [NODES[0]] * 16384
        self.rows = np.full((ROWS, ROW_BYTES), OTHERS, dtype=np.uint8)
        self.free = list(range(ROWS))
        self.links, self.calls = [], []
        self.answers = deque()
        self.served = Counter()
        self.wrong = 0  # accesses to rows of others, and values of others stored
        self.serial = self.ended = self.late_bytes = 0

    async def _connect(self, pool):
        (node,) = (node for node, one in self.nodes._pools.items() if one is pool)
        connection = Connection(0)
        self.links.append(Link(connection, node, self))
        return connection

    def answer(self, node, command):
        name, *rest = command
        if name == b"ASKING":
            return b"+OK\r\n"
        key = rest[0]
        if name == b"SET":
            self.wrong += rest[1] != whole(key)
            return b"+OK\r\n"
        kind = self.answers.popleft() if self.answers else "value"
        self.served[key, kind] += 1
        if kind in OTHER_KINDS:
            return OTHER_KINDS[kind](key, node)
        value = KINDS[kind](key)
        return b"$%d\r\n%b\r\n" % (len(value), value)

    def note_use(self, memory):
        """Count an access to a row that belongs to no call any more."""
        owned = [target.row for call in self.calls for target in call.targets]
        owned += [row for call in self.calls for _, row in call.values]
        is_row = isinstance(memory.obj, np.ndarray)
        self.wrong += is_row and not any(memory.obj is row.obj for row in owned)

    def _begin(self, count):
        self.serial += 1
        keys = [b"<%d.%d>" % (self.serial, i) for i in range(count)]
        call = Call(keys, [self.free.pop() for _ in range(count)])
        self.calls.append(call)
        return call

    def _start(self, call, commands):
        async def run():
            try:
                replies = await self.nodes.run(NODES[0], commands, call.targets)
                if call.targets:
                    self._check_replies(call, replies)
            except (ReplyError, OSError):
                pass
            finally:
                self.calls.remove(call)
                for target in call.targets:  # as the tier does
                    target.release()
                for _, row in call.values:
                    row.release()
                self.rows[call.rows] = OTHERS
                self.free += call.rows
                self.ended += 1

        call.task = self.runner.loop.create_task(run())
        self._settle()

    def _settle(self):
        running = list(self.calls)
        self.runner.run_ready()
        for call in running:
            if call not in self.calls and not call.task.cancelled():
                call.task.result()

    def _check_replies(self, call, replies):
        for key, reply, target, row in zip(
            call.keys, replies, call.targets, call.rows, strict=True
        ):
            if isinstance(reply, ServerError):
                assert reply.code in {"MOVED", "ASK"} or str(reply) == f"ERR for {key.decode()}"
            elif isinstance(reply, int):
                (kind,) = (kind for kind in KINDS if len(KINDS[kind](key)) == reply)
                assert self.served[key, kind]
                data = bytes(target.header) + self.rows[row].tobytes()
                assert data[:reply] == KINDS[kind](key)[: len(data)]
            else:
                assert reply in (None, b"OK") or isinstance(reply, ReplyError | OSError)

    @precondition(lambda self: self.free)
    @rule(count=st.integers(1, 4), kinds=st.lists(st.sampled_from([*KINDS, *OTHER_KINDS])))
    def load(self, count, kinds):
        call = self._begin(min(count, len(self.free)))
        self.answers.extend(kinds)
        call.targets = [Target(HEADER_BYTES, self.rows[row]) for row in call.rows]
        commands = [("GETRANGE", key, 0, VALUE_BYTES) for key in call.keys]
        self._start(call, commands)

    @precondition(lambda self: self.free)
    @rule(count=st.integers(1, 4))
    def store(self, count):
        call = self._begin(min(count, len(self.free)))
        for key, row in zip(call.keys, call.rows, strict=True):
            value = np.frombuffer(whole(key), dtype=np.uint8)
            self.rows[row] = value[HEADER_BYTES:]
            call.values.append((memoryview(whole(key)[:HEADER_BYTES]), self.rows[row].data))
        commands = [("SET", key, v, "NX") for key, v in zip(call.keys, call.values, strict=True)]
        self._start(call, commands)

    @precondition(lambda self: self.links)
    @rule(data=st.data(), count=st.sampled_from([1, 7, 30, 90, 1000]))
    def send(self, data, count):
        data.draw(st.sampled_from(self.links)).send(count)
        self._settle()

    @precondition(lambda self: any(link.incoming for link in self.links))
    @rule(data=st.data(), count=st.sampled_from([1, 7, 30, 90, 1000]))
    def deliver(self, data, count):
        busy = [link for link in self.links if link.incoming]
        data.draw(st.sampled_from(busy)).deliver(count)
        self._settle()

    @precondition(lambda self: any(link.outgoing for link in self.links))
    @rule(data=st.data())
    def answer_before_all_was_sent(self, data):
        link = data.draw(st.sampled_from([link for link in self.links if link.outgoing]))
        link.incoming += b"+OK\r\n" * 4
        link.is_mute = True
        link.deliver(1000)
        self._settle()

    @rule()
    def let_all_pass(self):
        while busy := [link for link in self.links if link.outgoing or link.incoming]:
            for link in busy:
                link.send(1000)
                link.deliver(1000)
            self._settle()

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), late_bytes=st.integers(0, 200), how=st.sampled_from(["cancel", "cut"]))
    def end_early(self, data, late_bytes, how):
        self.late_bytes = late_bytes
        if how == "cancel":
            call = data.draw(st.sampled_from(self.calls))
            for _ in range(data.draw(st.integers(1, 2))):
                call.task.cancel()
            self._settle()
            assert call.task.cancelled()
        else:
            link = data.draw(st.sampled_from(self.links))
            link.cut(data.draw(st.sampled_from([None, ConnectionResetError(), TimeoutError()])))
            self._settle()

    @invariant()
    def no_row_of_others_was_used(self):
        assert not self.wrong

    @invariant()
    def rows_of_others_are_untouched(self):
        assert (self.rows[self.free] == OTHERS).all()

    @invariant()
    def no_transport_has_a_row_of_others(self):
        owned = [value for call in self.calls for _, value in call.values]
        for link in self.links:
            for data in link.outgoing:
                if isinstance(data.obj, np.ndarray):
                    assert any(data.obj is value.obj for value in owned)

    def teardown(self):
        for link in list(self.links):
            link.cut(None)
        self._settle()
        for call in self.calls:
            call.task.cancel()
        self._settle()
        assert not self.calls
        assert self.ended == self.serial
        self.runner.run(self.nodes.close(), 10.0)
        self.runner.close()
        self.patch.undo()


TestCalls = pytest.mark.stateful(Machine.TestCase)
TestCalls.settings = settings(stateful_step_count=60, max_examples=2 * settings().max_examples)
