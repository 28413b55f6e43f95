"""Each "cannot" in SECURITY.md's table has tests, and each of these tests exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIERS = ("fs", "slab", "object", "valkey", "mooncake")

PRIMARY = ["tests/runtime/test_shared_users.py::test_engines_of_two_users_under_one_id_do_not_meet"]
SECRECY = {
    "fs": "tests/fs/test_encryption_key.py::"
    "test_only_without_keys_files_and_logs_tell_anything_of_1000_prompts",
    "slab": "tests/slab/test_encryption_key.py::"
    "test_only_without_keys_files_and_logs_tell_anything_of_1000_prompts",
    "object": "tests/remote/object/test_encryption.py::"
    "test_only_without_keys_a_bucket_and_logs_tell_anything_of_1000_prompts",
    "valkey": "tests/remote/valkey/test_encryption.py::"
    "test_only_without_keys_server_and_logs_tell_anything_of_1000_prompts",
    "mooncake": "tests/remote/mooncake/test_encryption.py::"
    "test_only_without_keys_values_and_logs_tell_anything_of_1000_prompts",
}
REMOTE_FORGED = (
    "tests/remote/test_parts.py::test_forged_blocks_are_not_served_with_an_integrity_key"
)
REMOTE_TAMPERED = "tests/remote/test_encryption.py::test_of_10000_tampered_blocks_none_is_served"
FORGED = {
    "fs": "tests/fs/test_integrity_key.py::test_bytes_of_a_neighbour_are_not_served",
    "slab": "tests/slab/test_integrity_key.py::test_blocks_that_a_neighbour_makes_are_not_served",
    **dict.fromkeys(("object", "valkey", "mooncake"), REMOTE_FORGED),
}
REPLAYED = {
    "fs": "tests/fs/test_integrity_key.py::"
    "test_a_block_under_another_name_or_of_another_rank_is_not_served",
    "slab": "tests/slab/test_integrity_key.py::test_a_block_under_another_key_is_not_served",
    **dict.fromkeys(("object", "valkey", "mooncake"), REMOTE_FORGED),
}
TAMPERED = {
    "fs": "tests/fs/test_encryption_key.py::"
    "test_10_000_tampered_blocks_are_not_served_and_leave_no_byte",
    "slab": "tests/slab/test_encryption_key.py::"
    "test_10_000_tampered_blocks_are_not_served_and_leave_no_byte",
    "object": "tests/remote/object/test_encryption.py::"
    "test_of_many_tampered_objects_none_is_served",
    "valkey": "tests/remote/valkey/test_encryption.py::"
    "test_of_many_tampered_strings_none_is_served",
    "mooncake": REMOTE_TAMPERED,
}
CANNOT = {("the primary", "any", verb): PRIMARY for verb in (
    "read", "write", "replay", "observe which", "delete"
)} | {
    (tier, *cell): [tests[tier]]
    for cell, tests in {
        ("integrity", "write"): FORGED,
        ("integrity", "replay"): REPLAYED,
        ("encryption", "read"): SECRECY,
        ("encryption", "write"): TAMPERED,
        ("encryption", "replay"): TAMPERED,
        ("name", "observe which"): SECRECY,
    }.items()
    for tier in TIERS
}  # fmt: skip


def cannot_cells(text: str) -> set[tuple[str, str, str]]:
    """Return tier, key and action of each "cannot" in the table."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    columns, _, *rows = rows
    verbs = [re.match(r"observe which|\w+", column)[0] for column in columns]
    return {
        (tier, key, verb)
        for data, key, *cells in rows
        for tier in (TIERS if data == "all tiers" else [data.partition("'")[0]])
        for verb, cell in zip(verbs[2:], cells, strict=True)
        if cell != "can"
    }


def test_each_cannot_of_the_security_page_has_tests():
    assert cannot_cells((ROOT / "SECURITY.md").read_text()) == set(CANNOT)


def test_these_tests_exist():
    for path, name in {tuple(test.split("::")) for tests in CANNOT.values() for test in tests}:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (path, name)
