"""Management of the cached blocks at run time: delete, count, list, pin, clear a tier.

An operation begins at the end of the step in which it is called, and advances by a bounded number
of blocks per step. Its places are the primary, `"primary"`, and the tiers, under the names that
they have in statistics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Final, Literal

from kvoffload_async.abc.events import CallEnded
from kvoffload_async.core.deletions import KEYS_A_STEP, MOST_KEYS, Deletion, Deletions
from kvoffload_async.core.pins import MOST_PIN_S
from kvoffload_async.core.planner import Planner
from kvoffload_async.core.requests import RequestState
from kvoffload_async.core.tier_state import TierState
from kvoffload_async.errors import BusyError, StateError, text_of
from kvoffload_async.tables.keymap import key_of_cursor, require_keys
from kvoffload_async.types import (
    ENGINE_REQ_ID,
    LookupResult,
    OffloadKey,
    ReqContext,
    counted,
)
from kvoffload_async.waiting import seconds

PRIMARY: Final = "primary"
MOST_OPERATIONS: Final = 24
"""Maximum number of operations under way."""
_CALLS_AT_ONCE: Final = 2
_PROMOTED_AT_ONCE: Final = 128
"""Maximum number of blocks that a copy has promoted at once."""
_PROMOTION_S: Final = 30.0
"""Seconds after which a copy leaves blocks out that were not promoted yet."""
_CLEARING_S: Final = 3600.0
"""Seconds after which a tier that is being cleared is used again, although its listing goes on."""

OperationName = Literal["delete", "count", "clear", "copy", "move", "list", "pin", "unpin"]
Selects = Callable[[OffloadKey], bool]
"""Whether an operation concerns a key."""
_LASTING: Final[tuple[OperationName, ...]] = ("delete", "count", "clear", "copy", "move", "list")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReport:
    """State or result of an operation on cached blocks.

    Attributes:
        operation: What is done.
        blocks: Number of blocks that were named; 0 for "clear" and "list".
        done: Place -> number of blocks that are deleted, or that were found.
        left: Place -> number of blocks that are not deleted yet, or not known; for "clear" 1 while
            the tier may have blocks left.
        errors: Place -> last error there, which explains what is left.
        keys: For "list": keys of blocks, at most 512.
        cursor: For "list": where to continue; None at the end.
    """

    operation: OperationName
    blocks: int = 0
    done: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    keys: Sequence[OffloadKey] = ()
    cursor: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left."""
        return not any(self.left.values())


class CacheOperation(ABC):
    """An operation under way; `CacheManager` advances it at the end of each step."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the operation has ended: complete, or given up by a shutdown."""

    @property
    @abstractmethod
    def report(self) -> CacheReport:
        """The state of the operation; its result once it is done."""

    @abstractmethod
    def advance(self) -> None:
        """Do the part of one step, which may end the operation."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether the next step can advance the operation; not while it waits for a tier."""


class _Deleting(CacheOperation):
    """Deletes blocks; `Deletions` does the work."""

    def __init__(
        self, planner: Planner, keys: Collection[OffloadKey], places: Mapping[str, int | None]
    ) -> None:
        tiers = [index for index in places.values() if index is not None]
        self._planner = planner
        self._places = places
        self._deletion = Deletion(keys, tiers, in_primary=None in places.values())
        self._is_begun = False

    @property
    def report(self) -> CacheReport:
        deletion, number = self._deletion, len(self._deletion.keys)
        here = deletion.in_use + number - deletion.num_taken
        left = {name: here if i is None else deletion.left[i] for name, i in self._places.items()}
        return CacheReport(
            operation="delete",
            blocks=number,
            done={
                name: deletion.removed if i is None else number - deletion.left[i]
                for name, i in self._places.items()
            },
            left=left,
            errors={
                name: text_of(deletion.errors[i])
                for name, i in self._places.items()
                if i in deletion.errors
            },
        )

    @property
    def has_work(self) -> bool:
        number = len(self._deletion.keys)
        return not self._is_begun and self._planner.deletions.takes(number)

    @property
    def is_done(self) -> bool:
        return self._deletion.is_done

    def advance(self) -> None:
        if self.has_work:
            self._planner.deletions.begin(self._deletion)
            self._is_begun = True


