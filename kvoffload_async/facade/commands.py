"""Commands that manage cached blocks, received from other threads such as that of a socket.

    received --execute--> begun --the operation ends--> ended, kept for its client to ask for
    received --its deadline, refused--> ended

The owner executes them at the ends of its steps, one per step, so that a step stays short.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Final

from kvoffload_async.errors import OffloadError, StateError, text_of
from kvoffload_async.facade.cache import CacheManager, CacheOperation, CacheReport
from kvoffload_async.types import OffloadKey

logger = logging.getLogger(__name__)

ACTIONS: Final = ("delete", "count", "pin", "unpin", "copy", "move", "clear", "list")
MOST_HASHES: Final = 512
"""Maximum number of block hashes of a command; a client divides a longer list."""
KEY_PREFIX: Final = "key:"
"""Precedes the digits of a key, which a listing returns, in the place of a block hash."""
MOST_TOKENS: Final = 4096
"""Maximum number of token ids of a command; a client divides a longer prompt."""
_MOST_PLACES: Final = 64
_MOST_ERROR_CHARS: Final = 1000
"""Maximum length of an error that is kept; it may repeat what the client has sent."""
_MOST_QUEUED: Final = 64
_MOST_KEPT: Final = 256
_DEADLINE_S: Final = 30.0
"""Seconds after which a command that no step has executed is dropped."""
_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "do": str,
    "hashes": list,
    "groups": list,
    "places": list,
    "duration_s": (int, float),
    "cursor": str,
    "older_than_s": (int, float),
    "tokens": list,
    "parent": str,
    "cache_salt": str,
    "lora": list,
    "tenant": str,
}
_HASH: Final = "hash"

MakeKey = Callable[[bytes, int, str | None], OffloadKey]
FindOwner = Callable[[str], Callable[[OffloadKey], bool]]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A part of a prompt, to be hashed.

    Attributes:
        tokens: Its token ids.
        parent: `PromptHashes.parent` of the part before; None: the prompt begins here.
        cache_salt: The request's salt, if it has one.
        lora: Name and path of the request's adapter, if it has one.
    """

    tokens: Sequence[int]
    parent: bytes | None = None
    cache_salt: str | None = None
    lora: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PromptHashes:
    """The block hashes of a part of a prompt.

    Attributes:
        hashes: KV-cache group -> hashes of the full blocks, in order.
        num_tokens: Token ids after which the next part begins; 0: too few for one block.
        parent: Hash of the tokens up to there, for the next part.
    """

    hashes: Mapping[int, Sequence[bytes]]
    num_tokens: int
    parent: bytes | None


HashTokens = Callable[[PromptTokens], PromptHashes]
"""Hashes a part of a prompt as the host does; thread-safe."""


@dataclass(slots=True)
class _Command:
    """One command; only the owner writes it after it was queued."""

    number: int
    request: Mapping[str, Any]
    until_s: float
    operation: CacheOperation | None = None
    report: CacheReport | None = None
    error: str = ""
    is_done: bool = False


