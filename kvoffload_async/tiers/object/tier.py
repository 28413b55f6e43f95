"""The `object` tier, its options, and its search for the longest stored prefix of each chain."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, Self
from urllib.parse import parse_qs, urlsplit

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import Direction, KVIdentity, TierEnvironment, TierLocation
from kvoffload_async.config import (
    at_least,
    instance_of,
    is_encodable,
    is_secret,
    option,
    or_none,
    parse_bool,
    parse_file,
    parse_size_bytes,
    parse_url,
    shown,
)
from kvoffload_async.errors import (
    ConfigError,
    CorruptBlockError,
    SlowDownError,
    TierError,
    TierFullError,
    TierTimeoutError,
    Trouble,
)
from kvoffload_async.policies.tenants import TenantQuotas
from kvoffload_async.tiers.object.bound import BucketBound
from kvoffload_async.tiers.object.endpoints import variables_of
from kvoffload_async.tiers.object.quota import MOST_BLOCKS, MOST_TENANTS, SHORTEST_KEY
from kvoffload_async.tiers.remote.client import RefusedError, RemoteClient
from kvoffload_async.tiers.remote.lookups import Lookups
from kvoffload_async.tiers.remote.settings import (
    MAX_CONNECTIONS,
    REMEDIES,
    Redactor,
    RemoteSettings,
    ReplaceableFile,
    read_file,
)
from kvoffload_async.tiers.remote.tier import Portion, RemoteTier
from kvoffload_async.types import JobMetadata, OffloadKey

logger = logging.getLogger(__name__)

_SMALL_BYTES: Final = 256 << 10
"""A PUT to S3 costs as much as storing 228 KiB for a month."""
_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file")
_MAX_OPTIONS_BYTES: Final = 64 << 10


def _parse_object_url(value: object, key: str) -> str:
    url = parse_url(value, key)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"{key}: it is not valid; write s3://bucket/prefix") from None
    if "@" in url or parts.query:
        raise ConfigError(
            f"{key}: the URL must have neither user nor query, since messages show it; give "
            "secrets in store_options, in store_options_file or in the environment"
        )
    if parts.scheme not in _SCHEMES:
        raise ConfigError(
            f"{key}: {shown(url)} is not valid; its scheme must be one of {', '.join(_SCHEMES)}"
        )
    if not (parts.path if parts.scheme == "file" else parts.netloc):
        raise ConfigError(f"{key}: {shown(url)} is not valid; write s3://bucket/prefix")
    return url


def _parse_text(value: object, key: str) -> str:
    """Validate a non-empty text; error messages do not contain it."""
    if not isinstance(value, str) or not value or not is_encodable(value):
        raise ConfigError(f"{key}: it is not valid; it must be a text that is not empty")
    return value


def _parse_store_options(value: object, key: str) -> Mapping[str, str | bool]:
    """Validate options for the `obstore` library; error messages do not contain their values."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{key}: it must be an object of obstore's options")
    for name, given in value.items():
        if not isinstance(given, bool):
            _parse_text(given, f"{key}: {name}")
    return value


class StoreOptionsFile(ReplaceableFile):
    """A JSON file with options for the `obstore` library."""

    def read(self, redact: Redactor) -> Mapping[str, str | bool]:
        content = read_file(self.path, self.key, _MAX_OPTIONS_BYTES)
        try:
            given = json.loads(content)
        except (ValueError, RecursionError):
            raise ConfigError(
                f"{self.key}: {self.path!r} is not JSON; give an object of obstore's options"
            ) from None
        options = _parse_store_options(given, f"{self.key}: {self.path!r}")
        for secret in _secrets(options):
            redact.hide(secret)
        return options


