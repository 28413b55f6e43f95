"""Redirects to other hosts are not followed.

The library follows every one, and takes along what is a secret: the session token, and as the
referrer a URL with its shared access signature. It cannot be told not to. So where an endpoint is
configured, every host but that one and those that issue credentials is behind a proxy that does
not exist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

NOWHERE: Final = "127.0.0.1:0"
"""The proxy that does not exist."""
REDIRECTED: Final = f"{NOWHERE},"
"""Is in the library's error where it was to follow a redirect."""

_ENDPOINT: Final = re.compile(
    r"(?:aws_|azure_|google_)?(?:(?:storage_)?endpoint(?:_url)?(?:_s3)?|base_url)"
)
_ISSUERS: Final = (
    "169.254.0.0/16",
    "fd00:ec2::/32",
    "sts.amazonaws.com",
    "metadata.google.internal",
    "oauth2.googleapis.com",
    "login.microsoftonline.com",
)
"""Who issues credentials; hosts that are configured for that are known from there."""
_VARIABLES: Final = {"s3": ("AWS_",), "s3a": ("AWS_",), "gs": ("GOOGLE_",)}
_AZURE_VARIABLES: Final = ("AZURE_", "IDENTITY_", "MSI_")


def permitted_hosts(url: str, options: Mapping[str, Any]) -> list[str]:
    """Return the hosts that a store needs; none, if all are permitted.

    That is so without an endpoint, where the server is the provider's, and where the environment
    names a proxy for the endpoint.

    Args:
        url: Of the store.
        options: Of the library.
    """
    prefixes = _VARIABLES.get(urlsplit(url).scheme, _AZURE_VARIABLES)
    variables = {name: text for name, text in os.environ.items() if name.startswith(prefixes)}
    settings = {name.lower(): str(text) for name, text in (variables | dict(options)).items()}
    endpoints = [text for name, text in settings.items() if _ENDPOINT.fullmatch(name)]
    if not any(map(_host, endpoints)) or any(map(_has_proxy, endpoints)):
        return []
    hosts = [*_ISSUERS, *filter(None, map(_host, settings.values()))]
    hosts += (f"sts.{text}.amazonaws.com" for name, text in settings.items() if "region" in name)
    return hosts


def _host(text: str) -> str | None:
    try:
        return urlsplit(text).hostname if text.startswith(("http://", "https://")) else None
    except ValueError:
        return None


def _has_proxy(endpoint: str) -> bool:
    proxies, host = getproxies(), _host(endpoint)
    is_proxied = "all" in proxies or endpoint.partition(":")[0] in proxies
    return is_proxied and not (host and proxy_bypass(host))
