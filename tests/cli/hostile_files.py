"""What may be in a file that somebody else, or a fault, has written."""

import json

from hypothesis import strategies as st

DEEP = 100_000
SPARSE_BYTES = 1 << 43

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1 << 62, 1 << 64, 10**300, -(10**30)])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "\0", "../..", "\x1b[2J\n", "x" * 5000, ":::", "0:0:0", "٣"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)
"""Values of JSON as Python reads it: infinity and NaN are among them."""

CORPUS = {
    "empty": b"",
    "zeros": bytes(4096),
    "no UTF-8": b'{"boot_id": "\xff\xfe"}',
    "half a line": b'{"boot_id": "a", ',
    "deep lists": b"[" * DEEP,
    "deep lists that end": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"run_config":' * DEEP,
    "less deep lists that end": b"[" * 900 + b"]" * 900,
    **{
        f"{depth} deep within a value": b'{"model_name": ' + b"[" * depth + b"]" * depth + b"}"
        for depth in (900, 980, 3_000, 9_900)
    },
    "infinity": b"[Infinity, {}, -Infinity]",
    "infinity in an object": b'{"block_bytes": Infinity, "version": NaN, "rank": -Infinity}',
    "infinity within": b'[1, {"a": 1e999}, 0]',
    "no number": b"[NaN, {}, NaN]",
    "a number of many digits": b"[" + b"9" * 5000 + b", {}, 0]",
    "large numbers": b"[" + b"9" * 4000 + b', {"a": -' + b"9" * 4000 + b"}, 1]",
    "negative numbers": b'[-5, {"a": -7}, -9]',
    "a key twice": b'{"format": 1, "format": "kvoffload-slab", "version": 1, "version": 2}',
    "wrong types": b'{"format": [], "version": {}, "xxh3": 3, "model_name": {"a": []}}',
    "half a character": b'{"model_name": "\\ud800", "boot_id": "\\udfff"}',
    "null": b"null",
    "text": b'"text"',
}


@st.composite
def altered(draw: st.DrawFn, fields: dict) -> dict:
    """Return an object of which one value, or two, are others, missing or nested."""
    changed = dict(fields)
    for key in draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=2)):
        if draw(st.integers(0, 4)):
            changed[key] = draw(values)
        else:
            changed.pop(key, None)
    return changed


def written(value: object) -> bytes:
    """Return a value as Python writes it: with infinity, NaN and halves of characters."""
    return json.dumps(value).encode()
