"""The `valkey` tier behind plain calls, and the meaning of its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Unpack

from kvoffload_async.abc.tier import AsyncTier, KVIdentity, TierPlace
from kvoffload_async.config import or_none, parse_bool, parse_name
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.remote import (
    RemoteOptions,
    RemoteTierManager,
    check_installed,
    parse_file,
    parse_url,
    read_secret,
    remote_settings,
)
from kvoffload_async.facade.tier_options import check_tier_options, named_layout
from kvoffload_async.tiers.valkey.address import Address
from kvoffload_async.tiers.valkey.tier import ValkeySettings, ValkeyTier


class ValkeyTierManager(RemoteTierManager):
    """Blocks in Valkey or Redis, shared by all hosts that use the server or cluster.

    The server bounds its memory and evicts (`maxmemory`, `maxmemory-policy`); what it has no
    room for is not stored, which is no fault.
    """

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str = "valkey",
        *,
        url: str,
        cluster: bool = False,
        username: str | None = None,
        password_file: str | None = None,
        tls_ca_file: str | None = None,
        tls_cert_file: str | None = None,
        tls_key_file: str | None = None,
        connections: int = 8,
        **options: Unpack[RemoteOptions],
    ) -> None:
        """Connect; see `RemoteTierManager` for further options.

        Args:
            offloading_spec: See `SecondaryTierManager`.
            primary_kv_view: See `SecondaryTierManager`.
            tier_type: See `SecondaryTierManager`.
            url: `valkey://[user[:password]@]host[:port][/database]`, `valkeys://` for TLS;
                `redis://` and `rediss://` mean the same.
            cluster: Whether the server is a node of a cluster.
            username: Whom to log in as, in place of the URL's.
            password_file: Absolute path of a file with the password, in place of the URL's.
            tls_ca_file: Absolute path of certificates to verify the server with.
            tls_cert_file: Absolute path of this client's certificate.
            tls_key_file: Absolute path of its key.
            connections: Calls with payload at once, in each direction.
            **options: The options of every tier behind a network, and of every tier.

        Raises:
            ConfigError: An option is unusable, or the server refuses the credentials.
            TierUnavailableError: The server cannot be reached.
        """
        own = {
            "url": url,
            "cluster": cluster,
            "username": username,
            "password_file": password_file,
            "tls_ca_file": tls_ca_file,
            "tls_cert_file": tls_cert_file,
            "tls_key_file": tls_key_file,
            "connections": connections,
        }
        super().__init__(offloading_spec, primary_kv_view, tier_type, own, **options)

    @classmethod
    def _create_tier(cls, options: Mapping[str, Any], identity: KVIdentity) -> AsyncTier:
        return ValkeyTier(_settings(options, identity))

    @classmethod
    def check_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> list[TierPlace]:
        """Check every option; connects to nothing."""
        settings = _settings(cls._with_defaults(options), identity)
        return [TierPlace(settings.address.shown, is_exclusive=False, key="url")]


def _settings(options: Mapping[str, Any], identity: KVIdentity) -> ValkeySettings:
    """Return what the options mean, all of which are there; raises ConfigError."""
    check_installed("redis", "valkey")
    check_tier_options(options)
    named_layout(identity)
    address = Address.parse(parse_url(options["url"]))
    username = or_none(parse_name)(options["username"], "username")
    password = read_secret(options["password_file"], "password_file")
    address = replace(
        address, username=username or address.username, password=password or address.password
    )
    is_cluster = parse_bool(options["cluster"], "cluster")
    if is_cluster and address.database:
        raise ConfigError(
            f"url: database {address.database} does not go with cluster; leave it out"
        )
    files = {key: parse_file(options[key], key) for key in _TLS_FILES}
    if not address.has_tls and any(files.values()):
        key = next(key for key, path in files.items() if path)
        raise ConfigError(f"{key}: goes with a URL of valkeys:// or rediss://; correct one of them")
    return ValkeySettings(
        address=address,
        is_cluster=is_cluster,
        ca_file=files["tls_ca_file"],
        cert_file=files["tls_cert_file"],
        key_file=files["tls_key_file"],
        remote=remote_settings(options, [address.password] if address.password else []),
    )


_TLS_FILES: Final = ("tls_ca_file", "tls_cert_file", "tls_key_file")