class _Counting(CacheOperation):
    """Counts which blocks are readable in the primary, and which the tiers have."""

    def __init__(
        self, planner: Planner, keys: Sequence[OffloadKey], places: Mapping[str, int | None]
    ) -> None:
        self._planner = planner
        self._keys = keys
        self._next = dict.fromkeys(places, 0)
        """Place -> index of the next key to ask for there."""
        self._places = places
        self._done = dict.fromkeys(places, 0)
        self._left = dict.fromkeys(places, len(keys))
        self._calls = dict.fromkeys(places, 0)
        self._errors: dict[str, str] = {}

    @property
    def report(self) -> CacheReport:
        return CacheReport(
            operation="count",
            blocks=len(self._keys),
            done=dict(self._done),
            left=dict(self._left),
            errors=dict(self._errors),
        )

    @property
    def is_done(self) -> bool:
        is_asked = all(at >= len(self._keys) for at in self._next.values())
        return is_asked and not any(self._calls.values())

    @property
    def has_work(self) -> bool:
        end = len(self._keys)
        return any(
            at < end and self._calls[name] < _CALLS_AT_ONCE for name, at in self._next.items()
        )

    def advance(self) -> None:
        for name, index in self._places.items():
            first = self._next[name]
            keys = self._keys[first : first + KEYS_A_STEP]
            if keys and self._calls[name] < _CALLS_AT_ONCE:
                self._next[name] += len(keys)
                self._count(name, index, keys)

    def _count(self, name: str, index: int | None, keys: Sequence[OffloadKey]) -> None:
        if index is None:
            answers = self._planner.primary.lookup_many(keys)
            self._found(name, len(keys), answers.count(LookupResult.HIT))
            return
        tier, asked = self._planner.tiers[index], len(keys)
        keys = tier.barred.without(keys)
        if tier.index.is_exact:
            self._found(name, asked, len(keys) - len(tier.index.lacks(keys)))
            return
        self._calls[name] += 1
        tier.call("contains", keys, partial(self._answered, name, asked))

    def _found(self, name: str, asked: int, present: int) -> None:
        self._done[name] += present
        self._left[name] -= asked

    def _answered(self, name: str, asked: int, event: CallEnded) -> None:
        self._calls[name] -= 1
        if event.error is None:
            self._found(name, asked, len(event.keys))
        else:
            self._errors[name] = text_of(event.error)


class _Listing(CacheOperation):
    """Lists a page of the blocks at one place."""

    def __init__(
        self,
        planner: Planner,
        place: str,
        index: int | None,
        cursor: str | None,
        age_s: float | None = None,
        *,
        selects: Selects | None,
    ) -> None:
        self._planner = planner
        self._age_s = age_s
        self._selects = selects
        self._place = place
        self._index = index
        self._cursor = cursor
        self._is_asked = False
        self._answer: CallEnded | None = None

    @property
    def report(self) -> CacheReport:
        answer = self._answer
        if answer is None:
            return CacheReport(operation="list", left={self._place: 1})
        if answer.error is not None:
            errors = {self._place: text_of(answer.error)}
            return CacheReport(operation="list", left={self._place: 1}, errors=errors)
        keys = sorted(filter(self._selects, answer.keys))
        return CacheReport(
            operation="list", done={self._place: len(keys)}, keys=keys, cursor=answer.cursor
        )

    @property
    def is_done(self) -> bool:
        return self._answer is not None

    @property
    def has_work(self) -> bool:
        return not self._is_asked

    def advance(self) -> None:
        if self._is_asked:
            return
        self._is_asked = True
        if self._index is None:
            keys = self._planner.primary.following(key_of_cursor(self._cursor), KEYS_A_STEP)
        elif (tier := self._planner.tiers[self._index]).index.is_exact:
            keys = tier.index.following(key_of_cursor(self._cursor), KEYS_A_STEP)
        else:
            tier.call("list", (), self._answered, self._cursor, self._age_s)
            return
        cursor = keys[-1].hex() if len(keys) == KEYS_A_STEP else None
        self._answered(CallEnded(0, "list", frozenset(keys), cursor))

    def _answered(self, event: CallEnded) -> None:
        self._answer = event


