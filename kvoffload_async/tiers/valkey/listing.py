"""Lists the blocks of a namespace with SCAN, on one node after another.

A cursor is `NODE/POSITION/OWNERS`, and `/KEY` for each key of the last reply that the page had no
room for: the number of the node, the position in its scan, and a digest of the cluster's slots.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from kvoffload_async.errors import TierError, TierUnavailableError
from kvoffload_async.tables.keymap import MAX_KEY_BYTES
from kvoffload_async.tiers.valkey.nodes import Node, Nodes
from kvoffload_async.tiers.valkey.replies import ReplyError
from kvoffload_async.types import OffloadKey

_SCANS_A_PAGE: Final = 16
"""Maximum number of calls of SCAN for a page, which stays small where others have most keys."""
_EXCESS_NAMES: Final = 256
"""Maximum number of names that a server returns beyond twice those asked for."""
_NAME_OVERHEAD_BYTES: Final = 32
"""Bytes of a reply for each name, in addition to the name's own."""
_CURSOR: Final = re.compile(r"(\d{1,4})/(\d{1,20})/([0-9a-f]{16})((?:/(?:[0-9a-f]{2})+)*)")


async def list_page(
    nodes: Nodes, prefix: bytes, cursor: str | None, count: int
) -> tuple[list[OffloadKey], str | None]:
    """Return some keys whose names have a prefix, and where to continue; None at the end.

    A restart of a server between two pages may hide keys: its positions are its own.

    Args:
        nodes: The servers.
        prefix: Of the names; contains no character with a meaning in a pattern.
        cursor: None to begin, or what an earlier call has returned.
        count: Maximum number of keys.

    Raises:
        TierError: The cursor is not valid.
        TierUnavailableError: The slots of the cluster have moved since the listing began.
        Exception: The library's error; a node did not answer.
    """
    at, position, owners, rest = (0, 0, _owners_of(nodes), ()) if cursor is None else _parse(cursor)
    found = dict.fromkeys(rest)
    servers: Sequence[Node | None] = nodes.owners or [None]
    for _ in range(_SCANS_A_PAGE):
        if at >= len(servers) or len(found) >= count:
            break
        wanted = count - len(found)
        command = ("SCAN", position, "MATCH", prefix + b"*", "COUNT", wanted)
        name_bytes = len(prefix) + MAX_KEY_BYTES + _NAME_OVERHEAD_BYTES
        most_bytes = (2 * wanted + _EXCESS_NAMES) * name_bytes
        (reply,) = await nodes.run(servers[at], [command], most_bytes=most_bytes)
        position, keys = _parse_reply(reply, position, prefix)
        found.update(dict.fromkeys(keys))
        at += position == 0
    if nodes.settings.is_cluster:
        await nodes.refresh()
        if _owners_of(nodes) != owners:
            raise TierUnavailableError("slots of the cluster have moved; begin a new listing")
    ordered = list(found)
    rest = ordered[count:]
    is_end = at >= len(servers) and not rest
    parts = (str(at), str(position), owners, *(key.hex() for key in rest))
    return ordered[:count], None if is_end else "/".join(parts)


def _parse(cursor: str) -> tuple[int, int, str, Sequence[OffloadKey]]:
    parts = _CURSOR.fullmatch(cursor)
    if parts is None:
        raise TierError(f"cursor: {cursor!r:.99} is not valid; give one that a listing returned")
    keys = [OffloadKey(bytes.fromhex(digits)) for digits in parts[4].split("/")[1:]]
    return int(parts[1]), int(parts[2]), parts[3], keys


def _parse_reply(reply: Any, position: int, prefix: bytes) -> tuple[int, list[OffloadKey]]:  # noqa: ANN401 - untyped in the library
    """Return the next position and the keys of a reply to SCAN."""
    if isinstance(reply, Exception):
        raise reply
    try:
        following, names = int(reply[0]), reply[1]
        are_valid = all(name.startswith(prefix) for name in names)
    except (TypeError, ValueError, LookupError, AttributeError):
        are_valid = False
    if not are_valid or following < 0 or following == position != 0:
        raise ReplyError("the reply to SCAN is malformed, or repeats itself")
    keys = (OffloadKey(name.removeprefix(prefix)) for name in names)
    return following, [key for key in keys if len(key) <= MAX_KEY_BYTES]


def _owners_of(nodes: Nodes) -> str:
    """Return a digest of which node has which slots."""
    runs = [(node, len(list(slots))) for node, slots in groupby(nodes.slots)]
    return hashlib.blake2b(repr(runs).encode(), digest_size=8).hexdigest()
