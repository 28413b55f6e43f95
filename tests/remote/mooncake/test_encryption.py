"""Encrypted blocks and names in a Mooncake Store."""

from sealed_names import check_secrecy, content_below


def test_only_without_keys_values_and_logs_tell_anything_of_1000_prompts(
    fake, tmp_path_factory, caplog
):
    folder = tmp_path_factory.mktemp("keys")
    check_secrecy(fake.tier, lambda: content_below(fake.folder), folder, caplog)
