"""An asyncio HTTP server that streams tokens and reuses prefixes that other requests computed.

    python async_server.py --config config.json
    curl -N -d '{"prompt": "What is a prefix cache?"}' http://127.0.0.1:8080/generate
    curl http://127.0.0.1:8080/metrics

`OffloadEngine` runs on the server's own loop. If a client disconnects, its request is cancelled,
and its device blocks are reused once no copy uses them. At SIGTERM the server accepts no further
requests, lets running ones finish within a deadline, and closes the engine, which stores the
pending blocks. The model is a stand-in: it fills a block with a number and generates "la". The HTTP
implementation is minimal; put `Server.generate` behind a framework of your choice.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvoffload_async import (
    BusyError,
    EngineRequest,
    InvalidatedError,
    OffloadEngine,
    OffloadError,
    TransportError,
)
from kvoffload_async.observe.prometheus import OffloadCollector

BLOCK_LETTERS, BLOCK_BYTES = 16, 4096
BLOCKS_PER_REQUEST, ROOMS = 16, 6  # device blocks per request, concurrent requests on the device
MAX_REQUESTS = 64  # including those that wait for device blocks
MAX_BODY_BYTES, MAX_TOKENS = 64 * 1024, 10_000
READ_S, WRITE_S = 10.0, 10.0
log = logging.getLogger("async_server")
CONFIG = {
    "cpu_bytes_to_use": "1MiB",
    "model": "org/example",
    "secondary_tiers": [{"type": "example"}],  # in memory; a slab or fs tier survives a restart
}


def chained_hashes(prompt: str) -> list[bytes]:
    """One hash per full block; equal hashes mean equal text up to the block's end."""
    ends = range(BLOCK_LETTERS, len(prompt) + 1, BLOCK_LETTERS)
    return [hashlib.sha256(prompt[:end].encode()).digest() for end in ends]


class RefusedError(Exception):
    """A request is answered with an error: an HTTP status and a reason."""


class Server:
    """Serves prompts; `rooms` are the sets of device blocks, one per running request."""

    def __init__(self, engine: OffloadEngine, kv_cache: torch.Tensor, token_s: float) -> None:
        self.engine = engine
        self.kv_cache = kv_cache
        self.token_s = token_s
        self.connections: set[asyncio.Task[None]] = set()
        self.number = 0
        self.rooms: asyncio.Queue[list[int]] = asyncio.Queue()
        for first in range(0, ROOMS * BLOCKS_PER_REQUEST, BLOCKS_PER_REQUEST):
            self.rooms.put_nowait(list(range(first, first + BLOCKS_PER_REQUEST)))
        self.registry = CollectorRegistry()
        self.registry.register(OffloadCollector({"0": engine.stats}))
        free = Gauge("server_free_rooms", "Free rooms.", registry=self.registry)
        free.set_function(self.rooms.qsize)
        self.cancelled = Counter("server_cancelled", "Streams cut off.", registry=self.registry)

    async def generate(self, prompt: str, max_tokens: int) -> AsyncGenerator[dict[str, Any]]:
        """Yield the messages to send; closing the generator cancels the request."""
        hashes = chained_hashes(prompt)
        if len(hashes) > BLOCKS_PER_REQUEST:
            raise RefusedError("413 Content Too Large", "the prompt has too many blocks")
        self.number += 1
        async with self.engine.request(f"request-{self.number}", hashes) as request:
            room = await self.rooms.get()
            # However the request ends: as soon as no copy uses the blocks.
            request.when_released(self.rooms.put_nowait, room)
            found = await self.prefill(request, hashes, room)
            yield {"loaded_blocks": found, "computed_blocks": len(hashes) - found}
            for _ in range(max_tokens):
                await asyncio.sleep(self.token_s)  # the model's next token
                yield {"text": "la "}

    async def prefill(self, request: EngineRequest, hashes: list[bytes], room: list[int]) -> int:
        """Load the longest known prefix, compute the rest, and store the computed blocks."""
        try:
            found = await self.engine.lookup(request, timeout_s=1.0)  # pins the prefix
            found = await self.engine.load(request, room[:found])
        except (BusyError, InvalidatedError, TimeoutError, TransportError):
            if not await request.released(timeout_s=1.0):  # a copy may still write there
                raise RefusedError("503 Service Unavailable", "a copy hangs") from None
            found = 0  # compute
        for index, block_hash in enumerate(hashes[found:], found):
            self.kv_cache[room[index]] = block_hash[0]  # the model
        with contextlib.suppress(BusyError, InvalidatedError, TimeoutError, TransportError):
            # If it fails, other requests compute this prefix too.
            await self.engine.store(request, room[found : len(hashes)], found)
        return found

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer), name="connection")
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of a connection; its errors do not affect other requests."""
        try:
            try:
                await self.answer(reader, writer)
            except RefusedError as error:
                status, reason = error.args
                await send(writer, status, "text/plain", f"{reason}\n".encode())
        except (ConnectionError, TimeoutError):
            pass  # the client has disconnected, or does not read
        except Exception:
            log.exception("a request failed")
        finally:
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, path, body = await read_request(reader)
        if (method, path) == ("POST", "/generate"):
            if len(self.connections) > MAX_REQUESTS:
                raise RefusedError("503 Service Unavailable", "too many requests")
            prompt, max_tokens = parse(body)
            stream = asyncio.create_task(self.stream(writer, prompt, max_tokens), name="stream")
            gone = asyncio.create_task(until_gone(reader), name="gone")
            try:
                await asyncio.wait({stream, gone}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                gone.cancel()
                stream.cancel()
                await asyncio.wait({stream, gone})
                if stream.cancelled() or isinstance(stream.exception(), OSError):
                    self.cancelled.inc()
            if not stream.cancelled():
                stream.result()
        elif (method, path) == ("GET", "/metrics"):
            await send(writer, "200 OK", CONTENT_TYPE_LATEST, generate_latest(self.registry))
        else:
            raise RefusedError("404 Not Found", "POST /generate or GET /metrics")

    async def stream(self, writer: asyncio.StreamWriter, prompt: str, max_tokens: int) -> None:
        """Send each line of JSON as a chunk; a chunk of length 0 ends the stream."""
        start = head("200 OK", "application/x-ndjson", "Transfer-Encoding: chunked")
        async with contextlib.aclosing(self.generate(prompt, max_tokens)) as events:
            async for event in events:
                line = json.dumps(event).encode() + b"\n"
                writer.write(b"%s%x\r\n%s\r\n" % (start, len(line), line))
                start = b""
                async with asyncio.timeout(WRITE_S):
                    await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def drain(self, timeout_s: float) -> None:
        """Let running requests finish within the deadline; then cancel them."""
        if self.connections:
            await asyncio.wait(self.connections, timeout=timeout_s)
        for task in self.connections:
            task.cancel()
        if self.connections:
            await asyncio.wait(self.connections, timeout=timeout_s)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Return method, path and body; refuse a slow client or an invalid request."""
    try:
        async with asyncio.timeout(READ_S):
            start, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
            method, path, _ = start.split(" ")
            pairs = (field.partition(":") for field in fields)
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            length = int(headers.get("content-length", "0"))
            if not 0 <= length <= MAX_BODY_BYTES:
                raise RefusedError("413 Content Too Large", f"at most {MAX_BODY_BYTES} bytes")
            return method, path, await reader.readexactly(length)
    except (ValueError, EOFError, asyncio.LimitOverrunError) as error:
        raise RefusedError("400 Bad Request", "expected an HTTP request") from error


