"""How a request's positions are taken over from vLLM; without vLLM, whose context is imitated."""

import pytest

from kvoffload_async.core.index import ProbedIndex
from kvoffload_async.integrations.vllm.internals import share_positions, take_positions
from kvoffload_async.types import ReqContext, make_offload_key

KEYS = [make_offload_key(bytes([number]) * 32) for number in range(4)]


class Context:
    """As vLLM 0.33's, as far as positions go."""

    def __init__(self):
        self._offload_key_positions = {}

    def set_offload_key_position(self, key, end_token):
        self._offload_key_positions[key] = end_token

    def get_offload_key_position(self, key):
        return self._offload_key_positions.get(key)


class OfAnotherRelease:
    """Answers as vLLM's does, and keeps its positions where nobody knows."""

    def __init__(self, positions):
        self.positions = positions

    def get_offload_key_position(self, key):
        return self.positions.get(key)


def test_positions_that_vllm_notes_later_are_known_to_a_probe():
    context, request = Context(), ReqContext("r")
    share_positions(context, request)
    for number, key in enumerate(KEYS, 1):
        context.set_offload_key_position(key, 16 * number)
    index = ProbedIndex(1, keeps_order=True)
    for key in KEYS[::-1]:
        index.lookup(key, request)
    assert index.next_probe().chains == tuple((key,) for key in KEYS[::-1])


def test_shared_positions_are_not_copied_again_and_stay_as_vllm_noted_them():
    context, request = Context(), ReqContext("r")
    share_positions(context, request)
    context.set_offload_key_position(KEYS[0], 16)
    context.get_offload_key_position = None  # would fail if it were called
    take_positions(KEYS, context, request)
    assert request.key_positions is context._offload_key_positions
    assert request.key_positions == {KEYS[0]: 16}


@pytest.mark.parametrize("kept", [{}, {"_offload_key_positions": [(KEYS[0], 16)]}])
def test_of_a_vllm_that_keeps_positions_in_another_way_those_of_given_keys_are_copied(kept):
    context, request = OfAnotherRelease({KEYS[0]: 16, KEYS[1]: 32}), ReqContext("r")
    vars(context).update(kept)
    share_positions(context, request)
    assert request.key_positions == {}
    take_positions(KEYS[1:], context, request)
    assert request.key_positions == {KEYS[1]: 32}
