"""What is alike in the managers of tiers whose calls go through `tiers/remote`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Unpack

from kvoffload_async.abc.tier import AsyncTier, KVIdentity
from kvoffload_async.facade.secondary import SecondaryTierManager
from kvoffload_async.facade.storage import config_of, identity_of
from kvoffload_async.facade.tier_options import TierOptions, defaults_of


class RemoteOptions(TierOptions, total=False):
    """The options that every such tier takes; see `RemoteTierManager`."""

    ttl_s: float | None
    bytes_in_flight: int | str
    call_timeout_s: float
    max_retries: int
    remember_present_s: float
    remember_absent_s: float
    integrity_key_file: str | None


class RemoteTierManager(SecondaryTierManager):
    """Blocks behind a network, shared by all hosts that use the server."""

    def __init__(
        self,
        offloading_spec: object,
        primary_kv_view: memoryview,
        tier_type: str,
        own: Mapping[str, Any],
        /,
        *,
        ttl_s: float | None = None,
        bytes_in_flight: int | str = "64MiB",
        call_timeout_s: float = 5.0,
        max_retries: int = 2,
        remember_present_s: float = 10.0,
        remember_absent_s: float = 1.0,
        integrity_key_file: str | None = None,
        **options: Unpack[TierOptions],
    ) -> None:
        """Connect; see `SecondaryTierManager` for the options that every tier takes.

        Args:
            offloading_spec: See `SecondaryTierManager`.
            primary_kv_view: See `SecondaryTierManager`.
            tier_type: See `SecondaryTierManager`.
            own: The options of the kind of tier.
            ttl_s: Seconds that a block lives unused, fewer than a rule of the server's own allows;
                None: as long as the server keeps it.
            bytes_in_flight: Payload on the way at once, in each direction.
            call_timeout_s: Seconds for one call.
            max_retries: How often a call that failed is repeated.
            remember_present_s: Seconds that a positive answer is believed; 0: never.
            remember_absent_s: Seconds that a negative answer is believed; 0: never.
            integrity_key_file: Absolute path of a file with a key that checksums are made with.
            **options: The options that every tier takes.

        Raises:
            ConfigError: An option is unusable, or the server refuses the credentials.
            TierUnavailableError: The server cannot be reached.
        """
        given = {
            **own,
            "ttl_s": ttl_s,
            "bytes_in_flight": bytes_in_flight,
            "call_timeout_s": call_timeout_s,
            "max_retries": max_retries,
            "remember_present_s": remember_present_s,
            "remember_absent_s": remember_absent_s,
            "integrity_key_file": integrity_key_file,
            **options,
        }
        row_bytes = primary_kv_view.nbytes // len(primary_kv_view)
        identity = identity_of(options, config_of(offloading_spec), row_bytes)
        tier = self._create_tier(given, identity)
        super().__init__(offloading_spec, primary_kv_view, tier_type, tier, **options)

    @classmethod
    @abstractmethod
    def _create_tier(cls, options: Mapping[str, Any], identity: KVIdentity) -> AsyncTier:
        """Return the tier for options of which none is missing; raises ConfigError."""

    @classmethod
    def _with_defaults(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options with the defaults of those that are not given."""
        return {**defaults_of(RemoteTierManager), **defaults_of(cls), **options}
