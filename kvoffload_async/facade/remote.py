"""The managers of the tiers behind a network: `valkey`, `object` and `mooncake`."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import KVIdentity, TierLocation
from kvoffload_async.config import (
    Options,
    at_least,
    is_encodable,
    option,
    or_none,
    parse_bool,
    parse_file,
    parse_url,
    shown,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.secondary import DeclaredTierManager
from kvoffload_async.facade.tier_options import TierOptions, require_model
from kvoffload_async.tiers.files.digests import IntegrityKey
from kvoffload_async.tiers.files.settings import IntegrityOptions
from kvoffload_async.tiers.mooncake.cells import Geometry
from kvoffload_async.tiers.mooncake.process import (
    HelperSettings,
    MooncakeConnection,
    MooncakeOptions,
)
from kvoffload_async.tiers.mooncake.tier import MooncakeTier
from kvoffload_async.tiers.object.tier import ObjectSettings, ObjectTier
from kvoffload_async.tiers.remote.settings import (
    MAX_CONNECTIONS,
    Redactor,
    RemoteSettings,
)
from kvoffload_async.tiers.valkey.tier import ValkeySettings, ValkeyTier

R = TypeVar("R", bound=RemoteSettings)

logger = logging.getLogger(__name__)


def check_installed(library: str, extra: str) -> None:
    """Check that a tier's client library is installed; raises ConfigError."""
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"type: {extra!r} needs the library {library}, which is not installed; "
            f"run pip install 'kvoffload-async[{extra}]'"
        )


def _take(cls: type[R], options: Mapping[str, Any], identity: KVIdentity) -> R:
    """Return a remote tier's options; raises ConfigError."""
    common = TierOptions.take(options)
    settings = cls.take(
        options, job_timeout_s=common.io_timeout_s, probe_timeout_s=common.probe_timeout_s
    )
    require_model(identity)
    return settings


def _warn_of_large_blocks(settings: RemoteSettings, identity: KVIdentity, kind: str) -> None:
    if identity.block_bytes > settings.bytes_in_flight:
        logger.warning(
            "tier %s: bytes_in_flight (%d) is less than a block (%d bytes), so only one block at a "
            "time is stored, and one loaded; raise bytes_in_flight",
            kind,
            settings.bytes_in_flight,
            identity.block_bytes,
        )


class ValkeyTierManager(DeclaredTierManager[ValkeySettings]):
    """Blocks in Valkey or Redis, shared by all hosts that use the server or cluster.

    Capacity and eviction are configured in the server (`maxmemory`, `maxmemory-policy`). A block
    for which it has no room is not stored, which does not count as a fault.
    """

    kind = "valkey"
    declares = ValkeySettings

    @classmethod
    def settings_of(cls, options: Mapping[str, Any], identity: KVIdentity) -> ValkeySettings:
        check_installed("redis", "valkey")
        check_installed("hiredis", "valkey")
        settings = _take(ValkeySettings, options, identity)
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

    @classmethod
    def create_tier(cls, settings: ValkeySettings) -> ValkeyTier:
        return ValkeyTier(settings)

    @classmethod
    def locations_of(cls, settings: ValkeySettings, identity: KVIdentity) -> list[TierLocation]:
        return [TierLocation(settings.address.shown, is_exclusive=False, key="url")]

    @classmethod
    def warn_of(cls, settings: ValkeySettings, identity: KVIdentity) -> None:
        _warn_of_large_blocks(settings, identity, cls.kind)


_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file")
_VARIABLES: Final = ("AWS_", "AZURE_", "GOOGLE_")
_SECRET_WORDS: Final = ("key", "token", "secret", "password", "credential", "service_account")


def _parse_object_url(value: object, key: str) -> str:
    url = parse_url(value, key)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"{key}: it is not valid; write s3://bucket/prefix") from None
    if "@" in url or parts.query:
        raise ConfigError(
            f"{key}: it must have neither user nor query, since it is shown; give secrets as "
            "options of their own, or in the environment"
        )
    if parts.scheme not in _SCHEMES:
        raise ConfigError(
            f"{key}: {shown(url)} is not valid; its scheme must be one of {', '.join(_SCHEMES)}"
        )
    if not (parts.path if parts.scheme == "file" else parts.netloc):
        raise ConfigError(f"{key}: {shown(url)} is not valid; write s3://bucket/prefix")
    return url


def _parse_secret(value: object, key: str) -> str:
    """Return a secret text; error messages do not contain it."""
    if not isinstance(value, str) or not value or not is_encodable(value):
        raise ConfigError(f"{key}: it is not valid; it must be a text that is not empty")
    return value


