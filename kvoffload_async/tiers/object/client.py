"""Calls to object stores through `obstore`. With `maintenance`, all that knows the library."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

import obstore
from obstore import exceptions
from obstore.store import LocalStore, ObjectStore, from_url

from kvoffload_async.errors import (
    ConfigError,
    TierError,
    TierFullError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvoffload_async.tiers.object.chains import Chains
from kvoffload_async.tiers.object.names import description_name_of, name_of, renewal_name_of
from kvoffload_async.tiers.object.packs import Packs, head_bytes
from kvoffload_async.tiers.remote.client import RefusedError, RemoteClient, Value
from kvoffload_async.tiers.remote.envelope import Bytes
from kvoffload_async.tiers.remote.together import run_together
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    from obstore.store import ClientConfig

_MAX_TEXT_CHARS: Final = 400
_NAMES: Final = re.compile(r"https?://\S+|<(?:Resource|Key|BucketName)>[^<]*")
_RENEWALS_AT_ONCE: Final = 8
_REFUSALS: Final = ("403 Forbidden", "401 Unauthorized", "NoSuchBucket", "NoSuchContainer")
_NOT_TRUSTED: Final = "InvalidCertificate"
_TIMED_OUT: Final = "source: TimedOut"
"""Only what the library says for debugging has these."""
_FULL: Final = (
    "507 Insufficient Storage",
    "QuotaExceeded",
    "StorageFull",
    "InsufficientStorage",
    "no space left",
)
"""In whatever case; some servers refuse what is beyond a quota with 403."""
_TOO_SLOW: Final = ("timed out", "timeout")
_NO_SUCH_RANGE: Final = ("status code: 416", "InvalidRange", "range was invalid")
"""What is said of the head of an empty object; names, which are digits, may have any number."""


@dataclass(frozen=True, slots=True)
class ObjectConnection:
    """How to connect.

    Attributes:
        url: Bucket and prefix; has no secret.
        options: Options of the store by the library's names; their values may be secrets.
        allow_http: Whether the connection may be without encryption.
        ca_certificates: Certificates to verify the server with besides the system's, as PEM.
        call_timeout_s: Seconds for one request.
        makes_directory: Whether the directory of a file URL is made.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    allow_http: bool = False
    ca_certificates: bytes | None = None
    call_timeout_s: float = 5.0
    makes_directory: bool = True

    def open(self) -> ObjectStore:
        """Return the library's store; it connects when it is used.

        Raises:
            ConfigError: URL and options do not go together; the message has no value of these.
        """
        try:
            opened: ObjectStore = self._open()
        except exceptions.UnknownConfigurationKeyError as error:
            names = ", ".join(sorted(self.options))
            raise ConfigError(
                f"url: {self.url!r} does not go with every option that is given ({names}); see "
                "obstore's documentation of that store"
            ) from error
        except (exceptions.BaseError, ValueError, TypeError) as error:
            # Its text may have the value of an option in it.
            raise ConfigError(
                f"url: {self.url!r} cannot be used with the options that are given "
                f"({type(error).__name__}); correct them"
            ) from None
        return opened

    def _open(self) -> Any:  # noqa: ANN401 - the library says no more in every case
        if self.url.startswith("file:"):
            return LocalStore.from_url(self.url, mkdir=self.makes_directory, **self.options)
        timeout = timedelta(seconds=self.call_timeout_s)
        client_options: ClientConfig = {
            "allow_http": self.allow_http,
            "timeout": timeout,
            "connect_timeout": timeout,
        }
        if self.ca_certificates is not None:
            client_options["root_certificate"] = self.ca_certificates
        return from_url(
            self.url,
            config=dict(self.options),  # type: ignore[call-overload] # of three stores
            client_options=client_options,
            # Repeats are counted where they are made.
            retry_config={"max_retries": 0},
        )


