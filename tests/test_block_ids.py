"""`as_block_ids`: what numbers become, of whatever type they come."""

import numpy as np
import pytest

from kvoffload_async.types import as_block_ids

NUMBERS = [3, 0, 2**31 - 1]


@pytest.mark.parametrize(
    "given",
    [
        NUMBERS,
        iter(NUMBERS),
        np.array(NUMBERS, dtype=np.int32),
        np.array(NUMBERS),
        np.array(NUMBERS, dtype=">i4"),
        np.repeat(np.array(NUMBERS, dtype=np.int32), 2)[::2],
    ],
    ids=["list", "iterator", "int32", "int64", "big-endian", "strided"],
)
def test_block_ids_are_a_private_read_only_copy(given):
    ids = as_block_ids(given)
    assert ids.tolist() == NUMBERS
    assert ids.dtype == np.int32
    assert ids.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    if isinstance(given, np.ndarray):
        given[0] = 1
        assert ids.tolist() == NUMBERS


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (np.zeros((2, 2), dtype=np.int32), TypeError),
        (np.array([1.5]), TypeError),
        ([1.0], TypeError),
        (np.array([2**31]), OverflowError),
        ([-(2**31) - 1], OverflowError),
    ],
    ids=["rows", "floats", "a float", "an int64 above", "an integer below"],
)
def test_what_is_no_list_of_block_ids_is_an_error(given, error):
    with pytest.raises(error):
        as_block_ids(given)
