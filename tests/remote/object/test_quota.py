"""The pure part of `capacity_bytes`: records, words, last uses and grants."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.tiers.object import quota
from kvoffload_async.tiers.object.quota import (
    MOST_HOSTS,
    MOST_KEY_BYTES,
    MOST_KEYS,
    MOST_RECORD_BYTES,
    MOST_TENANTS,
    Account,
    Claim,
    Leader,
    Listed,
    Record,
    UseTable,
    Word,
    allot,
    fresh_hosts,
    joined,
    split,
)
from kvoffload_async.types import make_offload_key

numbers = st.integers(0, (1 << 64) - 1)
hosts = st.binary(min_size=8, max_size=8)
keys = st.binary(min_size=5, max_size=MOST_KEY_BYTES)
records = st.builds(
    Record, hosts, numbers.filter(bool), numbers, numbers, numbers, numbers,
    st.lists(keys, max_size=5), st.lists(keys, max_size=5),
)  # fmt: skip
words = st.builds(
    Word, hosts, numbers, numbers, numbers, numbers, numbers,
    st.dictionaries(hosts, numbers, max_size=5),
)  # fmt: skip
K = [make_offload_key(bytes([number]) * 16, 0) for number in range(64)]


def parsed(data):
    """A record, whoever's it is."""
    return Record.parse(data, data[8:16], 1)


@given(records)
def test_a_record_is_read_as_it_was_written(record):
    assert parsed(record.encode()) == record


@given(words)
def test_a_word_is_read_as_it_was_written(word):
    assert Word.parse(word.encode()) == word