class CacheCommands:
    """Queues commands, executes them on the owner's thread, and keeps their results for a while.

    Thread: `answer` any; everything else the owner's.

    Attributes:
        hash_tokens: Hashes token ids as the host does; None: it cannot be done.
    """

    def __init__(
        self,
        cache: CacheManager,
        make_key: MakeKey,
        find_owner: FindOwner,
        wake: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without commands.

        Args:
            cache: Executes them.
            make_key: Returns the key of a block hash, a KV-cache group and a tenant in the present
                generation; called on the owner's thread, as the next one.
            find_owner: Returns the test for the keys of a tenant.
            wake: Has a step begin soon if the owner can; thread-safe.
            clock: Monotonic seconds; thread-safe.
        """
        self.hash_tokens: HashTokens | None = None
        self._cache = cache
        self._make_key = make_key
        self._find_owner = find_owner
        self._wake = wake
        self._clock = clock
        self._queue: deque[_Command] = deque()
        self._commands: dict[int, _Command] = {}
        """Number -> command that is queued, runs, or has ended recently."""
        self._running: list[_Command] = []
        self._ended: deque[int] = deque()
        """Numbers of the commands that have ended; these two are the owner's alone."""
        self._numbers = count(1)

    # -- any thread -----------------------------------------------------------------------------

    def answer(self, request: object) -> dict[str, Any]:
        """Accept a command, or return the state of an earlier one; never raises for bad input.

        Args:
            request: `{"do": "delete", "hashes": [...], ...}`, `{"id": NUMBER}`, or
                `{"do": "hash", "tokens": [...], ...}`, which is answered at once.
        """
        if isinstance(request, Mapping) and request.keys() == {"id"}:
            command = self._commands.get(request["id"]) if type(request["id"]) is int else None
            return {"error": "there is no such command"} if command is None else _state_of(command)
        if error := _defect_of(request):
            return {"error": error}
        assert isinstance(request, Mapping)  # noqa: S101 - for the type checker; see _defect_of
        if request["do"] == _HASH:
            return self._hash(request)
        if len(self._queue) >= _MOST_QUEUED:
            return {"error": f"{_MOST_QUEUED} commands wait for the engine's steps; try later"}
        command = _Command(next(self._numbers), request, self._clock() + _DEADLINE_S)
        self._commands[command.number] = command
        self._queue.append(command)
        self._wake()
        return _state_of(command)

    def _hash(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.hash_tokens is None:
            return {"error": "tokens: only the engine's host can hash them; give block hashes"}
        parent, lora = request.get("parent"), request.get("lora")
        prompt = PromptTokens(
            request["tokens"],
            None if parent is None else bytes.fromhex(parent),
            request.get("cache_salt"),
            None if lora is None else (lora[0], lora[1]),
        )
        try:
            found = self.hash_tokens(prompt)
        except Exception as error:  # noqa: BLE001 - the host's
            text = f"tokens: the host cannot hash them: {text_of(error)}"
            return {"error": text[:_MOST_ERROR_CHARS]}
        return {
            "id": 0,
            "is_done": True,
            "hashes": {group: [one.hex() for one in some] for group, some in found.hashes.items()},
            "num_tokens": found.num_tokens,
            "parent": None if found.parent is None else found.parent.hex(),
        }

    # -- the owner's thread ---------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a command is queued."""
        return bool(self._queue)

    def execute(self) -> None:
        """Begin the oldest command in the queue, if any; call at a step's end."""
        if self._queue:
            command = self._queue.popleft()
            self._execute(command)
            command.request = {}  # may be large, and the command is kept
            self._running.append(command)

    def publish(self) -> None:
        """Update the results of the commands under way, after the end of a step."""
        for command in tuple(self._running):
            if command.operation is not None:
                command.report = command.operation.report
            if command.operation is None or command.operation.is_done:
                command.is_done, command.operation = True, None
                self._running.remove(command)
                self._ended.append(command.number)
        while len(self._ended) > _MOST_KEPT:
            del self._commands[self._ended.popleft()]

    # -- internal -------------------------------------------------------------------------------

    def _execute(self, command: _Command) -> None:
        request = command.request
        what, hashes = request["do"], request.get("hashes", ())
        if self._clock() > command.until_s:
            command.error = f"the engine made no step for {_DEADLINE_S:g} s; nothing was done"
        else:
            tenant = request.get("tenant")
            owner = "" if tenant is None else f" of tenant {tenant!r:.99}"
            logger.warning("status socket: cache %s of %d block hashes%s", what, len(hashes), owner)
            try:
                self._begin(command, what, hashes)
            except OffloadError as error:
                command.error = text_of(error)[:_MOST_ERROR_CHARS]
        command.is_done = command.operation is None

    def _begin(self, command: _Command, what: str, hashes: Sequence[str]) -> None:
        request, cache, places = command.request, self._cache, command.request.get("places")
        tenant = request.get("tenant")
        keys = list(self._keys_of(hashes, request.get("groups", (0,)), tenant))
        selects = None if tenant is None else self._find_owner(tenant)
        match what:
            case "delete" if selects is not None and "hashes" not in request:
                command.operation = cache.delete_all(selects, places)
            case "delete":
                command.operation = cache.delete(keys, places)
            case "count":
                command.operation = cache.count(keys, places)
            case "clear":
                command.operation = cache.clear(places or ())
            case "copy" | "move":
                if places is None or len(places) != 1 + (what == "move"):
                    raise StateError("places: name the tier to copy to; before it, the source")
                source = places[0] if what == "move" else None
                command.operation = cache.copy(keys, places[-1], source=source)
            case "list":
                place = (places or ["primary"])[0]
                age_s = request.get("older_than_s")
                command.operation = cache.list_keys(place, request.get("cursor"), age_s, selects)
            case "pin":
                pinned = cache.pin(keys, request.get("duration_s", 0))
                command.report = CacheReport(
                    operation="pin", blocks=len(keys), done={"primary": pinned}
                )
            case "unpin":
                gone = cache.unpin(keys)
                command.report = CacheReport(
                    operation="unpin", blocks=len(keys), done={"primary": gone}
                )

    def _keys_of(
        self, hashes: Sequence[str], groups: Sequence[int], tenant: str | None
    ) -> Iterator[OffloadKey]:
        for one in hashes:
            digits = bytes.fromhex(one.removeprefix(KEY_PREFIX))
            if one.startswith(KEY_PREFIX):
                yield OffloadKey(digits)
            else:
                yield from (self._make_key(digits, group, tenant) for group in groups)


def _defect_of(request: object) -> str:
    """Return why a request is not valid, or an empty text."""
    if not isinstance(request, Mapping) or request.get("do") not in (*ACTIONS, _HASH):
        return f'give an object with "do", one of {", ".join(ACTIONS)}'
    for name, value in request.items():
        if name not in _KINDS or not isinstance(value, _KINDS[name]):
            return f"{name}: it is unknown, or its value has the wrong type"
    hashes, groups = request.get("hashes", ()), request.get("groups", (0,))
    if max(len(hashes), len(groups), len(hashes) * len(groups)) > MOST_HASHES:
        return f"hashes: {len(hashes)} for {len(groups)} groups; give at most {MOST_HASHES}"
    if not (groups and all(type(group) is int and 0 <= group < 1 << 31 for group in groups)):
        return f"groups: {groups!r} is not valid; give numbers of KV-cache groups"
    places = request.get("places", ())
    if len(places) > _MOST_PLACES or not all(isinstance(place, str) for place in places):
        return f"places: it is not valid; give at most {_MOST_PLACES} names"
    try:
        named = (*(one.removeprefix(KEY_PREFIX) for one in hashes), request.get("parent", "00"))
        is_empty = not all(map(bytes.fromhex, named))
    except (AttributeError, ValueError):
        is_empty = True
    wrong = "hashes: one is not valid; give hexadecimal digits"
    return wrong if is_empty else _defect_of_options(request)


def _defect_of_options(request: Mapping[str, Any]) -> str:
    """Return why a value that only one action takes is not valid, or an empty text."""
    if "older_than_s" in request and request["do"] != "list":
        return "older_than_s: only a list takes it; delete what it has listed"
    tokens, lora = request.get("tokens", ()), request.get("lora", ("", ""))
    if bool(tokens) is not (request["do"] == _HASH) or len(tokens) > MOST_TOKENS:
        return f"tokens: {len(tokens)}; give at most {MOST_TOKENS}, to be hashed"
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        return "tokens: one is not valid; give token ids"
    if [type(one) for one in lora] != [str, str]:
        return f"lora: {lora!r:.99} is not valid; give the adapter's name and path"
    return ""


def _state_of(command: _Command) -> dict[str, Any]:
    """Return a command's state as a JSON object."""
    is_done = command.is_done  # first: the owner sets it last
    report = command.report
    state: dict[str, Any] = {"id": command.number, "is_done": is_done}
    if command.error:
        return {**state, "error": command.error}
    if report is not None:
        fields = asdict(report)
        fields["keys"] = [KEY_PREFIX + key.hex() for key in report.keys]
        state |= {"is_complete": report.is_complete, "report": fields}
    return state
