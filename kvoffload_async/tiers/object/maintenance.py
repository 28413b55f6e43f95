"""Maintenance of namespaces in an object store; see `StoreMaintenance`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Self

import anyio.to_thread
import obstore
from obstore import exceptions

from kvoffload_async.abc.maintenance import (
    Finding,
    Findings,
    GcOptions,
    MaintenanceControl,
    Problem,
    Removal,
    StoreMaintenance,
    Summary,
)
from kvoffload_async.config import without_user_info
from kvoffload_async.errors import InputError
from kvoffload_async.tiers.files.digests import Hash, IntegrityKey, create_digester, read_key_file
from kvoffload_async.tiers.files.maintenance import BadBlock, Verdict, Verification
from kvoffload_async.tiers.object.client import (
    NAMESPACE,
    RECORDS,
    RENEWALS,
    claim_library,
    description_name_of,
    key_of_name,
    open_store,
    read_at_most,
    text_of,
)
from kvoffload_async.tiers.remote.client import SEALED_VERSION, Header, is_newer
from kvoffload_async.types import OffloadKey

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_DESCRIPTION_BYTES: Final = 64 << 10
"""Maximum length of the description of a namespace."""

Judged = tuple[Verdict, str]
"""The verdict on one block, and the reason for it."""


class ObjectJudge:
    """Verifies the block that an object contains, given in parts. Thread: any, one at a time.

    Attributes:
        verdict: The verdict and its reason, if known before the last part.
        num_bytes: Bytes given.
    """

    def __init__(
        self, key: OffloadKey | None, namespace: str, integrity_key: IntegrityKey | None
    ) -> None:
        """Expect the first part.

        Args:
            key: Key that the object is named after.
            namespace: Namespace in which it was found.
            integrity_key: The key for keyed checksums.
        """
        self.verdict: Judged | None = None
        self.num_bytes = 0
        self._expected = key, namespace
        self._integrity_key = integrity_key
        self._header: Header | None = None
        self._hash: Hash | None = None

    def take(self, part: memoryview) -> None:
        """Take the next part; the first one contains the header, or all of a shorter object."""
        if self._hash is None:
            part = self._begin(part)
        if self._hash is not None:
            self._hash.update(part)

    def end(self) -> Judged:
        """Return the verdict after the last part."""
        if self.verdict is not None:
            return self.verdict
        header = self._header
        if header is None or self._hash is None:
            return Verdict.CORRUPT, _NO_HEADER
        if self.num_bytes != header.payload_offset + header.payload_bytes:
            return Verdict.CORRUPT, f"{self.num_bytes} bytes"
        if self._hash.digest() != header.digest:
            return Verdict.CORRUPT, "wrong checksum"
        return Verdict.VERIFIED, ""

    def _begin(self, part: memoryview) -> memoryview:
        """Check the header; return the part of the block behind it."""
        if is_newer(part):
            self.verdict = Verdict.NEWER, ""
            return part
        header = self._header = Header.parse(part)
        if header is None or (header.key, header.namespace) != self._expected:
            self.verdict = Verdict.CORRUPT, _NO_HEADER
            return part
        used_key = self._integrity_key if header.is_keyed else None
        is_sealed = header.version == SEALED_VERSION
        if is_sealed or (header.is_keyed and (used_key is None or used_key.id != header.key_id)):
            self.verdict = Verdict.OTHER_KEY, ""
            return part
        self._hash = create_digester(header.layout, used_key).begin(header.key)
        return part[header.payload_offset :]


_NO_HEADER: Final = "its header is not that block's"
_PREFIXES: Final = 1 << 12
"""Number of name prefixes (three hexadecimal digits), listed in order; for progress reports."""
_PAGE_OBJECTS: Final = 64
"""Objects listed, and deleted, at once."""
_READS_AT_ONCE: Final = 8
_PART_BYTES: Final = 4 << 20
"""Bytes of an object read and verified at a time: a verification holds a few dozen MiB, whatever
the size of the objects."""
_MAX_READ_BYTES: Final = 1 << 30
"""Maximum size of an object to read; writers to the bucket control object sizes."""
_REQUEST_TIMEOUT_S: Final = 60.0
"""Timeout in seconds of a request, and of all requests until the next object is listed."""
_PASSED_OVER: Final = 10
"""Factor on the timeout for listing the namespaces: other objects next to them are listed too."""


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object in a namespace; `key` is the key of its block, None if it contains no block."""

    name: str
    size_bytes: int
    age_s: float
    key: OffloadKey | None


