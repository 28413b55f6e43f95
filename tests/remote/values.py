"""Values read and written behind a tier's back, by its client."""

from dataclasses import replace

import numpy as np

from kvoffload_async.tiers.remote.client import Target


def room(num_bytes):
    """Return memory for a value of as many bytes, without a row."""
    return Target(0, np.empty(num_bytes, dtype=np.uint8))


def read(harness, key, most_bytes):
    """Return the value of a key, at most a byte longer than `most_bytes`."""
    target = room(most_bytes)
    (found,) = harness.run(harness.tier._client.get([key], [target]))
    return found if found is None or found.data is not None else replace(found, data=target.copy())


def value_of(harness, key, slot):
    """Return a block as it is stored."""
    return (harness.tier._envelopes.wrap(key, harness.rows[slot]).data,)
