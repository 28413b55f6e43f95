"""Bare `object` tiers for tests: no memory of answers unless asked for."""

import obstore

from kvoffload_async.tiers.object.tier import ObjectSettings, ObjectTier
from kvoffload_async.tiers.remote.settings import RemoteSettings

QUICK = {"call_timeout_s": 2.0, "job_timeout_s": 8.0, "probe_timeout_s": 4.0}


def tier_on(connection, pack_bytes=0, **options):
    remote = RemoteSettings(**{"remember_present_s": 0.0, "remember_absent_s": 0.0} | options)
    return ObjectTier(ObjectSettings(connection=connection, pack_bytes=pack_bytes, remote=remote))


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
