"""Bare `object` tiers for tests: no memory of answers unless asked for."""

from dataclasses import replace

import obstore

from kvoffload_async.testing.harness import key_of
from kvoffload_async.tiers.object.tier import ObjectTier

BLOCK_BYTES = 4096
K = [key_of(number) for number in range(64)]
QUICK = {"call_timeout_s": 2.0, "job_timeout_s": 8.0, "probe_timeout_s": 4.0}


def tier_on(connection, **options):
    options = {"positive_cache_ttl_s": 0.0, "negative_cache_ttl_s": 0.0} | options
    return ObjectTier(replace(connection, **options))


def set_environment(monkeypatch, connection):
    """Set the variables that say what the options of a store in S3 say."""
    for name, value in connection.store_options.items():
        if name != "allow_http":
            monkeypatch.setenv(f"AWS_{name.upper()}", value)


def names_in(connection):
    return [meta["path"] for page in obstore.list(connection.open()) for meta in page]


def damage(connection, key):
    """Change one bit of a block's object; False if there is none."""
    store, digits = connection.open(), key[:-4].hex()
    names = [name for name in names_in(connection) if digits in name]
    for name in names:
        value = bytearray(bytes(obstore.get(store, name).bytes()))
        value[-1] ^= 1
        obstore.put(store, name, bytes(value))
    return bool(names)


def head(harness, chain):
    """Look for a chain, as every request does before it computes, or loads, anything."""
    (length,) = harness.run(harness.tier.longest_prefixes([chain]))
    return length


def stored(harness, chain):
    assert head(harness, chain) == 0
    assert harness.store(chain) == {}


def loads(harness, keys):
    assert harness.load(keys) == {}
    return all(harness.holds(key, slot) for slot, key in enumerate(keys))


def objects(connection):
    return sorted(name for name in names_in(connection) if "_g" in name)
