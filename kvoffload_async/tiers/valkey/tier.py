"""The `valkey` tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

from kvoffload_async.abc.tier import KVIdentity, TierLocation
from kvoffload_async.config import (
    at_least,
    option,
    or_none,
    parse_bool,
    parse_file,
    parse_url,
)
from kvoffload_async.errors import ConfigError, CorruptBlockError, TierFullError, Trouble
from kvoffload_async.tiers.remote.client import RemoteClient
from kvoffload_async.tiers.remote.settings import (
    MAX_CONNECTIONS,
    REMEDIES,
    Redactor,
    RemoteSettings,
    SecretFile,
)
from kvoffload_async.tiers.remote.tier import RemoteTier
from kvoffload_async.tiers.valkey.address import Address


def parse_address(value: object, key: str) -> Address:
    """Return the address in a URL; raises ConfigError."""
    return Address.parse(parse_url(value, key), key)


@dataclass(frozen=True, kw_only=True)
class ValkeySettings(RemoteSettings):
    """The options of a `valkey` tier, and values derived from others."""

    address: Address = option(parse_address, remedy="a URL such as valkey://host:6379/0", key="url")
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
    connections: int = option(at_least(1, MAX_CONNECTIONS), 8)
    """Concurrent calls with payload, in each direction."""

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
        self.warn_of_large_blocks("valkey", identity.block_bytes)
        return [TierLocation(self.address.shown, is_exclusive=False, key="url")]


class ValkeyTier(RemoteTier):
    """Blocks in Valkey or Redis, shared by all hosts that use the server or cluster.

    Capacity and eviction are configured in the server (`maxmemory`, `maxmemory-policy`). A block
    for which it has no room is not stored, which does not count as a fault.
    """

    declares = ValkeySettings
    requires: ClassVar = dict.fromkeys(("redis", "hiredis"), "install kvoffload-async[valkey]")
    remedies: ClassVar = {
        **REMEDIES,
        CorruptBlockError: "not served; if this recurs, check the memory of the server",
        TierFullError: "no blocks are stored until there is space: raise the server's maxmemory, "
        "or set its maxmemory-policy to one that evicts",
        Trouble.TOO_SLOW: "raise cpu_bytes_to_use, set write_back to wait, or make the tier "
        "faster: raise connections and bytes_in_flight, or add servers",
    }

    def __init__(self, settings: ValkeySettings) -> None:
        """Configure the tier; nothing is connected before `open`."""
        self._valkey = settings
        super().__init__(settings, self._client_of, settings.address.shown, probes_prefixes=False)

    def _client_of(
        self, namespace: str, block_bytes: int, emptied: Callable[[], None]
    ) -> RemoteClient:
        # Imported here because the library is an optional dependency.
        from kvoffload_async.tiers.valkey.client import ValkeyClient  # noqa: PLC0415
        from kvoffload_async.tiers.valkey.nodes import ValkeyConnection  # noqa: PLC0415

        del block_bytes
        settings = self._valkey
        file = settings.password_file
        connection = ValkeyConnection(
            settings.address,
            settings.is_cluster,
            settings.connections,
            settings.call_timeout_s,
            None if file is None else partial(file.read, settings.redact),
            settings.ca_file,
            settings.cert_file,
            settings.key_file,
        )
        return ValkeyClient(connection, namespace, settings.ttl_s, emptied)
