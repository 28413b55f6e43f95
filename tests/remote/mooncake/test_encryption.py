"""Encrypted blocks and names in a Mooncake Store."""

from remote.mooncake.fakes import K, helper_of
from remote.tampering import KEYS
from sealed_names import check_secrecy, content_below

from kvoffload_async.testing import TierHarness
from kvoffload_async.tiers.files.sealing import Sealer


def test_only_without_keys_values_and_logs_tell_anything_of_1000_prompts(
    fake, tmp_path_factory, caplog
):
    folder = tmp_path_factory.mktemp("keys")
    check_secrecy(fake.tier, lambda: content_below(fake.folder), folder, caplog)


def test_what_others_write_into_the_shared_memory_is_not_authenticated(fake, monkeypatch):
    seal = Sealer.seal

    def scribbling(*arguments):
        proof = seal(*arguments)
        helper_of(harness.tier).cells._cells[:] ^= 0xFF
        return proof

    with TierHarness(fake.tier(encryption_keys=KEYS[:1]), 8, 4096) as harness:
        monkeypatch.setattr(Sealer, "seal", scribbling)
        for key in K[:3]:
            assert harness.store([key]) == {}
        assert harness.load(K[:3]) == {}
        assert all(harness.holds(key, slot) for slot, key in enumerate(K[:3]))
