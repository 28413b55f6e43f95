"""The example's server behind Starlette and uvicorn: clients that go away cost no device blocks."""

import asyncio
import contextlib
import importlib.util
import json
import random
import socket
from pathlib import Path

import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from kvoffload_async import OffloadEngine

EXAMPLE = Path(__file__).parents[1] / "examples" / "async_server.py"
SEED = 42
REQUESTS, CLIENTS = 1000, 16
TIMEOUT_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.servers]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("async_server", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def application(server):
    async def generate(request):
        body = await request.json()

        async def lines():
            async with contextlib.aclosing(server.generate(**body)) as events:
                async for event in events:
                    yield json.dumps(event) + "\n"

        return StreamingResponse(lines())

    return Starlette(routes=[Route("/generate", generate, methods=["POST"])])


@contextlib.asynccontextmanager
async def served(app):
    """Serve an application on this loop; yield its port."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


async def ask(port, prompt, max_tokens, chance=None):
    """Send a request; return the answer. With `chance`, go away at a drawn moment."""
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        if chance is None:
            return await reader.read()
        if chance.random() < 0.5:  # before the answer, or beside its beginning
            for _ in range(chance.randint(0, 60)):
                await asyncio.sleep(0)
        else:
            for _ in range(chance.randint(1, 12)):
                await reader.readline()
        return b""
    finally:
        writer.transport.abort()


@pytest.mark.timeout(180)
def test_after_1000_clients_that_went_away_all_rooms_are_back(example, tmp_path):
    asyncio.run(clients_go_away(example, tmp_path))


async def clients_go_away(example, folder):
    kv_cache = torch.zeros(
        example.ROOMS * example.BLOCKS_PER_REQUEST, example.BLOCK_BYTES, dtype=torch.uint8
    )
    config = {
        "cpu_bytes_to_use": "1MiB",
        "model": "m",
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "kv")}],
    }
    chances = [random.Random(f"{SEED}/{number}") for number in range(REQUESTS)]
    async with OffloadEngine(config, kv_caches={"layer": kv_cache}) as engine:
        server = example.Server(engine, kv_cache, 0.0)
        async with served(application(server)) as port:

            async def clients():
                while chances:
                    chance = chances.pop()
                    await ask(port, "".join(chance.choices("abcdefgh", k=16 * 16)), 50, chance)

            async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(clients())
            async with asyncio.timeout(TIMEOUT_S):
                answer = await ask(port, "x" * 32, 1)
                assert b"computed_blocks" in answer
                rooms = [await server.rooms.get() for _ in range(example.ROOMS)]
    assert len({room[0] for room in rooms}) == example.ROOMS
