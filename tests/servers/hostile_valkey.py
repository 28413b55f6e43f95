"""A server that speaks a little of Valkey's protocol, and answers what a test wants."""

import asyncio
import threading


class HostileServer:
    """Answers the opening as a server does, and everything else with one reply."""

    def __init__(self, reply):
        self._reply = reply
        self.is_hostile = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        call = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(call, self._loop).result(60.0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self):
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, reader, writer):
        try:
            while data := await reader.read(1 << 16):
                if self.is_hostile:
                    writer.write(self._reply)
                elif b"SETINFO" in data:
                    writer.write(b"+OK\r\n" * data.count(b"SETINFO"))
                else:
                    writer.write(b"+OK\r\n$16\r\n0123456789abcdef\r\n")
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
