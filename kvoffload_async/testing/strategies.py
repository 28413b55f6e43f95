"""Hypothesis strategies for keys, jobs and streams of requests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvoffload_async.types import (
    JobMetadata,
    OffloadKey,
    ReqContext,
    as_block_ids,
    make_offload_key,
)

_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class StreamedRequest:
    """A request of a stream: its id and the keys of its blocks, in prompt order."""

    req_id: str
    keys: tuple[OffloadKey, ...]


def offload_keys(num_groups: int = 2) -> st.SearchStrategy[OffloadKey]:
    """Return a strategy for keys of any hash in one of `num_groups` KV-cache groups."""
    hashes = st.binary(min_size=_HASH_BYTES, max_size=_HASH_BYTES)
    return st.builds(make_offload_key, hashes, st.integers(0, num_groups - 1))


def key_lists(
    min_size: int = 0, max_size: int = 8, num_groups: int = 2
) -> st.SearchStrategy[tuple[OffloadKey, ...]]:
    """Return a strategy for tuples of distinct keys."""
    return st.lists(
        offload_keys(num_groups), min_size=min_size, max_size=max_size, unique=True
    ).map(tuple)


@st.composite
def jobs(
    draw: st.DrawFn,
    num_slots: int = 16,
    max_blocks: int = 8,
    job_ids: st.SearchStrategy[int] | None = None,
    is_promotion: st.SearchStrategy[bool] | None = None,
) -> JobMetadata:
    """Generate well-formed jobs: distinct keys, and as many distinct slots below `num_slots`."""
    keys = draw(key_lists(max_size=min(max_blocks, num_slots)))
    slots = draw(
        st.lists(st.integers(0, num_slots - 1), min_size=len(keys), max_size=len(keys), unique=True)
    )
    return JobMetadata(
        draw(st.integers(0, 2**31) if job_ids is None else job_ids),
        keys,
        as_block_ids(slots),
        draw(st.booleans() if is_promotion is None else is_promotion),
        ReqContext(draw(st.text("abc", min_size=1, max_size=3))),
    )


@st.composite
def request_streams(
    draw: st.DrawFn, max_requests: int = 8, max_blocks: int = 6, num_branches: int = 3
) -> list[StreamedRequest]:
    """Generate streams of requests that share prefixes, as chained block hashes do.

    A request's k-th key depends on its first k branch choices, so two requests share exactly the
    blocks before their first different choice.
    """
    branches = st.lists(st.integers(0, num_branches - 1), min_size=1, max_size=max_blocks)
    paths = draw(st.lists(branches, min_size=1, max_size=max_requests))
    return [
        StreamedRequest(
            f"r{index}",
            tuple(make_offload_key(bytes(path[: depth + 1])) for depth in range(len(path))),
        )
        for index, path in enumerate(paths)
    ]
