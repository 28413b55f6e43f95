"""Configuration, opening and closing of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvoffload_async.abc.transport import Transport, hold_pages
from kvoffload_async.async_engine.request import EngineRequest
from kvoffload_async.async_engine.steps import Steps, Stores
from kvoffload_async.async_engine.transfers import EngineBounds, Transfers
from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import ClosedError, ConfigError, StateError, naming_shortage
from kvoffload_async.facade.driver import PlannerDriver, planner_text
from kvoffload_async.facade.spec import TieringOffloadingSpec
from kvoffload_async.runtime.bridge import SameLoopBridge
from kvoffload_async.runtime.helper_thread import HelperThread
from kvoffload_async.runtime.lifetime import guard_forks, warn_unclosed
from kvoffload_async.runtime.loop import SameLoopRunner
from kvoffload_async.statistics import EngineStatistics
from kvoffload_async.timeline import RequestTimeline
from kvoffload_async.waiting import seconds, until_done

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


async def on_helper(helper: HelperThread, call: Callable[[], T]) -> T:
    """Run a call on a helper thread and await it.

    A cancellation is raised only after the call has ended, so its result is never lost.
    """
    return await until_done(asyncio.wrap_future(helper.call(call)))


CreateTransport = Callable[[memoryview], Transport]
_END_THREAD_S = 1.0
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
        self._is_open = False
        self._is_closed = True
        """Whether nothing is left to be closed."""
        self._closing: asyncio.Task[None] | None = None
        """The latest attempt to close."""
        self._requests: dict[EngineRequest, None] = {}
        """Requests that have begun and not ended."""

    async def __aenter__(self) -> Self:
        """Map the memory, open the tiers and the transport.

        Raises:
            ConfigError: A tier or the transport failed to start; started components are closed.
            TierUnavailableError: Likewise, or threads, descriptors or memory are exhausted.
            StateError: The engine has been opened before.
        """
        if hasattr(self, "_loop"):
            raise StateError("an engine is opened once; make another one")
        self._loop = asyncio.get_running_loop()
        self._steps = Steps(self._bounds.unread_events)
        runner = SameLoopRunner(self._loop, self._steps.note_report)
        bridge = SameLoopBridge(runner)
        bridge.lag = self._steps.lag
        self._spec = TieringOffloadingSpec(self._config, bridge, self.stats)
        with naming_shortage("the engine cannot be started"):
            # It waits for coroutines on this loop, and stays: closing may find no further thread.
            self._helper = HelperThread("kvoffload-engine")
            try:
                await on_helper(self._helper, self._start)
            except BaseException:
                try:
                    await self._end(self._config.shutdown_timeout_s)
                finally:  # after another cancellation, too
                    self._helper.end(_END_THREAD_S)
                raise
        self._transfers = Transfers(
            self._transport,
            self._bounds,
            recorder=self._driver.recorder,
            block_bytes=self._config.block_bytes,
        )
        self._stores = Stores(self._driver, self._steps, self._transfers)
        self._is_open = True
        self._is_closed = False
        self._steps.begin(self._driver)
        guard_forks(self, _is_open=False, _is_closed=True)
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and self._closing is None:
            warn_unclosed(self, "close()")

    def __repr__(self) -> str:
        state = planner_text(self._driver.planner) if self._is_open else "not open"
        return f"<{type(self).__name__} of {self._config.model}: {state}>"

    @property
    def driver(self) -> PlannerDriver:
        """The driver of the planner and the tiers. For invariants and inspection."""
        return self._driver

    def stats(self) -> EngineStatistics:
        """Return counters and gauges; works on a closed engine too.

        Thread-safe; see `PlannerDriver.stats`.
        """
        driver = self._require_started()
        return self._transfers.stats(driver.stats(), self._steps.missed_events)

    def explain(self, req_id: str) -> RequestTimeline | None:
        """Return the timeline of a request; see `PlannerDriver.explain`."""
        return self._require_started().explain(req_id)

    def timelines(self) -> tuple[RequestTimeline, ...]:
        """Return all kept request timelines, in the order in which the requests began."""
        return self._require_started().timelines()

    async def close(self, timeout_s: float | None = None) -> None:
        """Reject new calls, wait for copies, close transport and tiers; idempotent.

        Calls under way return a partial result or raise. A copy still running after half of
        `timeout_s` seconds (by default the configuration's `shutdown_timeout_s`) is given up; then
        the primary's memory stays mapped. Cancelling the call does not stop the shutdown, for which
        further calls wait. Starts no thread.

        Raises:
            OffloadError: A tier failed to close; all other components are closed. After any error,
                another call closes what is left.
            StateError: Called on another event loop than the engine's.
        """
        limit_s = self._config.shutdown_timeout_s if timeout_s is None else seconds(timeout_s)
        if self._is_closed:
            return
        if asyncio.get_running_loop() is not self._loop:
            raise StateError("close() was called on another event loop than the engine's")
        if self._closing is None or self._closing.done():  # the first attempt, or the last failed
            self._is_open = False
            self._closing = self._loop.create_task(self._close(limit_s), name="kvoffload:close")
        await until_done(self._closing)

    def _require_started(self) -> PlannerDriver:
        if not hasattr(self, "_transfers"):
            raise ClosedError("the engine is not open")
        return self._driver

    def _require_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the engine is not open")
        self._steps.ensure_open()

    def _start(self) -> None:
        """Create driver and transport; runs on a helper thread that the loop awaits."""
        self._driver = self._spec.get_driver(PlannerDriver)
        self._transport = self._create_transport(self._driver.get_primary_kv_view())

    async def _end(self, timeout_s: float) -> None:
        """Close transport and tiers, then end the helper thread."""
        await on_helper(self._helper, partial(self._close_parts, timeout_s))
        self._is_closed = True
        self._helper.end(_END_THREAD_S)  # it has nothing left to do

    def _close_parts(self, timeout_s: float) -> None:
        """Close transport and tiers; runs on a helper thread that the loop awaits."""
        try:
            if hasattr(self, "_transport") and not self._transport.close(timeout_s):
                hold_pages(self._driver.get_primary_kv_view(), "a copy that has not ended")
        finally:
            self._spec.shutdown(timeout_s)

    async def _close(self, timeout_s: float) -> None:
        deadline_s = self._loop.time() + timeout_s
        self._steps.stop()
        self._transfers.stop()
        has_landed = await self._transfers.running.quiesce(timeout_s / 2)
        self._transfers.running.abandon()
        self._steps.waiters.give_up()
        try:
            self._steps.end(self._driver)
        finally:
            left_s = max(0.0, deadline_s - self._loop.time())
            await self._end(left_s if has_landed else left_s / 2)


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
