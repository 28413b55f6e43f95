"""Makes each allocation of a call of the native engine fail, one after the other. A script."""

import _testcapi
import select
import sys
from pathlib import Path

from native_engine import BLOCKS, Block, opened_engine

SMALL, MOST_ALLOCATIONS = 3, 200
KINDS = {
    "extents": lambda block: block.extents(is_store=True, runs=[(99999, 0, BLOCKS)]),
    "load_files": lambda block: block.load_files(),
    "store_files": lambda block: block.store_files(),
    "has_files": lambda block: block.engine.has_files(block.root, block.names),
    "copies": lambda block: block.engine.copies(block.target, block.source, bytes(48)),
}


def without(allocation, call):
    """Make a call, one of whose allocations fails; return what it returns, None if it raises."""
    _testcapi.set_nomemory(allocation, allocation + 1)
    try:
        return call()
    except MemoryError:
        return None
    finally:
        _testcapi.remove_mem_hooks()


def take_without(folder, submit, allocation):
    """Take outcomes; return how many the first call returned, and whether all came in the end."""
    with opened_engine() as engine:
        block = Block(engine, folder, BLOCKS, 1000)
        tickets = {submit(block) for _ in range(SMALL)}
        engine.close(30.0)  # now all have ended
        first = without(allocation, engine.take)
        found = dict(first or [])
        while found.keys() != tickets and select.select([engine.fd], [], [], 0)[0]:
            found.update(engine.take())
        block.close()
        return first, found.keys() == tickets


def submit_without(folder, submit, allocation):
    """Submit a batch; return whether that failed, and whether then no batch is under way."""
    with opened_engine() as engine:
        for ticket in range(1, 300):  # as later tickets are no cached integers
            assert engine.has_files((0, "/"), []) == ticket
            while not engine.take():
                select.select([engine.fd], [], [], 60.0)
        block = Block(engine, folder, BLOCKS, 1000)
        ticket = without(allocation, lambda: submit(block))
        engine.close(30.0)
        ended = [ended for ended, _ in engine.take()]
        block.close()
        return ticket is None, ended == ([] if ticket is None else [ticket])


def sweep(folder: Path) -> None:
    seen = set()
    for kind, submit in KINDS.items():
        firsts = []
        for allocation in range(MOST_ALLOCATIONS):
            first, is_complete = take_without(folder, submit, allocation)
            assert is_complete, f"{kind}: without allocation {allocation}, an outcome is lost"
            firsts.append(None if first is None else len(first))
            if firsts[-3:] == [SMALL] * 3:
                break
        assert None in firsts, f"{kind}: {firsts}"
        seen |= set(firsts)
        has_failed = []
        for allocation in range(MOST_ALLOCATIONS):
            failed, is_right = submit_without(folder, submit, allocation)
            assert is_right, f"{kind}: without allocation {allocation}, an unknown batch runs"
            has_failed.append(failed)
            if has_failed[-3:] == [False] * 3:
                break
        assert any(has_failed), kind
    assert seen == {None, 1, 2, SMALL}, "each outcome is the first that is lost"


if __name__ == "__main__":
    sweep(Path(sys.argv[1]))
