"""The blocks of queued requests are promoted before their first lookup."""

import pytest
from connector.worlds import HIT, Desk, Request, Scripted, keys

from kvoffload_async.facade.connector.protocol import KVGroup


class Queued(Scripted):
    """Records what is to be promoted ahead."""

    def __init__(self):
        super().__init__(answers=dict.fromkeys(keys("abcdef"), HIT))
        self.ahead = []

    def prefetch(self, keys, req_context, windows=()):
        self.ahead.append((req_context.req_id, list(keys)))
        self.windows = [(list(window.keys), window.num_blocks) for window in windows]


def desk_of(*groups, **options):
    return Desk(manager=Queued(), groups=groups or (KVGroup(4),), options=options)


def test_a_queued_request_is_prefetched_as_far_as_it_may_be_loaded():
    desk, request = desk_of(), Request("r", "abcd")
    desk.connector.on_new_request(request)
    (ahead,) = desk.manager.ahead
    matched, _ = desk.ask(request)
    assert ahead == ("r", keys("abcd")[: matched // 4])


@pytest.mark.parametrize(
    ("on_device", "options", "names"),
    [
        (4, {}, slice(1, 5)),
        (5, {}, slice(1, 5)),
        (20, {}, slice(5, 5)),
        (0, {"max_load_tokens": 8}, slice(0, 2)),
        (4, {"max_load_tokens": 8}, slice(1, 3)),
    ],
)
def test_what_the_device_has_or_is_not_loaded_is_not_prefetched(on_device, options, names):
    desk, request = desk_of(**options), Request("r", "abcde")
    desk.connector.on_new_request(request, on_device)
    assert desk.manager.ahead == [("r", keys("abcde")[names])]


def test_a_window_is_prefetched_with_its_size():
    desk = desk_of(KVGroup(4), KVGroup(4, sliding_window_tokens=7))
    desk.connector.on_new_request(Request("r", "abcd"), 4)
    assert desk.manager.ahead == [("r", keys("abcd")[1:])]
    assert desk.manager.windows == [(keys("abcd", group=1)[1:], 2)]


@pytest.mark.parametrize(
    "groups",
    [
        (KVGroup(4, sliding_window_tokens=8),),
        (KVGroup(4), KVGroup(8, sliding_window_tokens=8)),
        (KVGroup(4),) * 2,
    ],
)
def test_other_models_are_not_prefetched(groups):
    desk = desk_of(*groups)
    desk.connector.on_new_request(Request("r", "abcd"))
    assert desk.manager.ahead == []