@dataclass(frozen=True, kw_only=True)
class ObjectOptions(RemoteSettings):
    """The options of an `object` tier; some fields are derived from other options."""

    url: str = option(_parse_object_url, remedy="a URL such as s3://bucket/prefix")
    """s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix, or
    file:///directory."""
    endpoint: str | None = option(or_none(_parse_text), None, is_shown=False)
    """URL of another server with the same protocol."""
    store_options: Mapping[str, str | bool] | None = option(
        or_none(_parse_store_options), None, is_shown=False
    )
    """Options of the obstore library, as an object of names and values, such as `region`,
    `access_key_id` and `secret_access_key`. `"allow_http": true` allows unencrypted connections."""
    options_file: StoreOptionsFile | None = option(
        or_none(StoreOptionsFile.parse), None, key="store_options_file"
    )
    """Absolute path of a JSON file with further `store_options`, such as secrets. Read again when
    the server has refused the tier."""
    ca_file: str | None = option(or_none(parse_file), None, key="tls_ca_file")
    """Absolute path of certificates that verify the server, in addition to the system's. Read
    again when the server has refused the tier."""
    capacity_bytes: int | None = option(or_none(parse_size_bytes), None)
    """Maximum bytes of the blocks of this layout in the bucket, such as "2TiB"; the hosts delete
    the blocks that were not used for longest. Give all hosts the same, or the smallest holds. None:
    the tier deletes nothing."""
    quotas: TenantQuotas | None = option(or_none(instance_of(TenantQuotas)), None, is_internal=True)
    """The tenants' quotas; None: no tenants."""
    connections: int = option(at_least(1, MAX_CONNECTIONS), 256)
    """Maximum number of concurrent calls with payload, in each direction; each has one block.
    Connections are opened when needed."""

    @classmethod
    def of(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        settings = super().of(options, identity)
        given = [settings.store_options or {}, *map(variables_of, ("s3:", "gs:", "az:"))]
        secrets = [secret for some in given for secret in _secrets(some)]
        settings.capacities(identity.block_bytes)
        return replace(settings, redact=Redactor(secrets))

    def capacities(self, object_bytes: int) -> list[int]:
        """Return the bound of each tenant in bytes, given the bytes of an object; 0: unknown.

        Raises:
            ConfigError: A bound has no room for an object, or for more than can be counted.
        """
        if not self.capacity_bytes or not object_bytes:
            return []
        num_blocks = self.capacity_bytes // object_bytes
        if not 0 < num_blocks <= MOST_BLOCKS:
            raise ConfigError(
                f"capacity_bytes: {self.capacity_bytes} has room for {num_blocks} blocks of "
                f"{object_bytes} bytes; give room for 1 to {MOST_BLOCKS} blocks, or change their "
                "size with blocks_per_chunk"
            )
        if self.quotas is None:
            return [self.capacity_bytes]
        if len(self.quotas.quota_bytes) > MOST_TENANTS:
            raise ConfigError(
                f"tenants: there are {len(self.quotas.quota_bytes)}; a tier object with "
                f"capacity_bytes takes at most {MOST_TENANTS}: omit its capacity_bytes"
            )
        parts = self.quotas.blocks(num_blocks, object_bytes, "capacity_bytes")
        return [num * object_bytes for num in parts]

    def tenant_of(self, key: OffloadKey) -> int:
        """Return the index of a key's tenant; 0 without tenants."""
        return 0 if self.quotas is None else self.quotas.tenant_of(key)

    def locations(self, identity: KVIdentity) -> list[TierLocation]:
        if self.url.startswith("file:"):  # opening it creates its directory
            self._given()
        else:
            self.open()
            _warn_of_small_blocks(identity.block_bytes)
        return [TierLocation(self.url, is_exclusive=False, key="url")]

    def open(self) -> Any:  # noqa: ANN401 - the library's store, whose module is an extra
        """Open the store with the present credentials; reads files, so call it in a thread.

        Raises:
            ConfigError: The options contradict each other, or the library rejects them.
        """
        from kvoffload_async.tiers.object.client import open_store  # noqa: PLC0415 - an extra

        given, allow_http = self._given()
        more = {} if self.options_file is None else self.options_file.read(self.redact)
        for name in given.keys() & more.keys():
            raise ConfigError(
                f"{name}: is given twice, in store_options_file too; leave one of them out"
            )
        return open_store(
            self.url,
            {**given, **more},
            allow_http=allow_http,
            timeout_s=self.call_timeout_s,
            request_timeout_s=max(self.call_timeout_s, self.job_timeout_s),  # of a list request
            ca_file=self.ca_file,
        )

    def _given(self) -> tuple[dict[str, str | bool], bool]:
        """Return the library's options that need no file, and whether `http://` is allowed."""
        given = dict(self.store_options or {})
        if self.endpoint is not None:
            if "endpoint" in given:
                raise ConfigError(
                    "endpoint: is given twice, in store_options too; leave one of them out"
                )
            given["endpoint"] = self.endpoint
        return given, parse_bool(given.pop("allow_http", False), "store_options: allow_http")


def _warn_of_small_blocks(block_bytes: int) -> None:
    if 0 < block_bytes < _SMALL_BYTES:  # 0: unknown
        logger.warning(
            "tier object: a block has %d bytes, and each one costs requests; make blocks of at "
            "least %d bytes: raise blocks_per_chunk, under SGLang page_size, under LMCache "
            "chunk_size",
            block_bytes,
            _SMALL_BYTES,
        )


def _secrets(options: Mapping[str, str | bool]) -> list[str]:
    """Return the secrets among the values of options or environment variables."""
    secrets = [value for key, value in options.items() if isinstance(value, str) and is_secret(key)]
    # A URL contains only the decoded signature.
    return secrets + [sig for text in secrets for sig in parse_qs(text.lstrip("?")).get("sig", ())]


async def bisect_prefixes(
    chains: Sequence[Sequence[OffloadKey]],
    ask: Callable[[Sequence[OffloadKey]], Awaitable[Collection[OffloadKey]]],
) -> list[int]:
    """Return how many keys at the head of each chain are stored, by probing only a few keys.

    Keys are chained hashes, so all blocks before a stored one are assumed to be stored; a wrong
    assumption costs a failed load, never wrong bytes. Each round asks for one key of every chain:
    the first, the last, since most chains are stored as a whole or not at all, and then the middle
    of the rest. These are at most 2 + ceil(log2(n - 1)) rounds for chains of n keys.

    Args:
        chains: The key chains, head to tail.
        ask: Returns those of the keys that are stored; called without duplicates.
    """
    found, limits, rounds = [0] * len(chains), [len(chain) for chain in chains], 0
    while True:
        wanted = {
            number: (low, limit - 1, (low + limit) // 2)[min(rounds, 2)]
            for number, (low, limit) in enumerate(zip(found, limits, strict=True))
            if low < limit
        }
        if not wanted:
            return found
        present = await ask(list(dict.fromkeys(chains[n][index] for n, index in wanted.items())))
        for number, index in wanted.items():
            if chains[number][index] in present:
                found[number] = index + 1
            else:
                limits[number] = index
        rounds += 1


class ObjectTier(RemoteTier):
    """Blocks as objects in S3, Google Cloud Storage or Azure, shared by all hosts that use it.

    Credentials that are not configured come from the environment or from the machine's role.
    `capacity_bytes` or a lifecycle rule of the bucket limits its size; see docs/howto/object.md.
    """

    declares = ObjectOptions
    requires: ClassVar = {"obstore": "install kvoffload-async[object]"}
    remedies: ClassVar = {
        **REMEDIES,
        CorruptBlockError: "not served; if this recurs, check the store: kvoffload store verify",
        TierFullError: "no blocks are stored until there is space: raise capacity_bytes or the "
        "quota of the bucket, or let a lifecycle rule delete old objects",
        Trouble.TOO_SLOW: "raise cpu_bytes_to_use, set write_back to wait, or make the tier "
        "faster: make blocks larger, or raise connections",
    }

    capabilities = replace(RemoteTier.capabilities, probes_prefixes=True, ages=True)
    period_s: ClassVar[float] = 10.0
    """Seconds between two records of a host that has `capacity_bytes`."""
    _settings: ObjectOptions
    _client: Any  # an `ObjectClient`, whose library is an extra

    def __init__(self, settings: ObjectOptions) -> None:
        """Configure the tier; nothing is connected before `open`."""
        super().__init__(settings, settings.url)
        self._description: Mapping[str, Any] = {}
        self._store: Any = None  # the library's, whose module is an extra
        self._bound: BucketBound | None = None

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Imported on demand, because the library is an extra.
        from kvoffload_async.tiers.object.maintenance import ObjectMaintenance  # noqa: PLC0415

        return ObjectMaintenance

    async def open(self, env: TierEnvironment) -> None:
        from kvoffload_async.tiers.object.client import claim_library  # noqa: PLC0415 - an extra

        claim_library()
        # It reads files, and creates the directory of a file URL; either may hang.
        self._store = await env.io.run(Direction.METADATA, self._settings.open)
        self._description = asdict(replace(env.identity, generation=None))
        await super().open(env)
        settings = self._settings
        if settings.capacity_bytes is None:
            return

        def deleted(keys: Sequence[OffloadKey]) -> None:
            self._questions.deleted(keys)
            env.blocks_evicted(keys)

        self._bound = BucketBound(
            self._client,
            lambda call: self._calls.run(call, self._deadline(settings.call_timeout_s)),
            self._run_long,
            partial(env.io.run, Direction.METADATA),
            capacities=settings.capacities(self._envelopes.value_bytes(SHORTEST_KEY)),
            tenant_of=settings.tenant_of,
            size_of=self._envelopes.value_bytes,
            deleted=deleted,
            period_s=self.period_s,
        )
        self._on_close.push_async_callback(self._bound.close)
        await self._bound.start(settings.call_timeout_s / 2)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        super().touch(keys)
        if self._bound is not None:
            self._bound.accounts[0].used(keys)

    def gauges(self) -> Mapping[str, float]:
        """As those of `RemoteTier`, with those of `capacity_bytes`."""
        return {**super().gauges(), **({} if self._bound is None else self._bound.gauges())}

    async def _store_portion(
        self, job: JobMetadata, portion: Portion, deadline_s: float
    ) -> dict[int, TierError]:
        """Store the block of a portion; decline it if it would exceed `capacity_bytes`."""
        if self._bound is None:
            return await super()._store_portion(job, portion, deadline_s)
        (i,) = portion
        key = job.keys[i]
        account = self._bound.accounts[self._settings.tenant_of(key)]
        num_bytes = self._envelopes.value_bytes(key)
        if not account.admits(num_bytes):
            return {i: TierFullError(f"{self._location}: capacity_bytes has no room yet")}
        is_written = True  # unless the store has said otherwise
        try:
            failures = await super()._store_portion(job, portion, deadline_s)
            is_written = not failures
        except (RefusedError, SlowDownError, TierFullError):
            is_written = False
            raise
        finally:
            account.ended(key, num_bytes, is_written=is_written)
        return failures

    async def longest_prefixes(self, chains: Sequence[Sequence[OffloadKey]]) -> Sequence[int]:
        """Return the number of keys at the head of each chain that probably are stored.

        If the first key behind a prefix was just found absent, those after it are cached as absent
        too, so that a store right after the look-up does not ask for them.
        """
        self._opened()
        deadline_s = self._deadline(self._settings.probe_timeout_s)
        asked: set[OffloadKey] = set()

        async def ask(keys: Sequence[OffloadKey]) -> set[OffloadKey]:
            is_first = not asked
            asked.update(self._memory.unknown(keys))
            try:
                return await self._questions.ask(keys, deadline_s)
            except TierTimeoutError:
                if is_first:
                    raise
                return set()  # the store has answered, and the time is over

        lengths = await bisect_prefixes(chains, ask)
        for chain, length in zip(chains, lengths, strict=True):
            is_behind = length < len(chain) and chain[length] in asked
            if is_behind and self._memory.get(chain[length]) is False:  # not unanswered
                self._memory.vanished(self._memory.unknown(chain[length + 1 :]))
        return lengths

    async def list_older(
        self, cursor: str | None, count: int, age_s: float
    ) -> tuple[Sequence[OffloadKey], str | None]:
        """As `list_keys`; a block's age is that of its object, which a renewal rewrites."""
        self._opened()
        return await self._run_long(partial(self._client.list_older, cursor, count, age_s))

    def _create_client(self, namespace: str) -> RemoteClient:
        # Imported here because the library is an optional dependency.
        from kvoffload_async.tiers.object.client import ObjectClient  # noqa: PLC0415

        settings = self._settings
        lookups = Lookups(settings.probe_timeout_s)
        return ObjectClient(
            self._store,
            namespace,
            self._description,
            reopen=partial(lookups.run, "credentials", settings.open),
            patience_s=settings.call_timeout_s / 2,
            list_timeout_s=settings.job_timeout_s,
        )
