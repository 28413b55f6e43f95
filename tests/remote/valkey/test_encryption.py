"""Encrypted blocks on a real server, which receives no row and fills rows only with what opens."""

import os
from functools import partial
from itertools import islice

import numpy as np
from remote.tampering import KEYS, NUM_CHANGES, tampered
from remote.valkey.tiers import tier_at
from sealed_names import check_secrecy

from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import GUARD, content_of, key_of

K = [key_of(number) for number in range(64)]
BLOCK = 4096
TRIES = 10_000 if os.environ.get("KVOFFLOAD_SERVERS") == "all" else 640


def opened(server, keys=KEYS[:1], slot_bytes=BLOCK):
    return TierHarness(tier_at(server.url(), encryption_keys=keys), 64, slot_bytes)


def test_blocks_load_and_the_server_has_none_of_their_bytes(server):
    with opened(server, slot_bytes=1 << 20) as harness, server.client() as client:
        assert harness.store(K[:8]) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K[:8]))
        assert harness.load(K[:8], range(8, 16)) == {}
        assert all(harness.holds(key, 8 + slot) for slot, key in enumerate(K[:8]))
        stored = [client.get(name) for name in client.scan_iter("kvo:*:*")]
        told = b"".join(map(bytes, stored))
        assert len(stored) == 8
        assert not [key for key in K[:8] if content_of(key, 1 << 20)[:64].tobytes() in told]


def test_of_many_tampered_strings_none_is_served(server):
    with opened(server) as harness, server.client() as client:
        envelopes = harness.tier._envelopes
        rows = [content_of(key, BLOCK) for key in K]
        layout = harness._env.identity.digest
        changes = tampered(envelopes, K, rows, layout, seed=11)
        seen, tries = set(), 0
        while tries < TRIES:
            batch = {key: (how, value) for how, key, value in islice(changes, 64)}
            pipe = client.pipeline()
            for key, (_, value) in batch.items():
                pipe.set(f"kvo:{envelopes.namespace}:".encode() + key, value)
            pipe.execute()
            failures = harness.load(list(batch))
            assert len(failures) == len(batch)
            kinds = {type(why) for why in failures.values()}
            assert kinds <= {CorruptBlockError, BlockMissingError}
            # A value of no length is absent, and its row is not touched.
            found = np.unique(harness.rows[: len(batch)])
            assert {*found.tolist()} <= {0, GUARD}
            seen.update(how for how, _ in batch.values())
            tries += len(batch)
        assert len(seen) == NUM_CHANGES
        assert harness.tier.gauges()["unremoved"] == 0


def test_the_memory_to_encrypt_in_is_used_again(server):
    with opened(server) as harness:
        for first in (0, 16, 32):
            assert harness.store(K[first : first + 16]) == {}
            assert harness.tier.gauges()["staging_bytes"] == 16 * BLOCK
        harness.tier._staged = type(harness.tier._staged)(maxlen=4)
        assert harness.store(K[48:]) == {}
        assert harness.tier.gauges()["staging_bytes"] == 4 * BLOCK
        assert harness.load(K) == {}
    assert harness.tier.gauges()["staging_bytes"] == 0


def test_a_corrupt_string_is_removed_although_its_row_was_decrypted(server):
    with opened(server) as harness, server.client() as client:
        harness.store(K[:2])
        (name,) = [name for name in client.scan_iter("kvo:*:*") if name.endswith(K[1])]
        value = bytearray(client.get(name))
        value[-1] ^= 1
        client.set(name, bytes(value))
        assert [*harness.load(K[:2])] == [1]
        assert not client.exists(name)
        assert not harness.rows[1].any()


def test_only_without_keys_server_and_logs_tell_anything_of_1000_prompts(server, tmp_path, caplog):
    def content():
        with server.client() as client:
            names = list(client.scan_iter(count=1000))
            return b"\n".join([*names, *filter(None, client.mget(names)), server.log.read_bytes()])

    check_secrecy(partial(tier_at, server.url()), content, tmp_path, caplog)
