"""Shared parts of network tiers: envelopes, limits, deadlines, retries, existence cache.

A block is one value of the store, an *envelope*: a header followed by the block's bytes at an
aligned offset. All integers are little-endian.

| offset | bytes | content |
|---|---|---|
| 0 | 4 | `KVOB` |
| 4 | 2 | version of the format, 1 |
| 6 | 2 | flags: bit 0: the checksum is keyed with an integrity key |
| 8 | 4 | offset of the block's bytes, a multiple of 64 |
| 12 | 4 | length of the key |
| 16 | 8 | length of the block |
| 24 | 16 | layout: the digest of the `KVIdentity` |
| 40 | 16 | checksum of the block, bound to key and layout (`files/digests.py`) |
| 56 | 8 | id of the integrity key, or zeros |
| 64 | | the key, zero-padded up to the block's bytes |

All values of a *namespace* have the same format, layout and integrity key, and its name is a digest
of these. So a value that does not verify is corrupt, and not one of another configuration.
"""
