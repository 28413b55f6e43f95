"""Block checksums bound to key and layout, and integrity keys that make them MACs.

A valid block under a wrong name, or of another layout, fails verification. Without an integrity key
this detects accidents only, because anyone can compute a checksum. With a key it is a MAC, which
also detects tampering by others with write access.

Source: XXH3, 128 bits (xxhash.com), seeded with the 64 bits of XXH3 over layout, a zero byte, key.
With a key BLAKE2b (RFC 7693) of 16 bytes, keyed and with the person `kvoffload-block`, over the
layout and the block's key, each prefixed with its length as 8 bytes, little-endian, and then the
data.
"""

from __future__ import annotations

import hashlib
import os
import stat as stat_module
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Generic, NoReturn, Protocol, TypeVar

import xxhash

from kvoffload_async.block_io.contract import Cipher
from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.files.ops import read_given
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    from hashlib import blake2b


LEAST_KEY_BYTES: Final = 16
MOST_KEY_BYTES: Final = 64
KEY_ID_BYTES: Final = 8

_LINE_ENDS: Final = b"\r\n"
_REMEDY: Final = "`(umask 077; openssl rand -hex 32 > FILE)` makes one"


class SecretKey:
    """A secret key and its public id. The secret never appears in texts, `repr` included.

    Attributes:
        id: `KEY_ID_BYTES` that identify the key without revealing it.
    """

    __slots__ = ("_secret", "id")

    id_purpose: ClassVar[bytes]
    """Separates the ids of kinds of keys."""

    def __init__(self, secret: bytes, tenant: bytes = b"") -> None:
        """Create a key from a secret of `LEAST_KEY_BYTES` to `MOST_KEY_BYTES` bytes.

        Its id tells tenants apart.
        """
        self._secret = secret
        self.id = hashlib.blake2b(
            tenant, key=secret, digest_size=KEY_ID_BYTES, person=self.id_purpose
        ).digest()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id.hex()!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret key cannot be serialized")


K = TypeVar("K", bound=SecretKey)


@dataclass(frozen=True)
class TenantRings(Generic[K]):
    """Keys by tenant.

    Attributes:
        rings: The keys for each tenant's blocks, by its index; None: none.
        tenant_of: Returns the index of a key's tenant.
    """

    rings: Sequence[Sequence[K] | None]
    tenant_of: Callable[[OffloadKey], int]


class IntegrityKey(SecretKey):
    """The key of keyed checksums."""

    __slots__ = ()

    id_purpose = b"kvoffload-key-id"

    def mac(self, purpose: bytes, num_bytes: int) -> blake2b:
        """Return a hash object that computes a MAC of `num_bytes` bytes for one purpose."""
        return hashlib.blake2b(key=self._secret, digest_size=num_bytes, person=purpose)


def read_key_file(path: str) -> IntegrityKey:
    """Read an integrity key from a file; see `read_secret`."""
    return IntegrityKey(read_secret(path, "integrity_key_file"))


def read_secret(path: str, option: str) -> bytes:
    """Read the secret of a key from a file: the file's bytes without trailing line ends.

    Raises:
        ConfigError: The file cannot be read, has too few or too many bytes, is accessible to users
            other than its owner and group, or belongs to another user. It names `option`.
    """
    given = f"{option}: {path!r}"
    try:
        content = read_given(
            path, MOST_KEY_BYTES + len(_LINE_ENDS) + 1, partial(_check_secrecy, given)
        )
    except ConfigError:  # ConfigError is a ValueError, too
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        _refuse(given, f"cannot be read ({why})", f"give a file with a key: {_REMEDY}")
    secret = content.rstrip(_LINE_ENDS)
    if len(secret) < LEAST_KEY_BYTES:
        _refuse(given, f"has only {len(secret)} bytes", f"a key has 16 to 64: {_REMEDY}")
    if len(secret) > MOST_KEY_BYTES:
        _refuse(given, f"has more than {MOST_KEY_BYTES} bytes", f"a key has 16 to 64: {_REMEDY}")
    return secret


def _check_secrecy(given: str, status: os.stat_result) -> None:
    if status.st_mode & stat_module.S_IRWXO:
        mode = stat_module.S_IMODE(status.st_mode)
        _refuse(given, f"is accessible to all users (mode {mode:04o})", "run `chmod o= FILE` on it")
    if status.st_uid not in {0, os.geteuid()}:
        _refuse(given, "belongs to another user", "give a file of your own, or of root")


def _refuse(given: str, why: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{given} {why}; {remedy}")


DIGEST_BYTES = 16


class Hash(Protocol):
    """A hash of data that is given in parts."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


_FOR_BLOCKS: Final = b"kvoffload-block"


class BlockDigester:
    """Computes the checksums of blocks of one layout. Thread: any; hashing releases the GIL.

    Attributes:
        prefix: Hashed before the block's key to compute the seed.
    """

    is_keyed: ClassVar[bool] = False
    """Whether the checksums are made with a key."""

    def __init__(self, layout: str) -> None:
        self.prefix = layout.encode() + b"\0"

    @property
    def cipher(self) -> Cipher | None:
        """Encrypts the blocks, where checksums come from that."""
        return None

    def digest(self, key: OffloadKey, data: memoryview) -> bytes:
        """Return the checksum of a block, `DIGEST_BYTES` long."""
        return xxhash.xxh3_128_digest(data, xxhash.xxh3_64_intdigest(self.prefix + key))

    def begin(self, key: OffloadKey) -> Hash:
        """Return a hash object for a block that is read in parts."""
        return xxhash.xxh3_128(seed=xxhash.xxh3_64_intdigest(self.prefix + key))

    def digests(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bytes]:
        """Return the checksums of several blocks."""
        seed, digest, prefix = xxhash.xxh3_64_intdigest, xxhash.xxh3_128_digest, self.prefix
        return [digest(data, seed(prefix + key)) for key, data in zip(keys, blocks, strict=True)]


class KeyedDigester(BlockDigester):
    """Computes MACs of blocks with the integrity key."""

    is_keyed = True

    def __init__(self, layout: str, integrity_key: IntegrityKey) -> None:
        super().__init__(layout)
        self._begun = integrity_key.mac(_FOR_BLOCKS, DIGEST_BYTES)
        self._begun.update(framed(layout.encode()))

    def digest(self, key: OffloadKey, data: memoryview) -> bytes:
        mac = self.begin(key)
        mac.update(data)
        return mac.digest()

    def begin(self, key: OffloadKey) -> Hash:
        mac = self._begun.copy()
        mac.update(framed(key))
        return mac

    def digests(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bytes]:
        return list(map(self.digest, keys, blocks))


def create_digester(layout: str, integrity_key: IntegrityKey | None) -> BlockDigester:
    """Create the digester for a layout, with or without a key."""
    return BlockDigester(layout) if integrity_key is None else KeyedDigester(layout, integrity_key)


def framed(part: bytes) -> bytes:
    """Return a part of hashed or authenticated data after its length."""
    return len(part).to_bytes(8, "little") + part