def test_the_longest_record_and_word_are_within_the_bytes_that_are_read():
    names = [n.to_bytes(2, "big") * (MOST_KEY_BYTES // 2) for n in range(MOST_KEYS)]
    longest = Record(b"h" * 8, 1, 2, 3, 4, 5, names[: MOST_KEYS // 2], names[MOST_KEYS // 2 :])
    assert parsed(longest.encode()) == longest
    parts = [
        longest._replace(stored=names[n :: 2 * MOST_TENANTS], used=[]) for n in range(MOST_TENANTS)
    ]
    parts[0] = parts[0]._replace(used=names[MOST_KEYS // 2 :])
    assert len(joined(parts)) <= MOST_RECORD_BYTES
    assert [*map(parsed, split(joined(parts), MOST_TENANTS))] == parts
    word = Word(b"h" * 8, 1, 2, 3, 4, 5, {n.to_bytes(8, "big"): n for n in range(MOST_HOSTS)})
    assert Word.parse(word.encode()) == word
    assert max(len(joined([longest])), len(joined([word] * MOST_TENANTS))) <= MOST_RECORD_BYTES


@given(st.lists(records, min_size=1, max_size=3), st.data())
def test_an_object_is_split_into_the_records_of_all_tenants_or_not_at_all(tenants, data):
    whole = joined(tenants)
    assert [*map(parsed, split(whole, len(tenants)))] == tenants
    assert split(whole, len(tenants) + 1) == []
    assert split(whole, len(tenants) - 1) == []
    assert split(whole + b"x", len(tenants)) == []
    end = data.draw(st.integers(0, len(whole) - 1))
    assert None in [*map(parsed, split(whole[:end], len(tenants))), *[None] * (end == 0)] or (
        split(whole[:end], len(tenants)) == []
    )


@given(st.one_of(records, words), st.data())
def test_neither_is_read_from_other_bytes(item, data):
    whole = item.encode()
    end = data.draw(st.integers(0, len(whole) - 1))
    assert parsed(whole[:end]) is None or end == len(whole)
    assert Word.parse(whole[:end]) is None
    assert parsed(whole + b"x") is None
    assert Word.parse(whole + b"x") is None
    newer = whole[:4] + b"\2" + whole[5:]
    assert parsed(newer) is None
    assert Word.parse(newer) is None
    assert (Word.parse if isinstance(item, Record) else parsed)(whole) is None


@given(st.binary(max_size=200))
def test_any_bytes_after_a_head_are_read_or_refused(rest):
    for magic in (b"KVOR", b"KVOW"):
        data = magic + b"\1\0\0\0" + rest
        for found in (parsed(data), Word.parse(data)):
            assert found is None or found.encode() == data


def test_a_record_or_word_with_too_many_or_impossible_names_is_refused():
    record = Record(b"h" * 8, 1, 2, 3, 4, 5, (K[0],))
    assert parsed(record.encode()) == record._replace(stored=[K[0]], used=[])
    assert Record.parse(record.encode(), b"h" * 8, 2) is None
    assert Record.parse(record.encode(), b"i" * 8, 1) is None
    for names in ((K[0],) * MOST_KEYS, (b"k",), (b"k" * (MOST_KEY_BYTES + 1),)):
        assert parsed(record._replace(used=names).encode()) is None
    limits = {n.to_bytes(8, "big"): n for n in range(MOST_HOSTS + 1)}
    assert Word.parse(Word(b"h" * 8, 1, 2, 3, 4, 5, limits).encode()) is None


# -- a host -------------------------------------------------------------------------------------


def test_a_host_writes_up_to_its_limit_and_counts_the_others():
    account = Account(b"h" * 8, 100)
    assert not account.admits(1)
    account.limit_bytes = 20
    assert account.admits(10)
    assert account.admits(10)
    assert not account.admits(1)
    account.ended(K[0], 10, is_written=True)
    account.ended(K[1], 10, is_written=False)
    assert account.admits(10)
    assert account.declined == 2
    record = account.record()
    assert record == Record(b"h" * 8, 100, 10, 20, 32, 1, (K[0],))
    account.sent(record)
    assert account.record() == Record(b"h" * 8, 100, 10, 20, 0, 2)


def test_a_write_that_may_have_succeeded_counts_as_written():
    account = Account(b"h" * 8, 100)
    account.limit_bytes = 10
    assert account.admits(10)
    account.ended(K[0], 10, is_written=True)
    assert not account.admits(10)


def test_a_report_that_was_not_sent_is_part_of_the_next():
    account = Account(b"h" * 8, 100)
    account.limit_bytes = 20
    account.admits(10)
    account.ended(K[0], 10, is_written=True)
    account.record()
    account.used([K[1], K[2]])
    account.used([K[1]])
    record = account.record()
    assert (record.stored, record.used) == ((K[0],), (K[2], K[1]))
    assert (record.wanted_bytes, record.number) == (10, 2)
    account.used([K[3]])
    account.sent(record)
    assert account.record() == Record(b"h" * 8, 100, 10, 20, 0, 3, (), (K[3],))


def test_the_keys_of_a_record_are_bounded_and_what_has_no_room_is_counted(monkeypatch):
    monkeypatch.setattr(quota, "MOST_KEYS", 4)
    account = Account(b"h" * 8, 100)
    account.limit_bytes = 100
    account.used(K[:10])
    assert account.dropped == 8
    assert all(account.admits(10) for _ in range(3))
    for key in K[10:13]:
        account.ended(key, 10, is_written=True)
    assert not account.admits(10)
    record = account.record()
    assert (record.stored, record.used) == (tuple(K[10:12]), tuple(K[:2]))
    account.sent(record)
    record = account.record()
    assert (record.stored, record.used) == ((K[12],), ())


def test_tenants_share_the_keys_of_a_record(monkeypatch):
    monkeypatch.setattr(quota, "MOST_KEYS", 8)
    account = Account(b"h" * 8, 100, num_tenants=2)
    account.limit_bytes = 100
    for key in K[:2]:
        assert account.admits(10)
        account.ended(key, 10, is_written=True)
    assert not account.admits(10)


# -- last uses ----------------------------------------------------------------------------------


def listed(*blocks):
    return [Listed(K[number], size, modified) for number, size, modified in blocks]


def scanned(*blocks):
    table = UseTable()
    table.listed(listed(*blocks))
    assert not table.is_complete
    assert table.end_scan() == []
    assert table.is_complete
    return table


def test_the_blocks_used_longest_ago_are_deleted_first():
    table = scanned((0, 10, 3.0), (1, 20, 1.0), (2, 30, 2.0))
    assert table.used_bytes == 60
    assert list(table.oldest(60)) == []
    assert list(table.oldest(59)) == [K[1]]
    table.use(K[1], 99)
    assert table.used_bytes == 60
    assert list(table.oldest(25)) == [K[2], K[0]]
    table.deleted([K[2], K[2], K[9]])
    assert (table.used_bytes, list(table.oldest(0))) == (30, [K[0], K[1]])


def test_a_scan_finds_what_others_stored_and_deleted_but_not_what_was_stored_since_its_page():
    table = scanned((0, 10, 1.0), (1, 10, 2.0), (2, 10, 3.0), (3, 10, 4.0))
    table.listed(listed((5, 10, 9.0), (0, 15, 1.0), (2, 10, 1.0), (4, 10, 8.0)))
    table.deleted([K[2]])
    table.use(K[3], 0)
    table.use(K[6], 10)
    assert set(table.end_scan()) == {K[1], K[3]}
    assert list(table.oldest(0)) == [K[0], K[4], K[5], K[6]]
    assert table.used_bytes == 45
    table.listed(listed((0, 10, 1.0), (5, 20, 2.0), (4, 10, 3.0)))
    assert table.end_scan() == [K[6]]
    assert (table.used_bytes, list(table.oldest(0))) == (40, [K[0], K[5], K[4]])


def test_a_use_of_a_block_that_is_not_stored_takes_no_room():
    table = scanned((0, 10, 1.0), (1, 10, 2.0))
    table.use(K[5], 0)
    table.use(K[0], 0)
    assert (table.used_bytes, list(table.oldest(0))) == (20, [K[1], K[0]])


def test_uses_that_are_read_before_the_first_scan_ends_rank_the_blocks_that_it_finds():
    table = UseTable()
    table.use(K[0], 0)
    table.use(K[5], 0)
    table.listed(listed((0, 10, 1.0), (1, 10, 2.0)))
    assert table.used_bytes == 20
    assert table.end_scan() == [K[5]]
    assert list(table.oldest(0)) == [K[1], K[0]]


def test_the_table_is_bounded_and_learns_of_the_rest_by_later_scans(monkeypatch):
    monkeypatch.setattr(quota, "MOST_BLOCKS", 3)
    table = scanned((0, 10, 1.0), (1, 10, 2.0))
    table.use(K[2], 10)
    table.use(K[3], 10)
    table.listed(listed(*((n, 10, float(n)) for n in range(10))))
    assert table.end_scan() == []
    assert list(table.oldest(0)) == [K[0], K[1], K[2]]
    table.deleted([K[0], K[1]])
    table.listed(listed((4, 10, 1.0), (5, 10, 3.0), (6, 10, 2.0)))
    assert table.end_scan() == [K[2]]
    assert list(table.oldest(0)) == [K[4], K[5]]


@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "use", "list", "delete", "scan"]), st.integers(0, 9))
    )
)
def test_the_bytes_used_are_the_sum_of_the_blocks_in_any_order(steps):
    table = UseTable()
    for step, number in steps:
        if step in {"store", "use"}:
            table.use(K[number], number + 1 if step == "store" else 0)
        elif step == "list":
            table.listed(listed((number, number + 1, float(number))))
        elif step == "delete":
            table.deleted([K[number]])
        else:
            table.end_scan()
        sizes = {key: K.index(key) + 1 for key in table.oldest(-1)}
        used_only = sum(sizes.values()) - table.used_bytes
        assert used_only == 0 or not table.is_complete
        assert used_only >= 0
        assert set(table.oldest(0)) <= sizes.keys()


# -- grants -------------------------------------------------------------------------------------

small = st.integers(0, 10_000)
claims = st.dictionaries(hosts, st.builds(Claim, small, small, small), max_size=6)


@given(claims, st.integers(-5_000, 50_000), st.integers(1, 500))
def test_grants_never_exceed_the_free_bytes_whichever_word_a_host_obeys(claims, free, block):
    limits = allot(claims, free, block)
    assert limits.keys() == claims.keys()
    before = sum(claim.open_bytes for claim in claims.values())
    after = sum(
        max(claim.open_bytes, limits[host] - claim.written_bytes) for host, claim in claims.items()
    )
    assert after <= max(before, free)
    assert all(limits[host] >= claim.written_bytes for host, claim in claims.items())


@given(claims, st.integers(1, 500))
def test_with_enough_room_each_host_is_granted_two_periods_of_its_demand(claims, block):
    free = 1_000_000
    limits = allot(claims, free, block)
    for host, claim in claims.items():
        assert limits[host] - claim.written_bytes >= 2 * claim.wanted_bytes + block - 1


def test_a_grant_that_is_not_wanted_any_more_is_taken_back():
    limits = allot({b"a": Claim(0, 900, 0), b"b": Claim(0, 0, 400)}, 1000, 1)
    assert limits[b"a"] < 900
    assert limits[b"b"] == 100
    limits = allot({b"a": Claim(0, limits[b"a"], 0), b"b": Claim(0, 100, 400)}, 1000, 1)
    assert limits[b"b"] > 800


def leader_of(*taken, last=None):
    leader = Leader(last, lambda _key: 10)
    for record in taken:
        leader.take(record)
        for key in record.stored:
            leader.table.use(key, 10)
    return leader


def test_a_leader_grants_nothing_until_it_has_listed_the_namespace():
    leader = leader_of(Record(b"h" * 8, 1000, 0, 0, 0, 1))
    assert leader.word(b"h" * 8) == Word(b"h" * 8, 1000, 1000, 1000, 1, 1000, {b"h" * 8: 0})
    leader.table.end_scan()
    word = leader.word(b"h" * 8)
    assert (word.used_bytes, word.number) == (0, 2)
    assert word.limits[b"h" * 8] > 0


def test_a_successor_counts_all_that_was_granted_until_it_has_listed_the_namespace():
    host = b"h" * 8
    last = Word(b"p" * 8, 600, 1000, 1000, 7, 850, {host: 250})
    leader = leader_of(Record(host, 1000, 0, 0, 100, 1), last=last)
    word = leader.word(host)
    assert (word.used_bytes, word.number) == (600, 8)
    assert word.committed_bytes <= 1000
    for number in range(2, 20):
        written = word.limits[host]
        leader.take(Record(host, 1000, written, written, 100, number))
        word = leader.word(host)
    assert written == word.used_bytes - 600 == word.committed_bytes - 600 == 400
    leader.table.end_scan()
    assert leader.word(host).used_bytes == 0


def test_a_leader_takes_the_newest_record_of_each_host_and_the_uses_of_all():
    host = b"h" * 8
    leader = leader_of(
        Record(host, 1000, 20, 0, 50, 2, (K[0],)),
        Record(host, 500, 10, 0, 40, 1, (K[1],), (K[2],)),
        Record(b"i" * 8, 2000, 0, 0, 30, 1),
    )
    leader.table.end_scan()
    word = leader.word(host)
    assert (word.used_bytes, word.bound_bytes, word.largest_bytes) == (20, 1000, 2000)
    assert leader.target_bytes == 1000 - (2 * 50 + 10) - (2 * 30 + 10)
    leader.take(Record(host, 1000, 30, 0, 0, 3))
    assert leader.target_bytes == 1000 - (2 * 50 + 10) - (2 * 30 + 10)
    leader.keep([host])
    leader.take(Record(host, 1000, 30, 0, 0, 4))
    assert leader.target_bytes == 1000 - 1000 // 32
    assert leader.word(host).limits.keys() == {host}


def test_of_a_bound_of_few_blocks_one_block_a_host_is_freed():
    leader = leader_of(Record(b"h" * 8, 15, 0, 0, 0, 1))
    assert leader.target_bytes == 5
    leader.take(Record(b"i" * 8, 15, 0, 0, 0, 1))
    assert leader.target_bytes == 0


# -- who leads ----------------------------------------------------------------------------------


def test_the_smallest_fresh_host_leads_unless_a_word_is_fresh():
    modified_s = {b"a": 50.0, b"b": 80.0, b"c": 100.0}
    fresh = {b"b", b"c"}
    assert fresh_hosts(modified_s, -math.inf, 100.0, 10.0) == (fresh, b"b")
    assert fresh_hosts(modified_s, 69.0, 100.0, 10.0) == (fresh, b"b")
    assert fresh_hosts(modified_s, 70.0, 100.0, 10.0) == (fresh, None)
    assert fresh_hosts({}, -math.inf, 0.0, 10.0) == (set(), None)


def test_records_and_words_of_the_future_are_not_fresh():
    modified_s = {b"a": 10_000.0, b"b": 90.0, b"c": 100.0}
    assert fresh_hosts(modified_s, 9_000.0, 100.0, 10.0) == ({b"b", b"c"}, b"b")


@pytest.mark.parametrize("count", [MOST_HOSTS, MOST_HOSTS + 1])
def test_no_more_hosts_are_fresh_than_a_word_can_name(count):
    modified_s = {n.to_bytes(8, "big"): 1.0 for n in range(count)}
    fresh, _ = fresh_hosts(modified_s, -math.inf, 1.0, 10.0)
    assert len(fresh) == MOST_HOSTS
