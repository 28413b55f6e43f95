"""HD written from its definition, with lists and dictionaries of keys and no thought of speed.

The estimates (`density`) are taken from the policy under test, as rounding would decide between
equals; `test_reuse` compares them with a naive computation.
"""

from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from zlib import crc32

from kvoffload_async.policies.reuse import NUM_CLASSES, ReuseModel
from kvoffload_async.types import OffloadKey

LRU_RANK = (0, 7, 8, 9, 10, 11, 1, 2, 3, 4, 5, 6)
EDGES = [0.0, *(2 ** (i / 2) for i in range(25))]


def bin_of(age):
    return max(0, sum(edge <= age + 1e-6 for edge in EDGES) - 1)


@dataclass(eq=False)
class Group:
    kind: int
    time: int
    size: int
    members: list = field(default_factory=list)


class NaiveTables:
    def __init__(self):
        self.arrivals = [[0.0] * len(EDGES) for _ in range(NUM_CLASSES)]
        self.hits = [[0.0] * len(EDGES) for _ in range(NUM_CLASSES)]

    def fade(self):
        for rows in (self.arrivals, self.hits):
            rows[:] = [[count * 0.99 for count in row] for row in rows]


class NaiveModel:
    """Known blocks: key -> [uses, group]; `others` are those not cached, least recent first."""

    def __init__(self, num_cached, num_others, update_requests):
        self.most, self.num_others = num_cached + num_others, num_others
        self.update_requests = update_requests
        self.clock = 0
        self.tables = NaiveTables()
        self.known = {}
        self.others = []
        self.groups = []

    def prompt(self, positions, keys):
        whole = list(positions or keys)
        is_known = len(whole) > 1 and all(key in self.known for key in whole[:2])
        length = len(whole)
        return whole[-1], (6 if is_known else 9) + (length >= 16) + (length >= 64)

    def kind(self, key, prompt):
        if key not in self.known:
            return 0 if key == prompt[0] else prompt[1]
        uses = self.known[key][0] + 1
        return 1 if uses == 2 else 2 if uses == 3 else 3 if uses < 6 else 4 if uses < 11 else 5

    def record(self, keys, prompt, cached):  # noqa: C901 - naive
        self.clock += 1
        for group in self.groups:
            for which, edge in enumerate(EDGES):
                if which and self.clock - group.time - 1 < edge - 1e-6 <= self.clock - group.time:
                    self.tables.arrivals[group.kind][which] += len(group.members) / group.size**0.5
        kinds = [self.kind(key, prompt) for key in keys]
        keys = keys[: self.num_others]
        for key in keys:
            if key in self.known:
                _, group = self.known[key]
                age = self.clock - group.time
                self.tables.hits[group.kind][bin_of(age)] += group.size**-0.5
                group.members.remove(key)
                if key in self.others:
                    self.others.remove(key)
        while len(self.known.keys() | set(keys)) > self.most:
            self.forget(self.others.pop(0))
        groups = {kind: Group(kind, self.clock, kinds[: len(keys)].count(kind)) for kind in kinds}
        for key, kind, is_cached in zip(keys, kinds, cached, strict=False):
            uses = self.known[key][0] if key in self.known else 0
            self.known[key] = (uses + 1, groups[kind])
            groups[kind].members.append(key)
            if not is_cached:
                self.others.append(key)
        for kind in sorted(groups):
            if groups[kind].members:
                self.groups.append(groups[kind])
                self.tables.arrivals[kind][0] += groups[kind].size ** 0.5
        if self.clock % self.update_requests == 0:
            self.tables.fade()
        return kinds

    def forget(self, key):
        self.known.pop(key)[1].members.remove(key)


