"""Object store requests via `obstore`; only this module and `maintenance` use the library."""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

import obstore
from obstore import exceptions
from obstore.store import LocalStore, ObjectStore, from_url

from kvoffload_async.errors import (
    CallTimeoutError,
    ConfigError,
    SlowDownError,
    StateError,
    TierError,
    TierFullError,
    TierUnavailableError,
)
from kvoffload_async.tiers.object.endpoints import (
    NOWHERE,
    REDIRECTED,
    permitted_hosts,
    unencrypted_endpoint,
)
from kvoffload_async.tiers.object.quota import MOST_RECORD_BYTES, MOST_RECORDS, Listed
from kvoffload_async.tiers.remote.calls import run_together
from kvoffload_async.tiers.remote.client import (
    Parts,
    RefusedError,
    RemoteClient,
    Server,
    Target,
    Value,
    ValueExistsError,
    heard,
)
from kvoffload_async.tiers.remote.settings import read_file
from kvoffload_async.types import (
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta, UpdateVersion
    from obstore.store import ClientConfig


NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
RENEWALS: Final = "renewals"
"""Replaces the 3 digits in the name of a temporary copy, which renews an object's age."""
RECORDS: Final = "records"
"""Replaces the 3 digits in the name of a record of a host that bounds the namespace."""

_DIGITS: Final = 3
_BLOCK: Final = re.compile(r"([0-9a-f]{3})/([0-9a-f]+)_g(\d{1,10})")


def name_of(namespace: str, key: OffloadKey) -> str:
    """Return the object name of a block."""
    digits = get_offload_block_hash(key).hex()
    return f"{namespace}/{digits[:_DIGITS]:0<3}/{digits}_g{get_offload_group_idx(key)}"


def renewal_name_of(namespace: str, key: OffloadKey) -> str:
    """Return the name of the temporary copy that renews a block's age."""
    return f"{namespace}/{RENEWALS}/{key.hex()}"


def description_name_of(namespace: str) -> str:
    """Return the name of the object that describes a namespace."""
    return f"{namespace}.json"


def key_of_name(name: str, namespace: str) -> OffloadKey | None:
    """Return the key of the block with this object name, or None for other objects."""
    match = _BLOCK.fullmatch(name.removeprefix(f"{namespace}/"))
    if match is None or len(match[2]) % 2:
        return None
    try:
        key = make_offload_key(bytes.fromhex(match[2]), int(match[3]))
    except OverflowError:
        return None
    return key if name == name_of(namespace, key) else None


logger = logging.getLogger(__name__)

_MAX_CERTIFICATE_BYTES: Final = 1 << 20
_MAX_TEXT_CHARS: Final = 400
_MAX_JUDGED_CHARS: Final = 1 << 14
"""Maximum characters of an error text that are examined; a server controls its length."""
_ANSWER: Final = re.compile(r"status code: \d{3}[\w ]*|error response")
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_NAMES: Final = re.compile(r"https?://\S+|<(?:Resource|Key|BucketName)>[^<]*")
_REFUSALS: Final = ("403 Forbidden", "401 Unauthorized", "NoSuchBucket", "NoSuchContainer")
_NOT_DELETED: Final = (
    "object store: deletion is not permitted. Empty objects that replace corrupt blocks, and "
    "copies made to renew ages, stay until they are overwritten or expire"
)
_NOT_TRUSTED: Final = "InvalidCertificate"
_TIMED_OUT: Final = "source: TimedOut"
"""Error codes that occur only in the library's debug output."""
_FULL: Final = (
    "507 Insufficient Storage",
    "QuotaExceeded",
    "StorageFull",
    "InsufficientStorage",
    "no space left",
)
"""Error texts of a full store, compared case-insensitively; some servers report an exceeded quota
with status 403."""
_SLOW_DOWN: Final = (
    "SlowDown",
    "429 Too Many Requests",
    "TooManyRequests",
    "RequestLimitExceeded",
    "ServerBusy",
    "rateLimitExceeded",
)
"""Signs that a server limits the rate of requests."""
_TOO_SLOW: Final = ("timed out", "timeout")
_EMPTY: Final = memoryview(b"")
_MOST_PUTS: Final = 2
"""Attempts at a conditional write that the store refuses although the object does not exist."""


_users: Final[set[int]] = set()
"""Ids of the processes that have called the library: this one and those it was forked from."""


def claim_library() -> None:
    """Record that this process calls the library.

    The library keeps its threads until the process ends, and a forked child has none of them.

    Raises:
        StateError: A process that this one was forked from has called it: no call would return.
    """
    if _users - {os.getpid()}:
        raise StateError(
            "the object store library was used before this process was forked, and its threads "
            "exist only in the parent, so no call would be answered here; open object stores only "
            'in the child, or start the child with the "spawn" method'
        )
    _users.add(os.getpid())


def open_store(
    url: str,
    given: Mapping[str, Any],
    *,
    allow_http: bool,
    timeout_s: float,
    request_timeout_s: float,
    ca_file: str | None = None,
    makes_directory: bool = True,
) -> ObjectStore:
    """Create the `obstore` store for a URL; it connects on first use.

    The library keeps what it reads from files, so a new store is needed if they change.

    Args:
        url: Bucket and prefix; contains no secret.
        given: Options of the store, named as in the library; values may be secrets.
        allow_http: Whether unencrypted connections are allowed.
        timeout_s: Seconds in which a connection is made.
        request_timeout_s: Timeout of one request, in seconds.
        ca_file: Additional CA certificates to verify the server with, as PEM.
        makes_directory: Whether to create the directory of a file URL.

    Raises:
        ConfigError: A file cannot be read, or URL and options are incompatible; the message
            contains no option values.
    """
    for name in given:
        if name.lower().endswith("allow_http"):
            raise ConfigError(f"{name}: give it as allow_http, and in store_options")
    endpoint = None if allow_http else unencrypted_endpoint(url, given)
    if endpoint is not None:
        raise ConfigError(
            f"{endpoint}: begins with http://, and connections must be encrypted; give "
            "https://, or set allow_http to true in store_options"
        )
    client_options: ClientConfig = {
        "allow_http": allow_http,
        "timeout": timedelta(seconds=request_timeout_s),
        "connect_timeout": timedelta(seconds=timeout_s),
    }
    if ca_file is not None:
        certificates = read_file(ca_file, "tls_ca_file", _MAX_CERTIFICATE_BYTES)
        client_options["root_certificate"] = certificates
    if hosts := permitted_hosts(url, given):
        client_options["proxy_url"] = f"http://{NOWHERE}"
        client_options["proxy_excludes"] = ",".join(hosts)
    options = dict(given)
    if url.startswith("s3") and not any("bulk_delete" in name for name in options):
        # The library reads no response body when it deletes a single object, however long it is.
        options["disable_bulk_delete"] = True
    try:
        if url.startswith("file:"):
            return LocalStore.from_url(url, mkdir=makes_directory, **options)
        return from_url(  # type: ignore[no-any-return] # because of the next one
            url,
            config=options,  # type: ignore[call-overload] # of three stores
            client_options=client_options,
            retry_config={"max_retries": 0},  # retries are made and counted by the caller
        )
    except exceptions.UnknownConfigurationKeyError as error:
        names = ", ".join(sorted(given))
        raise ConfigError(
            f"url: {url!r} does not support all of the given options ({names}); see "
            "obstore's documentation of that store"
        ) from error
    except (exceptions.BaseError, ValueError, TypeError) as error:
        # The error's text may contain option values.
        raise ConfigError(
            f"url: {url!r} cannot be used with the given options ({type(error).__name__}); "
            "correct them"
        ) from None


class ObjectClient(RemoteClient):
    """Stores one block per object: head, conditional put, get."""

    location: ClassVar[str] = "object store"
    answers_many: ClassVar[bool] = False

    def __init__(
        self,
        store: ObjectStore,
        namespace: str,
        description: Mapping[str, Any],
        *,
        reopen: Callable[[], Awaitable[ObjectStore]] | None = None,
        patience_s: float = 1.0,
        list_timeout_s: float = 30.0,
    ) -> None:
        """Create the client without connecting.

        Args:
            store: Bucket and prefix.
            namespace: 32 hexadecimal digits.
            description: Describes the namespace for people.
            reopen: Returns a new store of the same bucket, with the present credentials.
            patience_s: Seconds after which `connect` no longer waits for its list request.
            list_timeout_s: Seconds until that request ends.
        """
        self._store = store
        self._reopen = reopen
        self._is_refused = False
        self._namespace = namespace
        self._description = json.dumps(description, sort_keys=True, indent=2).encode()
        self._has_warned = False
        self._patience_s, self._list_timeout_s = patience_s, list_timeout_s
        self._listing: asyncio.Task[None] | None = None
        self._is_late = self._has_warned_of_list = False

    async def connect(self) -> None:
        """List the namespace, and describe it; a list request that takes long goes on alone.

        Only a list request can tell a missing bucket from a missing object.
        """
        if self._listing is None or self._listing.done():
            loop = asyncio.get_running_loop()
            self._listing = loop.create_task(self._list_first(), name="object:list")
            self._listing.add_done_callback(self._listed)
            self._is_late = False
        await asyncio.wait({self._listing}, timeout=self._patience_s)
        if self._listing.done():
            self._listing.result()
        else:
            self._is_late = True
        await self._create(description_name_of(self._namespace), self._description)

    def _listed(self, listing: asyncio.Task[None]) -> None:
        """Warn of a list request that has failed unless an opening raises its error; only once.

        The warning omits the error's text, which may contain secrets.
        """
        if listing.cancelled() or (error := listing.exception()) is None:
            return
        if self._is_late and not self._has_warned_of_list:
            self._has_warned_of_list = True
            logger.warning("object store: a list request has failed (%s)", type(error).__name__)

    async def _list_first(self) -> None:
        async with asyncio.timeout(self._list_timeout_s):
            async for _ in obstore.list(self._store, self._namespace, chunk_size=1):
                break

    async def check(self, server: Server) -> None:
        del server  # there is only one
        if self._is_refused and self._reopen is not None:
            self._store = await self._reopen()
            self._is_refused = False
        await self._look_at(description_name_of(self._namespace))

    async def exist(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys that have an object; an empty one counts as absent."""
        found = {key: await self._look_at(self._name(key)) for key in keys}
        return frozenset(key for key, meta in found.items() if meta is not None and meta["size"])

    async def get(
        self, keys: Sequence[OffloadKey], targets: Sequence[Target]
    ) -> Sequence[Value | TierError | None]:
        pairs = zip(keys, targets, strict=True)
        return [await self._get(self._name(key), target.capacity - 1) for key, target in pairs]

    async def put(
        self, keys: Sequence[OffloadKey], values: Sequence[Parts]
    ) -> Sequence[TierError | None]:
        pairs = zip(keys, values, strict=True)
        return [await self._create(self._name(key), value) for key, (value,) in pairs]

    async def remove_if(self, key: OffloadKey, value: Value, sha1: str) -> bool:
        """Remove an object if its version is unchanged.

        It is conditionally emptied, then deleted. An empty object counts as absent, and the next
        `put` overwrites it: blocks heal even without permission to delete.
        """
        name = self._name(key)
        found = await self._look_at(name)
        if found is None or value.version is None or found["e_tag"] != value.version:
            return False
        if not await self._overwrite(name, found, b""):
            return False
        await self._delete(name)
        return True

    async def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Delete objects, all at once; without permission, replace them with empty ones."""
        await run_together(map(self._remove, keys), "object:delete")

    async def _remove(self, key: OffloadKey) -> None:
        name = self._name(key)
        if await self._delete(name):
            return
        found = await self._look_at(name)
        if found is not None and found["size"] and not await self._overwrite(name, found, b""):
            raise RefusedError(f"{name}: may not be deleted, and is being written")

    async def list_keys(
        self, cursor: str | None, count: int
    ) -> tuple[list[OffloadKey], str | None]:
        return await self.list_older(cursor, count, -math.inf)

    async def list_older(
        self, cursor: str | None, count: int, age_s: float
    ) -> tuple[list[OffloadKey], str | None]:
        """Return keys in the order of their objects' names; a cursor is the end of a name.

        Empty objects count as absent.
        """
        until_s = time.time() - age_s
        blocks, _, following = await self.list_blocks(cursor, count)
        return [block.key for block in blocks if block.modified_s <= until_s], following

    async def list_blocks(
        self, cursor: str | None, count: int
    ) -> tuple[list[Listed], int, str | None]:
        """Return blocks as `list_older` does, and the number of objects of others among them.

        Names up to the cursor are ignored, so that a server that does not begin behind it cannot
        have a listing repeated for ever.
        """
        prefix = f"{self._namespace}/"
        offset = None if cursor is None else prefix + cursor
        found: list[tuple[str, int, float]] = []
        async for some in obstore.list(self._store, prefix, offset=offset, chunk_size=count):
            found += [
                (meta["path"], meta["size"], meta["last_modified"].timestamp())
                for meta in some
                if meta["path"] > (offset or "")
            ]
            if isinstance(self._store, LocalStore):
                found = heapq.nsmallest(count, found)  # it lists in no order
            elif len(found) >= count:
                break
        found = sorted(found)[:count]
        blocks, num_foreign = [], 0
        for name, size, modified_s in found:
            key = key_of_name(name, self._namespace)
            if key is None:
                num_foreign += not name.startswith((f"{prefix}{RENEWALS}/", f"{prefix}{RECORDS}/"))
            elif size:
                blocks.append(Listed(key, size, modified_s))
        following = found[-1][0].removeprefix(prefix) if len(found) == count else None
        return blocks, num_foreign, following

    async def list_records(self) -> list[tuple[str, float, str]]:
        """Return name, time (seconds since 1970) and version of each record, within a bound."""
        found: list[tuple[str, float, str]] = []
        prefix = f"{self._namespace}/{RECORDS}/"
        async for some in obstore.list(self._store, prefix):
            for meta in some:
                time_s = meta["last_modified"].timestamp()
                name = meta["path"].removeprefix(prefix)
                found.append((name, time_s, meta["e_tag"] or str(time_s)))
            if len(found) >= MOST_RECORDS:
                break
        return found

    async def read_record(self, name: str) -> bytes | None:
        """Return a record, empty if it is too long; None if it does not exist."""
        value = await self._get(self._record_name(name), MOST_RECORD_BYTES)
        return None if value is None else bytes(value.data or b"")

    async def write_record(self, name: str, content: bytes) -> None:
        """Create or replace a record."""
        path = self._record_name(name)
        await obstore.put_async(self._store, path, content, use_multipart=False)

    async def discard_records(self, names: Sequence[str]) -> None:
        """Delete records, present or not."""
        await run_together(map(self._delete, map(self._record_name, names)), "object:delete")

    async def renew(self, keys: Sequence[OffloadKey]) -> None:
        """Rewrite each object, because a lifecycle rule counts its age from the last write.

        The store copies it to a temporary name and back.
        """
        for key in keys:
            name, copy = self._name(key), renewal_name_of(self._namespace, key)
            try:
                await obstore.copy_async(self._store, name, copy)
                await obstore.copy_async(self._store, copy, name)
            except FileNotFoundError:
                continue  # deleted, or just renewed by another host
            await self._delete(copy)

    def mapped(self, error: Exception) -> TierError:
        mapped = self._mapped(error)
        self._is_refused |= isinstance(mapped, RefusedError)
        return mapped

    def _mapped(self, error: Exception) -> TierError:  # noqa: PLR0911 - one per kind
        if isinstance(error, TierError):
            return error
        said, _, debugging = str(error)[:_MAX_JUDGED_CHARS].partition("Debug source:")
        text = text_of(error)
        signs = _NAMES.sub("", " ".join(said.split()))  # names may contain any words
        if REDIRECTED in debugging:
            return RefusedError(f"the server redirected to another host: {text}")
        if _NOT_TRUSTED in debugging:
            return RefusedError(f"the server's certificate is not trusted: {text}")
        if any(sign.lower() in signs.lower() for sign in _FULL):
            return TierFullError(text)
        if any(sign in signs for sign in _SLOW_DOWN):
            return SlowDownError(text)
        if isinstance(
            error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
        ) or any(sign in signs for sign in _REFUSALS):
            return RefusedError(text)
        if _TIMED_OUT in debugging or any(sign in signs for sign in _TOO_SLOW):
            return CallTimeoutError(f"request timed out: {text}")
        return TierUnavailableError(f"{type(error).__name__}: {text}")

    async def close(self) -> None:
        """Cancel the list request of `connect`; the library closes idle connections."""
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.wait({self._listing})

    def _name(self, key: OffloadKey) -> str:
        return name_of(self._namespace, key)

    def _record_name(self, name: str) -> str:
        return f"{self._namespace}/{RECORDS}/{name}"

    async def _create(self, name: str, content: bytes | memoryview) -> TierError | None:
        """Store an object unless it exists; return the error or None."""
        for _ in range(_MOST_PUTS):
            try:
                await obstore.put_async(
                    self._store, name, content, mode="create", use_multipart=False
                )
            except exceptions.AlreadyExistsError:
                found = await self._look_at(name)
                if found is None:
                    continue  # S3 answers 409, too, while it processes a request for the object
                if found["size"]:
                    return ValueExistsError(name)
                if not await self._overwrite(name, found, content):
                    continue
            return None
        return TierUnavailableError(
            f"{name}: the store refused twice to create this object, as if there were one (status "
            "409 or 412), but said that there is none"
        )

    async def _overwrite(self, name: str, found: ObjectMeta, content: bytes | memoryview) -> bool:
        """Replace an object if its version is unchanged."""
        version: UpdateVersion = {}
        if found["e_tag"] is not None:
            version["e_tag"] = found["e_tag"]
        if found["version"] is not None:  # Google Cloud Storage compares only this one
            version["version"] = found["version"]
        try:
            await obstore.put_async(self._store, name, content, mode=version, use_multipart=False)
        except (exceptions.PreconditionError, exceptions.AlreadyExistsError, FileNotFoundError):
            return False
        except (exceptions.NotSupportedError, NotImplementedError):  # a local directory
            await obstore.put_async(self._store, name, content, use_multipart=False)
        return True

    async def _delete(self, name: str) -> bool:
        """Delete an object, present or not; return whether that is permitted."""
        try:
            await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            pass
        except exceptions.BaseError as error:
            if not isinstance(self._mapped(error), RefusedError):
                raise
            if not self._has_warned:
                self._has_warned = True
                logger.warning(_NOT_DELETED)
            return False
        return True

    async def _look_at(self, name: str) -> ObjectMeta | None:
        """Return the object's metadata, or None if it does not exist."""
        try:
            return await obstore.head_async(self._store, name)
        except FileNotFoundError:
            return None

    async def _get(self, name: str, most_bytes: int) -> Value | None:
        try:
            answer = await obstore.get_async(self._store, name)
        except FileNotFoundError:
            return None
        heard()  # the head of the answer; the body may take long
        size, version = answer.meta["size"], answer.meta["e_tag"]
        if not size:
            return None
        data = None if size > most_bytes else await read_at_most(self._store, answer, most_bytes)
        return Value(_EMPTY if data is None else data, version)


async def read_at_most(store: ObjectStore, answer: GetResult, most_bytes: int) -> memoryview | None:
    """Return an answer's body; None if it is longer than `most_bytes`, whatever its header says."""
    if isinstance(store, LocalStore):
        return memoryview(await answer.bytes_async())
    async for data in answer.stream(min_chunk_size=most_bytes + 1):
        return None if len(data) > most_bytes else memoryview(data)
    return _EMPTY


def text_of(error: Exception) -> str:
    """Return the library's error text, with the server's error code if any.

    Omits the rest of the server's response, which may repeat the request with its secrets.
    """
    said = " ".join(str(error)[:_MAX_JUDGED_CHARS].partition("Debug source:")[0].split())
    answer = _ANSWER.search(said)
    if answer is None:
        return said[:_MAX_TEXT_CHARS]
    code = _CODE.search(said, answer.end())
    return f"{said[: answer.start()][:_MAX_TEXT_CHARS]}{answer[0]}{f': {code[1]}' if code else ''}"
