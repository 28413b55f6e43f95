"""A store with an integrity key, as the command sees it: with the key, without it, with another."""

import pytest
from slab.maintenance.slabs import Slab


@pytest.fixture
def keys(command):
    paths = []
    for name in ("key", "other"):
        path = command.directory / name
        path.write_text(f"{name} of sixteen bytes at least\n")
        path.chmod(0o600)
        paths.append(path)
    return paths


@pytest.fixture
def keyed(command, keys):
    made = Slab(command)
    made.store_blocks(integrity_key_file=str(keys[0]))
    yield made
    made.close()


def test_verify_compares_with_the_key(keyed, keys):
    found = keyed.run("verify", "--integrity-key-file", keys[0])["verification"]
    assert (found["verified"], found["other_key"]) == (12, 0)
    keyed.flip(3)
    found = keyed.run("verify", "--integrity-key-file", keys[0], exit_code=1)["verification"]
    assert (found["verified"], len(found["corrupt"])) == (11, 1)


@pytest.mark.parametrize("which", [None, 1], ids=["no key", "another key"])
@pytest.mark.parametrize("verb", ["verify", "gc"])
def test_without_the_key_nothing_is_called_corrupt_and_nothing_dropped(keyed, keys, verb, which):
    keyed.flip(3)
    arguments = ["--corrupt"] if verb == "gc" else []
    if which is not None:
        arguments += ["--integrity-key-file", keys[which]]
    before = keyed.files()
    (complaint,) = keyed.complaints(verb, *arguments)
    assert ("give --integrity-key-file" if which is None else "another integrity key") in complaint
    assert keyed.files() == before
    if verb == "verify":
        found = keyed.run(verb, *arguments, exit_code=1)["verification"]
        assert (found["checked"], found["other_key"], found["corrupt"]) == (0, 12, [])


def test_gc_needs_no_key_where_it_compares_nothing(keyed):
    (keyed.folder / "journal.tmp").write_bytes(b"x")
    assert keyed.run("gc")["temps"] == ["journal.tmp"]
    assert keyed.run("inspect")["blocks"] == 12


def test_a_store_without_a_key_does_not_verify_with_one(slab, keys):
    for verb, arguments in (("verify", []), ("gc", ["--corrupt"])):
        (complaint,) = slab.complaints(verb, *arguments, "--integrity-key-file", keys[0])
        assert "without an integrity key, but one is given" in complaint


def test_gc_drops_what_does_not_verify_with_the_key(keyed, keys):
    keyed.flip(3)
    assert len(keyed.run("gc", "--corrupt", "--integrity-key-file", keys[0])["corrupt"]) == 1
    served = keyed.served(integrity_key_file=str(keys[0]))
    assert served == [i for i in range(12) if i != 3]


@pytest.mark.parametrize("verb", ["verify", "gc"])
def test_an_unusable_key_is_refused_before_anything_is_done(keyed, keys, verb):
    keys[0].chmod(0o644)
    before = keyed.files()
    assert "integrity_key_file: " in keyed.command.refusal(
        "store", verb, keyed.root, "--integrity-key-file", keys[0]
    )
    assert "No such file" in keyed.command.refusal(
        "store", verb, keyed.root, "--integrity-key-file", "/no/such/key"
    )
    assert keyed.files() == before
