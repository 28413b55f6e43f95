"""The hosts that an object store's options and environment name, and which of them are permitted.

The library follows every redirect and sends secrets along: the session token, and in the referrer a
URL with its shared access signature. It has no option against that. Therefore, if an endpoint is
configured, requests to all hosts except the endpoint and the credential issuers are sent to a proxy
that does not exist.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

NOWHERE: Final = "127.0.0.1:0"
"""Address of a nonexistent proxy, to which requests to other hosts are sent."""
REDIRECTED: Final = f"{NOWHERE},"
"""Occurs in the library's error for a blocked redirect."""

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
"""Hosts that issue credentials; hosts that the options name are permitted as well."""
_VARIABLES: Final = {"s3": ("AWS_",), "s3a": ("AWS_",), "gs": ("GOOGLE_",)}
_AZURE_VARIABLES: Final = ("AZURE_", "IDENTITY_", "MSI_")


def permitted_hosts(url: str, options: Mapping[str, Any]) -> list[str]:
    """Return the hosts that a store needs; empty if all are permitted.

    All are permitted without an endpoint, because the server is then the provider's, and if the
    environment defines a proxy for the endpoint.

    Args:
        url: URL of the store.
        options: Options for the library.
    """
    given = variables_of(url) | dict(options)
    settings = {name.lower(): str(text) for name, text in given.items()}
    endpoints = [text for name, text in settings.items() if _ENDPOINT.fullmatch(name)]
    if not any(map(_host, endpoints)) or any(map(_has_proxy, endpoints)):
        return []
    hosts = [*_ISSUERS, *filter(None, map(_host, settings.values()))]
    hosts += (f"sts.{text}.amazonaws.com" for name, text in settings.items() if "region" in name)
    return hosts


def unencrypted_endpoint(url: str, options: Mapping[str, Any]) -> str | None:
    """Return the name of the option or variable with an `http://` endpoint; None if there is none.

    Args:
        url: URL of the store.
        options: Options for the library, which take precedence over the environment.
    """
    for given in (options, variables_of(url)):
        endpoints = {n: str(text) for n, text in given.items() if _ENDPOINT.fullmatch(n.lower())}
        if endpoints:
            plain = (n for n, text in endpoints.items() if text.lower().startswith("http:"))
            return next(plain, None)
    return None


def variables_of(url: str) -> dict[str, str]:
    """Return the environment variables that the library reads for a store."""
    prefixes = _VARIABLES.get(urlsplit(url).scheme, _AZURE_VARIABLES)
    return {name: text for name, text in os.environ.items() if name.startswith(prefixes)}


def _host(text: str) -> str | None:
    try:
        return urlsplit(text).hostname if text.startswith(("http://", "https://")) else None
    except ValueError:
        return None


def _has_proxy(endpoint: str) -> bool:
    proxies, host = getproxies(), _host(endpoint)
    is_proxied = "all" in proxies or endpoint.partition(":")[0] in proxies
    return is_proxied and not (host and proxy_bypass(host))
