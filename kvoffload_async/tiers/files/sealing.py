"""Blocks sealed with AES-256-GCM: encrypted, and bound to key, layout, format and tenant.

A sealed block has the length of the block. Its seal has `SEAL_BYTES`: the encryption key's id (8
bytes), a salt (16), a nonce (12: 4 random bytes of the salt's, and a counter, little-endian) and
the tag (16).

The AES key is HKDF-SHA256 (RFC 5869) of the encryption key, with the salt, for the information
`kvoffload-seal` and the purpose, such as `kvoffload-seal fs 2`. The associated data is purpose,
layout, tenant's name, header and the block's key, each prefixed with its length as 8 bytes,
little-endian. The name is empty without tenants.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple

import numpy as np

from kvoffload_async.block_io import contract
from kvoffload_async.config import parse_file
from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.digests import (
    KEY_ID_BYTES,
    MOST_KEY_BYTES,
    IntegrityKey,
    SecretKey,
    TenantRings,
    framed,
    read_secret,
)
from kvoffload_async.tiers.files.identity import boot_id
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

SALT_BYTES: Final = 16
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
SEAL_BYTES: Final = contract.SEAL_BYTES
BLOCKS_PER_SALT: Final = 1 << 24
_PREFIX_BYTES: Final = 4
_COUNTER_BYTES: Final = NONCE_BYTES - _PREFIX_BYTES
_AFTER_SALT: Final = KEY_ID_BYTES + SALT_BYTES
_NUM_SUBKEYS: Final = 1024
_LEAST_RELEASE: Final = 50
"""The first release of `cryptography` that releases the GIL in `update_into`."""


class EncryptionKey(SecretKey):
    """A key that blocks are sealed with.

    Attributes:
        tenant: Name of the tenant whose blocks alone it seals; empty without tenants.
    """

    __slots__ = ("tenant",)

    id_purpose = b"kvoffload-enc-id"

    def __init__(self, secret: bytes, tenant: bytes = b"") -> None:
        """Create a key from a secret; see `SecretKey`."""
        super().__init__(secret, tenant)
        self.tenant = tenant

    def of(self, tenant: str) -> EncryptionKey:
        """Return the key with the same secret for a tenant's blocks."""
        return EncryptionKey(self._secret, tenant.encode())

    @property
    def packed(self) -> bytes:
        """Id, length and bytes, as the native engine takes them."""
        return struct.pack(f"8sQ{MOST_KEY_BYTES}s", self.id, len(self._secret), self._secret)

    def subkey(self, salt: bytes, info: bytes) -> bytes:
        """Return the AES key of a salt and a purpose: HKDF-SHA256."""
        return hmac.digest(hmac.digest(salt, self._secret, "sha256"), info + b"\x01", "sha256")


EncryptionKeys = Sequence[EncryptionKey] | TenantRings[EncryptionKey]
"""Different keys, or those of each tenant: the first seals, and all open."""

BlockKey = IntegrityKey | EncryptionKeys | None
"""With what key blocks are made, if any."""


def parse_encryption_keys(value: object, key: str) -> EncryptionKeys:
    """Return encryption keys that `with_tenant_keys` has read, or `read_encryption_keys`."""
    return value if isinstance(value, TenantRings) else read_encryption_keys(value, key)


def read_encryption_keys(value: object, key: str) -> Sequence[EncryptionKey]:
    """Return the encryption keys in a file, or in a list of files, given by absolute paths.

    Raises:
        ConfigError: A path or file is unusable, two files have one key, or `cryptography` is
            missing or too old.
    """
    paths = value if isinstance(value, list | tuple) else [value]
    if not paths:
        raise ConfigError(f"{key}: the list is empty; give the path of at least one file, or None")
    keys = [EncryptionKey(read_secret(parse_file(path, key), key)) for path in paths]
    if len({each.id for each in keys}) < len(keys):
        raise ConfigError(f"{key}: two of the files have the same key; give each key once")
    try:
        release = importlib.metadata.version("cryptography")
    except importlib.metadata.PackageNotFoundError:
        release = "0"
    if int(release.partition(".")[0]) < _LEAST_RELEASE:
        raise ConfigError(
            f"{key}: needs the package `cryptography` from release {_LEAST_RELEASE} on; install "
            "`kvoffload-async[encryption]`, or leave the option out"
        )
    return tuple(keys)


class Nonces:
    """Gives out salts with nonces, of which no two are the same in any process. Thread: any.

    The salt is new in every process, after a fork, after `BLOCKS_PER_SALT` blocks, and when the
    boot id or the wall clock changes, because this process may then be a copy of another.
    """

    _BOOT_CHECK_S: ClassVar = 1.0

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Use this wall clock."""
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        """Begin anew in a forked child, whatever its parent's threads did meanwhile."""
        self._lock = threading.Lock()
        self._begin(time.monotonic())

    def take(self) -> bytes:
        """Return a salt and a nonce, together `SALT_BYTES + NONCE_BYTES`."""
        with self._lock:
            now = time.monotonic()
            jumped = abs(self._clock() - now - self._offset) > 1
            if self._count == BLOCKS_PER_SALT or jumped or self._other_boot(now):
                self._begin(now)
            self._count += 1
            return self._salt + self._count.to_bytes(_COUNTER_BYTES, "little")

    def _begin(self, now: float) -> None:
        self._salt = os.urandom(SALT_BYTES + _PREFIX_BYTES)
        self._count = 0
        self._offset = self._clock() - now
        self._boot, self._boot_read = boot_id(), now

    def _other_boot(self, now: float) -> bool:
        if now - self._boot_read < self._BOOT_CHECK_S:
            return False
        self._boot_read = now
        return boot_id() != self._boot