class _Copying(CacheOperation):
    """Stores blocks in a tier; for a move, deletes those that the tier then has.

    Portion by portion:

        taken --all readable--> stored    --asked--> verified --copy--> taken, or done
        taken --promote--> promoting --landed, or in vain--> stored
        verified --move--> found --delete--> deleting --gone--> taken, or done

    A block is deleted from its source only once the tier has stored it and says that it has it. So
    a failure leaves it where it was.
    """

    def __init__(
        self,
        planner: Planner,
        keys: Sequence[OffloadKey],
        target: tuple[str, int],
        source: tuple[str, int | None] | None,
        begin_request: Callable[[ReqContext], object],
    ) -> None:
        self._planner = planner
        self._keys = keys
        self._name, self._index = target
        self._source = source
        self._tier = planner.tiers[self._index]
        self._ctx = ReqContext(f"{ENGINE_REQ_ID}:copy")
        self._begin_request = begin_request
        self._request: RequestState | None = None
        """The request for which blocks are promoted, once there is one."""
        self._num_taken = self._num_copied = self._num_deleted = 0
        self._stage: Literal["take", "promote", "store", "ask", "delete", "end", "done"] = "take"
        self._portion: Sequence[OffloadKey] = ()
        """The blocks that are being copied."""
        self._num_ended = 0
        """Number of blocks at the head of the portion whose copies have ended."""
        self._until_s = 0.0
        """When the promotion of the portion is given up."""
        self._deletion: Deletion | None = None
        self._error = ""

    @property
    def report(self) -> CacheReport:
        number, name = len(self._keys), self._name
        done, left = {name: self._num_copied}, {name: number - self._num_copied}
        if self._source is not None:
            done[self._source[0]] = self._num_deleted
            left[self._source[0]] = self._num_copied - self._num_deleted
        return CacheReport(
            operation="copy" if self._source is None else "move",
            blocks=number,
            done=done,
            left=left,
            errors={name: self._error} if self._error else {},
        )

    @property
    def is_done(self) -> bool:
        return self._stage == "done"

    @property
    def has_work(self) -> bool:
        match self._stage:
            case "promote":
                return not self._is_promoting()
            case "store":
                return not self._is_storing()
            case "delete":
                return self._planner.deletions.takes(len(self._portion))
            case "end":
                return self._deletion is not None and self._deletion.is_done
        return self._stage == "take"

    def advance(self) -> None:
        if not self.has_work:
            return
        match self._stage:
            case "take":
                self._take()
            case "promote":
                self._store()
            case "store":
                self._verify()
            case "delete":
                self._delete()
            case "end":
                assert self._deletion is not None  # noqa: S101 - for the type checker
                self._num_deleted += len(self._deletion.keys)
                self._end_portion()

    def _take(self) -> None:
        """Take the next blocks, and have those promoted that only tiers have."""
        planner = self._planner
        most = min(planner.room.most_early, _PROMOTED_AT_ONCE)
        keys = self._keys[self._num_taken : self._num_taken + KEYS_A_STEP]
        answers = zip(keys, planner.primary.lookup_many(keys), strict=True)
        absent = [key for key, answer in answers if answer is not LookupResult.HIT]
        if self._tier.index.is_exact:
            absent = self._tier.index.lacks(absent)
        _, of_one = next(iter(planner.primary.keys_by_share(absent)), (None, absent))
        count = len(list(takewhile(set(of_one).__contains__, absent)))  # of one tenant
        count = min(most, count) if most else count
        if len(absent) > count:
            keys, absent = keys[: keys.index(absent[count])], absent[:count]
        self._num_taken += len(keys)
        self._portion = keys
        if not (absent and most) or planner.promotions_paused:
            self._store()
            return
        if self._request is None:
            self._begin_request(self._ctx)
        self._request = planner.promote(absent, self._ctx)
        self._until_s = planner.now_s + _PROMOTION_S
        self._stage = "promote"

    def _is_promoting(self) -> bool:
        planner, request = self._planner, self._request
        return request is not None and (
            planner.prefetcher.is_under_way(request) and planner.now_s < self._until_s
        )

    def _store(self) -> None:
        """Queue the blocks that are readable now for the tier."""
        planner, keys = self._planner, self._portion
        answers = zip(keys, planner.primary.lookup_many(keys), strict=True)
        readable = [key for key, answer in answers if answer is LookupResult.HIT]
        planner.prefetcher.loaded(readable)
        planner.cascades.defer(self._index, readable)
        self._num_ended = 0
        self._stage = "store"

    def _is_storing(self) -> bool:
        """Return whether the tier still stores blocks; a block that has ended is not looked up."""
        while self._num_ended < len(self._portion):
            key = self._portion[self._num_ended]
            if self._planner.cascades.is_storing(self._index, [key]):
                return True
            self._num_ended += 1
        return False

    def _verify(self) -> None:
        if self._request is not None:
            self._planner.demote(self._request)
        keys = self._tier.barred.without(self._portion)
        if self._tier.index.is_exact:
            absent = set(self._tier.index.lacks(keys))
            self._found([key for key in keys if key not in absent])
        else:
            self._stage = "ask"
            self._tier.call("contains", keys, self._answered)

    def _answered(self, event: CallEnded) -> None:
        self._error = self._error if event.error is None else text_of(event.error)
        self._found(sorted(event.keys))

    def _found(self, keys: Sequence[OffloadKey]) -> None:
        """Count the blocks that the tier has, which are deleted from the source."""
        self._num_copied += len(keys)
        self._portion = keys
        if keys and self._source is not None:
            self._stage = "delete"
        else:
            self._end_portion()

    def _delete(self) -> None:
        assert self._source is not None  # noqa: S101 - for the type checker
        index = self._source[1]
        tiers = () if index is None else (index,)
        # Another operation may delete them from the tier meanwhile.
        keys = [] if self._tier.is_clearing else self._tier.barred.without(self._portion)
        self._deletion = self._planner.delete(keys, tiers, in_primary=index is None)
        self._stage = "end"

    def _end_portion(self) -> None:
        self._portion, self._deletion = (), None
        self._stage = "take"
        if self._num_taken >= len(self._keys):
            self._stage = "done"
            if self._request is not None:
                self._planner.on_request_finished(self._ctx)


