"""Encrypted blocks and names in a bucket."""

from functools import partial

import pytest
from remote.object.tiers import names_in, tier_on
from sealed_names import check_secrecy, content_below


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
