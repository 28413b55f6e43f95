"""How to reach a Valkey server: the options, its address, the credentials, the connections.

URLs are displayed without secrets. A server may move, and its credentials may be replaced: its
addresses are looked up for each connection.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, cast
from urllib.parse import SplitResult, unquote, urlsplit

from kvoffload_async.abc.tier import KVIdentity, TierLocation
from kvoffload_async.config import (
    at_least,
    option,
    or_none,
    parse_bool,
    parse_file,
    parse_url,
    without_user_info,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.tiers.remote.lookups import Lookups
from kvoffload_async.tiers.remote.settings import (
    MAX_CONNECTIONS,
    Redactor,
    RemoteSettings,
    SecretFile,
)

DEFAULT_PORT: Final = 6379

_SCHEMES: Final = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""Scheme of a URL -> whether it means TLS."""
_FORM: Final = "valkey://[user[:password]@]host[:port][/database], or valkeys:// for TLS"


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server, or of the first node to contact in a cluster.

    Attributes:
        has_tls: Whether the connection is encrypted.
    """

    host: str
    port: int = DEFAULT_PORT
    database: int = 0
    has_tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The address as a URL, without user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "valkeys" if self.has_tls else "valkey"
        return f"{scheme}://{host}:{self.port}/{self.database}"

    @classmethod
    def parse(cls, value: object, key: str = "url") -> Address:
        """Parse the URL of a server.

        Raises:
            ConfigError: The URL is invalid; the message contains no secrets.
        """
        url = parse_url(value, key)
        try:
            parts = urlsplit(url)
            port = parts.port or DEFAULT_PORT
        except ValueError:  # its text may contain part of a password
            raise ConfigError(f"{key}: it is not valid; it must be {_FORM}") from None
        if parts.scheme not in _SCHEMES:
            schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
            raise ConfigError(f"{key}: its scheme is not one of {schemes}; it must be {_FORM}")
        if not parts.hostname or parts.query or parts.fragment:
            shown = without_user_info(url)
            raise ConfigError(f"{key}: {shown!r} is not valid; it must be {_FORM}")
        return cls(
            host=parts.hostname,
            port=port,
            database=_database(parts, key),
            has_tls=_SCHEMES[parts.scheme],
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
        )


def _database(parts: SplitResult, key: str) -> int:
    text = parts.path.strip("/")
    if text and not (text.isascii() and text.isdigit()):
        # Do not show the rest of an unquoted password that contains a slash.
        shown = "after the first /" if "@" in text else repr(text)
        raise ConfigError(f"{key}: database {shown} is not a number; it must be {_FORM}")
    return int(text or 0)


@dataclass(frozen=True, slots=True)
class Login:
    """Credentials of a connection.

    Attributes:
        password: The password; None: none is needed.
        tls: Verifies the server, and has the client's certificate; None: no encryption.
    """

    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, kw_only=True)
class ValkeySettings(RemoteSettings):
    """The options of a `valkey` tier, and values derived from others."""

    address: Address = option(Address.parse, remedy="a URL such as valkey://host:6379/0", key="url")
    """`valkey://[user[:password]@]host[:port][/database]`, `valkeys://` for TLS; `redis://` and
    `rediss://` are synonyms."""
    is_cluster: bool = option(parse_bool, default=False, key="cluster")
    """Whether the server is a node of a cluster."""
    password_file: SecretFile | None = option(or_none(SecretFile.parse), None, is_shown=False)
    """Absolute path of a file with the password, instead of the URL's. Read for each connection."""
    ca_file: str | None = option(or_none(parse_file), None, key="tls_ca_file")
    """Absolute path of the certificates that verify the server, in place of the system's. All
    three files are read for each connection."""
    cert_file: str | None = option(or_none(parse_file), None, key="tls_cert_file")
    """Absolute path of this client's certificate."""
    key_file: str | None = option(or_none(parse_file), None, key="tls_key_file")
    """Absolute path of the private key of this client's certificate."""
    connections: int = option(at_least(1, MAX_CONNECTIONS), 32)
    """Maximum number of concurrent calls with payload, in each direction; each has blocks of up to
    4 MiB, or one larger block. Connections are opened when needed."""

    @classmethod
    def of(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        settings = super().of(options, identity)
        address = settings.address
        if settings.is_cluster and address.database:
            raise ConfigError(
                f"url: database {address.database} does not go with cluster; leave it out"
            )
        for key in ("tls_ca_file", "tls_cert_file", "tls_key_file"):
            if options.get(key) is not None and not address.has_tls:
                raise ConfigError(
                    f"{key}: goes with a URL of valkeys:// or rediss://; correct one of them"
                )
        password = address.password
        return replace(settings, redact=Redactor([password] if password else []))

    def locations(self, identity: KVIdentity) -> list[TierLocation]:
        return [TierLocation(self.address.shown, is_exclusive=False, key="url")]

    def read_login(self) -> Login:
        """Return the current credentials; may read files.

        Raises:
            ConfigError: A file is not usable.
        """
        password, tls = self.address.password, None
        if self.password_file is not None:
            password = self.password_file.read(self.redact)
        if self.address.has_tls:
            try:
                tls = ssl.create_default_context(cafile=self.ca_file)
                if self.cert_file or self.key_file:
                    tls.load_cert_chain(cast("str", self.cert_file), self.key_file)
            except (OSError, TypeError) as error:  # TypeError: a key without a certificate
                raise ConfigError(
                    f"tls_ca_file, tls_cert_file, tls_key_file: not usable ({error}); correct them"
                ) from None
        return Login(password, tls)


SockAddress = tuple[socket.AddressFamily, tuple[Any, ...]]

_TCP_OPTIONS: Final = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 30,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
}
"""Socket options: a dead peer is noticed within 45 s."""


