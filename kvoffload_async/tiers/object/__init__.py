"""The `object` tier: blocks in an object store, shared by many hosts.

An object's name is `<namespace>/<3 digits>/<hash>_g<group>` below the URL's prefix: the namespace
has 32 hexadecimal digits, and the 3 digits are the first of the hash, to spread the names over key
prefixes. An object is an envelope (`tiers/remote`) with one block. An empty object counts as
absent: it replaces a corrupt one that cannot be deleted. `<namespace>.json` describes the namespace
for people. With `capacity_bytes`, `<namespace>/records/` has the records that hosts write, named
`<host>-<0 to 3>`, and the `word` of their leader (`quota.py`).
"""