class NaiveRanking:
    """The groups of each class, oldest first; `first` goes before all of them."""

    def __init__(self):
        self.classes = [[] for _ in range(NUM_CLASSES)]
        self.first = []
        self.group_of = {}
        self.stamps = {}
        self.last_stamp = 0
        self.skipped = set()

    def form(self, kind, time, keys):
        group = Group(kind, time, 0)
        for key in keys:
            self.group_of[key] = group
            self.append(key)

    def append(self, key):
        self.last_stamp += 1
        self.stamps[key] = self.last_stamp
        self.insert(key)

    def insert(self, key):
        group = self.group_of[key]
        if group is None:
            self.first.append(key)
            self.first.sort(key=self.stamps.__getitem__)
            return
        if not group.members:
            groups = self.classes[group.kind]
            is_older = groups and group.time < groups[0].time
            groups.insert(0 if is_older else len(groups), group)
        group.members.append(key)
        group.members.sort(key=self.stamps.__getitem__)

    def unlink(self, key):
        group = self.group_of[key]
        if group is None:
            self.first.remove(key)
            return
        group.members.remove(key)
        if not group.members:
            self.classes[group.kind].remove(group)

    def remove(self, key):
        if key in self.skipped:
            self.skipped.remove(key)
        else:
            self.unlink(key)
        del self.group_of[key]

    def put_first(self, keys):
        for key in keys:
            self.remove(key)
        for key in keys:
            self.group_of[key] = None
            self.append(key)

    def release(self, keys):
        for key in keys:
            if key in self.skipped:
                self.skipped.remove(key)
                self.insert(key)

    def choose(self, count, may_leave, worth, offers=()):
        """The chosen members, and how many of each offer; all members stay."""
        chosen = []
        declined = [0] * len(offers)
        while len(chosen) + sum(declined) < count:
            ends = [
                (worth(kind, group.time), kind, which)
                for kind, groups in enumerate(self.classes)
                for which, group in enumerate([*groups[:1], *groups[1:][-1:]])
            ]
            open_offers = [
                (each, index)
                for index, (each, num_blocks) in enumerate(offers)
                if declined[index] < num_blocks
            ]
            if self.first:
                key = self.first[-1]
            elif not ends:
                break
            elif open_offers and min(open_offers)[0] < min(ends)[0]:
                declined[min(open_offers)[1]] += 1
                continue
            else:
                _, kind, which = min(ends)
                key = self.classes[kind][-which].members[-1]
            self.unlink(key)
            if may_leave(key):
                chosen.append(key)
            else:
                self.skipped.add(key)
        for key in reversed(chosen):
            self.insert(key)
        return chosen, declined

    def order(self, worth):
        """All members, best victim first; those of equal groups in any order."""

        def rank(key):
            group = self.group_of[key]
            if group is None:
                return ((-1, 0), 0, 0, -self.stamps[key])
            newest = max(self.stamps[k] for k, its in self.group_of.items() if its is group)
            return (worth(group.kind, group.time), group.kind, newest, -self.stamps[key])

        return sorted(self.group_of, key=rank)


