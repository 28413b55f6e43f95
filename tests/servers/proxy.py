"""A TCP proxy that breaks connections in the ways in which networks do."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass, replace

CHUNK_BYTES = 1 << 16
SLOW_CHUNK_BYTES = 1 << 10


@dataclass(frozen=True)
class Network:
    """What becomes of connections; offsets count the bytes of replies since this was set.

    Attributes:
        refuses: New connections are closed at once, and old ones, too.
        stalls: Nothing moves, in either direction, and nobody hears of it.
        stalls_at: So it is from there within a reply; the connection ends when this is set anew.
        drops_open: So it is for ever with the connections that are open now; new ones are in order.
        reader_pause_s: The server takes requests in small pieces, with such a pause before each.
        latency_s: Each chunk of a reply waits as long.
        reset_at: The connection is reset within a reply.
        close_at: It is closed there in order.
        flip_at: One bit of a reply is another.
    """

    refuses: bool = False
    stalls: bool = False
    stalls_at: int | None = None
    drops_open: bool = False
    reader_pause_s: float = 0.0
    latency_s: float = 0.0
    reset_at: int | None = None
    close_at: int | None = None
    flip_at: int | None = None


class Proxy:
    """Listens on a port of its own, in a thread of its own; a context manager.

    With an SSL context it speaks TLS with its clients, and without TLS with the server.
    """

    def __init__(self, upstream_port, tls=None, *, host="127.0.0.1", port=0):
        self._upstream_port = upstream_port
        self._address = host, port
        self._tls = tls
        self._network = Network()
        self._replied = 0
        self._tasks = set()
        self._writers = set()
        self._dropped = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self.connections = 0

    def __enter__(self):
        self._thread.start()
        self.port = self._run(self._listen())
        return self

    def __exit__(self, *_):
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def set(self, **faults):
        """Have the network be so from now on; without arguments: in order."""
        self._run(self._set(Network(**faults)))

    def lead_to(self, upstream_port):
        """Have new connections lead to another server; open ones stay."""
        self._upstream_port = upstream_port

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60.0)

    async def _listen(self):
        self._changed = asyncio.Event()
        self._server = await asyncio.start_server(self._serve, *self._address, ssl=self._tls)
        return self._server.sockets[0].getsockname()[1]

    async def _set(self, network):
        self._network, self._replied = network, 0
        self._changed.set()
        self._changed = asyncio.Event()
        if network.drops_open:
            self._dropped |= self._writers
        if network.refuses:
            for writer in list(self._writers):
                writer.transport.abort()

    async def _stop(self):
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        try:
            if not self._network.refuses:
                await self._connect(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            self._dropped.discard(writer)
            writer.transport.abort()

    async def _connect(self, reader, writer):
        upstream, requests = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        pumps = [
            asyncio.create_task(self._pump(reader, requests, client=writer)),
            asyncio.create_task(self._pump(upstream, writer, client=writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(pumps)
            requests.transport.abort()

    async def _pump(self, reader, writer, *, client):
        is_reply = writer is client
        with contextlib.suppress(OSError):
            while data := await reader.read(self._chunk_bytes(is_reply)):
                while self._network.stalls or client in self._dropped:
                    await self._changed.wait()
                if is_reply:
                    data = await self._broken(data, writer)
                elif self._network.reader_pause_s:
                    await asyncio.sleep(self._network.reader_pause_s)
                if data is None:
                    return
                writer.write(data)
                await writer.drain()

    def _chunk_bytes(self, is_reply):
        is_slow = self._network.reader_pause_s and not is_reply
        return SLOW_CHUNK_BYTES if is_slow else CHUNK_BYTES

    async def _broken(self, data, writer):
        """Return what arrives of a reply, or None if the connection has ended."""
        network, first = self._network, self._replied
        self._replied += len(data)
        if network.latency_s:
            await asyncio.sleep(network.latency_s)
        if network.flip_at is not None and first <= network.flip_at < self._replied:
            flipped = bytearray(data)
            flipped[network.flip_at - first] ^= 0x10
            return bytes(flipped)
        if network.stalls_at is not None and network.stalls_at < self._replied:
            writer.write(data[: max(0, network.stalls_at - first)])
            await self._changed.wait()
            return None
        for end, resets in ((network.reset_at, True), (network.close_at, False)):
            if end is not None and end < self._replied:
                writer.write(data[: max(0, end - first)])
                if resets:
                    writer.transport.abort()
                else:
                    await writer.drain()
                    writer.close()
                self._network = replace(network, reset_at=None, close_at=None)
                return None
        return data
