"""Sealed names: a tier that sees each block under the encryption of its key.

A block's key is a hash of guessable tokens, and tiers put it into the names of files, objects and
strings. With a name key the tier gets another key in its place: the hash sealed with AES-SIV (RFC
5297), bound to the group, followed by the group's 4 bytes. With tenants, the tag in the hash is not
sealed, but bound, and keeps its place. Equal keys have equal sealed keys, so
engines with one name key share blocks. To the tier a sealed key is a key like any other: checksums
and encryption bind it, and messages show it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice, repeat, takewhile
from typing import Final

from kvoffload_async.abc.events import BlockFailures
from kvoffload_async.abc.tier import AsyncTier, Direction, TierEnvironment
from kvoffload_async.config import parse_files
from kvoffload_async.errors import BlockMissingError, ConfigError, TierError
from kvoffload_async.tables.keymap import MAX_KEY_BYTES, KeyMap
from kvoffload_async.tiers.files.digests import SecretKey, TenantRings, read_secret
from kvoffload_async.types import TENANT_TAG, JobMetadata, OffloadKey

logger = logging.getLogger(__name__)

_OPTION: Final = "name_key_file"
_SIV_KEY_BYTES: Final = 64
_TAG_BYTES: Final = 16
_GROUP_BYTES: Final = 4
_CACHED_NAMES: Final = 16_384
_KEYS_AT_ONCE: Final = 256
"""Keys that are sealed before the loop runs other work: less than a millisecond."""


class NameKey(SecretKey):
    """A key that names are sealed with."""

    __slots__ = ()

    id_purpose = b"kvoffload-nam-id"

    def siv_key(self) -> bytes:
        """Return the key of AES-SIV."""
        return hashlib.blake2b(
            key=self._secret, digest_size=_SIV_KEY_BYTES, person=b"kvoffload-names"
        ).digest()


def read_name_keys(value: object, key: str = _OPTION) -> list[NameKey]:
    """Return the name keys in a file, or in a list of files, given by absolute paths.

    Raises:
        ConfigError: A file is unusable, two files have one key, or `cryptography` is missing.
    """
    try:
        import cryptography.exceptions  # noqa: F401, PLC0415 - an extra
    except ImportError:
        raise ConfigError(
            f"{key}: needs the package `cryptography`; install "
            "`kvoffload-async[encryption]`, or leave the option out"
        ) from None
    keys = [NameKey(read_secret(path, key)) for path in parse_files(value, key)]
    if len({each.id for each in keys}) < len(keys):
        raise ConfigError(f"{key}: two of the files have the same key; give each key once")
    return keys


class NameKeys:
    """Seals and opens the keys of blocks with one or more name keys; the first seals new blocks.

    A tenant without a name key has its keys as names. Thread: any.

    Attributes:
        id: Identifies the first key without revealing it.
        numbers: The positions of the keys.
        unknown_names: Number of names seen that no key opens.
    """

    def __init__(self, keys: Sequence[NameKey] | TenantRings[NameKey]) -> None:
        """Use these keys, or those of tenants."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV  # noqa: PLC0415

        if isinstance(keys, TenantRings):
            self.id, self._begin = "of each tenant", TENANT_TAG.stop
        else:
            self.id, self._begin = keys[0].id.hex(), TENANT_TAG.start
            keys = TenantRings([keys], lambda _: 0)
        self.numbers = range(max(len(ring or ()) for ring in keys.rings))
        self.unknown_names = 0
        self._invalid = InvalidTag
        self._tenant_of = keys.tenant_of
        self._ciphers = [
            None if ring is None else [AESSIV(key.siv_key()) for key in ring] for ring in keys.rings
        ]
        # A block is looked up, moved and touched in turn.
        self._sealed = lru_cache(_CACHED_NAMES)(self._seal)

    def _seal(self, number: int, key: OffloadKey) -> OffloadKey:
        if (ciphers := self._ciphers[self._tenant_of(key)]) is None:
            return key
        block_hash, bound = self._parts(key)
        return self._joined(ciphers[number].encrypt(block_hash, bound), bound)

    def _parts(self, key: OffloadKey) -> tuple[bytes, list[bytes]]:
        """Return a key's or name's hash without the tag; and the tag, if any, and the group."""
        begin, end = self._begin, len(key) - _GROUP_BYTES
        tag, group = key[TENANT_TAG.start : begin], key[end:]
        return key[: TENANT_TAG.start] + key[begin:end], [tag, group] if tag else [group]

    def _joined(self, block_hash: bytes, bound: Sequence[bytes]) -> OffloadKey:
        """Return the key or name with these parts."""
        *tag, group = bound
        start = TENANT_TAG.start
        return OffloadKey(b"".join((block_hash[:start], *tag, block_hash[start:], group)))

    def has(self, number: int, key: OffloadKey) -> bool:
        """Return whether the key's tenant has a `number`-th name key, or 0: or none at all."""
        return number < len(self._ciphers[self._tenant_of(key)] or (None,))

    def sealed(self, number: int, keys: Sequence[OffloadKey]) -> dict[OffloadKey, OffloadKey]:
        """Return keys by their names of the `number`-th name key, without keys that have none."""
        return {
            self._sealed(number, key): key
            for key in keys
            if is_sealable(key) and self.has(number, key)
        }

    def opened(self, names: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys behind names; names of others are skipped, counted and logged once."""
        found = list(map(self._open, names))
        keys = [key for key in found if key is not None]
        if len(keys) < len(found) and not self.unknown_names:
            logger.warning("%s: no key that is given opens the names of some blocks", _OPTION)
        self.unknown_names += len(found) - len(keys)
        return keys

    def opened_map(self, names: KeyMap) -> KeyMap:
        """Like `opened`, for all blocks of a store; the integers are 0."""
        keys, rest = KeyMap(len(names)), iter(names)
        while some := list(islice(rest, _KEYS_AT_ONCE)):
            keys.update(self.opened(some), repeat(0))
        return keys

    def _open(self, name: OffloadKey) -> OffloadKey | None:
        if (ciphers := self._ciphers[self._tenant_of(name)]) is None:
            return name
        sealed_hash, bound = self._parts(name)
        if len(sealed_hash) > _TAG_BYTES:
            for cipher in ciphers:
                with suppress(self._invalid):
                    return self._joined(cipher.decrypt(sealed_hash, bound), bound)
        return None


def is_sealable(key: OffloadKey) -> bool:
    """Return whether a key's name is not too long for tiers."""
    return len(key) <= MAX_KEY_BYTES - _TAG_BYTES


class _SealedEnvironment:
    """The environment of a tier that announces names: announces the keys behind them.

    The announcements of `open` may have millions of names; they wait for `post_first`.
    """

    def __init__(self, env: TierEnvironment, names: NameKeys) -> None:
        self.kv_view, self.io, self.identity = env.kv_view, env.io, env.identity
        self.renew_deadline = env.renew_deadline
        self._env = env
        self._names = names
        self._first: list[tuple[_Post, KeyMap | tuple[OffloadKey, ...]]] | None = []

    def blocks_appeared(self, keys: Iterable[OffloadKey]) -> None:
        self._announce(self._env.blocks_appeared, keys)

    def blocks_evicted(self, keys: Iterable[OffloadKey]) -> None:
        self._announce(self._env.blocks_evicted, keys)

    def _announce(self, post: _Post, names: Iterable[OffloadKey]) -> None:
        if self._first is None:
            post(self._names.opened(names))
        else:
            self._first.append((post, names if isinstance(names, KeyMap) else tuple(names)))

    async def post_first(self) -> None:
        """Announce the blocks that `open` has found or evicted; later ones are posted at once."""
        while self._first:
            post, names = self._first.pop(0)
            if isinstance(names, KeyMap):
                post(await self.io.run(Direction.METADATA, partial(self._names.opened_map, names)))
            else:
                post(await self.io.run(Direction.METADATA, partial(self._names.opened, names)))
        self._first = None


_Post = Callable[[Iterable[OffloadKey]], None]


class SealedNames(AsyncTier):
    """Gives a tier sealed keys in the place of its blocks' keys.

    A block is stored under the first name key, and looked for under each in order. `touch` renews
    blocks of the first name key alone; others are renewed by loads. Keys of more than 80 bytes are
    not stored.

    Many keys are sealed in pieces between which the loop runs other work, so that neither the loop
    nor the scheduler, which needs the interpreter's lock, waits for all of them.
    """

    def __init__(self, tier: AsyncTier, names: NameKeys) -> None:
        """Wrap a tier that is not open yet."""
        self._tier = tier
        self._names = names
        self._is_open = False
        self.capabilities, self.bounds = tier.capabilities, tier.bounds
        self.remedies = tier.remedies  # type: ignore[misc]  # the wrapped class's

    def opening_s(self, block_bytes: int) -> float:
        return self._tier.opening_s(block_bytes)

    async def open(self, env: TierEnvironment) -> None:
        sealed = _SealedEnvironment(env, self._names)
        await self._tier.open(sealed)
        self.bounds = self._tier.bounds
        await sealed.post_first()
        self._is_open = True

    async def contains(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        found: set[OffloadKey] = set()
        for number in self._names.numbers:
            if names := await self._sealed(number, [key for key in keys if key not in found]):
                found.update(map(names.__getitem__, await self._tier.contains(list(names))))
        return frozenset(found)

    async def longest_prefixes(self, chains: Sequence[Sequence[OffloadKey]]) -> Sequence[int]:
        if len(self._names.numbers) > 1:  # the names of a chain may be of several keys
            return await super().longest_prefixes(chains)
        usable = [list(takewhile(is_sealable, chain)) for chain in chains]
        return await self._tier.longest_prefixes(
            [list(await self._sealed(0, chain)) for chain in usable]
        )

    async def store(self, job: JobMetadata) -> BlockFailures:
        return await self._move(self._tier.store, job, 0, range(len(job.keys)))

    async def load(self, job: JobMetadata) -> BlockFailures:
        failures: dict[int, TierError] = {}
        missing: Sequence[int] = range(len(job.keys))
        for number in self._names.numbers:
            failures |= await self._move(self._tier.load, job, number, missing)
            missing = [
                i
                for i in missing
                if isinstance(failures.get(i), BlockMissingError)
                and self._names.has(number + 1, job.keys[i])
            ]
            if not missing:
                break
            for i in missing:
                del failures[i]
        return failures

    async def _move(
        self,
        move: Callable[[JobMetadata], Awaitable[BlockFailures]],
        job: JobMetadata,
        number: int,
        indices: Sequence[int],
    ) -> dict[int, TierError]:
        """Move some blocks of a job under their names of one key; return the failed ones."""
        names = await self._sealed(number, [job.keys[i] for i in indices])
        failures: dict[int, TierError] = {}
        if len(names) < len(indices):
            too_long = BlockMissingError if job.is_promotion else TierError
            failures = {
                i: too_long(f"a key of {len(job.keys[i])} bytes is too long for {_OPTION}")
                for i in indices
                if not is_sealable(job.keys[i])
            }
            indices = [i for i in indices if i not in failures]
        if indices:
            part = replace(job, keys=tuple(names), block_ids=job.block_ids[list(indices)])
            failures |= {indices[i]: why for i, why in (await move(part)).items()}
        return failures

    async def delete(self, keys: Sequence[OffloadKey]) -> BlockFailures:
        failed: dict[OffloadKey, TierError] = {}
        for number in self._names.numbers:
            names = await self._sealed(number, keys)
            sealed = list(names)
            found = await self._tier.delete(sealed) if names else {}
            failed |= {names[sealed[i]]: why for i, why in found.items()}
        return {i: failed[key] for i, key in enumerate(keys) if key in failed}

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[Sequence[OffloadKey], str | None]:
        keys, following = await self._tier.list_keys(cursor, count)
        return self._names.opened(keys), following

    async def list_older(
        self, cursor: str | None, count: int, age_s: float
    ) -> tuple[Sequence[OffloadKey], str | None]:
        keys, following = await self._tier.list_older(cursor, count, age_s)
        return self._names.opened(keys), following

    async def close(self) -> None:
        self._is_open = False
        await self._tier.close()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        if self._is_open:
            self._tier.touch(list(self._names.sealed(0, keys[:_KEYS_AT_ONCE])))
            if rest := keys[_KEYS_AT_ONCE:]:
                asyncio.get_running_loop().call_soon(self.touch, rest)

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        for number in self._names.numbers:
            self._tier.pin(list(self._names.sealed(number, keys)))

    def unpin(self, keys: Sequence[OffloadKey]) -> None:
        for number in self._names.numbers:
            self._tier.unpin(list(self._names.sealed(number, keys)))

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        for number in self._names.numbers:
            self._tier.discard(list(self._names.sealed(number, keys)))

    def gauges(self) -> Mapping[str, float]:
        return {**self._tier.gauges(), "unknown_names": self._names.unknown_names}

    def describe(self) -> str:
        return f"{self._tier.describe()}, names sealed with key {self._names.id}"

    async def _sealed(
        self, number: int, keys: Sequence[OffloadKey]
    ) -> dict[OffloadKey, OffloadKey]:
        """Return keys by their names, as `NameKeys.sealed`; the loop runs in between."""
        names: dict[OffloadKey, OffloadKey] = {}
        for first in range(0, len(keys), _KEYS_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            names |= self._names.sealed(number, keys[first : first + _KEYS_AT_ONCE])
        return names
