"""A blocking call beside the loop: for opening and closing, where tiers are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def run_aside(call: Callable[..., T], *args: object) -> T:
    """Await a call on a thread of its own.

    A cancellation is delivered when the call has ended: what it makes is owned by somebody.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="kvoffload-engine")
    future = asyncio.get_running_loop().run_in_executor(executor, call, *args)
    executor.shutdown(wait=False)  # the thread ends with the call
    return await until_done(future)


async def until_done(future: asyncio.Future[T]) -> T:
    """Await a future to its end; a cancellation is delivered then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()  # retrieved: nobody will ask any more
        try:
            raise cancelled
        finally:
            del cancelled  # it holds this frame, and what its callers hold
    return future.result()
