"""Options that tiers share: those of every tier on a disk, and the integrity key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from kvoffload_async.abc.policy import CachePolicy
from kvoffload_async.abc.tier import KVIdentity, TierSettings
from kvoffload_async.config import (
    instance_of,
    one_of,
    option,
    or_none,
    parse_bool,
    parse_directory,
    parse_file,
    parse_name,
    shown,
)
from kvoffload_async.errors import ConfigError
from kvoffload_async.policies.tenants import TenantQuotas
from kvoffload_async.registry import check_tier_policy, create_policy
from kvoffload_async.tiers.files.digests import IntegrityKey, read_key_file
from kvoffload_async.tiers.files.modes import Modes
from kvoffload_async.tiers.files.ops import FileOps
from kvoffload_async.tiers.files.sealing import BlockKey, EncryptionKeys, parse_encryption_keys
from kvoffload_async.types import Locality


def parse_key_file(value: object, key: str) -> IntegrityKey:
    """Return the integrity key in a file, given by its absolute path.

    Raises:
        ConfigError: The value is not an absolute path, or the file is unusable.
    """
    # The message does not show the value: it may be the key itself, given by mistake.
    return read_key_file(parse_file(value, key))


@dataclass(frozen=True, kw_only=True)
class IntegrityOptions(TierSettings):
    """The option of every tier that verifies blocks."""

    integrity_key: IntegrityKey | None = option(
        or_none(parse_key_file), None, key="integrity_key_file"
    )
    """Absolute path of a file with the key of the blocks' checksums. With a key the tier serves
    only blocks whose checksum was made with it."""

    @property
    def key_option(self) -> str | None:
        """The option with a key, without which no block is served; None if there is none."""
        return None if self.integrity_key is None else "integrity_key_file"


@dataclass(frozen=True, kw_only=True)
class SealingOptions(IntegrityOptions):
    """The options of a tier that verifies blocks and can encrypt them."""

    encryption_keys: EncryptionKeys | None = option(
        or_none(parse_encryption_keys), None, key="encryption_key_file"
    )
    """Absolute path of a file with the key that blocks are encrypted with, or a list of paths: the
    first key encrypts, and all decrypt. The tier serves only blocks encrypted with one of them."""

    def __post_init__(self) -> None:
        if self.encryption_keys is not None and self.integrity_key is not None:
            raise ConfigError(
                "integrity_key_file: does not go with encryption_key_file, which also detects "
                "every change; leave one of them out"
            )

    @property
    def block_key(self) -> BlockKey:
        """The key that blocks are made with, if any."""
        return self.integrity_key if self.encryption_keys is None else self.encryption_keys

    @property
    def is_encrypted(self) -> bool:
        """Whether blocks are encrypted."""
        return self.encryption_keys is not None

    @property
    def key_option(self) -> str | None:
        return super().key_option if self.encryption_keys is None else "encryption_key_file"


_OCTAL: Final = re.compile(r"(?:0o)?[0-7]{3,5}")
_OWNERS_BITS: Final = 0o600


def parse_file_mode(value: object, key: str) -> int:
    """Return the permissions of a file, given as octal text or as an integer."""
    mode = -1
    if isinstance(value, str) and _OCTAL.fullmatch(value):
        mode = int(value, 8)
    elif type(value) is int:
        mode = value
    if mode & _OWNERS_BITS != _OWNERS_BITS or mode & ~0o666:  # a negative one has all bits
        raise ConfigError(
            f"{key}: {shown(value)} is not valid; give octal digits as text, with all bits of "
            '"0600" and none outside "0666", such as "0660"'
        )
    return mode


@dataclass(frozen=True, kw_only=True)
class DiskSettings(IntegrityOptions):
    """The options of every tier on a disk, and the identity of its blocks.

    Attributes:
        run_config: The layout of the blocks.
        rank: The rank whose blocks these are.
    """

    root_dir: str = option(parse_directory, remedy="the absolute path of a directory")
    """Absolute path of the directory; created if it does not exist."""
    eviction_policy: str = option(parse_name, "lru")
    """Eviction policy at capacity."""
    direct_io: bool = option(parse_bool, default=False)
    """Bypass the page cache where the filesystem supports it."""
    file_mode: int | None = option(or_none(parse_file_mode), None)
    """Permissions of new files, as octal text such as "0640"; new directories can be searched by
    whoever may read these files ("0750"). By default only the owner has permissions, and the group
    those that it has in the directory."""
    locality: Locality = option(one_of(Locality), Locality.LOCAL)
    """Distance of the directory: "LOCAL" or "REMOTE"."""
    quotas: TenantQuotas | None = option(or_none(instance_of(TenantQuotas)), None, is_internal=True)
    """The tenants' quotas; None: no tenants."""
    ops: FileOps | None = option(or_none(instance_of(FileOps)), None, is_internal=True)
    """System calls; tests put a fault layer here."""
    run_config: Mapping[str, Any] = field()
    rank: int = 0

    @classmethod
    def of(cls, options: Mapping[str, Any], identity: KVIdentity) -> Self:
        settings = cls.take(options, run_config=identity.run_config, rank=identity.rank)
        identity.require_model()
        check_tier_policy(settings.eviction_policy)
        return settings

    def create_policy(self, capacity_blocks: int) -> CachePolicy:
        """Return a new eviction policy."""
        return create_policy(self.eviction_policy, capacity_blocks)

    def check_verifies(self, verify: str, *, does: bool) -> None:
        """Raise ConfigError if a tier with a key does not verify all blocks it loads."""
        if self.key_option is not None and not does:
            raise ConfigError(
                f"verify: {verify!r} does not go with {self.key_option}: the tier would serve "
                "blocks that anybody may have made; leave one of them out"
            )

    @property
    def modes(self) -> Modes:
        """Permissions of new files and directories."""
        return Modes(self.file_mode)
