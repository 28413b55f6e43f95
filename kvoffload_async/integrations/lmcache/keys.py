"""Conversion between the keys of LMCache's objects and the keys of tiers.

The model and the object group are those of a store, in which all objects have one size; a key has
the other fields, each after its length:

    salt: 1 byte and up to 52, or the byte 255 and a digest of 16 bytes
    KV rank: 1 byte and as many as it needs, big-endian
    chunk hash: 1 byte and its bytes
    object group: 4 bytes, as in every key of a tier

With tenants, a tag of 8 bytes follows the first byte: the tenant's, whom the salt names.

So a key found in a store after a restart gives the whole `ObjectKey`, unless its salt is too long;
then it is recognised once a request has named the salt.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

from kvoffload_async.facade.tenants import TENANT_TAG_BYTES, Tenants, untagged
from kvoffload_async.tables.keymap import MAX_KEY_BYTES
from kvoffload_async.types import OffloadKey, get_offload_group_idx, make_offload_key

_DIGEST_BYTES: Final = 16
_DIGESTED: Final = 255
_MOST_SALT_BYTES: Final = 52
_GROUP_BYTES: Final = 4
MOST_SALTS: Final = 65_536
"""Maximum number of long salts that are remembered; objects with further salts are not counted."""


KeySet = frozenset[OffloadKey]


class StoreId(NamedTuple):
    """Identifies a store by the properties that all its objects have in common.

    Attributes:
        model: Name of the model.
        group: Number of the object group.
        object_bytes: Size of an object.
    """

    model: str
    group: int
    object_bytes: int

    def __str__(self) -> str:
        return f"{self.model!r}, group {self.group}, {self.object_bytes} bytes"


class Keys:
    """Encodes LMCache's keys as tiers' keys, and decodes keys whose salt is known. Thread-safe.

    Attributes:
        salts: Digest -> long salt, of keys that were encoded.
    """

    def __init__(self, key_class: Any, tenants: Tenants | None = None) -> None:  # noqa: ANN401 - LMCache's ObjectKey
        """Decode to `key_class`, LMCache's class of keys; tag the keys of `tenants`."""
        self._key_class = key_class
        self._tenants = tenants
        self.salts: dict[bytes, str] = {}

    def encode(self, key: Any) -> OffloadKey | None:  # noqa: ANN401 - LMCache's ObjectKey
        """Encode an `ObjectKey` as a key for tiers; None if it has no tenant.

        Raises:
            OverflowError: The KV rank is negative, or the object group has more than 4 bytes.
            ValueError: The chunk hash or the KV rank is too long, or the salt is not valid text.
        """
        if self._tenants is None:
            return self._encoded(key, MAX_KEY_BYTES)
        tenant = self._tenants.index_of(key.cache_salt)
        if tenant is None:
            return None
        return self._tenants.tagged(self._encoded(key, MAX_KEY_BYTES - TENANT_TAG_BYTES), tenant)

    def _encoded(self, key: Any, most_bytes: int) -> OffloadKey:  # noqa: ANN401 - as above
        salt = key.cache_salt.encode()
        rank = key.kv_rank.to_bytes(-(-key.kv_rank.bit_length() // 8), "big")
        room = most_bytes - _GROUP_BYTES - 3 - len(rank) - len(key.chunk_hash)
        is_long = len(salt) > min(_MOST_SALT_BYTES, room)
        if is_long and room < _DIGEST_BYTES:
            raise ValueError(
                f"a chunk hash of {len(key.chunk_hash)} bytes and a KV rank of {len(rank)} are too "
                "long for a tier"
            )
        rest = b"%c%b%c%b" % (len(rank), rank, len(key.chunk_hash), key.chunk_hash)
        if not is_long:
            return make_offload_key(b"%c%b%b" % (len(salt), salt, rest), key.object_group_id)
        digest = hashlib.blake2b(salt, digest_size=_DIGEST_BYTES).digest()
        if digest not in self.salts and len(self.salts) < MOST_SALTS:
            self.salts[digest] = key.cache_salt
        return make_offload_key(b"%c%b%b" % (_DIGESTED, digest, rest), key.object_group_id)

    def decode(self, model: str, key: OffloadKey) -> Any | None:  # noqa: ANN401 - ObjectKey
        """Decode a tier's key to an `ObjectKey`; None if its salt is unknown, or it is invalid.

        A directory may have files with names that `encode` does not make.
        """
        tagged, tenants = key, self._tenants
        if tenants is not None:
            key = untagged(key)
        try:
            if key[0] == _DIGESTED:
                at = 1 + _DIGEST_BYTES
                salt = self.salts.get(key[1:at])
            else:
                encoded, at = _field(key, 0)
                salt = encoded.decode()
            rank, at = _field(key, at)
            chunk_hash, at = _field(key, at)
            if salt is None or at != len(key) - _GROUP_BYTES:
                return None
            if tenants is not None:
                tenant = tenants.index_of(salt)
                if tenant is None or not tenants.owns(tagged, tenant):
                    return None
            return self._key_class(
                chunk_hash=chunk_hash,
                model_name=model,
                kv_rank=int.from_bytes(rank, "big"),
                object_group_id=get_offload_group_idx(key),
                cache_salt=salt,
            )
        except (IndexError, ValueError):
            return None


def _field(key: bytes, at: int) -> tuple[bytes, int]:
    """Return the field at a position of an encoded key, and the position after it."""
    end = at + 1 + key[at]
    return key[at + 1 : end], end
