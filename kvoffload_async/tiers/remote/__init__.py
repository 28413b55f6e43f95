"""What tiers behind a network share: envelopes, limits, deadlines, retries, remembered answers.

A block is one value of the store, an *envelope*: a header and the block's bytes at an aligned
offset. All integers are little-endian.

| offset | bytes | what |
|---|---|---|
| 0 | 4 | `KVOB` |
| 4 | 2 | version of the format, 1 |
| 6 | 2 | flags: bit 0: the checksum is made with an integrity key |
| 8 | 4 | offset of the block's bytes, a multiple of 64 |
| 12 | 4 | length of the key |
| 16 | 8 | length of the block |
| 24 | 16 | layout: the digest of the `KVIdentity` |
| 40 | 16 | checksum of the block, bound to key and layout (`files/digests.py`) |
| 56 | 8 | the id of the integrity key, or zeros |
| 64 | | the key, and zeros up to the block's bytes |

Values of one *namespace* have one format, layout and integrity key; a namespace is called after a
digest of these. So what does not verify in it is bad, and not somebody else's.
"""
