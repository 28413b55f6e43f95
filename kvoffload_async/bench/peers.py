"""Other engines' tiers as contenders; what they need is imported only when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

from kvoffload_async.bench.contender import Contender
from kvoffload_async.bench.places import Place
from kvoffload_async.config import nearest, reject_unknown
from kvoffload_async.errors import InputError
from kvoffload_async.registry import load_class


class Entry(NamedTuple):
    """Where a peer's adapter is, what it takes, and how its engine is installed."""

    module: str
    class_name: str
    options: tuple[str, ...]
    remedy: str


PEERS: Final[Mapping[str, Entry]] = {
    "vllm-fs": Entry(
        "kvoffload_async.integrations.vllm.peer",
        "VllmFsPeer",
        ("n_read_threads", "n_write_threads", "direct_io"),
        "pip install vllm, or a build of it for this machine",
    ),
    "lmcache-fs": Entry(
        "kvoffload_async.integrations.lmcache.peer",
        "LmcacheFsPeer",
        ("num_workers", "use_odirect"),
        "pip install lmcache",
    ),
}


def load_peer(peer_config: Mapping[str, Any]) -> Contender:
    """Import and return a peer: `type` is its name, beside `root_dir` and options of its own.

    Raises:
        InputError: There is no such peer, its engine is not installed, or an option is unusable.
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
        peer = load_class(entry.module, entry.class_name)(name, config, place)
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"--peer {name} cannot be measured here: {error}; remedy: {entry.remedy}"
        ) from error
    return cast("Contender", peer)
