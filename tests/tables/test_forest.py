from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.tables.forest import NumberForest

NUMBERS = range(8)
steps_of_a_forest = st.lists(
    st.tuples(
        st.sampled_from(["attach", "detach", "leave", "take"]),
        st.sampled_from(NUMBERS),
        st.sampled_from(NUMBERS),
    ),
    max_size=40,
)


def children_of(forest, number):
    """Return the children of a number, the first first."""
    ring = forest._ring_of(number)
    link, found = forest._after[ring], []
    while link not in {0, ring}:
        found.append(link - 1)
        link = forest._after[link]
    return found


def test_clear_makes_roots_of_all():
    forest = NumberForest(3)
    forest.attach(0, 1)
    forest.attach(2, 0)
    forest.leave(1)
    assert forest.has_orphans
    forest.clear()
    assert not forest.has_orphans
    assert children_of(forest, 0) == children_of(forest, 1) == []


def test_a_circle_of_parents_ends_when_one_leaves():
    forest = NumberForest(2)
    forest.attach(0, 1)
    forest.attach(1, 0)
    forest.leave(0)
    assert forest.take_orphan() == 1
    forest.leave(1)
    assert forest.take_orphan() is None


@given(steps_of_a_forest)
def test_children_and_orphans_equal_those_of_lists(steps):
    forest, children, orphans = NumberForest(8), {n: [] for n in NUMBERS}, []

    def detach(number):
        for one in (*children.values(), orphans):
            if number in one:
                one.remove(number)

    for what, number, parent in steps:
        match what:
            case "attach":
                forest.attach(number, parent)
                detach(number)
                children[parent].insert(0, number)
            case "detach":
                forest.detach(number)
                detach(number)
            case "leave":
                forest.leave(number)
                detach(number)
                orphans[:0], children[number] = children[number], []
            case _:
                assert forest.take_orphan() == (orphans.pop(0) if orphans else None)
        assert {n: children_of(forest, n) for n in NUMBERS} == children
        assert forest.has_orphans is bool(orphans)
    while orphans:
        assert forest.take_orphan() == orphans.pop(0)
