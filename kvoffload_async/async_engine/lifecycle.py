"""Configuration, opening and closing of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvoffload_async.abc.pages import hold_pages
from kvoffload_async.abc.transport import Transport
from kvoffload_async.async_engine.request import EngineRequest
from kvoffload_async.async_engine.steps import Steps, Stores
from kvoffload_async.async_engine.transfers import EngineBounds, Transfers
from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import ClosedError, ConfigError, StateError
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.facade.tiering import TieringOffloadingManager
from kvoffload_async.runtime.bridge import Bridge
from kvoffload_async.runtime.loop import SameLoopRunner
from kvoffload_async.runtime.owned import guard_forks, warn_unclosed
from kvoffload_async.statistics import EngineStatistics
from kvoffload_async.timeline import RequestTimeline
from kvoffload_async.waiting import seconds, until_done

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


async def to_thread(call: Callable[..., T], *args: object) -> T:
    """Run a call on a new thread and await it.

    A cancellation is raised only after the call has ended, so its result is never lost.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="kvoffload-engine")
    future = asyncio.get_running_loop().run_in_executor(executor, call, *args)
    executor.shutdown(wait=False)  # the thread ends with the call
    try:
        return await until_done(future)
    finally:
        # The ending thread still references the call; joining it takes no time now.
        executor.shutdown(wait=future.done())


CreateTransport = Callable[[memoryview], Transport]
_NO_MODEL = 'model: missing; add "model": "org/name", the model whose KV blocks the engine keeps'


