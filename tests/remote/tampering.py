"""Ways to change encrypted values, of which no tier may serve the result."""

import random

from kvoffload_async.tiers.files.sealing import SEAL_BYTES, EncryptionKey
from kvoffload_async.tiers.remote.client import Envelopes

KEYS = [EncryptionKey(bytes([number]) * 32) for number in range(3)]
_FIXED_BYTES = 40
_SEAL_END = _FIXED_BYTES + SEAL_BYTES
_HEADER_BYTES = 128


def _flip(value, _other, chance):
    value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)


def _flip_in_seal(value, _other, chance):
    value[chance.randrange(_FIXED_BYTES, _SEAL_END)] ^= 1 << chance.randrange(8)


def _swap(value, other, _chance):
    value[:] = other


def _swap_all_but_the_key(value, other, _chance):
    value[:_SEAL_END], value[_HEADER_BYTES:] = other[:_SEAL_END], other[_HEADER_BYTES:]


def _other_seal(value, other, _chance):
    value[_FIXED_BYTES:_SEAL_END] = other[_FIXED_BYTES:_SEAL_END]


def _cut(value, _other, chance):
    del value[chance.randrange(len(value)) :]


def _lengthen(value, _other, chance):
    value += bytes(chance.randrange(1, 100))


def _zeros(value, _other, chance):
    begin = chance.randrange(_HEADER_BYTES, len(value) - 64)
    value[begin : begin + 64] = bytes(64)


def _other_version(value, _other, chance):
    value[4] = chance.choice([0, 1, 3])


CHANGES = [
    _flip, _flip_in_seal, _swap, _swap_all_but_the_key, _other_seal, _cut, _lengthen, _zeros,
    _other_version,
]  # fmt: skip


def tampered(envelopes, keys, rows, layout, seed):
    """Yield without end the name of a change, the key of a block, and what replaces its value."""
    chance = random.Random(seed)
    own = [envelopes.wrap(key, row).tobytes() for key, row in zip(keys, rows, strict=True)]
    num_bytes = len(rows[0])
    made_by_others = [
        Envelopes("f" * 32, num_bytes, None, KEYS[:1]),  # of another layout
        Envelopes(layout, num_bytes, None, KEYS[2:]),  # with an unknown key
        Envelopes(layout, num_bytes),  # with a checksum alone
    ]
    while True:
        i, j = chance.sample(range(len(keys)), 2)
        how = chance.choice([*CHANGES, *made_by_others])
        if isinstance(how, Envelopes):
            yield made_by_others.index(how), keys[i], how.wrap(keys[i], rows[i]).tobytes()
        else:
            value = bytearray(own[i])
            how(value, own[j], chance)
            yield how, keys[i], bytes(value)


NUM_CHANGES = len(CHANGES) + 3