@dataclass(slots=True)
class Inspection:
    """Counts of the objects in a namespace."""

    objects: int = 0
    object_bytes: int = 0
    unknown_files: int = 0
    unknown_file_bytes: int = 0
    oldest_s: float = 0.0

    def take_in(self, found: FoundObject) -> None:
        """Add an object to the counts."""
        if found.key is None:
            self.unknown_files += 1
            self.unknown_file_bytes += found.size_bytes
            return
        self.objects += 1
        self.object_bytes += found.size_bytes
        self.oldest_s = max(self.oldest_s, found.age_s)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Label and formatted value of each figure, for display."""
        return [
            ("objects of blocks", f"{self.objects:,}"),
            ("bytes", f"{self.object_bytes:,}"),
            ("age of the oldest", f"{self.oldest_s:,.0f} s"),
            ("unknown objects", f"{self.unknown_files:,}"),
            ("bytes of these", f"{self.unknown_file_bytes:,}"),
        ]


@dataclass(slots=True)
class Removed:
    """Counts of the objects removed, or in a dry run to be removed."""

    expired_objects: int = 0
    surplus_objects: int = 0
    corrupt_objects: int = 0
    unknown_files: int = 0
    tenant_objects: int = 0
    freed_bytes: int = 0

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Label and formatted value of each figure, for display."""
        return [(name.replace("_", " "), f"{value:,}") for name, value in asdict(self).items()]


@dataclass(slots=True)
class _Place:
    """Position of a pass over a namespace's objects, and the position at which it was stopped."""

    after: str = ""
    stopped_after: str = ""


