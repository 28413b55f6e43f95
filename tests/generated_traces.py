"""Named, seeded traces of block ids: chats, agents, loops, Zipf, scans, changes of regime.

Each is a list of requests; equal ids mean equal prefixes, as in a trace file.
"""

import random
from bisect import bisect
from itertools import accumulate, count


def chats(seed=1, *, talks=500, turns=8, per_turn=(1, 6), active=60, system_blocks=(8, 4, 2)):
    """Conversations that grow, of which `active` are open at once; three system prompts."""
    chance, new = random.Random(seed), count()
    systems = [[next(new) for _ in range(size)] for size in system_blocks]
    trace, open_ones, begun = [], [], 0
    while begun < talks or open_ones:
        if begun < talks and len(open_ones) < active:
            begun += 1
            length = 1 + min(int(chance.expovariate(1 / turns)), 5 * turns)
            open_ones.append([list(chance.choice(systems)), length])
        index = min(int(chance.expovariate(3 / active)), len(open_ones) - 1)
        talk = open_ones[-1 - index]
        talk[0] += [next(new) for _ in range(chance.randint(*per_turn))]
        trace.append(list(talk[0]))
        talk[1] -= 1
        if not talk[1]:
            open_ones.remove(talk)
    return trace


def agents(seed=2, *, sessions=40, steps=40, active=6, tools_blocks=10):
    """Sessions of many steps that reuse nearly everything; a few take turns."""
    chance, new = random.Random(seed), count()
    tools = [next(new) for _ in range(tools_blocks)]
    trace, waiting = [], [steps] * sessions
    open_ones = [[list(tools), waiting.pop()] for _ in range(active)]
    while open_ones:
        session = chance.choice(open_ones)
        if chance.random() < 0.05:  # its context was condensed
            session[0] = tools + [next(new) for _ in range(5)]
        session[0] += [next(new) for _ in range(chance.randint(1, 5))]
        trace.append(list(session[0]))
        session[1] -= 1
        if not session[1]:
            open_ones.remove(session)
            if waiting:
                open_ones.append([list(tools), waiting.pop()])
    return trace


def loop(num_blocks=4000, *, per_request=20, rounds=12, base=0):
    """The same prompts in turn, again and again."""
    starts = range(base, base + num_blocks, per_request)
    return [list(range(at, at + per_request)) for _ in range(rounds) for at in starts]


def zipf(seed=3, *, exponent=0.9, documents=6000, requests=15_000, blocks=(1, 3)):
    """Independent documents with popularity by Zipf's law."""
    chance = random.Random(seed)
    weights = list(accumulate(rank**-exponent for rank in range(1, documents + 1)))
    sizes = [chance.randint(*blocks) for _ in range(documents)]
    starts = list(accumulate(sizes, initial=0))
    trace = []
    for _ in range(requests):
        which = bisect(weights, chance.random() * weights[-1])
        trace.append(list(range(starts[which], starts[which + 1])))
    return trace


def scans(seed=4, *, requests=4000, popular=200, scan_every=2):
    """Popular documents, between prompts that never return."""
    chance, new = random.Random(seed), count(10**6)
    trace = []
    for number in range(requests):
        if number % scan_every:
            trace.append([next(new) for _ in range(10)])
        else:
            at = 10 * chance.randrange(popular)
            trace.append(list(range(at, at + 10)))
    return trace


def only_scans(*, requests=1500):
    """Nothing ever returns."""
    return [list(range(10 * n, 10 * n + 10)) for n in range(requests)]


def _renamed(trace, offset):
    return [[block_id + offset for block_id in request] for request in trace]


def regimes(seed=5):
    """Chats, then a loop, then agents, then Zipf, then other chats."""
    parts = [
        chats(seed, talks=250),
        loop(1200, rounds=6),
        agents(seed + 1, sessions=15),
        zipf(seed + 2, requests=4000),
        chats(seed + 3, talks=250),
    ]
    return [
        request for number, part in enumerate(parts) for request in _renamed(part, number * 10**8)
    ]


def recency(seed=6, *, requests=6000, depth=150):
    """Documents that are used again soon or never: what LRU is best at."""
    chance, new = random.Random(seed), count()
    recent, trace = [], []
    for _ in range(requests):
        if recent and chance.random() < 0.6:
            document = recent.pop(-1 - min(int(chance.expovariate(4 / depth)), len(recent) - 1))
        else:
            document = [next(new) for _ in range(chance.randint(2, 12))]
        recent.append(document)
        del recent[:-depth]
        trace.append(document)
    return trace


GENERATED = {
    "chats": chats,
    "many chats": lambda: chats(11, talks=900, active=200, per_turn=(1, 3)),
    "long chats": lambda: chats(12, talks=120, turns=25, active=20),
    "agents": agents,
    "many agents": lambda: agents(21, sessions=60, active=20, steps=20),
    "loop": loop,
    "zipf 0.9": zipf,
    "zipf 1.2": lambda: zipf(31, exponent=1.2),
    "zipf 0.6": lambda: zipf(32, exponent=0.6),
    "scans": scans,
    "only scans": only_scans,
    "regimes": regimes,
    "other regimes": lambda: regimes(55),
    "recency": recency,
}
