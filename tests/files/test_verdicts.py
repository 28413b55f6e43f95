"""What reading every block has shown is counted and listed, whatever store the blocks are in."""

import pytest

from kvoffload_async.tiers.files.maintenance import BadBlock, Verdict, Verification, problem_of

COUNTS = ("checked", "verified", "without_digest", "newer", "other_key")
COUNTS += ("corrupt_blocks", "unreadable_blocks", "gone")
BAD = BadBlock("block 3", "7 bytes short")


@pytest.mark.parametrize(
    ("verdict", "counted"),
    [
        (Verdict.VERIFIED, {"checked", "verified"}),
        (Verdict.WITHOUT_DIGEST, {"checked", "without_digest"}),
        (Verdict.NEWER, {"checked", "newer"}),
        (Verdict.OTHER_KEY, {"checked", "other_key"}),
        (Verdict.CORRUPT, {"checked", "corrupt_blocks"}),
        (Verdict.UNREADABLE, {"unreadable_blocks"}),
        (Verdict.GONE, {"gone"}),
    ],
)
def test_a_block_is_counted_by_its_verdict_and_only_a_bad_one_is_a_problem(verdict, counted):
    found = Verification()
    problem = found.count(verdict, BAD)
    assert {name for name in COUNTS if getattr(found, name)} == counted
    found.count(verdict, BAD)
    assert {getattr(found, name) for name in counted} == {2}
    is_bad = verdict in {Verdict.CORRUPT, Verdict.UNREADABLE}
    assert problem == (problem_of(verdict, BAD) if is_bad else None)
    assert found.corrupt == ([BAD, BAD] if verdict is Verdict.CORRUPT else [])
    assert found.unreadable == ([BAD, BAD] if verdict is Verdict.UNREADABLE else [])


def test_a_problem_names_the_verdict_and_the_block():
    problem = problem_of(Verdict.CORRUPT, BAD)
    assert problem.text == "corrupt: block 3: 7 bytes short"
    assert problem.what == "block 3"


@pytest.mark.parametrize(("bound", "num_listed"), [(2, 2), (None, 5)])
def test_of_many_bad_blocks_all_are_counted_and_the_first_ones_listed(bound, num_listed):
    found = Verification(max_listed=bound)
    blocks = [BadBlock(f"block {number}", "short") for number in range(5)]
    for each in blocks:
        found.count(Verdict.CORRUPT, each)
        found.count(Verdict.UNREADABLE, each)
    assert found.corrupt == found.unreadable == blocks[:num_listed]
    assert (found.corrupt_blocks, found.unreadable_blocks) == (5, 5)


def test_the_figures_for_people_have_every_count_once():
    found = Verification(**{name: 1000 + number for number, name in enumerate(COUNTS)})
    assert [figure for _, figure in found.rows] == [f"1,00{number}" for number in range(8)]
