"""Encrypted blocks and names in a bucket."""

import os
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from remote.object.tiers import BLOCK_BYTES, K, names_in, tier_on
from remote.tampering import KEYS, NUM_CHANGES, tampered
from sealed_names import check_secrecy, content_below

from kvoffload_async.errors import BlockMissingError, CorruptBlockError
from kvoffload_async.testing import TierHarness
from kvoffload_async.testing.harness import GUARD, content_of

TRIES = 10_000 if os.environ.get("KVOFFLOAD_SERVERS") == "all" else 640


def test_only_without_keys_files_and_logs_tell_anything_of_1000_prompts(
    connection, tmp_path, caplog
):
    content = partial(content_below, tmp_path / "blocks")
    check_secrecy(partial(tier_on, connection), content, tmp_path, caplog)


@pytest.mark.servers
def test_only_without_keys_a_bucket_and_logs_tell_anything_of_1000_prompts(
    server, prefix, tmp_path, caplog
):
    connection = server.connection(prefix, timeout_s=60.0)

    def content():
        names = "\n".join(names_in(connection)).encode()
        return content_below(server.folder / "data") + names

    check_secrecy(partial(tier_on, connection), content, tmp_path, caplog)


def test_of_many_tampered_objects_none_is_served(connection):
    with TierHarness(tier_on(connection, encryption_keys=KEYS[:1]), 64, BLOCK_BYTES) as harness:
        assert harness.store(K) == {}
        folder = Path(connection.url.removeprefix("file://"))
        paths = {
            key: folder / name
            for name in names_in(connection)
            for key in K
            if key[:-4].hex() in name
        }
        rows = [content_of(key, BLOCK_BYTES) for key in K]
        layout = harness._env.identity.digest
        changes = tampered(harness.tier._envelopes, K, rows, layout, seed=5)
        seen = set()
        for _ in range(TRIES // 64):
            batch = {key: (how, value) for how, key, value in islice(changes, 64)}
            for key, (_, value) in batch.items():
                paths[key].write_bytes(value)
            failures = harness.load(list(batch))
            assert len(failures) == len(batch)
            kinds = {type(why) for why in failures.values()}
            assert kinds <= {CorruptBlockError, BlockMissingError}
            # A value that is too long is not read.
            assert {*harness.rows[: len(batch)].ravel().tolist()} <= {0, GUARD}
            seen.update(how for how, _ in batch.values())
        assert len(seen) == NUM_CHANGES
