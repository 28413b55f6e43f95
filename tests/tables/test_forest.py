from hypothesis import given
from hypothesis import strategies as st

from kvoffload_async.tables.forest import NumberForest

links = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 8)), max_size=30)


def test_descendants_come_parents_first_and_once():
    forest = NumberForest(6)
    for child, parent in [(1, 0), (2, 1), (3, 1), (4, 3)]:
        forest.attach(child, parent)
    found = forest.below([1, 3], [], lambda _: False)
    assert sorted(found) == [1, 2, 3, 4]
    assert found.index(1) < found.index(2)
    assert found.index(3) < found.index(4)
    assert forest.below([1], [2], lambda number: number == 3) == [1]


def test_a_removed_number_leaves_its_children_as_roots():
    forest = NumberForest(4)
    forest.attach(1, 0)
    forest.attach(2, 1)
    forest.attach(3, 1)
    assert sorted(forest.remove(1)) == [2, 3]
    assert [forest.parent(number) for number in range(4)] == [None] * 4
    assert [forest.children(number) for number in range(4)] == [[]] * 4


def test_a_circle_of_parents_ends_the_search():
    forest = NumberForest(2)
    forest.attach(0, 1)
    forest.attach(1, 0)
    assert sorted(forest.below([0], [], lambda _: False)) == [0, 1]


def test_clear_makes_roots_of_all():
    forest = NumberForest(2)
    forest.attach(0, 1)
    forest.clear()
    assert forest.parent(0) is None
    assert forest.children(1) == []


@given(links)
def test_parents_and_children_equal_those_of_a_dictionary(steps):
    forest, parents = NumberForest(8), {}
    for child, parent in steps:
        if parent == 8:
            forest.detach(child)
            parents.pop(child, None)
        else:
            forest.attach(child, parent)
            parents[child] = parent
        assert {n: forest.parent(n) for n in range(8)} == {n: parents.get(n) for n in range(8)}
        for number in range(8):
            children = {each for each, its in parents.items() if its == number}
            assert set(forest.children(number)) == children
            assert len(forest.children(number)) == len(children)