class _Clearing(CacheOperation):
    """Deletes all blocks of tiers, which are not used meanwhile, once no reset is under way.

    The primary's blocks that are pending for a tier could otherwise follow before the reset.
    """

    def __init__(self, planner: Planner, places: Mapping[str, int], until_s: float) -> None:
        self._planner = planner
        self._parts = {
            name: _ClearedTier(planner.tiers[i], planner.deletions) for name, i in places.items()
        }
        self._indices = places
        self._until_s = until_s

    @property
    def report(self) -> CacheReport:
        parts = self._parts
        return CacheReport(
            operation="clear",
            done={name: part.num_deleted for name, part in parts.items()},
            left={name: int(not part.is_empty) for name, part in parts.items()},
            errors={name: part.error for name, part in parts.items() if part.error},
        )

    @property
    def is_done(self) -> bool:
        return all(part.is_done for part in self._parts.values())

    @property
    def has_work(self) -> bool:
        if self._planner.promotions_paused:
            return False
        return any(part.has_work for part in self._parts.values())

    def advance(self) -> None:
        if self._planner.now_s >= self._until_s:
            for part in self._parts.values():
                part.give_up()
        for name, part in self._parts.items():
            part.tier.is_clearing = not part.is_done
            if part.has_work and not self._planner.promotions_paused:
                index = [self._indices[name]]
                part.advance(partial(self._planner.delete, tiers=index, in_primary=False))


class _DeletingSelected(CacheOperation):
    """Deletes the blocks whose keys a test selects: it lists place after place, page by page.

    The primary is listed first, and each block is deleted at all places at once, so that no block
    that is there at the beginning follows into a tier behind its listing.
    """

    def __init__(
        self, planner: Planner, selects: Selects, places: Mapping[str, int | None]
    ) -> None:
        self._planner = planner
        self._selects = selects
        self._tiers = [index for index in places.values() if index is not None]
        self._in_primary = None in places.values()
        self._places = sorted(places.items(), key=lambda place: place[1] is not None)
        self._done = dict.fromkeys(places, 0)
        self._errors: dict[str, str] = {}
        self._at = 0
        """Index of the place that is being listed."""
        self._cursor: str | None = None
        self._page: _Listing | None = None
        self._deletion: Deletion | None = None

    @property
    def report(self) -> CacheReport:
        waiting = [name for name, _ in self._places[self._at :]]
        left = {name: int(name in waiting or name in self._errors) for name in self._done}
        return CacheReport(operation="delete", done=self._done, left=left, errors=self._errors)

    @property
    def is_done(self) -> bool:
        return self._at == len(self._places)

    @property
    def has_work(self) -> bool:
        if self.is_done:
            return False
        if self._deletion is not None:
            return self._deletion.is_done
        return self._page is None or self._page.is_done

    def advance(self) -> None:
        if not self.has_work:
            return
        name, index = self._places[self._at]
        if self._deletion is not None:
            self._done[name] += len(self._deletion.keys)
            self._deletion = None
            self._next_page()
        elif self._page is None:
            planner = self._planner
            self._page = _Listing(planner, name, index, self._cursor, selects=self._selects)
            self._page.advance()
        elif self._page.report.errors:
            self._errors |= self._page.report.errors
            self._at, self._page, self._cursor = self._at + 1, None, None
        elif not (keys := self._page.report.keys):
            self._next_page()
        elif self._planner.deletions.takes(len(keys)):
            self._deletion = self._planner.delete(keys, self._tiers, in_primary=self._in_primary)

    def _next_page(self) -> None:
        assert self._page is not None  # noqa: S101 - for the type checker
        self._cursor, self._page = self._page.report.cursor, None
        self._at += self._cursor is None