class ObjectMaintenance(StoreMaintenance):
    """Maintains a namespace below a URL; tiers may be open on it.

    The library takes credentials, region and endpoint from the environment.
    """

    tier_type: ClassVar[str] = "object"
    report_key: ClassVar[str] = "object_namespaces"
    appearance: ClassVar[str] = "names that begin with 32 hexadecimal digits"
    takes_urls: ClassVar[bool] = True
    bounds_blocks: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    listing_timeout_s: ClassVar[float] = _REQUEST_TIMEOUT_S
    """Seconds in which a server must list the next objects of a namespace."""

    def __init__(self, store: ObjectStore, url: str, namespace: str) -> None:
        """Maintain the namespace `namespace`; nothing is read yet."""
        self.folder = f"{url.rstrip('/')}/{namespace}"
        self._store = store
        self._namespace = namespace
        self._is_directory = url.startswith("file:")
        self._key: IntegrityKey | None = None

    def use_integrity_key_file(self, path: str) -> None:
        self._key = read_key_file(path)

    @classmethod
    async def find(cls, directory: str) -> Sequence[Self]:
        claim_library()
        store = open_store(
            directory,
            {},
            allow_http=True,
            timeout_s=_REQUEST_TIMEOUT_S,
            request_timeout_s=_REQUEST_TIMEOUT_S,
            makes_directory=False,
        )
        timeout_s = _PASSED_OVER * cls.listing_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                listed = await obstore.list_with_delimiter_async(store)
        except TimeoutError:
            raise _endless(directory, timeout_s) from None
        except (exceptions.BaseError, OSError) as error:
            raise _unreadable(directory, error) from None
        names = sorted(prefix.strip("/").rpartition("/")[2] for prefix in listed["common_prefixes"])
        return [cls(store, directory, name) for name in names if NAMESPACE.fullmatch(name)]

    async def inspect(self, control: MaintenanceControl) -> Findings:
        found, place = Inspection(), _Place()
        async with aclosing(self._pages(control, place)) as pages:
            async for page in pages:
                for item in page:
                    found.take_in(item)
        model = await self._model()
        rows = [("model", "unknown" if model is None else model), *found.rows]
        yield Summary("Store", rows, {"model": model, **asdict(found)})

    async def verify(self, control: MaintenanceControl) -> Findings:
        inspected, place = Inspection(), self._begin(control)
        verified = Verification(max_listed=control.max_listed)
        async with aclosing(self._pages(control, place)) as pages:
            async for page in pages:
                for item in page:
                    inspected.take_in(item)
                for item, verdict, reason in await self._verdicts(page):
                    problem = verified.count(verdict, BadBlock(item.name, reason))
                    if problem is not None:
                        yield problem
        figures = asdict(inspected) | {"verification": asdict(verified)}
        yield Summary("Blocks", verified.rows, figures, place.stopped_after)

    async def gc(self, options: GcOptions, control: MaintenanceControl) -> Findings:
        """Remove objects that are too old, beyond the size limit, corrupt or unknown."""
        removed, place = Removed(), self._begin(control)
        surplus_age_s = None
        if options.keep_bytes is not None:
            surplus_age_s = await self._surplus_age_s(options.keep_bytes, control)
        async with aclosing(self._pages(control, place)) as pages:
            async for page in pages:
                async for finding in self._clean_up(page, options, surplus_age_s, removed):
                    yield finding
        yield Summary("Removed", removed.rows, asdict(removed), place.stopped_after)

    # -- internal -------------------------------------------------------------------------------

    async def _model(self) -> str | None:
        """Return the model that the description of the namespace names, if it is readable."""
        try:
            answer = await obstore.get_async(self._store, description_name_of(self._namespace))
            text = await read_at_most(self._store, answer, _DESCRIPTION_BYTES)
            model = json.loads(bytes(text or b"{}"))["model"]
        except (exceptions.BaseError, OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return model if isinstance(model, str) else None

    def _begin(self, control: MaintenanceControl) -> _Place:
        if control.resume_after and self._is_directory:
            raise InputError(
                f"{self.folder}: a directory is not listed in order, so a run cannot be "
                "resumed; omit --after"
            )
        return _Place(control.resume_after)

    async def _pages(
        self, control: MaintenanceControl, place: _Place
    ) -> AsyncGenerator[Sequence[FoundObject], None]:
        """List the namespace in pages until stopped; updates the position after each page."""
        control.expect(_PREFIXES)
        done = 0
        now = datetime.now(UTC)
        prefix = f"{self._namespace}/"
        if place.after >= f"{self._namespace}0":  # behind this namespace
            control.advance(_PREFIXES)
            return
        place.after = max(prefix, place.after)
        listing = obstore.list(self._store, prefix, offset=place.after, chunk_size=_PAGE_OBJECTS)
        try:
            while True:
                async with asyncio.timeout(self.listing_timeout_s):
                    page = await anext(listing, None)
                if page is None:
                    break
                if control.should_stop():
                    if not self._is_directory:
                        place.stopped_after = place.after
                    return
                found = [
                    FoundObject(
                        meta["path"],
                        meta["size"],
                        max(0.0, (now - meta["last_modified"]).total_seconds()),
                        key_of_name(meta["path"], self._namespace) if meta["size"] else None,
                    )
                    for meta in page
                ]
                self._check_order(found, place.after)
                yield found
                if found:
                    place.after = found[-1].name
                    reached = _prefix_of(place.after)
                    control.advance(max(0, reached - done))
                    done = max(done, reached)
        except TimeoutError:
            raise _endless(self.folder, self.listing_timeout_s) from None
        except (exceptions.BaseError, OSError) as error:
            raise _unreadable(self.folder, error) from None
        control.advance(_PREFIXES - done)

    def _check_order(self, page: Sequence[FoundObject], after: str) -> None:
        """Check that a server's listing makes progress: it is ordered and has no duplicates.

        Raises:
            InputError: It does not, and might not end.
        """
        if self._is_directory:
            return
        for item in page:
            if item.name <= after:
                raise InputError(
                    f"{self.folder}: the server lists {item.name!r} after {after!r}: it repeats a "
                    "page, or does not list in order; check the server"
                )
            after = item.name

    async def _surplus_age_s(self, keep_bytes: int, control: MaintenanceControl) -> float:
        """Return the age in whole seconds at which the younger blocks exceed `keep_bytes`."""
        bytes_by_age: dict[int, int] = {}
        async with aclosing(self._pages(control, _Place())) as pages:
            async for page in pages:
                for item in page:
                    if item.key is not None:
                        age_s = int(item.age_s)
                        bytes_by_age[age_s] = bytes_by_age.get(age_s, 0) + item.size_bytes
        total = 0
        for age_s in sorted(bytes_by_age):
            total += bytes_by_age[age_s]
            if total > keep_bytes:
                return float(age_s)
        return float("inf")

    async def _clean_up(
        self,
        page: Sequence[FoundObject],
        options: GcOptions,
        surplus_age_s: float | None,
        removed: Removed,
    ) -> AsyncGenerator[Finding, None]:
        rest: list[FoundObject] = []
        unwanted: list[tuple[FoundObject, str]] = []
        for item in page:
            if (why := _unwanted(item, options, surplus_age_s)) is None:
                rest.append(item)
            else:
                figure, reason = why
                setattr(removed, figure, getattr(removed, figure) + 1)
                unwanted.append((item, reason))
        for item, verdict, reason in await self._verdicts(rest) if options.corrupt else ():
            if verdict is Verdict.CORRUPT:
                removed.corrupt_objects += 1
                unwanted.append((item, reason))
            elif verdict is Verdict.UNREADABLE:
                yield Problem(f"unreadable: {item.name}: {reason}", item.name)
        async with asyncio.TaskGroup() as group:  # a page at once
            removals = [group.create_task(self._remove(*u, options, removed)) for u in unwanted]
        for removal in removals:
            yield removal.result()

    async def _remove(
        self, item: FoundObject, reason: str, options: GcOptions, removed: Removed
    ) -> Finding:
        if not options.dry_run:
            try:
                await obstore.delete_async(self._store, item.name)
            except FileNotFoundError:
                pass  # another process was first
            except (exceptions.BaseError, OSError) as error:
                return Problem(f"{item.name}: cannot be removed: {_text_of(error)}", item.name)
        removed.freed_bytes += item.size_bytes
        return Removal(item.name, reason, item.size_bytes)

    async def _verdicts(
        self, page: Sequence[FoundObject]
    ) -> list[tuple[FoundObject, Verdict, str]]:
        """Read objects in parts, a few concurrently, and verify their blocks."""
        gate, threads = asyncio.Semaphore(_READS_AT_ONCE), anyio.CapacityLimiter(_READS_AT_ONCE)

        async def verdict(item: FoundObject) -> Judged:
            if item.size_bytes > _MAX_READ_BYTES:
                return Verdict.UNREADABLE, f"{item.size_bytes} bytes exceed the read limit"
            async with gate:
                judge = ObjectJudge(item.key, self._namespace, self._key)
                try:
                    found = await obstore.get_async(self._store, item.name)
                    async for data in found.stream(min_chunk_size=_PART_BYTES):
                        judge.num_bytes += len(data)
                        if judge.num_bytes > item.size_bytes:
                            return Verdict.UNREADABLE, "it is longer than listed"
                        call = partial(judge.take, memoryview(data))
                        await anyio.to_thread.run_sync(call, limiter=threads)
                        if judge.verdict is not None:
                            break
                except FileNotFoundError:
                    return Verdict.GONE, ""
                except (exceptions.BaseError, OSError) as error:
                    return Verdict.UNREADABLE, _text_of(error)
                return judge.end()

        async with asyncio.TaskGroup() as group:
            blocks = [item for item in page if item.key is not None]
            tasks = {item: group.create_task(verdict(item)) for item in blocks}
        return [(item, *task.result()) for item, task in tasks.items()]


def _unwanted(
    item: FoundObject, options: GcOptions, surplus_age_s: float | None
) -> tuple[str, str] | None:
    """Return the figure and the reason under which `gc` removes an object unread, or None."""
    if item.key is None:
        folder = item.name.split("/")[1]
        is_leftover = folder in {RENEWALS, RECORDS} or not item.size_bytes
        is_wanted = item.age_s < options.older_than_s or not (is_leftover or options.unknown_files)
        return None if is_wanted else ("unknown_files", "not a block")
    if options.selects(item.key):
        return "tenant_objects", "of the tenant"
    if options.max_age_s is not None and item.age_s >= options.max_age_s:
        return "expired_objects", "too old"
    if surplus_age_s is not None and item.age_s >= surplus_age_s:
        return "surplus_objects", "too much"
    return None


def _prefix_of(name: str) -> int:
    """Return the numeric value of the three digits in an object's name."""
    digits = name.partition("/")[2].partition("/")[0]
    try:
        return int(digits, 16)
    except ValueError:
        return _PREFIXES


def _text_of(error: Exception) -> str:
    return without_user_info(text_of(error))


def _endless(where: str, seconds: float) -> InputError:
    return InputError(
        f"{where}: the server listed no further objects within {seconds:g} s: it does not answer, "
        "or its list does not end; check the server"
    )


def _unreadable(where: str, error: Exception) -> InputError:
    return InputError(
        f"{where}: cannot be read: {_text_of(error)}; check the URL, and credentials, region "
        "and endpoint in the environment (such as AWS_REGION and AWS_ENDPOINT)"
    )
