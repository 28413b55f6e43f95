"""A blocking call beside the loop: for opening and closing, where tiers are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvoffload_async.waiting import until_done

T = TypeVar("T")


async def to_thread(call: Callable[..., T], *args: object) -> T:
    """Await a call on a thread of its own.

    A cancellation is delivered when the call has ended: what it makes is owned by somebody.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="kvoffload-engine")
    future = asyncio.get_running_loop().run_in_executor(executor, call, *args)
    executor.shutdown(wait=False)  # the thread ends with the call
    try:
        return await until_done(future)
    finally:
        # Until the thread is gone, which takes no time now, it refers to what it has called.
        executor.shutdown(wait=future.done())