class ObjectClient(RemoteClient):
    """Blocks as objects, one each or several: a conditional put, a get, and a look at the head."""

    place: ClassVar[str] = "object store"
    answers_many: ClassVar[bool] = False

    def __init__(
        self,
        store: ObjectStore,
        namespace: str,
        description: Mapping[str, Any],
        packs: Packs | None = None,
        chains: Chains | None = None,
    ) -> None:
        """Connect to nothing yet.

        Args:
            store: Bucket and prefix.
            namespace: 32 hexadecimal digits.
            description: Whose blocks these are, for people.
            packs: Reads the tables of packs; None: it is not looked what objects have.
            chains: Where it is noted what they have.
        """
        self._store = store
        self._namespace = namespace
        self._packs = packs
        self._chains = Chains() if chains is None else chains
        self._description = json.dumps(description, sort_keys=True, indent=2).encode()

    async def connect(self) -> None:
        # Of all requests only this one tells a missing bucket from a missing object.
        async for _ in obstore.list(self._store, self._namespace, chunk_size=1):
            break
        await self._create(description_name_of(self._namespace), self._description)

    async def check(self) -> None:
        await self._head(description_name_of(self._namespace))

    async def exist(self, keys: Sequence[OffloadKey]) -> frozenset[OffloadKey]:
        """Return the keys after which an object is called; notes what else these have."""
        return frozenset([key for key in keys if await self._is_there(key)])

    async def get(
        self, keys: Sequence[OffloadKey], most_bytes: int
    ) -> Sequence[Value | TierError | None]:
        return [await self._get(self._name(key), most_bytes) for key in keys]

    async def put(
        self, keys: Sequence[OffloadKey], values: Sequence[Bytes]
    ) -> Sequence[TierError | None]:
        for key, value in zip(keys, values, strict=True):
            await self.create(key, value)
        return [None] * len(keys)

    async def create(self, key: OffloadKey, value: Bytes) -> bool:
        """Store an object that is called after a block; False if there is one: it stays."""
        return await self._create(self._name(key), value.data)

    async def remove_if(self, key: OffloadKey, value: Value, sha1: str) -> bool:
        """Remove an object if its version is still this one.

        Where the store can: it is replaced by an empty one on that condition, over which nobody
        writes, and which then goes. Who dies in between leaves what the next load removes.
        """
        name = self._name(key)
        if value.version is None:
            return False
        try:
            await obstore.put_async(
                self._store, name, b"", mode={"e_tag": value.version}, use_multipart=False
            )
        except (exceptions.PreconditionError, FileNotFoundError):
            return False
        except (exceptions.NotSupportedError, NotImplementedError):
            found = await self._head(name)
            if found != value.version:
                return False
        await obstore.delete_async(self._store, name)
        return True

    async def renew(self, keys: Sequence[OffloadKey]) -> None:
        """Have the store copy objects to another name and back: an object's age is its own."""
        gate = asyncio.Semaphore(_RENEWALS_AT_ONCE)

        async def renew(key: OffloadKey) -> None:
            name, copy = self._name(key), renewal_name_of(self._namespace, key)
            async with gate:
                try:
                    await obstore.copy_async(self._store, name, copy)
                    await obstore.copy_async(self._store, copy, name)
                except FileNotFoundError:
                    return  # it has gone meanwhile
                await obstore.delete_async(self._store, copy)

        await run_together(map(renew, keys), "object:renew")

    def mapped(self, error: Exception) -> TierError:
        said, _, debugging = str(error).partition("Debug source:")
        words = " ".join(said.split())
        text = words[:_MAX_TEXT_CHARS]
        signs = _NAMES.sub("", words)  # which may be any words
        if _NOT_TRUSTED in debugging:
            return RefusedError(f"the server's certificate is not trusted: {text}")
        if any(sign.lower() in signs.lower() for sign in _FULL):
            return TierFullError(text)
        if isinstance(
            error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
        ) or any(sign in signs for sign in _REFUSALS):
            return RefusedError(text)
        if _TIMED_OUT in debugging or any(sign in signs for sign in _TOO_SLOW):
            return TierTimeoutError(f"no answer in time: {text}")
        return TierUnavailableError(f"{type(error).__name__}: {text}")

    async def close(self) -> None:
        """Nothing is to be closed: the library closes connections that are not used."""

    def _name(self, key: OffloadKey) -> str:
        return name_of(self._namespace, key)

    async def _create(self, name: str, content: bytes | memoryview) -> bool:
        try:
            await obstore.put_async(self._store, name, content, mode="create", use_multipart=False)
        except exceptions.AlreadyExistsError:
            return False  # the first writer has won, with the same bytes
        return True

    async def _is_there(self, key: OffloadKey) -> bool:
        name = self._name(key)
        if self._packs is None:
            return await self._head(name) is not None
        try:
            found = await obstore.get_async(
                self._store, name, options={"range": (0, head_bytes(len(key)))}
            )
            head = memoryview(await found.bytes_async())
        except FileNotFoundError:
            self._chains.lost_object(key)
            return False
        except exceptions.BaseError as error:
            if not any(sign in str(error) for sign in _NO_SUCH_RANGE):
                raise
            head = memoryview(b"")
        table = self._packs.table(key, head)
        self._chains.saw_object((key,) if table is None else table.keys)
        return True

    async def _head(self, name: str) -> str | None:
        """Return an object's version, or None if there is none."""
        try:
            return (await obstore.head_async(self._store, name))["e_tag"] or ""
        except FileNotFoundError:
            return None

    async def _get(self, name: str, most_bytes: int) -> Value | None:
        try:
            found = await obstore.get_async(self._store, name)
        except FileNotFoundError:
            return None
        version = found.meta["e_tag"]
        if found.meta["size"] > most_bytes:
            return Value(memoryview(b""), version)
        return Value(memoryview(await found.bytes_async()), version)
