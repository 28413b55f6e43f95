"""Tenants, which share an engine and its tiers but no block.

A block's tenant is part of its key: a tag of 8 bytes behind the first byte of the hash, a hash of
the tenant's name. So tenants that send the same prompt have different blocks at every place.
Without tenants, keys have no tags.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvoffload_async.config import DEFAULT_TENANT, TenantOptions, UnknownTenant
from kvoffload_async.errors import StateError
from kvoffload_async.policies.tenants import TenantQuotas
from kvoffload_async.types import TENANT_TAG, OffloadingEvent, OffloadKey

_MAX_NAME_CHARS: Final = 255


class Tenants:
    """The tenants of an engine. Immutable. Thread: any.

    Attributes:
        names: The tenants' names by index; the first is `DEFAULT_TENANT`.
        options: The tenants' options by index.
        quotas: The tenants' quotas, by index.
        tenant_of: Returns the index of a tagged key's tenant; 0 for keys with an unknown tag.
    """

    def __init__(self, options: Sequence[TenantOptions], unknown: UnknownTenant) -> None:
        """Take the options of `OffloadConfig`."""
        self.options = sorted(options, key=lambda each: each.name != DEFAULT_TENANT)
        if not any(each.name == DEFAULT_TENANT for each in options):
            self.options.insert(0, TenantOptions(name=DEFAULT_TENANT))
        self.names = tuple(each.name for each in self.options)
        self._index = {name: index for index, name in enumerate(self.names)}
        self._tags = [tag_of(name) for name in self.names]
        self._indices = {tag: index for index, tag in enumerate(self._tags)}
        self._unknown_index = 0 if unknown is UnknownTenant.DEFAULT else None
        self.tenant_of = _tenant_of(self._indices)
        self.quotas = TenantQuotas([each.quota_bytes for each in self.options], self.tenant_of)

    def index_of(self, name: object) -> int | None:
        """Return the index of a tenant; None: blocks of such a request are not stored nor loaded.

        A name that is missing, not a text, or of no tenant is treated as `unknown_tenant` says.
        """
        if isinstance(name, str) and len(name) <= _MAX_NAME_CHARS:
            return self._index.get(name, self._unknown_index)
        return self._unknown_index

    def named(self, name: object) -> int:
        """Return the index of a tenant; raises StateError for an unknown one. None: the default."""
        index = 0 if name is None else self._index.get(name) if isinstance(name, str) else None
        if index is None:
            raise StateError(
                f"tenant: {str(name)[:_MAX_NAME_CHARS]!r} is not valid; give one of "
                f"{', '.join(self.names)}"
            )
        return index

    def tag(self, index: int) -> bytes:
        """Return a tenant's tag."""
        return self._tags[index]

    def tagged(self, key: OffloadKey, index: int) -> OffloadKey:
        """Return the key of a tenant's block, given the key without a tenant."""
        return OffloadKey(key[:1] + self._tags[index] + key[1:])

    def owns(self, key: OffloadKey, index: int) -> bool:
        """Return whether a tagged key is of a tenant."""
        return key[TENANT_TAG] == self._tags[index]

    def untag(self, event: OffloadingEvent) -> Iterator[OffloadingEvent]:
        """Yield the parts of an event by tenant, with keys that have no tag.

        Keys with an unknown tag stay as they are, in a part without a tenant.
        """
        parts: dict[int | None, list[OffloadKey]] = {}
        for key in event.keys:
            index = self._indices.get(key[TENANT_TAG])
            parts.setdefault(index, []).append(key if index is None else untagged(key))
        restarts = event.restarts
        for index, keys in parts.items() or [(None, [])]:
            tenant = None if index is None else self.names[index]
            yield replace(event, keys=keys, tenant=tenant, restarts=restarts)
            restarts = False


def untagged(key: OffloadKey) -> OffloadKey:
    """Return the key without a tenant, given a tagged one."""
    return OffloadKey(key[:1] + key[TENANT_TAG.stop :])


def tag_of(name: str) -> bytes:
    """Return the tag in the keys of the tenant of this name."""
    num_bytes = TENANT_TAG.stop - TENANT_TAG.start
    return hashlib.blake2b(
        name.encode(), digest_size=num_bytes, person=b"kvoffload-tenant"
    ).digest()


def _tenant_of(indices: dict[bytes, int]) -> Callable[[OffloadKey], int]:
    get = indices.get
    return lambda key: get(key[TENANT_TAG], 0)
