"""Address and credentials of a Valkey server, parsed from a URL, displayed without secrets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from kvoffload_async.config import without_user_info
from kvoffload_async.errors import ConfigError

DEFAULT_PORT: Final = 6379

_SCHEMES: Final = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""Scheme of a URL -> whether it means TLS."""
_FORM: Final = "valkey://[user[:password]@]host[:port][/database], or valkeys:// for TLS"


@dataclass(frozen=True, slots=True)
class Address:
    """One server, or the first node of a cluster to contact.

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
    def parse(cls, url: str, key: str = "url") -> Address:
        """Parse a URL.

        Raises:
            ConfigError: The URL is invalid; the message contains no secrets.
        """
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