class NaiveHd:
    """Keys instead of slots, and sets of keys instead of arrays."""

    def __init__(self, capacity, least_ghosts, update_requests, least_lead, density):
        self.capacity = capacity
        self.density_of = density
        self.least_lead = least_lead
        self.model = NaiveModel(capacity, max(capacity, least_ghosts), update_requests)
        self.ranking = NaiveRanking()
        self.now = 1
        self.resident = set()
        self.cached = set()
        self.parent = {}
        self.is_density = False
        self.lead = self.total = 0.0
        self.lru_shadow = []
        self.shadow = NaiveRanking()
        self.part = max(1, min(8, capacity // 256))
        self.shadow_blocks = capacity // self.part
        self.may_decline = False
        self.tiers_store = set()
        self.gaps = {}
        self.offered = {}

    def density(self, kind, time):
        return self.density_of(kind, bin_of(self.now - time)), time

    def worth(self, kind, time):
        return self.density(kind, time) if self.is_density else (time, LRU_RANK[kind])

    def declines(self, request, positions, keys, missing, free, may_leave):  # noqa: PLR0917 - naive
        prompt = self.model.prompt(positions, keys)
        self.offered = {key: self.model.kind(key, prompt) for key in missing}
        self.may_decline = free is not None
        if free is None or len(missing) <= free or not self.is_density:
            return set()
        gaps = self.gaps.setdefault(request, {})
        first = {group: key for group, key in gaps.items() if key not in missing}
        wanted = [key for key in missing if self.may_be_stored(self.offered[key], prompt)]
        kept = [key for key in missing if key[-4:] not in first or key in wanted]
        declined = set(missing) - set(kept)
        unwanted = [key for key in kept if key not in wanted]
        if unwanted and len(kept) > free:
            kinds = list(dict.fromkeys(self.offered[key] for key in unwanted))
            by_kind = [[key for key in unwanted if self.offered[key] == kind] for kind in kinds]
            offers = [
                (self.density(kind, self.now), len(group))
                for kind, group in zip(kinds, by_kind, strict=True)
            ]
            _, counts = self.ranking.choose(len(kept) - free, may_leave, self.density, offers)
            least = {
                key
                for group, count in zip(by_kind, counts, strict=True)
                for key in group[len(group) - count :]
            }
            for key in unwanted:
                if key in least:
                    first.setdefault(key[-4:], key)
                if key[-4:] in first:
                    declined.add(key)
        if first:
            self.gaps[request] = first
        return declined

    def may_be_stored(self, kind, prompt):
        """Whether a tier stores the class, or one that a longer prompt would give the block."""
        grown = range(0)
        if kind == 0:
            grown = range(prompt[1], 12 if prompt[1] >= 9 else 9)
        elif kind >= 6:
            grown = range(kind, 12 if kind >= 9 else 9)
        return not self.tiers_store.isdisjoint({kind, *grown})

    def make_room(self, count, may_leave):
        if not count:
            return []
        victims, _ = self.ranking.choose(count, may_leave, self.worth)
        if len(victims) < count:
            return None
        for key in victims:
            self.ranking.remove(key)
        self.leave(victims)
        return victims

    def leave(self, keys):
        self.resident -= set(keys)
        for key in keys:
            if key in self.cached:
                self.cached.remove(key)
                self.model.others.append(key)
        useless = {child for child, parent in self.parent.items() if parent in keys}
        for key in [*keys, *useless]:
            self.parent.pop(key, None)
        useless = {key for key in useless if self.is_useful(key)}
        grown = True
        while grown:
            below = {child for child, parent in self.parent.items() if parent in useless}
            grown = {key for key in below if self.is_useful(key)} - useless
            useless |= grown
        self.move_first(useless)
        self.parent = {key: its for key, its in self.parent.items() if its not in useless}

    def is_useful(self, key):
        return key in self.resident and self.ranking.group_of[key] is not None

    def move_first(self, useless):
        """In the order of the policy under test, which is the only one left to it."""
        self.ranking.put_first(self.order(useless))

    def admit(self, keys):
        offered, self.offered = self.offered, {}
        others = [key for key in keys if key not in offered]
        kinds = {}
        if others:
            prompt = self.model.prompt({}, others)
            kinds = {key: self.model.kind(key, prompt) for key in others}
        kinds = offered | kinds
        for kind in range(NUM_CLASSES):
            group = [key for key in keys if kinds[key] == kind]
            self.ranking.form(kind, self.now, group)
        self.resident |= set(keys)

    def request_ended(self, positions, keys):
        if not keys:
            return
        prompt = self.model.prompt(positions, keys)
        present = [key for key in keys if key in self.resident]
        self.cached |= set(present) & set(keys[: self.model.num_others])
        kinds = self.model.record(keys, prompt, [key in self.resident for key in keys])
        for key in present:
            self.ranking.remove(key)
        for kind in range(NUM_CLASSES):
            group = [k for k, each in zip(keys, kinds, strict=True) if each == kind]
            self.ranking.form(kind, self.now, [key for key in group if key in self.resident])
        unreachable = []
        for group in dict.fromkeys(key[-4:] for key in keys):
            chain = [key for key in keys if key[-4:] == group]
            for before, key in pairwise(chain):
                if key in self.resident:
                    if before in self.resident and before not in unreachable:
                        self.parent[key] = before
                    else:
                        self.parent.pop(key, None)
                        unreachable.append(key)
        self.ranking.put_first([key for key in keys if key in unreachable])
        self.duel(keys, kinds)
        self.now = self.model.clock + 1

    def discard(self, keys):
        for key in keys:
            self.ranking.remove(key)
        self.leave(keys)

    def duel(self, keys, kinds):
        sample = [
            (k, kind) for k, kind in zip(keys, kinds, strict=True) if not crc32(k) % self.part
        ]
        if not sample:
            return
        fade = 2 ** (-self.part * len(sample) / 60000)
        self.lead = (
            self.lead * fade + self.use_shadow(sample) - self.use_lru([k for k, _ in sample])
        )
        self.total = self.total * fade + len(sample)
        if self.lead > max(0.002 * self.total, self.least_lead):
            self.is_density = True
        elif self.lead < 0:
            self.is_density = False

    def use_lru(self, keys):
        head = len(list(takewhile(self.lru_shadow.__contains__, keys)))
        hits = [key for key in keys if key in self.lru_shadow]
        self.lru_shadow = [key for key in self.lru_shadow if key not in hits]
        new = [key for key in keys if key not in hits][: self.shadow_blocks - len(hits)]
        surplus = len(self.lru_shadow) + len(hits) + len(new) - self.shadow_blocks
        del self.lru_shadow[: max(0, surplus)]
        self.lru_shadow += [key for key in keys if key in hits or key in new][::-1]
        return head

    def use_shadow(self, sample):
        time, shadow = self.now, self.shadow
        head = len(list(takewhile(shadow.group_of.__contains__, [key for key, _ in sample])))
        hits = [key for key, _ in sample if key in shadow.group_of]
        new = [[k for k, each in sample if each == kind and k not in hits] for kind in range(12)]
        for key in hits:
            shadow.remove(key)
        surplus = len(shadow.group_of) + len(sample) - self.shadow_blocks
        if surplus > 0:
            kinds = set(range(12)) - self.tiers_store if self.may_decline else set()
            offers = [(self.density(kind, time), len(new[kind])) for kind in kinds]
            victims, counts = shadow.choose(surplus, lambda _: True, self.density, offers)
            for kind, count in zip(kinds, counts, strict=True):
                del new[kind][len(new[kind]) - count :]
            for key in victims:
                shadow.remove(key)
        num_others = len(hits)
        for kind in range(NUM_CLASSES):
            room = self.shadow_blocks - len(shadow.group_of) - num_others
            found = [k for k, each in sample if each == kind and k in hits]
            fitting = new[kind][:room]
            shadow.form(kind, time, found + fitting)
            num_others -= len(found)
        return head


def known_blocks(model: ReuseModel) -> dict[OffloadKey, tuple[int, int, int, bool]]:
    """Return key -> (uses, class, time of the last use, whether held) of a policy's model."""
    found = {}
    for one, number in model._known.items():
        group = model._group_of[number]
        seen = model._class_of_group[group], model._formed_at[group]
        found[one] = (model._uses[number], *seen, bool(model._is_cached[number]))
    return found
