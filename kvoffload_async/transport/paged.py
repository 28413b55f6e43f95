"""A paged device memory, one tensor per layer, with content that reveals misplacement.

Word i (8 bytes) of block b is `mix(b) + i * odd`, modulo 2**64, counted over all layers. Every word
depends on block and position, so that misplaced, shifted, partially copied and stale blocks are all
detected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvoffload_async.errors import ConfigError
from kvoffload_async.transport.streams import DeviceRuntime

BlockNames = npt.NDArray[np.uint64]
"""Block ids that determine the contents, shape `[num_blocks]`."""

_WORD_BYTES = 8
_SCRATCH_BYTES = 128 * 1024
"""Bytes of a batch that fits in a core's cache and that torch does not split among threads."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The memory of one layer.

    Attributes:
        words: int64 `[num_frames, words_per_frame]`; the end of a page may be padding.
        ramp: Offsets of a frame's words from the block's first word, int64 `[words_per_frame]`.
        mask: Bits of each word that are not padding, int64 `[words_per_frame]`.
    """

    words: torch.Tensor
    ramp: torch.Tensor
    mask: torch.Tensor


class PagedMemory:
    """Device memory in frames; a frame holds one block in every layer.

    A transport sees a frame as `blocks_per_chunk` device blocks. Frame 0 is reserved for the null
    block, and never used.

    Attributes:
        runtime: The device's runtime, or None.
        kv_caches: Layer name -> uint8 tensor, `[num_device_blocks, page_bytes]`.
    """

    def __init__(
        self,
        num_frames: int,
        block_bytes: int,
        *,
        layers: int = 1,
        blocks_per_chunk: int = 1,
        runtime: DeviceRuntime | None = None,
        salt: int = 0,
    ) -> None:
        """Allocate the memory.

        Args:
            num_frames: Number of blocks, in addition to frame 0.
            block_bytes: Bytes of a block, divided among its device blocks and layers.
            layers: Number of tensors.
            blocks_per_chunk: Device blocks per frame.
            runtime: The device's runtime; None: the memory is on the host.
            salt: Varies the contents, for example by worker.

        Raises:
            ConfigError: The device lacks the memory, or a block is too small.
        """
        require_pages(block_bytes, layers, blocks_per_chunk)
        page_bytes = block_bytes // blocks_per_chunk
        self.runtime = runtime
        self._device = torch.device("cpu" if runtime is None else runtime.device_type)
        self._blocks_per_chunk = blocks_per_chunk
        self._salt = np.uint64(salt)
        self._layers: list[_Layer] = []
        self.kv_caches: dict[str, torch.Tensor] = {}
        first_word = 0
        for index in range(layers):
            size = page_bytes // layers + (index < page_bytes % layers)
            page_words = -(-size // _WORD_BYTES)
            words_per_frame = page_words * blocks_per_chunk
            try:
                words = self._empty((num_frames + 1, words_per_frame), torch.int64)
            except (RuntimeError, MemoryError) as error:
                raise ConfigError(
                    f"--device-blocks: {num_frames} blocks of {block_bytes} bytes do not fit into "
                    f"the device's memory ({error})"
                ) from error
            ramp = np.arange(first_word, first_word + words_per_frame, dtype=np.uint64) * _GAMMA
            mask = np.full((blocks_per_chunk, page_words * _WORD_BYTES), 255, dtype=np.uint8)
            mask[:, size:] = 0
            self._layers.append(
                _Layer(
                    words,
                    self._to_device(ramp),
                    self._to_device(mask.reshape(-1).view(np.uint64)),
                )
            )
            pages = words.view(torch.uint8).view(-1, page_words * _WORD_BYTES)
            self.kv_caches[f"layer{index}"] = pages[:, :size]
            first_word += words_per_frame

    def device_blocks(self, frames: Sequence[int]) -> list[int]:
        """Return the device blocks of frames, in order."""
        size = self._blocks_per_chunk
        if size == 1:
            return list(frames)
        return [frame * size + position for frame in frames for position in range(size)]

    def compute(self, names: BlockNames, frames: Sequence[int]) -> None:
        """Write the contents of blocks into frames, as a model would; arguments are parallel."""
        with self._on_stream():
            for rows, heads in self._batches(names, frames):
                for layer in self._layers:
                    layer.words.index_copy_(0, rows, heads + layer.ramp)

    def count_wrong(self, names: BlockNames, frames: Sequence[int]) -> int:
        """Return the number of frames without exactly the expected block."""
        wrong = 0
        with self._on_stream():
            for rows, heads in self._batches(names, frames):
                is_wrong = self._empty((len(rows),), torch.bool).zero_()
                for layer in self._layers:
                    found = layer.words.index_select(0, rows)
                    found ^= heads + layer.ramp
                    found &= layer.mask
                    is_wrong |= found.any(dim=1)
                wrong += int(is_wrong.sum())
        return wrong

    def _batches(
        self, names: BlockNames, frames: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Split blocks into batches: rows `[n]`, and first words `[n, 1]`."""
        size = max(1, _SCRATCH_BYTES // (self._layers[0].words.shape[1] * _WORD_BYTES))
        rows = self._to_device(np.array(frames, dtype=np.uint64))
        heads = self._to_device(_mix(names) + self._salt)[:, None]
        for first in range(0, len(frames), size):
            yield rows[first : first + size], heads[first : first + size]

    def _on_stream(self) -> AbstractContextManager[object]:
        """Launch operations on the thread's current stream, inside of the context."""
        if self.runtime is None:
            return nullcontext()
        return self.runtime.stream(self.runtime.current_stream(self._device))

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self.runtime is None:
            return torch.empty(tuple(shape), dtype=dtype)
        return self.runtime.empty(shape, dtype, self._device)

    def _to_device(self, words: npt.NDArray[np.uint64]) -> torch.Tensor:
        host = torch.from_numpy(words.view(np.int64))
        if self.runtime is None:
            return host
        with self._on_stream():
            on_device = self._empty(host.shape, host.dtype)
            return on_device.copy_(self.runtime.pin_memory(host), non_blocking=True)


def require_pages(block_bytes: int, layers: int, blocks_per_chunk: int) -> None:
    """Raise ConfigError if a device block is too small for its layers."""
    page_bytes = block_bytes // blocks_per_chunk
    if page_bytes < layers:
        raise ConfigError(
            f"block_bytes: {layers} layers cannot share {page_bytes} bytes; give more"
        )


def pages_bytes(num_frames: int, block_bytes: int, layers: int, blocks_per_chunk: int) -> int:
    """Return the maximum number of bytes that a `PagedMemory` allocates."""
    page_bytes = block_bytes // blocks_per_chunk + layers * (_WORD_BYTES - 1)
    return (num_frames + 1) * blocks_per_chunk * page_bytes


def _mix(names: BlockNames) -> BlockNames:
    """Scatter ids over all 64 bits; injective.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    z = (names + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
