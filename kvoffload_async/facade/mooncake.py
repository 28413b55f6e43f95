"""The `mooncake` tier behind plain calls, and the meaning of its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Unpack

from kvoffload_async.abc.tier import KVIdentity, TierPlace
from kvoffload_async.config import at_least, parse_name, parse_seconds, parse_size_bytes, shown
from kvoffload_async.errors import ConfigError
from kvoffload_async.facade.remote import check_installed, parse_url
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.tier_options import (
    TierOptions,
    check_tier_options,
    config_of,
    defaults_of,
    identity_of,
    named_layout,
    parse_key_file,
)
from kvoffload_async.tiers.mooncake.cells import Geometry
from kvoffload_async.tiers.mooncake.process import HelperSettings, MooncakeConnection
from kvoffload_async.tiers.mooncake.tier import MooncakeTier

_PROTOCOLS: Final = ("tcp", "rdma")
_MAX_REPLICAS: Final = 64
_HOST_AND_PORT: Final = re.compile(r"[^\s:/]+:\d{1,5}")


class MooncakeTierManager(SecondaryTierManager):
    """Blocks in a Mooncake Store, in the memory that its clients give to it.

    The library runs in a helper process, and sees no memory of the engine's but a buffer that
    blocks are copied through. The store bounds itself and evicts; what it has no room for is not
    stored.
    """

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str = "mooncake",
        *,
        master: str,
        metadata_url: str,
        host: str = "127.0.0.1",
        segment_bytes: int | str = "1GiB",
        protocol: str = "tcp",
        rdma_devices: str = "",
        replicas: int = 1,
        buffer_bytes: int | str = "64MiB",
        call_timeout_s: float = 10.0,
        integrity_key_file: str | None = None,
        **options: Unpack[TierOptions],
    ) -> None:
        """Join the store; see `SecondaryTierManager` for the options that every tier takes.

        Args:
            offloading_spec: See `SecondaryTierManager`.
            primary_kv_view: See `SecondaryTierManager`.
            tier_type: See `SecondaryTierManager`.
            master: Host and port of the store's master.
            metadata_url: Where the clients of the store find each other, such as
                http://HOST:8080/metadata.
            host: The name by which other hosts reach this one.
            segment_bytes: Memory that the helper process gives to the store; 0: none.
            protocol: "tcp" or "rdma".
            rdma_devices: Names of the devices, joined by commas; for "rdma".
            replicas: Copies of each block, in the memory of as many clients.
            buffer_bytes: Memory, at most, that the helper process shares with the engine, half of
                it for each direction: at least two blocks.
            call_timeout_s: Seconds for one call of the library; then the helper process is killed,
                and another one is started.
            integrity_key_file: Absolute path of a file with a key that checksums are made with.
            **options: The options that every tier takes.

        Raises:
            ConfigError: An option is unusable, or the library cannot be loaded.
            TierUnavailableError: The master cannot be reached.
        """
        given = {
            "master": master,
            "metadata_url": metadata_url,
            "host": host,
            "segment_bytes": segment_bytes,
            "protocol": protocol,
            "rdma_devices": rdma_devices,
            "replicas": replicas,
            "buffer_bytes": buffer_bytes,
            "call_timeout_s": call_timeout_s,
            "integrity_key_file": integrity_key_file,
            **options,
        }
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        identity = identity_of(options, config_of(offloading_spec), row_bytes)
        connection, settings = _connection(given, identity), _settings(given, identity)
        tier = MooncakeTier(connection, parse_key_file(integrity_key_file), settings)
        super().__init__(offloading_spec, primary_kv_view, tier_type, tier, **options)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], identity: KVIdentity) -> list[TierPlace]:
        """Check every option; joins nothing."""
        given = _DEFAULTS | dict(options)
        connection = _connection(given, identity)
        _settings(given, identity)
        parse_key_file(given["integrity_key_file"])
        return [TierPlace(f"mooncake://{connection.master}", is_exclusive=False, key="master")]


_MOST_LEAVE_S: Final = 5.0
_DEFAULTS: Final = defaults_of(MooncakeTierManager)


def _connection(options: Mapping[str, Any], identity: KVIdentity) -> MooncakeConnection:
    """Return what the options mean, all of which are there; raises ConfigError."""
    check_installed("mooncake", "mooncake")
    check_tier_options(options)
    named_layout(identity)
    master = parse_name(options["master"], "master")
    if _HOST_AND_PORT.fullmatch(master) is None:
        raise ConfigError(f"master: {shown(master)} is not valid; write HOST:PORT")
    if options["protocol"] not in _PROTOCOLS:
        raise ConfigError(
            f"protocol: {shown(options['protocol'])} is not valid; it must be tcp or rdma"
        )
    devices = options["rdma_devices"]
    if not isinstance(devices, str):
        raise ConfigError(f"rdma_devices: {shown(devices)} is not valid; it must be a text")
    segment = options["segment_bytes"]
    is_none = isinstance(segment, int) and not isinstance(segment, bool) and segment == 0
    return MooncakeConnection(
        master,
        parse_url(options["metadata_url"], "metadata_url"),
        parse_name(options["host"], "host"),
        0 if is_none else parse_size_bytes(segment, "segment_bytes"),
        options["protocol"],
        devices,
        at_least(1, _MAX_REPLICAS)(options["replicas"], "replicas"),
    )


def _settings(options: Mapping[str, Any], identity: KVIdentity) -> HelperSettings:
    """Return what the helper process may take; raises ConfigError."""
    buffer_bytes = parse_size_bytes(options["buffer_bytes"], "buffer_bytes")
    Geometry.of(buffer_bytes, identity.block_bytes)
    return HelperSettings(
        buffer_bytes=buffer_bytes,
        call_timeout_s=parse_seconds(options["call_timeout_s"], "call_timeout_s"),
        start_timeout_s=options.get("open_timeout_s", 30.0),
        leave_timeout_s=min(_MOST_LEAVE_S, options.get("close_timeout_s", 30.0) / 2),
    )