class _ClearedTier:
    """One tier that is being cleared: its blocks are listed and deleted, page by page."""

    def __init__(self, tier: TierState, deletions: Deletions) -> None:
        self.tier = tier
        self._deletions = deletions
        self.num_deleted = 0
        self.is_empty = False
        self.error = ""
        self._is_asking = False
        self._cursor: str | None = None
        self._page: Sequence[OffloadKey] | None = None
        """The keys to delete next; None: not listed yet."""
        self._is_last = False
        self._deletion: Deletion | None = None

    @property
    def is_done(self) -> bool:
        """Whether the tier is empty, or cannot be listed."""
        return self.is_empty or bool(self.error)

    @property
    def has_work(self) -> bool:
        """Whether the next step can continue: no store, listing or deletion is under way."""
        if self.is_done or self._is_asking or self.tier.cascading_blocks:
            return False
        if self._deletion is not None and not self._deletion.is_done:
            return False
        return self._deletions.takes(KEYS_A_STEP if self._page is None else len(self._page))

    def advance(self, delete: Callable[[Sequence[OffloadKey]], Deletion]) -> None:
        """Delete a page, or ask for the next one; call only if `has_work`."""
        if self._deletion is not None:
            self.num_deleted += len(self._deletion.keys)
            self._deletion = None
        if self._page is None and self.tier.index.is_exact:
            self._page = self.tier.index.following(None, KEYS_A_STEP)
            self._is_last = not self._page
        if self._page:
            self._deletion, self._page = delete(self._page), None
        elif self._is_last:
            self.is_empty, self.tier.is_clearing = True, False
        else:
            self._is_asking = True
            self.tier.call("list", (), self._listed, self._cursor)

    def give_up(self) -> None:
        """End after too long a time; what a deletion under way has named is still deleted."""
        if not self.is_done:
            self.error = f"it was not empty after {_CLEARING_S:g} seconds; clear it again"

    def _listed(self, event: CallEnded) -> None:
        self._is_asking = False
        if event.error is not None:
            self.error, self.tier.is_clearing = text_of(event.error), False
            return
        self._page, self._cursor = tuple(event.keys), event.cursor
        self._is_last = event.cursor is None