def _parse_store_options(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{key}: it must be an object of obstore's options")
    return value


@dataclass(frozen=True, kw_only=True)
class StoreOptions(Options):
    """Options that are passed to the obstore library under the same names."""

    endpoint: str | None = option(or_none(_parse_secret), None)
    """URL of another server with the same protocol."""
    region: str | None = option(or_none(_parse_secret), None)
    """Region of the bucket."""
    access_key_id: str | None = option(or_none(_parse_secret), None)
    """Access key for S3."""
    secret_access_key: str | None = option(or_none(_parse_secret), None, is_shown=False)
    """Secret of the access key."""
    session_token: str | None = option(or_none(_parse_secret), None, is_shown=False)
    """Token of temporary credentials."""
    skip_signature: bool | None = option(or_none(parse_bool), None)
    """Send requests without credentials."""
    virtual_hosted_style_request: bool | None = option(or_none(parse_bool), None)
    """The bucket is part of the endpoint's host name."""
    service_account: str | None = option(or_none(_parse_secret), None, is_shown=False)
    """Path of a service account's file, for Google Cloud Storage."""
    account_name: str | None = option(or_none(_parse_secret), None)
    """Storage account, for Azure."""
    account_key: str | None = option(or_none(_parse_secret), None, is_shown=False)
    """Key of the storage account."""
    sas_key: str | None = option(or_none(_parse_secret), None, is_shown=False)
    """Shared access signature, for Azure."""


@dataclass(frozen=True, kw_only=True)
class ObjectOptions(RemoteSettings, StoreOptions):
    """The options of an `object` tier; some fields are derived from other options."""

    url: str = option(_parse_object_url, remedy="a URL such as s3://bucket/prefix")
    """s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix, or
    file:///directory."""
    store_options: Mapping[str, Any] = option(or_none(_parse_store_options), None, is_shown=False)
    """Further options of obstore, as an object of names and values."""
    allow_http: bool = option(parse_bool, default=False)
    """Allow unencrypted connections."""
    ca_file: str | None = option(or_none(parse_file), None, key="tls_ca_file")
    """Absolute path of certificates that verify the server, in addition to the system's. Read
    again when the server has refused the tier."""
    connections: int = option(at_least(1, MAX_CONNECTIONS), 16)
    """Concurrent calls with payload, in each direction."""


class ObjectTierManager(DeclaredTierManager[ObjectSettings]):
    """Blocks as objects in S3, Google Cloud Storage or Azure, shared by all hosts that use it.

    Credentials that are not configured come from the environment or from the machine's role. Only a
    lifecycle rule of the bucket limits its size; see docs/howto/object.md.
    """

    kind = "object"
    declares = ObjectOptions

    @classmethod
    def settings_of(cls, options: Mapping[str, Any], identity: KVIdentity) -> ObjectSettings:
        check_installed("obstore", "object")
        from kvoffload_async.tiers.object.client import ObjectConnection  # noqa: PLC0415 - an extra

        own = _take(ObjectOptions, options, identity)
        given = dict(own.store_options or {})
        for key in StoreOptions.declared():
            if (value := getattr(own, key)) is None:
                continue
            if key in given:
                raise ConfigError(
                    f"{key}: is given twice, in store_options too; leave one of them out"
                )
            given[key] = value
        connection = ObjectConnection(
            own.url,
            given,
            allow_http=own.allow_http,
            ca_file=own.ca_file,
            call_timeout_s=own.call_timeout_s,
        )
        if not own.url.startswith("file:"):  # opening a file store creates its directory
            connection.open()
        remote = replace(own, redact=Redactor(_secrets(given)))
        return ObjectSettings(connection=connection, remote=remote)

    @classmethod
    def create_tier(cls, settings: ObjectSettings) -> ObjectTier:
        return ObjectTier(settings)

    @classmethod
    def locations_of(cls, settings: ObjectSettings, identity: KVIdentity) -> list[TierLocation]:
        return [TierLocation(settings.connection.url, is_exclusive=False, key="url")]

    @classmethod
    def warn_of(cls, settings: ObjectSettings, identity: KVIdentity) -> None:
        _warn_of_large_blocks(settings.remote, identity, cls.kind)

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Imported on demand, because the library is an extra.
        from kvoffload_async.tiers.object.maintenance import (  # noqa: PLC0415
            ObjectMaintenance,
        )

        return ObjectMaintenance


def _secrets(store_options: Mapping[str, Any]) -> list[str]:
    """Return the secrets in the options and in the environment, where the library looks too."""
    given = {key: value for key, value in os.environ.items() if key.startswith(_VARIABLES)}
    secrets = [
        value
        for key, value in (given | dict(store_options)).items()
        if isinstance(value, str) and any(word in key.lower() for word in _SECRET_WORDS)
    ]
    # A URL contains only the decoded signature.
    return secrets + [sig for text in secrets for sig in parse_qs(text.lstrip("?")).get("sig", ())]


_MAX_LEAVE_S: Final = 5.0


MooncakeSettings = tuple[MooncakeConnection, IntegrityKey | None, HelperSettings]


class MooncakeTierManager(DeclaredTierManager[MooncakeSettings]):
    """Blocks in a Mooncake Store, which pools memory of its clients.

    The client library runs in a helper process, which can access only a bounce buffer. The store
    has its own capacity and eviction. A block for which it has no room is not stored.
    """

    kind = "mooncake"
    declares = MooncakeOptions

    @classmethod
    def settings_of(cls, options: Mapping[str, Any], identity: KVIdentity) -> MooncakeSettings:
        check_installed("mooncake", "mooncake")
        require_model(identity)
        common = TierOptions.take(options)
        helper = HelperSettings.take(
            options,
            response_timeout_s=common.probe_timeout_s,
            start_timeout_s=common.open_timeout_s,
            leave_timeout_s=min(_MAX_LEAVE_S, common.close_timeout_s / 2),
        )
        Geometry.of(helper.buffer_bytes, identity.block_bytes)
        key = IntegrityOptions.take(options).integrity_key
        return MooncakeConnection.take(options), key, helper

    @classmethod
    def create_tier(cls, settings: MooncakeSettings) -> MooncakeTier:
        return MooncakeTier(*settings)

    @classmethod
    def locations_of(cls, settings: MooncakeSettings, identity: KVIdentity) -> list[TierLocation]:
        connection, _, helper = settings
        memory_bytes = connection.segment_bytes + helper.buffer_bytes
        name = f"mooncake://{connection.master}"
        return [TierLocation(name, memory_bytes, is_exclusive=False, key="master", is_memory=True)]
