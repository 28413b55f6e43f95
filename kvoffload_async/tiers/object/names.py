"""The names of objects."""

from __future__ import annotations

import re
from typing import Final

from kvoffload_async.types import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
RENEWALS: Final = "renewals"
"""Where copies of blocks whose age is renewed are for a moment, in place of the digits."""

_DIGITS: Final = 3
_BLOCK: Final = re.compile(r"([0-9a-f]{3})/([0-9a-f]+)_g(\d{1,10})")


def name_of(namespace: str, key: OffloadKey) -> str:
    """Return the name of a block's object."""
    digits = get_offload_block_hash(key).hex()
    return f"{namespace}/{digits[:_DIGITS]:0<3}/{digits}_g{get_offload_group_idx(key)}"


def renewal_name_of(namespace: str, key: OffloadKey) -> str:
    """Return the name of the copy that renews a block's age."""
    return f"{namespace}/{RENEWALS}/{key.hex()}"


def description_name_of(namespace: str) -> str:
    """Return the name of the object that says whose blocks a namespace has."""
    return f"{namespace}.json"


def key_of_name(name: str, namespace: str) -> OffloadKey | None:
    """Return the key of the block with this name, or None if it is no block's."""
    match = _BLOCK.fullmatch(name.removeprefix(f"{namespace}/"))
    if match is None or len(match[2]) % 2:
        return None
    try:
        key = make_offload_key(bytes.fromhex(match[2]), int(match[3]))
    except OverflowError:
        return None
    return key if name == name_of(namespace, key) else None
