"""The `object` tier: blocks in an object store, one object each, shared by many hosts.

The name of a block is `<namespace>/<3 digits>/<hash>_g<group>` below the URL's prefix: the
namespace has 32 hexadecimal digits, and the digits in the middle are the first of the hash, so that
names are spread over key prefixes. An object is an envelope (`tiers/remote`) or a pack. An empty
one counts as none: it is what replaces a corrupt one that cannot be deleted. `<namespace>.json`
says for people whose blocks these are.
"""
