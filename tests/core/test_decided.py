"""Who watches the core is told of keys once more is known of them."""

from core.terms import k, ks

from kvoffload_async.core.index import ExactIndex, ProbedIndex
from kvoffload_async.core.primary import Primary
from kvoffload_async.policies.lru import LruPolicy
from kvoffload_async.types import LookupResult, ReqContext

CTX = ReqContext("r")


def watched(watchee):
    told = []
    watchee.decided = lambda keys: told.append(list(keys))
    return told


def primary():
    made = Primary(4, LruPolicy(4))
    made.open_request(CTX)
    return made


def test_the_end_of_a_write_is_told_when_the_block_is_readable():
    cache = primary()
    seen = []
    cache.decided = lambda keys: seen.extend((key, cache.lookup(key)) for key in keys)
    cache.prepare_store(CTX, ks("ab"))
    assert not seen
    cache.complete_store(CTX, ks("ab"), success=True)
    assert seen == [(k("a"), LookupResult.HIT), (k("b"), LookupResult.HIT)]


def test_a_write_that_failed_is_told_when_the_block_is_gone():
    cache = primary()
    cache.prepare_store(CTX, ks("a"))
    told = watched(cache)
    cache.complete_store(CTX, ks("a"), success=False)
    assert told == [ks("a")]


def test_a_promotion_that_is_given_up_is_told():
    cache = primary()
    cache.reserve(ks("a"))
    told = watched(cache)
    cache.orphan_write(ks("a"))
    assert told == [ks("a")]


def test_an_answered_probe_tells_of_all_its_keys_found_or_not():
    index = ProbedIndex(1)
    told = []
    index.watch(lambda keys: told.append(list(keys)))
    for name in "ab":
        index.lookup(k(name), "r")
    probe = index.next_probe()
    assert not told
    index.answered(probe.generation, frozenset(ks("a")))
    assert told == [ks("ab")]
    index.answered(probe.generation, frozenset())
    assert told[1:] in ([], [[]]), "it was answered already"


def test_nobody_need_watch():
    assert Primary.decided is None
    assert ExactIndex().listeners == []
