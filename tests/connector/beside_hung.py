"""What a scheduler must see beside a tier that hangs; see `serving`."""

import numpy as np
from connector.serving import MAX_WORKERS

from kvoffload_async.types import get_offload_block_hash, make_offload_key

STORED, PROMOTED = ("nmpo", "qrst", "uvwx"), "PQRS"
"""Stems of prompts that nobody else has."""
OVERDUE_S = 31.0
"""After that, what has begun in the tier that hangs is overdue."""


def check_work_beside_the_hung_tier(serving):
    """The other tier takes what is stored, and gives what it has."""
    (index,) = serving.world.healthy
    _rest(serving, index)
    tier = serving.world.tiers[index]
    for stem in STORED:
        _check_store(serving, index, tier, stem)
        serving.world.runner.advance(OVERDUE_S)
        _rest(serving, index)
    _check_promotion(serving, index, tier)


def _check_store(serving, index, tier, stem):
    left = serving.world.check_what_the_hung_tier_leaves()
    prompt = _prompt(serving, stem)
    serving.arrive(prompt, max_tokens=1)
    _rest(serving, index)
    resident = (key for key, _, _ in serving.world.primary.core.resident())
    new = {key for key in resident if get_offload_block_hash(key)[:1] == stem[:1].encode()}
    keys = _keys(serving, prompt)
    is_limited = serving.geometry.max_offload_tokens is not None
    has_window = any(group.sliding_window_tokens for group in serving.groups)
    if len(keys) <= left and not is_limited and not has_window:
        assert new >= set(keys), "there was no room in the primary"
    assert new <= tier.blocks.keys()


def _check_promotion(serving, index, tier):
    prompt = _prompt(serving, PROMOTED)
    keys = _keys(serving, prompt)
    for key in keys:
        row = np.full(MAX_WORKERS, serving.number_of(key), dtype=np.int64)
        tier.blocks[key] = row.view(np.uint8)
    if tier.capabilities.exclusive:
        tier.env.blocks_appeared(keys)
    serving.arrive(prompt, max_tokens=1)
    before = serving.tally["loaded"]
    _rest(serving, index)
    room, limit = serving.world.manager.planner.room, serving.geometry.max_load_tokens
    if limit is None and len(keys) <= room.budget:
        assert serving.tally["loaded"] - before == len(prompt) - 1


def _rest(serving, index):
    """Run until the adapter and the other tier have nothing to do.

    The adapter grants no store while a copy from before a reset is in flight, and the last blocks
    of a request that has ended are stored with the next step.
    """
    connector, jobs = serving.connector, serving.connector._jobs

    def is_at_rest():
        is_busy = len(jobs) or jobs.has_stale or connector._ending
        return not is_busy and not serving.world.has_pending(index)

    serving.run_until(is_at_rest, seconds=2.5)


def _prompt(serving, stem):
    """Return a prompt of one chunk of the widest group, and a token more."""
    groups = range(len(serving.groups))
    return stem[0] + (stem * 4)[: max(map(serving.geometry.tokens_per_chunk, groups))]


def _keys(serving, prompt):
    """Return the keys of a prompt's whole chunks, group after group."""
    keys = []
    for group in range(len(serving.groups)):
        size = serving.geometry.tokens_per_chunk(group)
        ends = range(size, len(prompt) + 1, size)
        keys += [make_offload_key(prompt[:end].encode(), group) for end in ends]
    return keys