class Route:
    """Connects to one server, which may have several addresses.

    Thread: loop.

    Attributes:
        host: Name or address of the server.
        port: Its port.
        generation: Connections of an older generation are replaced before they are used again.
    """

    def __init__(self, host: str, port: int, lookups: Lookups, timeout_s: float) -> None:
        """Create a route; the server's name is not resolved yet.

        Args:
            host: Name or address of the server.
            port: Its port.
            lookups: Resolves the name.
            timeout_s: Timeout of connecting to the addresses, in seconds.
        """
        self.host = host
        self.port = port
        self.generation = 0
        self._lookups = lookups
        self._timeout_s = timeout_s
        self._address: SockAddress | None = None
        """The address of the last connection."""
        self._failures = 0
        self._failed: dict[SockAddress, int] = {}
        """Address -> number of its last failure; addresses that never failed are tried first."""

    def leave(self, generation: int) -> None:
        """Have a generation's connections replaced, if possible by ones to another address."""
        if generation == self.generation:
            self.generation += 1
            if self._address is not None:
                self._note_failed(self._address)

    async def connect(self) -> socket.socket:
        """Connect to the first address that answers; each gets an equal share of the time left.

        Raises:
            LookUpError: The name was not resolved.
            OSError: No address accepts the connection.
        """
        addresses = await self._resolve()
        self._failed = {one: self._failed[one] for one in addresses if one in self._failed}
        addresses = sorted(addresses, key=lambda one: self._failed.get(one, 0))
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._timeout_s
        while True:
            address = addresses.pop(0)
            now_s = loop.time()
            try:
                async with asyncio.timeout_at(now_s + (ends_s - now_s) / (len(addresses) + 1)):
                    connected = await _connect(address)
            except BaseException as error:
                self._note_failed(address)
                if not addresses or not isinstance(error, OSError):  # includes TimeoutError
                    raise
            else:
                self._address = address
                return connected

    async def _resolve(self) -> list[SockAddress]:
        try:
            return self._addresses(socket.AI_NUMERICHOST)  # without a name server
        except socket.gaierror:
            return await self._lookups.run(f"address of {self.host}", self._addresses)

    def _addresses(self, flags: int = 0) -> list[SockAddress]:
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=flags)
        return [(family, address) for family, _, _, _, address in found]

    def _note_failed(self, address: SockAddress) -> None:
        self._failures += 1
        self._failed[address] = self._failures


async def _connect(address: SockAddress) -> socket.socket:
    family, where = address
    connected = socket.socket(family, socket.SOCK_STREAM)
    try:
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_OPTIONS.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        await asyncio.get_running_loop().sock_connect(connected, where)
    except BaseException:
        connected.close()
        raise
    return connected
