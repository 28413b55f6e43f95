"""The integrity key: its file, and the checksums made with it."""

import hashlib
import os
import pickle

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvoffload_async import ConfigError
from kvoffload_async.tiers.files.digests import (
    BlockDigester,
    IntegrityKey,
    create_digester,
    read_key_file,
)
from kvoffload_async.types import OffloadKey

SECRET = bytes(range(32))
KEY = IntegrityKey(SECRET)


def mac(key=KEY, layout="d:0:4", block=b"\x01\x02", data=b"data") -> bytes:
    return create_digester(layout, key).digest(OffloadKey(block), memoryview(data))


# -- golden values: what lies in files must be computed in the same way for ever -------------------


@pytest.mark.parametrize(
    ("layout", "block", "data", "expected"),
    [
        ("d:0:4", b"\x01\x02", b"data", "f571201a6b447395ee690ab256c85afd"),
        ("", b"", b"", "56f4d966670e7b923f66e89d27906b41"),
        ("0123456789ab:3:4096", bytes(36), bytes(4096), "11955decfdc5ba9606805cbc0c73d415"),
    ],
)
def test_a_mac_is_what_it_always_was(layout, block, data, expected):
    assert mac(KEY, layout, block, data).hex() == expected


def test_a_mac_is_blake2b_over_lengths_and_parts():
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in (b"d:0:4", b"\x01\x02"))
    blake = hashlib.blake2b(framed + b"data", key=SECRET, digest_size=16, person=b"kvoffload-block")
    assert mac() == blake.digest()


def test_a_keys_id_is_what_it_always_was():
    assert KEY.id.hex() == "f520fd3e53935507"


# -- no other input has the same MAC ---------------------------------------------------------------

secrets = st.binary(min_size=16, max_size=64)
inputs = st.tuples(secrets, st.text(max_size=8), st.binary(max_size=8), st.binary(max_size=16))


@given(inputs, inputs)
def test_a_mac_never_verifies_with_another_key_layout_block_or_data(one, other):
    assume(one != other)
    assert mac(IntegrityKey(one[0]), *one[1:]) != mac(IntegrityKey(other[0]), *other[1:])


@given(st.binary(max_size=24), st.data())
def test_bytes_do_not_pass_from_one_part_into_the_next(joined, data):
    cuts = sorted(data.draw(st.integers(0, len(joined))) for _ in range(2))
    others = sorted(data.draw(st.integers(0, len(joined))) for _ in range(2))
    assume(cuts != others)

    def parts(first, second):
        text = joined[:first].decode("latin-1")
        assume(text.isascii())  # else it is longer as bytes
        return mac(KEY, text, joined[first:second], joined[second:])

    assert parts(*cuts) != parts(*others)


@given(secrets, st.binary(max_size=16))
def test_a_key_changes_every_checksum_and_several_are_each_as_alone(secret, data):
    keyed, plain = create_digester("d:0:4", IntegrityKey(secret)), create_digester("d:0:4", None)
    assert type(plain) is BlockDigester
    keys, rows = [OffloadKey(b"a"), OffloadKey(b"b")], [memoryview(data)] * 2
    for digester in (keyed, plain):
        alone = [digester.digest(key, row) for key, row in zip(keys, rows, strict=True)]
        assert digester.digests(keys, rows) == alone
        assert {len(digest) for digest in alone} == {16}
    assert keyed.digests(keys, rows) != plain.digests(keys, rows)
    assert (keyed.is_keyed, plain.is_keyed) == (True, False)


@given(secrets, secrets)
def test_an_id_tells_keys_apart_and_says_nothing_of_them(one, other):
    key = IntegrityKey(one)
    assert (key.id == IntegrityKey(other).id) is (one == other)
    assert key.id not in one
    assert repr(key) == f"IntegrityKey(id='{key.id.hex()}')"


def test_a_key_is_written_nowhere():
    with pytest.raises(TypeError, match="cannot be serialized"):
        pickle.dumps(KEY)


# -- the file --------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("behind", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("secret", [SECRET[:16], SECRET, SECRET * 2], ids=len)
def test_a_key_is_the_files_bytes_without_line_ends(key_file, secret, behind):
    key_file.write_bytes(secret + behind)
    assert read_key_file(str(key_file)).id == IntegrityKey(secret).id


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has only 0 bytes"),
        (SECRET[:15] + b"\n\n\n", "has only 15 bytes"),
        (SECRET * 2 + b"x", "has more than 64 bytes"),
        (b"secret " * 1000, "has more than 64 bytes"),
    ],
)
def test_a_key_that_is_too_short_or_too_long_is_refused_and_not_shown(key_file, content, why):
    key_file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{why}; a key has 16 to 64: .*openssl rand") as raised:
        read_key_file(str(key_file))
    assert str(key_file) in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o666, 0o601])
def test_a_key_that_every_user_can_use_is_refused(key_file, mode):
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"all users \(mode {mode:04o}\); run `chmod o="):
        read_key_file(str(key_file))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o660])
def test_a_key_may_be_shared_with_a_group(key_file, mode):
    key_file.chmod(mode)
    assert read_key_file(str(key_file)).id == KEY.id


def test_a_key_of_another_user_is_refused(key_file):
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(key_file, 4711, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_key_file(str(key_file))


def test_a_key_that_is_not_there_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file.*openssl rand -hex 32"):
        read_key_file(str(tmp_path / "none"))


def test_what_is_no_file_is_refused_and_waits_for_nobody(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path, "/dev/null"):
        with pytest.raises(ConfigError, match=r"not a regular file.*; give"):
            read_key_file(str(path))


def test_a_path_that_no_system_takes_is_refused():
    for path in ("/a\0b", "/\ud800"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_key_file(path)


def test_a_link_to_a_key_is_followed(key_file, tmp_path):
    (tmp_path / "link").symlink_to(key_file)
    assert read_key_file(str(tmp_path / "link")).id == KEY.id
