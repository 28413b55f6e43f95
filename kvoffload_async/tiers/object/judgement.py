"""What a tier on a namespace would say of an object in it."""

from __future__ import annotations

from kvoffload_async.tiers.files.digests import create_digester
from kvoffload_async.tiers.files.integrity import IntegrityKey
from kvoffload_async.tiers.files.verdicts import Verdict
from kvoffload_async.tiers.object.packs import PackHeader, is_newer_pack, is_pack
from kvoffload_async.tiers.remote.envelope import Header, is_newer
from kvoffload_async.types import OffloadKey

Judged = tuple[Verdict, str]
"""Of one block, and why."""

_WRONG_HEADER = (Verdict.CORRUPT, "its header is not that block's")


def judge_object(
    value: memoryview, key: OffloadKey | None, namespace: str, integrity_key: IntegrityKey | None
) -> list[Judged]:
    """Judge each block of an object; one that says not what it has counts as one.

    Args:
        value: The object.
        key: After which block it is called.
        namespace: Where it was found.
        integrity_key: What checksums may be made with.
    """
    if is_newer(value) or is_newer_pack(value):
        return [(Verdict.NEWER, "")]
    header = PackHeader.parse(value) if is_pack(value) else Header.parse(value)
    if header is None or header.namespace != namespace:
        return [_WRONG_HEADER]
    used_key = integrity_key if header.is_keyed else None
    if header.is_keyed and (used_key is None or used_key.id != header.key_id):
        return [(Verdict.OTHER_KEY, "")]
    if isinstance(header, PackHeader):
        return _judge_pack(header, value, key, used_key)
    return [_judge_block(header, value, key, used_key)]


def _judge_block(
    header: Header, value: memoryview, key: OffloadKey | None, integrity_key: IntegrityKey | None
) -> Judged:
    if header.key != key:
        return _WRONG_HEADER
    if len(value) != header.payload_offset + header.payload_bytes:
        return Verdict.CORRUPT, f"{len(value)} bytes"
    digester = create_digester(header.layout, integrity_key)
    if digester.digest(header.key, value[header.payload_offset :]) != header.digest:
        return Verdict.CORRUPT, "wrong checksum"
    return Verdict.VERIFIED, ""


def _judge_pack(
    header: PackHeader,
    value: memoryview,
    key: OffloadKey | None,
    integrity_key: IntegrityKey | None,
) -> list[Judged]:
    digester = create_digester(header.layout, integrity_key)
    if header.keys[0] != key or not header.verifies(value, digester):
        return [_WRONG_HEADER]
    if len(value) != header.value_bytes:
        return [(Verdict.CORRUPT, f"{len(value)} bytes")]
    return [
        (Verdict.VERIFIED, "")
        if digester.digest(block, header.block(value, number)) == header.digests[number]
        else (Verdict.CORRUPT, f"block {number} of {len(header.keys)}: wrong checksum")
        for number, block in enumerate(header.keys)
    ]
