"""Tests of tiers with each implementation of block I/O."""

import pytest

from kvoffload_async.block_io import choice

IMPLEMENTATIONS = ["native", "python"]


@pytest.fixture(params=IMPLEMENTATIONS)
def each_implementation(request, monkeypatch):
    """Tiers copy and encrypt blocks with this one."""
    monkeypatch.setenv(choice.VARIABLE, "" if request.param == "native" else "0")
    if request.param == "native" and (choice.implementation().why or choice._cipher_obstacle()):
        pytest.skip("native code cannot encrypt here")
    return request.param