class CacheManager:
    """Deletes, counts, lists and pins blocks of a planner's primary and tiers.

    Keys are those of the present generation, made by its `key`. Every method returns at once.

    Not thread-safe; call only from the owner's thread.

    Attributes:
        running: The operations under way, oldest first. Read-only.
    """

    def __init__(
        self,
        planner: Planner,
        clock: Callable[[], float],
        begin_request: Callable[[ReqContext], object],
    ) -> None:
        """Start without operations.

        Args:
            planner: The planner.
            clock: Clock of its steps, in seconds.
            begin_request: Begins a request of the engine's own, at all tiers.
        """
        self._planner = planner
        self._begin_request = begin_request
        self._clock = clock
        self.running: list[CacheOperation] = []

    # -- blocks ---------------------------------------------------------------------------------

    def delete(
        self, keys: Sequence[OffloadKey], places: Collection[str] | None = None
    ) -> CacheOperation:
        """Delete blocks: from the next step on, no lookup finds them at these places.

        Nothing that is under way brings them back: copies end first, then the blocks are gone.
        While the operation runs, stores leave the blocks out. A tier that fails is asked again
        until it confirms.

        Args:
            keys: The keys.
            places: Where to delete them; None: in the primary and in every tier.

        Raises:
            StateError: A key has a wrong length, a place is unknown, or a tier cannot delete.
            BusyError: Too many operations or blocks.
        """
        where = self._find(places)
        unable = [name for name, i in where.items() if i is not None and not self._tier(i).deletes]
        if unable:
            raise StateError(
                f"places: {', '.join(unable)} cannot delete blocks, and would serve them again; "
                "name the places to delete from"
            )
        require_keys(keys)
        self._limit(keys)
        return self._begin(_Deleting(self._planner, keys, where))

    def delete_all(self, selects: Selects, places: Collection[str] | None = None) -> CacheOperation:
        """Delete all blocks whose keys a test selects, such as those of a tenant.

        Each is deleted as by `delete`. A block that is stored meanwhile may stay.

        Raises:
            StateError: A place is unknown, or a tier cannot list and delete its blocks.
            BusyError: Too many operations.
        """
        where = self._find(places)
        self._require_lists(where)
        self._limit(())
        return self._begin(_DeletingSelected(self._planner, selects, where))

    def count(
        self, keys: Sequence[OffloadKey], places: Collection[str] | None = None
    ) -> CacheOperation:
        """Count how many of the blocks are readable in the primary, and present in each tier.

        Arguments and errors as for `delete`; a tier that cannot be asked is left with an error.
        """
        where = self._find(places)
        require_keys(keys)
        self._limit(keys)
        return self._begin(_Counting(self._planner, tuple(dict.fromkeys(keys)), where))

    def copy(
        self, keys: Sequence[OffloadKey], tier: str, *, source: str | None = None
    ) -> CacheOperation:
        """Store blocks in a tier, whatever its admission.

        Blocks that only other tiers have are promoted, as a prefetch does: within its share of the
        primary, and while no request needs the room. Blocks that cannot be promoted, for 30 seconds
        because of that, or that the tier does not store, are left.

        Args:
            keys: The keys.
            tier: The tier's name.
            source: Move the blocks: delete those that the tier then has from this place.

        Raises:
            StateError: A key has a wrong length, a name is not valid, or the source cannot delete.
            BusyError: Too many operations or blocks.
        """
        ((name, index),) = self._find([tier]).items()
        if index is None or tier == source:
            raise StateError(f"tier: {tier!r} is not valid; give a tier, another than the source")
        origin: tuple[str, int | None] | None = None
        if source is not None:
            ((place, at),) = self._find([source]).items()
            if at is not None and not self._tier(at).deletes:
                raise StateError(f"source: {source!r} cannot delete blocks; copy them instead")
            origin = place, at
        require_keys(keys)
        self._limit(keys)
        unique = tuple(dict.fromkeys(keys))
        return self._begin(
            _Copying(self._planner, unique, (name, index), origin, self._begin_request)
        )

    def list_keys(
        self,
        place: str,
        cursor: str | None = None,
        older_than_s: float | None = None,
        selects: Selects | None = None,
    ) -> CacheOperation:
        """List some keys of the blocks at one place, of every generation.

        A block that is there throughout a listing is listed; those that a running deletion names
        may be.

        Args:
            place: `"primary"` or a tier.
            cursor: None to begin, or what the report before has returned.
            older_than_s: List only blocks that the tier has stored so many seconds ago, or earlier.
                `fs` and `object` know that.
            selects: List only keys for which this returns true.

        Raises:
            StateError: The place is unknown or cannot list its blocks, or does not know their ages,
                or an argument is not valid.
            BusyError: Too many operations.
        """
        ((name, index),) = self._find([place]).items()
        is_own = index is None or self._tier(index).index.is_exact
        if index is not None and not (is_own or self._tier(index).lists):
            raise StateError(f"place: {name!r} cannot list its blocks; count named ones instead")
        if older_than_s is not None:
            older_than_s = seconds(older_than_s, "older_than_s")
            if index is None or not self._tier(index).ages:
                known = [tier.label for tier in self._planner.tiers if tier.ages] or ["no place"]
                raise StateError(
                    f"older_than_s: {name!r} does not know the ages of its blocks; "
                    f"{', '.join(known)} here does"
                )
        elif is_own:
            key_of_cursor(cursor)
        self._limit(())
        return self._begin(
            _Listing(self._planner, name, index, cursor, older_than_s, selects=selects)
        )

    def clear(self, tiers: Collection[str]) -> CacheOperation:
        """Delete all blocks of tiers, of this model and configuration, whoever has stored them.

        The tiers are not used until the operation has ended. A tier whose listing fails, or that is
        not empty after an hour, is used again, with what it still has.

        Raises:
            StateError: A name is unknown or the primary's, or a tier cannot delete or list blocks.
            BusyError: Too many operations.
        """
        named = {name: i for name, i in self._find(tiers).items() if i is not None}
        if len(named) < len(set(tiers)):
            raise StateError(f"tiers: {PRIMARY!r} is no tier; reset_cache() empties it")
        self._require_lists(named)
        self._limit(())
        return self._begin(_Clearing(self._planner, named, self._clock() + _CLEARING_S))

    def pin(self, keys: Sequence[OffloadKey], duration_s: float) -> int:
        """Keep blocks that are readable in the primary for a time, or until `unpin` or a reset.

        Pins take at most a quarter of the primary, and nothing that running requests have.

        Args:
            keys: The keys, most important first.
            duration_s: At most an hour, from now on.

        Returns:
            The number of these blocks that are pinned.

        Raises:
            StateError: A key has a wrong length, or the duration is not valid.
        """
        require_keys(keys)
        if not 0 < (limit_s := seconds(duration_s, "duration_s")) <= MOST_PIN_S:
            raise StateError(
                f"duration_s: {duration_s!r} is not valid; give more than 0 and at most "
                f"{MOST_PIN_S:g} seconds, and pin again in time"
            )
        return self._planner.pins.pin(keys, self._clock() + limit_s)

    def unpin(self, keys: Sequence[OffloadKey]) -> int:
        """End the pins of blocks; return how many there were."""
        return self._planner.pins.unpin(keys)

    # -- steps ----------------------------------------------------------------------------------

    @property
    def places(self) -> Mapping[str, int | None]:
        """The name of each place -> the tier's index; None for the primary."""
        tiers = {tier.label: index for index, tier in enumerate(self._planner.tiers)}
        return {PRIMARY: None, **tiers}

    @property
    def num_running(self) -> dict[str, int]:
        """Number of operations under way by name."""
        names = [each.report.operation for each in self.running if not each.is_done]
        return {name: names.count(name) for name in _LASTING}

    @property
    def has_work(self) -> bool:
        """Whether a step can advance an operation."""
        return any(operation.has_work for operation in self.running)

    def end_step(self) -> None:
        """Advance the operations under way; call before the planner ends the step."""
        self.running = [each for each in self.running if not each.is_done]
        for operation in self.running:
            operation.advance()

    # -- internal -------------------------------------------------------------------------------

    def _begin(self, operation: CacheOperation) -> CacheOperation:
        self.running.append(operation)
        return operation

    def _limit(self, keys: Sequence[OffloadKey]) -> None:
        running = [each.report.blocks for each in self.running if not each.is_done]
        if len(running) >= MOST_OPERATIONS or sum(running) + len(keys) > MOST_KEYS:
            raise BusyError(
                f"{counted(len(keys), 'block')} while {len(running)} operations on {sum(running)} "
                f"are under way: at most {MOST_OPERATIONS} on {MOST_KEYS}; wait for some of them, "
                "or name fewer blocks"
            )

    def _find(self, places: Collection[str] | None) -> dict[str, int | None]:
        known = self.places
        if places is None:
            return dict(known)
        if isinstance(places, str) or not places or (unknown := set(places) - known.keys()):
            wrong = places if isinstance(places, str) or not places else sorted(unknown)
            raise StateError(
                f"places: {wrong!r} is not valid; give a list of some of {', '.join(known)}"
            )
        return {name: known[name] for name in known if name in places}

    def _require_lists(self, places: Mapping[str, int | None]) -> None:
        """Raise StateError if a tier cannot list and delete its blocks."""
        for name, index in places.items():
            tier = None if index is None else self._tier(index)
            if tier and not (tier.deletes and (tier.lists or tier.index.is_exact)):
                raise StateError(
                    f"tiers: {name!r} cannot list and delete its blocks; begin a new generation "
                    "instead"
                )

    def _tier(self, index: int) -> TierState:
        return self._planner.tiers[index]
