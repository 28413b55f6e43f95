"""The `object` tier behind plain calls, and the meaning of its options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Unpack
from urllib.parse import parse_qs, urlsplit

from kvoffload_async.abc.maintenance import StoreMaintenance
from kvoffload_async.abc.tier import AsyncTier, KVIdentity, TierPlace
from kvoffload_async.config import is_encodable, or_none, parse_bool, parse_size_bytes, shown
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.remote import (
    MAX_CERTIFICATE_BYTES,
    RemoteOptions,
    RemoteTierManager,
    check_installed,
    parse_url,
    read_file,
    remote_settings,
)
from kvoffload_async.facade.tier_options import check_tier_options, named_layout
from kvoffload_async.tiers.object.packs import MOST_PAYLOAD_BYTES
from kvoffload_async.tiers.object.tier import ObjectSettings, ObjectTier

_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file")
_TEXTS: Final = (
    "endpoint",
    "region",
    "access_key_id",
    "secret_access_key",
    "session_token",
    "service_account",
    "account_name",
    "account_key",
    "sas_key",
)
_SWITCHES: Final = ("skip_signature", "virtual_hosted_style_request")
_VARIABLES: Final = ("AWS_", "AZURE_", "GOOGLE_")
_SECRET_WORDS: Final = ("key", "token", "secret", "password", "credential", "service_account")


class ObjectTierManager(RemoteTierManager):
    """Objects of blocks in S3, Google Cloud Storage or Azure, shared by all hosts that use it.

    Credentials that are not given are found as the library finds them: in the environment, or from
    the machine's role. A rule of the bucket's life cycle bounds it; see docs/howto/object.md.
    """

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str = "object",
        *,
        url: str,
        endpoint: str | None = None,
        region: str | None = None,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        session_token: str | None = None,
        skip_signature: bool | None = None,
        virtual_hosted_style_request: bool | None = None,
        service_account: str | None = None,
        account_name: str | None = None,
        account_key: str | None = None,
        sas_key: str | None = None,
        store_options: Mapping[str, Any] | None = None,
        allow_http: bool = False,
        tls_ca_file: str | None = None,
        pack_bytes: int | str | None = "1MiB",
        connections: int = 16,
        **options: Unpack[RemoteOptions],
    ) -> None:
        """Connect; see `RemoteTierManager` for further options.

        Args:
            offloading_spec: See `SecondaryTierManager`.
            primary_kv_view: See `SecondaryTierManager`.
            tier_type: See `SecondaryTierManager`.
            url: s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix, or
                file:///directory.
            endpoint: URL of another server of the same protocol.
            region: Region of the bucket.
            access_key_id: Whose bucket, for S3.
            secret_access_key: The secret that goes with it.
            session_token: Token of temporary credentials.
            skip_signature: Make requests without credentials.
            virtual_hosted_style_request: The bucket is part of the endpoint's host name.
            service_account: Path of a service account's file, for Google Cloud Storage.
            account_name: Storage account, for Azure.
            account_key: The key that goes with it.
            sas_key: Shared access signature, for Azure.
            store_options: Further options of the store by obstore's names, as an object.
            allow_http: Whether the connection may be without encryption.
            tls_ca_file: Absolute path of certificates to verify the server with, besides the
                system's.
            pack_bytes: Bytes of blocks, at most, that are stored as one object, where they follow
                each other in a prompt: at most 64 blocks, and 16 MiB; None: one object a block.
            connections: Calls with payload at once, in each direction.
            **options: The options of every tier behind a network, and of every tier.

        Raises:
            ConfigError: An option is unusable, the store refuses the credentials, or there is no
                such bucket.
            TierUnavailableError: The store cannot be reached.
        """
        own = {
            "url": url,
            "endpoint": endpoint,
            "region": region,
            "access_key_id": access_key_id,
            "secret_access_key": secret_access_key,
            "session_token": session_token,
            "skip_signature": skip_signature,
            "virtual_hosted_style_request": virtual_hosted_style_request,
            "service_account": service_account,
            "account_name": account_name,
            "account_key": account_key,
            "sas_key": sas_key,
            "store_options": store_options,
            "allow_http": allow_http,
            "tls_ca_file": tls_ca_file,
            "pack_bytes": pack_bytes,
            "connections": connections,
        }
        super().__init__(offloading_spec, primary_kv_view, tier_type, own, **options)

    @classmethod
    def _create_tier(cls, options: Mapping[str, Any], identity: KVIdentity) -> AsyncTier:
        return ObjectTier(_settings(options, identity))

    @classmethod
    def check_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> list[TierPlace]:
        """Check every option, and that they go together; connects to nothing."""
        settings = _settings(cls._with_defaults(options), identity)
        return [TierPlace(settings.connection.url, is_exclusive=False, key="url")]

    @classmethod
    def maintenance(cls) -> type[StoreMaintenance]:
        # Not before it is asked for: the library is an extra.
        from kvoffload_async.tiers.object.maintenance import (  # noqa: PLC0415
            ObjectMaintenance,
        )

        return ObjectMaintenance


def _settings(options: Mapping[str, Any], identity: KVIdentity) -> ObjectSettings:
    """Return what the options mean, all of which are there; raises ConfigError."""
    check_installed("obstore", "object")
    from kvoffload_async.tiers.object.client import ObjectConnection  # noqa: PLC0415 - an extra

    check_tier_options(options)
    named_layout(identity)
    url = _parse_object_url(options["url"])
    store_options = _store_options(options)
    remote = remote_settings(options, _secrets(store_options))
    connection = ObjectConnection(
        url,
        store_options,
        allow_http=parse_bool(options["allow_http"], "allow_http"),
        ca_certificates=read_file(options["tls_ca_file"], "tls_ca_file", MAX_CERTIFICATE_BYTES),
        call_timeout_s=remote.call_timeout_s,
    )
    if not url.startswith("file:"):  # whose directory would be made
        connection.open()
    return ObjectSettings(
        connection=connection, pack_bytes=_pack_bytes(options["pack_bytes"]), remote=remote
    )


def _secrets(store_options: Mapping[str, Any]) -> list[str]:
    """Return the secrets that are given, also in the environment, where the library looks too."""
    given = {key: value for key, value in os.environ.items() if key.startswith(_VARIABLES)}
    secrets = [
        value
        for key, value in (given | dict(store_options)).items()
        if isinstance(value, str) and any(word in key.lower() for word in _SECRET_WORDS)
    ]
    # A URL has the signature alone, written anew.
    return secrets + [sig for text in secrets for sig in parse_qs(text.lstrip("?")).get("sig", ())]


def _pack_bytes(value: object) -> int:
    num_bytes = or_none(parse_size_bytes)(value, "pack_bytes") or 0
    if num_bytes > MOST_PAYLOAD_BYTES:
        raise ConfigError(
            f"pack_bytes: {shown(value)} is too much; it must be at most "
            f"{MOST_PAYLOAD_BYTES >> 20} MiB"
        )
    return num_bytes


def _parse_object_url(value: object) -> str:
    url = parse_url(value)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("url: it is not valid; write s3://bucket/prefix") from None
    if "@" in url or parts.query:
        raise ConfigError(
            "url: it must have neither user nor query, since it is shown; give secrets as options "
            "of their own, or in the environment"
        )
    if parts.scheme not in _SCHEMES:
        raise ConfigError(
            f"url: {shown(url)} is not valid; its scheme must be one of {', '.join(_SCHEMES)}"
        )
    if not (parts.path if parts.scheme == "file" else parts.netloc):
        raise ConfigError(f"url: {shown(url)} is not valid; write s3://bucket/prefix")
    return url


def _store_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given for the library, by its names; no value is shown."""
    further = options["store_options"]
    if further is not None and not (
        isinstance(further, Mapping) and all(isinstance(key, str) for key in further)
    ):
        raise ConfigError("store_options: it must be an object of obstore's options")
    given = dict(further or {})
    for key in (*_TEXTS, *_SWITCHES):
        value = options[key]
        if value is None:
            continue
        if key in given:
            raise ConfigError(f"{key}: is given twice, in store_options too; leave one of them out")
        if key in _SWITCHES:
            parse_bool(value, key)
        elif not isinstance(value, str) or not value or not is_encodable(value):
            raise ConfigError(f"{key}: it is not valid; it must be a text that is not empty")
        given[key] = value
    return given
