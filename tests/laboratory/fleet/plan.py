"""Assignment of tiers and requests to processes, and the hit ratio of an unbounded cache."""

from __future__ import annotations

import logging
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvoffload_async.config import OffloadConfig
from kvoffload_async.errors import InputError
from kvoffload_async.facade.tier_factory import SecondaryTierFactory
from kvoffload_async.facade.tier_options import options_of

logger = logging.getLogger(__name__)

RANDOM: Final = "random"
AFFINITY: Final = "affinity"
SPREADS: Final = (RANDOM, AFFINITY)

_SLAB: Final = "slab"
_SLAB_PRIMARIES: Final = 4
"""Default size of a process's slab, as a multiple of the primary."""
_SLAB_SEGMENTS: Final = 8
_SLAB_OVERHEAD_BYTES: Final = 1 << 20
_LEAST_SEGMENT_BYTES: Final = 1 << 20
_MATCH_SHARE: Final = 0.5


class Equipment:
    """The configuration of each process: its own tiers, and the shared ones.

    Tiers in memory are a process's own, and so is a `slab`, in a folder per process below its
    `root_dir`; all other tiers are shared. A process without an own tier gets a slab of four times
    the primary.
    """

    def __init__(self, config: OffloadConfig, scratch: Path) -> None:
        """Divide the tiers into own and shared ones.

        Args:
            config: Configuration of one process.
            scratch: A temporary folder of the replay.

        Raises:
            InputError: No tier is shared.
            ConfigError: The options of a tier are invalid.
        """
        self._config = config
        self._own: list[Mapping[str, Any]] = []
        self._shared: list[Mapping[str, Any]] = []
        for tier in config.secondary_tiers:
            is_own = tier["type"] == _SLAB or not SecondaryTierFactory.check_config(tier, config)
            (self._own if is_own else self._shared).append(tier)
        if not self._shared:
            raise InputError(
                "--fleet: no tier is shared by the processes; give one, such as "
                "--tier valkey:url=valkey://HOST"
            )
        if not self._own:
            self._own.append(_slab(config, scratch / _SLAB))
        self._pass = uuid.uuid4().hex

    @property
    def shared_names(self) -> list[str]:
        """Types of the shared tiers."""
        return [str(tier["type"]) for tier in self._shared]

    def of(self, member: int, pass_name: str, *, shares: bool, remembers: bool) -> OffloadConfig:
        """Return the configuration of one process in one pass, which starts with empty tiers.

        Args:
            member: Number of the process.
            pass_name: Separates the pass's blocks from others'.
            shares: Whether to include the shared tiers.
            remembers: Whether the shared tiers may cache that a block is absent.
        """
        tiers = [self._parted(tier, member, pass_name) for tier in self._own]
        for tier in self._shared if shares else ():
            given = f"{tier['namespace']}-" if tier.get("namespace") else ""
            named = {**tier, "namespace": f"{given}fleet-{self._pass}-{pass_name}"}
            takes = options_of(SecondaryTierFactory.get_tier_class(tier["type"]))
            if not remembers and "negative_cache_ttl_s" in takes:
                named["negative_cache_ttl_s"] = 0
            tiers.append(named)
        return replace(self._config, secondary_tiers=tuple(tiers))

    def remove_folders(self, num_members: int, pass_name: str) -> None:
        """Remove the processes' own folders of a pass; call it after the processes have ended.

        The folders have the name of this pass and are never reused.
        """
        for tier in self._own:
            for member in range(num_members if "root_dir" in tier else 0):
                folder = self._folder(tier, member, pass_name)
                # A process that could not be killed may still write to it.
                shutil.rmtree(folder, ignore_errors=True)
                if folder.exists():
                    logger.warning("%s could not be removed", folder)

    def _parted(self, tier: Mapping[str, Any], member: int, pass_name: str) -> Mapping[str, Any]:
        if "root_dir" not in tier:
            return tier
        return {**tier, "root_dir": str(self._folder(tier, member, pass_name))}

    def _folder(self, tier: Mapping[str, Any], member: int, pass_name: str) -> Path:
        return Path(tier["root_dir"]) / f"fleet-{self._pass}-{pass_name}-{member}"


def _slab(config: OffloadConfig, folder: Path) -> Mapping[str, Any]:
    blocks_bytes = _SLAB_PRIMARIES * config.cpu_bytes_to_use
    segment_bytes = max(_LEAST_SEGMENT_BYTES, blocks_bytes // _SLAB_SEGMENTS)
    return {
        "type": _SLAB,
        "root_dir": str(folder),
        "capacity_bytes": blocks_bytes + blocks_bytes // _SLAB_SEGMENTS + _SLAB_OVERHEAD_BYTES,
        "segment_bytes": segment_bytes,
    }


def spread(
    requests: Iterable[Sequence[int]], num_members: int, how: str, seed: int
) -> Iterator[int]:
    """Yield the process for each request.

    Affinity picks the process that has seen the longest prefix of the request, if that is at least
    half of it, else the process with the fewest blocks so far, like routers of serving fleets.
    """
    chance = random.Random(seed)
    seen: list[set[int]] = [set() for _ in range(num_members)]
    given = [0] * num_members
    for block_ids in requests:
        if how == RANDOM:
            yield chance.randrange(num_members)
            continue
        heads = [length_of_head(block_ids, known) for known in seen]
        member = max(range(num_members), key=lambda i: (heads[i], -given[i]))
        if heads[member] < _MATCH_SHARE * len(block_ids):
            member = min(range(num_members), key=given.__getitem__)
        seen[member].update(block_ids)
        given[member] += len(block_ids)
        yield member


def length_of_head(block_ids: Sequence[int], known: set[int]) -> int:
    """Return the number of leading blocks that are known."""
    return next((i for i, one in enumerate(block_ids) if one not in known), len(block_ids))


@dataclass(slots=True)
class UnboundedCache:
    """Hits of one unbounded cache shared by all processes."""

    refs: int = 0
    hits: int = 0

    @classmethod
    def over(cls, requests: Iterable[Sequence[int]]) -> UnboundedCache:
        """Return the cache's hits for a sequence of requests."""
        found, seen = cls(), set[int]()
        for block_ids in requests:
            ids = list(dict.fromkeys(block_ids))
            weights = Counter(block_ids)
            found.refs += len(block_ids)
            found.hits += sum(weights[i] for i in ids[: length_of_head(ids, seen)])
            seen.update(ids)
        return found

    @property
    def hit_ratio(self) -> float:
        """Hit ratio over block references."""
        return self.hits / max(1, self.refs)
