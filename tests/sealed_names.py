"""The contract of tiers whose names are sealed."""

from kvoffload_async.tiers._sealed_names import NameKeys, SealedNames, read_name_keys

TEXT = "a secret that names are sealed with"


def key_file(folder, text=TEXT):
    """Return the path of a new file with a key."""
    path = folder / f"name-key-{len(list(folder.glob('name-key-*')))}"
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def sealing(create, paths):
    """Return a function that creates a tier and seals its names, with the keys in some files."""
    return lambda: SealedNames(create(), NameKeys(read_name_keys(paths)))


def name_of(tier, key, number=0):
    """Return the key that stands in a key's place."""
    (name,) = tier._names.sealed(number, [key])
    return name


class SealedConformance:
    """Comes before a conformance class whose `damage` finds a block by its key."""

    def damage(self, tier, key):
        return super().damage(tier._tier, name_of(tier, key))