def parse(body: bytes) -> tuple[str, int]:
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        match {"max_tokens": 16} | json.loads(body):
            case {"prompt": str(prompt), "max_tokens": int(tokens)} if 0 <= tokens <= MAX_TOKENS:
                prompt.encode()  # rejects lone surrogates
                return prompt, tokens
    raise RefusedError("400 Bad Request", 'expected {"prompt": "...", "max_tokens": 16}')


async def until_gone(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(4096):
            pass  # one request per connection


def head(status: str, content_type: str, *fields: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", f"Content-Type: {content_type}", "Connection: close", *fields)
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


async def send(writer: asyncio.StreamWriter, status: str, content_type: str, body: bytes) -> None:
    writer.write(head(status, content_type, f"Content-Length: {len(body)}") + body)
    async with asyncio.timeout(WRITE_S):
        await writer.drain()


async def main(arguments: argparse.Namespace) -> None:
    kv_cache = torch.zeros(ROOMS * BLOCKS_PER_REQUEST, BLOCK_BYTES, dtype=torch.uint8)
    config = json.loads(arguments.config.read_text()) if arguments.config else CONFIG
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with OffloadEngine(config, kv_caches={"layer": kv_cache}) as engine:
        server = Server(engine, kv_cache, arguments.token_seconds)
        listening = await asyncio.start_server(server.connected, arguments.host, arguments.port)
        host, port = listening.sockets[0].getsockname()[:2]
        print(f"serving on http://{host}:{port}", flush=True)
        await stop.wait()
        listening.close()
        await server.drain(arguments.drain_seconds)
        print(f"closing after {server.number} requests", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A streaming server over a KV-cache engine.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0: any free port")
    parser.add_argument("--config", type=Path, help="engine configuration, JSON")
    parser.add_argument("--token-seconds", type=float, default=0.02, help="time per token")
    parser.add_argument(
        "--drain-seconds", type=float, default=5.0, help="drain deadline at SIGTERM"
    )
    try:
        asyncio.run(main(parser.parse_args()))
    except (OffloadError, OSError, ValueError) as error:
        raise SystemExit(f"async_server: {error}") from error
