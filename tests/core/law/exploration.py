"""Visits every state that a setting can reach, and looks for waits that never end."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final

from core.law.host import Action, Host, Setting

from kvoffload_async.errors import OffloadError

Edges = Mapping[int, Collection[tuple[Action, int]]]


class LawBrokenError(AssertionError):
    """The planner has broken the law; the message says how, and what led there."""


@dataclass
class Graph:
    """The states of a setting, numbered from its start, 0, and what leads from one to another.

    Attributes:
        setting: The setting.
        waiting: State -> the requests that wait in it.
        queued: State -> those of them that wait for a ticket.
        wanting: State -> the stores that may be offered in it.
        edges: State -> (action, the state that it leads to).
    """

    setting: Setting
    waiting: list[frozenset[int]] = field(default_factory=list)
    queued: list[frozenset[int]] = field(default_factory=list)
    wanting: list[frozenset[int]] = field(default_factory=list)
    edges: list[dict[Action, int]] = field(default_factory=list)

    @property
    def num_transitions(self) -> int:
        return sum(map(len, self.edges))

    def paths(self, start: int = 0) -> Iterator[tuple[int, list[Action]]]:
        """Iterate over the states that can be reached, with shortest paths, nearest state first."""
        origin: dict[int, tuple[int, Action] | None] = {start: None}
        todo = deque([start])
        while todo:
            at = todo.popleft()
            yield at, _path_to(at, origin)
            for action, to in self.edges[at].items():
                if to not in origin:
                    origin[to] = at, action
                    todo.append(to)


def _path_to(state: int, origin: Mapping[int, tuple[int, Action] | None]) -> list[Action]:
    actions: list[Action] = []
    while (step := origin[state]) is not None:
        state, action = step
        actions.append(action)
    return actions[::-1]


_DETOUR: Final = 200
"""Number of states around the end of a walk in which it looks for something left to try."""


class Explorer:
    """Explores by walking on from each new state, or a near one, and else from the start again.

    A planner cannot be copied, so known paths are walked again. What they end in must be described
    as before: otherwise the description would lack something that matters.
    """

    def __init__(self, setting: Setting, most_states: int) -> None:
        self.graph = Graph(setting)
        self._most_states = most_states
        self._numbers: dict[Action, int] = {}
        self._described: list[Action] = []
        self._untried: list[list[Action]] = []

    def explore(self) -> Graph:
        """Visit every state; raises LawBrokenError at the first one that breaks the law."""
        self._note(Host(self.graph.setting))
        while starts := [each for each in self.graph.paths() if self._untried[each[0]]]:
            for state, path in starts:
                if self._untried[state]:
                    self._walk(path, state)
        return self.graph

    def _walk(self, path: Sequence[Action], state: int) -> None:
        host, done = Host(self.graph.setting), []
        while True:
            for action in path:
                host.do(action)
            done += path
            if host.state() != self._described[state]:
                pairs = [*zip(host.state(), self._described[state], strict=True)]
                raise AssertionError(f"a description lacks something: {pairs} {path_text(done)}")
            while self._untried[state]:
                done.append(self._untried[state].pop())
                try:
                    host.do(done[-1])
                    to = self._note(host)
                except (AssertionError, OffloadError, LookupError) as error:
                    raise LawBrokenError(f"{error!r} after {path_text(done)}") from error
                self.graph.edges[state][done[-1]] = to
                state = to
            near = islice(self.graph.paths(state), _DETOUR)
            state, path = next((each for each in near if self._untried[each[0]]), (state, []))
            if not path:
                return

    def _note(self, host: Host) -> int:
        """Return the number of the state that the host is in; check it if it is new."""
        described = host.state()
        number = self._numbers.get(described)
        if number is not None:
            assert not host.refused, host.refused
            return number
        host.check()
        number = self._numbers[described] = len(self._untried)
        if number >= self._most_states:
            raise RuntimeError(f"more than {self._most_states} states")
        self._described.append(described)
        self._untried.append(host.actions()[::-1])
        graph = self.graph
        graph.edges.append({})
        numbers = range(len(graph.setting.runs))
        graph.waiting.append(frozenset(n for n in numbers if host.waits(n)))
        graph.queued.append(frozenset(host.queued()))
        graph.wanting.append(frozenset(host.wanting()))
        return number


def path_text(path: Sequence[Action]) -> str:
    """Return a path as text."""
    return "".join(f"\n  {' '.join(map(str, action))}" for action in path)


# -- waits that never end -----------------------------------------------------------------------


def check_progress(graph: Graph) -> None:
    """Raise LawBrokenError if somebody can wait for ever although what is under way ends.

    A request that waits for its own blocks may depend on the deadline of a copy; one that waits in
    the queue may not. A store waits if it would find no room at any time, not only when offered.
    """
    for number in range(len(graph.setting.runs)):
        for where, has_deadlines in (graph.waiting, True), (graph.queued, False):
            states = {state for state, who in enumerate(where) if number in who}
            _refuse_cycle(
                graph,
                _within(
                    graph, states, lambda step, who=number: who in step[1] and who not in step[3]
                ),
                f"request {number}",
                has_deadlines=has_deadlines,
            )
    for number in range(len(graph.setting.stores)):
        wanting = {state for state, who in enumerate(graph.wanting) if number in who}
        offer: Action = ("step", (), (number,), ())
        refused = {state for state in wanting if graph.edges[state][offer] in wanting}
        edges = _within(graph, refused, lambda step, who=number: who in step[2])
        _refuse_cycle(graph, edges, f"store {number}", has_deadlines=True)


def _within(graph: Graph, states: Collection[int], asks: Callable[[Action], bool]) -> Edges:
    """Return what leads from these states to each other, without the steps in which none asks."""
    return {
        state: [
            (action, to)
            for action, to in graph.edges[state].items()
            if to in states and (action[0] != "step" or asks(action))
        ]
        for state in states
    }


def _refuse_cycle(graph: Graph, edges: Edges, who: str, *, has_deadlines: bool) -> None:
    host = Host(graph.setting)
    for states in components(edges):
        inside = frozenset(states)
        inner = {action for at in states for action, to in edges[at] if to in inside}
        if not any(action[0] == "step" for action in inner):
            continue
        ends = partial(host.is_due, has_deadlines=has_deadlines)
        always = frozenset.intersection(*(frozenset(map(ends, graph.edges[at])) for at in states))
        if always <= {None, *map(ends, inner)}:
            first, path = next(each for each in graph.paths() if each[0] in inside)
            cycle = _cycle(first, edges, inside)
            raise LawBrokenError(
                f"{who} waits for ever:{path_text(path)}\nand then{path_text(cycle)}"
            )


def _cycle(start: int, edges: Edges, inside: frozenset[int]) -> list[Action]:
    """Return a shortest cycle through a state."""
    origin: dict[int, tuple[int, Action] | None] = {start: None}
    todo = deque([start])
    while todo:
        at = todo.popleft()
        for action, to in edges[at]:
            if to == start:
                return [*_path_to(at, origin), action]
            if to in inside and to not in origin:
                origin[to] = at, action
                todo.append(to)
    raise AssertionError("no cycle")


def components(edges: Edges) -> Iterator[list[int]]:
    """Iterate over the strongly connected components that have a cycle (Tarjan)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in edges:
        work = [] if root in index else [(root, iter(edges[root]))]
        while work:
            at, rest = work[-1]
            if at not in index:
                index[at] = low[at] = len(index)
                stack.append(at)
                on_stack.add(at)
            new = next((to for _, to in rest if to not in index), None)
            if new is not None:
                work.append((new, iter(edges[new])))
                continue
            work.pop()
            low[at] = min([low[at], *(low[to] for _, to in edges[at] if to in on_stack)])
            if low[at] == index[at]:
                component = stack[stack.index(at) :]
                del stack[-len(component) :]
                on_stack.difference_update(component)
                if len(component) > 1 or any(to == at for _, to in edges[at]):
                    yield component
