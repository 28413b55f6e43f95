"""The built-in workload: people who chat with an assistant, made up from a seed.

Conversations start from one of a few system prompts that they share, grow by some blocks a turn,
and come back: mostly soon, so that the primary tier still has them, sometimes much later.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from kvoffload_async.replay.source import RequestSource

DEFAULT_SEED = 20_250_301
NUM_REQUESTS = 400
SYSTEM_PROMPT_BLOCKS = (12, 8, 4)

_START_SHARE = 0.25
_SOON_SHARE = 0.6
_NUM_SOON = 6
_GROWTH_BLOCKS = (2, 8)
_TURNS = (1, 9)


@dataclass(slots=True)
class _Conversation:
    blocks: list[int]
    turns_left: int


class ChatWorkload(RequestSource):
    """`NUM_REQUESTS` turns of several conversations; the same ones for the same seed."""

    def __init__(self, limit: int | None = None, seed: int = DEFAULT_SEED) -> None:
        super().__init__(limit)
        self._seed = seed

    def most_blocks(self) -> int:
        return max(SYSTEM_PROMPT_BLOCKS) + _TURNS[1] * _GROWTH_BLOCKS[1]

    def _requests(self) -> Iterator[Sequence[int]]:
        chance = random.Random(self._seed)  # noqa: S311 - reproducible, and no secret
        new_ids = count()
        prompts = [[next(new_ids) for _ in range(size)] for size in SYSTEM_PROMPT_BLOCKS]
        open_ones: list[_Conversation] = []  # the latest last
        for _ in range(NUM_REQUESTS):
            if not open_ones or chance.random() < _START_SHARE:
                talk = _Conversation(list(chance.choice(prompts)), chance.randint(*_TURNS))
            else:
                soon = chance.random() < _SOON_SHARE
                oldest = max(0, len(open_ones) - _NUM_SOON) if soon else 0
                talk = open_ones.pop(chance.randrange(oldest, len(open_ones)))
            talk.blocks.extend(next(new_ids) for _ in range(chance.randint(*_GROWTH_BLOCKS)))
            talk.turns_left -= 1
            if talk.turns_left:
                open_ones.append(talk)
            yield tuple(talk.blocks)

    def _fraction_of_all(self) -> float:
        return self._taken / NUM_REQUESTS
