"""A continuous-batching scheduler in sixty lines, with its KV cache offloaded to host memory.

The scheduler makes synchronous calls: the connector decides, and the worker copies during the
forward pass. The device is a tensor on the CPU with room for three requests. The second round of
prompts finds the first round's blocks in host memory.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from kvoffload_async import (
    ConnectorGeometry,
    CPUOffloadingSpec,
    KVGroup,
    OffloadingConnectorScheduler,
    StepOutput,
)

TOKENS_PER_BLOCK, DEVICE_BLOCKS, BLOCK_BYTES, OUTPUT_TOKENS = 4, 20, 64, 3


@dataclass(eq=False)
class Request:
    """A request with the attributes that the connector reads: see `SchedulerRequest`."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(TOKENS_PER_BLOCK, len(self.tokens) + 1, TOKENS_PER_BLOCK)
        return [hashlib.sha256(bytes(self.tokens[:end])).digest() for end in ends]

    def is_finished(self) -> bool:
        return len(self.tokens) >= self.num_prompt_tokens + OUTPUT_TOKENS


class Scheduler:
    """Starts requests while device blocks are free, and tracks them until they finish."""

    def __init__(self, connector: OffloadingConnectorScheduler) -> None:
        self.connector = connector
        self.free = list(range(1, DEVICE_BLOCKS))  # block 0 stands for "none"
        self.waiting: deque[Request] = deque()
        self.loading: dict[str, Request] = {}
        self.running: list[Request] = []

    def schedule(self) -> StepOutput:
        """Schedule one step and return its work."""
        for _ in range(len(self.waiting)):
            request = self.waiting.popleft()
            need = -(-(request.num_prompt_tokens + OUTPUT_TOKENS) // TOKENS_PER_BLOCK)
            tokens, waits = self.connector.get_num_new_matched_tokens(request, 0)
            if tokens is None or len(self.free) < need:
                self.waiting.append(request)  # undecided, or no room: ask again
                continue
            request.blocks = [self.free.pop() for _ in range(need)]
            self.connector.update_state_after_alloc(request, [request.blocks], tokens)
            request.num_computed_tokens = tokens
            if waits:
                self.loading[request.request_id] = request
            else:
                self.running.append(request)
        missing = {r.request_id: r.num_tokens - r.num_computed_tokens for r in self.running}
        return StepOutput(missing)

    def update(self, loaded: set[str], invalid: set[int]) -> None:
        """Process a step's results: tokens, finished loads, finished requests."""
        for request in list(self.running):
            request.num_computed_tokens = request.num_tokens
            request.tokens.append(request.num_tokens % 251)
            if request.is_finished():
                self.running.remove(request)
                self.connector.request_finished(request)
                self.free += request.blocks
        for req_id in loaded:
            request = self.loading.pop(req_id)
            if invalid.intersection(request.blocks):  # the load failed: compute it instead
                request.num_computed_tokens = 0
            self.running.append(request)


def forward(kv_cache: torch.Tensor, request: Request) -> None:
    """Compute a request's missing KV, and check the loaded KV before it."""
    for index, block_hash in enumerate(request.block_hashes):
        expected = torch.tensor(list(block_hash * 2), dtype=torch.uint8)
        if index < request.num_computed_tokens // TOKENS_PER_BLOCK:
            assert torch.equal(kv_cache[request.blocks[index]], expected), "wrong KV was loaded"
        else:
            kv_cache[request.blocks[index]] = expected


def main() -> None:
    kv_cache = torch.zeros(DEVICE_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
    spec = CPUOffloadingSpec({"cpu_bytes_to_use": "1MiB", "block_bytes": BLOCK_BYTES})
    geometry = ConnectorGeometry([KVGroup(TOKENS_PER_BLOCK)], tokens_per_hash=TOKENS_PER_BLOCK)
    connector = OffloadingConnectorScheduler(spec.get_manager(), geometry)
    worker = spec.create_handlers({"layer": kv_cache})
    scheduler = Scheduler(connector)
    steps = computed = 0
    for number in range(12):  # six prompts, each of them twice
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, *range(10 + number % 6, 22 + number % 6)]
        scheduler.waiting.append(Request(f"request-{number}", prompt, len(prompt)))

    while scheduler.waiting or scheduler.running or scheduler.loading:
        output = scheduler.schedule()
        meta = connector.build_connector_meta(output)  # the end of the scheduler's step
        assert worker.handle_preemptions(meta)  # before any device block is overwritten
        worker.start_kv_transfers(meta)
        for request in scheduler.running:
            forward(kv_cache, request)
        worker.prepare_store_kv(meta)  # copied during the next step
        report, loaded = worker.build_output()
        connector.update_connector_output(report)
        scheduler.update(loaded, connector.take_invalid_blocks())
        steps += 1
        computed += sum(output.num_scheduled_tokens.values())

    print(f"{steps} steps; {computed} tokens computed")
    print(f"{connector.counters.loaded_tokens} tokens loaded from host memory")
    print(f"{connector.counters.stored_blocks} blocks stored")
    assert connector.counters.loaded_tokens
    worker.shutdown()
    spec.get_manager().shutdown()


if __name__ == "__main__":
    main()
