"""Bare `valkey` tiers for tests: short deadlines, no memory of answers unless asked for."""

import re
from pathlib import Path

from kvoffload_async.tiers.valkey.address import Address, ValkeySettings
from kvoffload_async.tiers.valkey.tier import ValkeyTier

QUICK = {"call_timeout_s": 2.0, "job_timeout_s": 8.0, "probe_timeout_s": 4.0}


TLS_FILES = ("ca_file", "cert_file", "key_file")

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "valkey.md"


def documented():
    """Return the rights that the how-to page names for a single server."""
    (rights,) = re.findall(r"`((?:\+[a-z|]+ ?)+)`, on\s+keys\s+`kvo:\*`", PAGE.read_text())
    return rights.split()


def tier_at(url, *, is_cluster=False, **options):
    files = {name: options.pop(name, None) for name in TLS_FILES}
    options = {"positive_cache_ttl_s": 0.0, "negative_cache_ttl_s": 0.0} | files | options
    return ValkeyTier(ValkeySettings(address=Address.parse(url), is_cluster=is_cluster, **options))


def damage(server, key, **options):
    """Change one bit of a block's value; False if there is none."""
    with server.client(**options) as client:
        names = [name for name in client.scan_iter() if name.endswith(key)]
        for name in names:
            value = bytearray(client.get(name))
            value[-1] ^= 1
            client.set(name, bytes(value), keepttl=True)
    return bool(names)


def calls_of(server, command):
    """Return how often a server has run a command."""
    with server.client() as client:
        return client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]