_nonces: Final = Nonces()
os.register_at_fork(after_in_child=_nonces.renew)


class Sealing(NamedTuple):
    """Parameters of AES-256-GCM for one block.

    Attributes:
        begin: The seal without its tag.
        subkey: The AES key.
        associated: The associated data.
    """

    begin: bytes
    subkey: bytes
    associated: bytes

    @property
    def nonce(self) -> bytes:
        """The nonce."""
        return self.begin[_AFTER_SALT:]


class Sealer:
    """Seals and opens blocks of one layout. Thread: any; the work releases the GIL.

    Attributes:
        info, prefix, secrets: See `kvoffload_async.block_io.contract.Seals`.
    """

    def __init__(self, keys: EncryptionKeys, purpose: str, layout: str) -> None:
        """Bind blocks to a format with its version, such as "fs 2", to layout and tenant."""
        from cryptography.hazmat.primitives.ciphers import (  # noqa: PLC0415 - an extra
            Cipher,
            algorithms,
            modes,
        )

        def cipher(sealing: Sealing) -> Cipher[modes.GCM]:
            return Cipher(algorithms.AES(sealing.subkey), modes.GCM(sealing.nonce))

        self._cipher = cipher
        if not isinstance(keys, TenantRings):
            keys = TenantRings([keys], lambda _: 0)
        self._tenant_of = keys.tenant_of
        self._rings = [[key.id for key in ring or ()] for ring in keys.rings]
        self._keys = {key.id: key for ring in keys.rings for key in ring or ()}
        self._bound = framed(purpose.encode()) + framed(layout.encode())
        info = b"kvoffload-seal " + purpose.encode()
        self.info = info + b"\1"
        self.prefix = self._bound + framed(b"") + framed(b"")
        has_tenants = any(key.tenant for key in self._keys.values())
        self.secrets = b"" if has_tenants else b"".join(k.packed for k in self._keys.values())
        self._subkey = lru_cache(_NUM_SUBKEYS)(
            lambda key_id, salt: self._keys[key_id].subkey(salt, info)
        )
        self._reported: set[bytes] = set()

    def begin(self, count: int) -> bytes:
        """Return new seals without their tags, for as many blocks that are encrypted elsewhere."""
        return b"".join([self._rings[0][0] + _nonces.take() for _ in range(count)])

    def sealing(self, key: OffloadKey, header: bytes = b"") -> Sealing:
        """Return new parameters to seal a block; `header` is authenticated, too."""
        return self._sealing(self._rings[self._tenant_of(key)][0] + _nonces.take(), key, header)

    def has_key(self, seal: bytes) -> bool:
        """Return whether a seal has the id of a key that is given here.

        Others are logged once, at most as many as there are tenants. A seal of a wrong length has
        none.
        """
        if len(seal) != SEAL_BYTES:
            return False
        if (key_id := seal[:KEY_ID_BYTES]) in self._keys:
            return True
        if key_id not in self._reported and len(self._reported) < len(self._rings):
            self._reported.add(key_id)
            logger.warning(
                "encryption_key_file: blocks are sealed with a key that is not given (id %s); "
                "they are not served",
                key_id.hex(),
            )
        return False

    def opening(self, key: OffloadKey, seal: bytes, header: bytes = b"") -> Sealing | None:
        """Return the parameters to open a block; None if it has no key of its tenant given here."""
        if self.has_key(seal) and seal[:KEY_ID_BYTES] in self._rings[self._tenant_of(key)]:
            return self._sealing(seal[:-TAG_BYTES], key, header)
        return None

    def seal(
        self, key: OffloadKey, data: memoryview, into: memoryview, header: bytes = b""
    ) -> bytes:
        """Encrypt a block into other memory of the same length, and return its seal."""
        sealing = self.sealing(key, header)
        encryptor = self._cipher(sealing).encryptor()
        encryptor.authenticate_additional_data(sealing.associated)
        encryptor.update_into(data, into)
        encryptor.finalize()
        return sealing.begin + encryptor.tag

    def open_into(
        self,
        key: OffloadKey,
        seal: bytes,
        data: memoryview,
        header: bytes = b"",
        *,
        source: memoryview | None = None,
    ) -> bool:
        """Decrypt a block, in place or from `source`; return whether it is valid.

        If not, the memory is wiped: it would hold bytes that others may have chosen.
        """
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra

        if (sealing := self.opening(key, seal, header)) is not None:
            decryptor = self._cipher(sealing).decryptor()
            decryptor.authenticate_additional_data(sealing.associated)
            try:
                decryptor.update_into(data if source is None else source, data)
                decryptor.finalize_with_tag(seal[-TAG_BYTES:])
            except InvalidTag:
                pass
            else:
                return True
        wipe(data)
        return False

    def _sealing(self, begin: bytes, key: bytes, header: bytes) -> Sealing:
        key_id = begin[:KEY_ID_BYTES]
        subkey = self._subkey(key_id, begin[KEY_ID_BYTES:_AFTER_SALT])
        parts = self._keys[key_id].tenant, header, key
        return Sealing(begin, subkey, self._bound + b"".join(map(framed, parts)))


def wipe(data: memoryview) -> None:
    """Overwrite memory with zeros."""
    np.asarray(data).fill(0)