class EngineLifecycle:
    """The components of an engine, and their configuration, start and shutdown.

    Not thread-safe; call only from the event loop's thread, except `stats`.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | OffloadConfig,
        create_transport: CreateTransport | None = None,
        bounds: EngineBounds | None = None,
        *,
        kv_caches: Mapping[str, torch.Tensor] | None = None,
        block_dim: int | None = None,
    ) -> None:
        """Validate the configuration; `async with` starts the engine.

        Args:
            config: See `OffloadConfig`; `model` is required here. `block_bytes` is optional with
                `kv_caches`: it defaults to the bytes of one chunk of them.
            create_transport: Creates the transport to the device's tensors, given the primary's
                buffer; called on a helper thread. The engine owns the transport.
            bounds: See `EngineBounds`.
            kv_caches: Instead of `create_transport`: layer name -> tensor.
            block_dim: Dimension of the `kv_caches` that indexes device blocks; see
                `register_kv_caches`.

        Raises:
            ConfigError: A key or a value is invalid, or the tensors cannot be addressed by block.
        """
        if (create_transport is None) is (kv_caches is None):
            raise ConfigError("give either create_transport or kv_caches")
        self._config = _parsed(config, kv_caches, block_dim)
        if self._config.write_back is None:
            self._config = replace(self._config, write_back="wait")
        if self._config.model is None:
            raise ConfigError(_NO_MODEL)
        spec = TieringOffloadingSpec(self._config)
        if create_transport is not None:
            self._create_transport = create_transport
        elif kv_caches is not None:
            self._create_transport = spec.transport_maker(kv_caches, block_dim=block_dim)
        self._bounds = EngineBounds() if bounds is None else bounds
        if not isinstance(self._bounds, EngineBounds):
            raise ConfigError(f"bounds: {bounds!r} is not valid; give an EngineBounds(...)")
        self._has_transport = False
        self._is_open = False
        self._closing: asyncio.Task[None] | None = None
        self._requests: dict[EngineRequest, None] = {}
        """Requests that have begun and not ended."""

    async def __aenter__(self) -> Self:
        """Map the memory, open the tiers and the transport.

        Raises:
            ConfigError: A tier or the transport failed to start; started components are closed.
            StateError: The engine has been opened before.
        """
        if hasattr(self, "_loop"):
            raise StateError("an engine is opened once; make another one")
        self._loop = asyncio.get_running_loop()
        self._steps = Steps(self._bounds.unread_events)
        runner = SameLoopRunner(self._loop, self._steps.note_progress)
        self._spec = TieringOffloadingSpec(self._config, Bridge(runner), self.stats)
        try:
            # On a helper thread, which waits for coroutines on this loop.
            await to_thread(self._start)
        except BaseException:
            await to_thread(self._end, self._config.shutdown_timeout_s)
            raise
        self._transfers = Transfers(
            self._transport,
            self._bounds,
            recorder=self._manager.recorder,
            block_bytes=self._config.block_bytes,
        )
        self._stores = Stores(self._manager, self._steps, self._transfers)
        self._is_open = True
        self._steps.begin(self._manager)
        guard_forks(self, _is_open=False)
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            warn_unclosed(self, "close()")

    def __repr__(self) -> str:
        state = repr(self._manager) if self._is_open else "not open"
        return f"<{type(self).__name__} of {self._config.model}: {state}>"

    @property
    def manager(self) -> TieringOffloadingManager:
        """The synchronous manager behind this engine. For invariants and inspection."""
        return self._manager

    def stats(self) -> EngineStatistics:
        """Return counters and gauges; works on a closed engine too.

        Thread-safe; see `TieringOffloadingManager.stats`.
        """
        manager = self._require_started()
        return self._transfers.stats(manager.stats(), self._steps.missed_events)

    def explain(self, req_id: str) -> RequestTimeline | None:
        """Return the timeline of a request; see `TieringOffloadingManager.explain`."""
        return self._require_started().explain(req_id)

    def timelines(self) -> tuple[RequestTimeline, ...]:
        """Return all kept request timelines, in the order in which the requests began."""
        return self._require_started().timelines()

    async def close(self, timeout_s: float | None = None) -> None:
        """Reject new calls, wait for copies, close transport and tiers; idempotent.

        Calls under way return a partial result or raise. A copy still running after half of
        `timeout_s` seconds (by default the configuration's `shutdown_timeout_s`) is given up; then
        the primary's memory stays mapped. Cancelling the call does not stop the shutdown.

        Raises:
            OffloadError: A tier failed to close; all other components are closed.
        """
        limit_s = self._config.shutdown_timeout_s if timeout_s is None else seconds(timeout_s)
        if self._is_open:
            self._is_open = False
            self._closing = self._loop.create_task(self._close(limit_s), name="kvoffload:close")
        elif self._closing is None or self._closing.done():
            return
        await until_done(self._closing)

    def _require_started(self) -> TieringOffloadingManager:
        if not hasattr(self, "_transfers"):
            raise ClosedError("the engine is not open")
        return self._manager

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the engine is not open")
        self._steps.ensure_open()

    def _start(self) -> None:
        """Create manager and transport; runs on a helper thread that the loop awaits."""
        self._manager = self._spec.get_manager()
        self._transport = self._create_transport(self._manager.get_primary_kv_view())
        self._has_transport = True

    def _end(self, timeout_s: float) -> None:
        """Close transport and tiers; runs on a helper thread that the loop awaits."""
        try:
            if self._has_transport and not self._transport.close(timeout_s):
                hold_pages(self._manager.get_primary_kv_view(), "a copy that has not ended")
        finally:
            self._spec.shutdown(timeout_s)

    async def _close(self, timeout_s: float) -> None:
        deadline_s = self._loop.time() + timeout_s
        self._steps.stop()
        self._transfers.stop()
        has_landed = await self._transfers.quiesce(timeout_s / 2)
        self._transfers.abandon()
        self._steps.waiters.give_up()
        try:
            self._steps.end(self._manager)
        finally:
            left_s = max(0.0, deadline_s - self._loop.time())
            await to_thread(self._end, left_s if has_landed else left_s / 2)


def _parsed(
    config: Mapping[str, Any] | OffloadConfig,
    kv_caches: Mapping[str, torch.Tensor] | None,
    block_dim: int | None,
) -> OffloadConfig:
    """Return the parsed configuration; derive a missing `block_bytes` from the tensors."""
    if isinstance(config, OffloadConfig):
        return config
    given: Any = config  # unchecked input; `parse` validates it
    if kv_caches is None or not isinstance(given, Mapping) or "block_bytes" in given:
        return OffloadConfig.parse(given)
    parsed = OffloadConfig.parse({**given, "block_bytes": 1})
    from kvoffload_async.transport.layout import register_kv_caches  # noqa: PLC0415 - torch

    layout = register_kv_caches(kv_caches, None, parsed.blocks_per_chunk, block_dim)
    return replace(parsed, block_bytes=layout.chunk_bytes)
