"""Peers: tiers of other engines, as contenders of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvoffload_async.bench.contender import Contender, Place
from kvoffload_async.config import nearest, reject_unknown
from kvoffload_async.errors import InputError
from laboratory.lmcache_fs import LmcacheFsPeer
from laboratory.vllm_fs import VllmFsPeer


class Entry(NamedTuple):
    """Adapter and options of a peer, and how to install its engine."""

    create: Callable[[str, Mapping[str, Any], Place], Contender]
    options: tuple[str, ...]
    remedy: str


PEERS: Final[dict[str, Entry]] = {
    "vllm-fs": Entry(
        VllmFsPeer,
        ("n_read_threads", "n_write_threads", "direct_io"),
        "pip install vllm, or a build of it for this machine",
    ),
    "lmcache-fs": Entry(LmcacheFsPeer, ("num_workers", "use_odirect"), "pip install lmcache"),
}


def load_peer(peer_config: Mapping[str, Any]) -> Contender:
    """Return a peer; `type` is its name, next to `root_dir` and its own options.

    Raises:
        InputError: The peer is unknown, its engine is not installed, or an option is invalid.
    """
    config = dict(peer_config)
    name = config.pop("type")
    if name not in PEERS:
        raise InputError(
            f"--peer {name}: unknown{nearest(name, PEERS)}; allowed: {', '.join(PEERS)}"
        )
    entry = PEERS[name]
    reject_unknown(config, ["root_dir", *entry.options], f"--peer {name}")
    directory = config.pop("root_dir", None)
    if directory is not None and not isinstance(directory, str):
        raise InputError(f"--peer {name}: root_dir: {directory!r} is not valid; give a path")
    place = Place(directory, f"--peer {name}: root_dir")
    try:
        return entry.create(name, config, place)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"--peer {name} cannot be measured here: {error}; remedy: {entry.remedy}"
        ) from error
