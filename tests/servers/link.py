"""A proxy in a process of its own that is a link: a latency, and a limit for each direction.

All connections share the two directions. Run as a program it serves until it is killed.
"""

import asyncio
import subprocess
import sys

CHUNK_BYTES = 1 << 16
QUEUED_CHUNKS = 4096


class Direction:
    """Paces what passes in one direction."""

    def __init__(self, bytes_per_s, delay_s):
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._free_s = 0.0

    async def carry(self, reader, writer):
        """Pass on what arrives, each chunk when its last byte would be there."""
        chunks = asyncio.Queue(QUEUED_CHUNKS)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take(reader, chunks))
            group.create_task(self._give(chunks, writer))

    async def _take(self, reader, chunks):
        now_s = asyncio.get_running_loop().time
        data = b"-"
        while data:
            data = await reader.read(CHUNK_BYTES)
            self._free_s = max(self._free_s, now_s()) + len(data) / self._bytes_per_s
            await chunks.put((self._free_s + self._delay_s, data))
            await asyncio.sleep(self._free_s - now_s())

    async def _give(self, chunks, writer):
        now_s = asyncio.get_running_loop().time
        while True:
            due_s, data = await chunks.get()
            await asyncio.sleep(due_s - now_s())
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()


async def serve(upstream_port, bytes_per_s, rtt_s):
    """Print the port, and serve."""
    up, down = (Direction(bytes_per_s, rtt_s / 2) for _ in range(2))

    async def connected(reader, writer):
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", upstream_port)
            async with asyncio.TaskGroup() as group:
                group.create_task(up.carry(reader, requests))
                group.create_task(down.carry(answers, writer))
        except* OSError:
            writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - for the parent
    await server.serve_forever()


class Link:
    """The process; a context manager.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, upstream_port, bytes_per_s, rtt_s):
        self._arguments = [str(upstream_port), str(bytes_per_s), str(rtt_s)]

    def __enter__(self):
        command = [sys.executable, __file__, *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
