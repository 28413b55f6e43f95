"""Several coroutines at once, without what a `TaskGroup` leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def run_together(coroutines: Iterable[Coroutine[Any, Any, None]], name: str) -> None:
    """Run all of them until they have ended; the first one that raises ends the others.

    A `TaskGroup` that is cancelled is left in a reference cycle with the frames of those who await
    it: the primary's rows would stay in use until the garbage collector finds it.

    Args:
        coroutines: What to run.
        name: Of the tasks.
    """
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(coroutine, name=name) for coroutine in coroutines]
    if not tasks:
        return
    try:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
    finally:
        del tasks, task  # a task holds what it has raised, and that holds this frame
