"""The list of the stored objects, page by page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvoffload_async.facade.plugged import ListPosition
from kvoffload_async.integrations.lmcache.keys import Keys
from kvoffload_async.integrations.lmcache.stores import Store
from kvoffload_async.types import OffloadKey

_CURSOR: Final = re.compile(r"(\d{1,6})\.(\d{1,6})\.((?:[0-9a-f]{2}){5,96}|)")
"""Numbers of the store and of the tier, and the last key."""


class Page(NamedTuple):
    """A page of the list.

    Attributes:
        objects: Keys of objects, and their sizes.
        next_cursor: Where the next page begins; None: this is the last one.
    """

    objects: list[tuple[Any, int]]
    next_cursor: str | None


def page_of(
    stores: Sequence[Store], keys: Keys, model: str | None, page_size: int, cursor: str | None
) -> Page:
    """Return a page of the objects in open stores.

    Args:
        stores: The stores, in the same order in all calls; further ones may follow.
        keys: Decodes keys; an object whose salt is not known is left out.
        model: Name of the only model to list; None: all.
        page_size: Maximum number of objects.
        cursor: `next_cursor` of the page before; None: the first page.

    Raises:
        NotImplementedError: A store has a tier that does not know its contents.
        ValueError: `page_size` or `cursor` is not valid.
    """
    if page_size <= 0:
        raise ValueError(f"page_size: {page_size} is not valid; give a positive number")
    number, position = _parsed(cursor)
    objects: list[tuple[Any, int]] = []
    while number < len(stores) and len(objects) < page_size:
        (name, _, size), opened = stores[number].store_id, stores[number].opened
        after = None
        if opened is not None and model in {None, name}:
            if unlisted := opened.tiers.unlisted:
                raise NotImplementedError(
                    f"tiers of type {', '.join(unlisted)} do not know their contents; slab does, "
                    "and fs with capacity_bytes"
                )
            found, after = opened.tiers.list_keys(position, page_size - len(objects))
            decoded = (keys.decode(name, key) for key in found)
            objects += [(key, size) for key in decoded if key is not None]
        number, position = (number + 1, ListPosition()) if after is None else (number, after)
    if number >= len(stores):
        return Page(objects, None)
    return Page(objects, f"{number}.{position.tier}.{(position.key or b'').hex()}")


def _parsed(cursor: str | None) -> tuple[int, ListPosition]:
    """Return the number of the store, and the position in it; raises ValueError."""
    if cursor is None:
        return 0, ListPosition()
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise ValueError(f"cursor: {cursor!r} is not valid; give the token of the page before")
    store, tier, key = found.groups()
    return int(store), ListPosition(int(tier), OffloadKey(bytes.fromhex(key)) if key else None)
