"""A tiny scheduler's view of the adapter: requests whose hashes can be read, and hand-made steps.

A request's text has one letter a hash; its chained hashes are the text's prefixes. Blocks and
tokens are given by hand, so that each test shows the very step that it is about.
"""

from dataclasses import dataclass, field

from kvoffload_async.core.primary import Primary
from kvoffload_async.facade.connector.protocol import (
    ConnectorGeometry,
    ConnectorOutput,
    KVGroup,
    StepOutput,
)
from kvoffload_async.facade.connector.scheduler import OffloadingConnectorScheduler
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.types import (
    LookupResult,
    OffloadPolicy,
    RequestOffloadingContext,
    make_offload_key,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY
TOKENS_PER_HASH = 4
REQUEST_LEVEL = RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)


@dataclass(eq=False)
class Request:
    """`text` is the prompt; `extra` are tokens behind its last full hash."""

    request_id: str
    text: str
    extra: int = 1
    output: str = ""
    num_computed_tokens: int = 0
    kv_transfer_params: dict | None = None
    ended: bool = False
    sampled: int = 0

    @property
    def block_hashes(self):
        whole = self.text + self.output
        return [whole[: i + 1].encode() for i in range(len(whole))]

    @property
    def num_prompt_tokens(self):
        return len(self.text) * TOKENS_PER_HASH + self.extra

    @property
    def num_tokens(self):
        return self.num_prompt_tokens + len(self.output) * TOKENS_PER_HASH + self.sampled

    def is_finished(self):
        return self.ended


def key(text, group=0):
    return make_offload_key(text.encode(), group)


def keys(text, group=0):
    """The keys of all prefixes, for chunks of one hash."""
    return [key(text[: i + 1], group) for i in range(len(text))]


class Recorder:
    """Passes every call of a manager on, and remembers their names, and whom hooks were about."""

    def __init__(self, manager):
        self.inner = manager
        self.calls = []
        self.contexts = []

    def __getattr__(self, name):
        target = getattr(self.inner, name)
        if not callable(target):
            return target

        def call(*args, **kwargs):
            self.calls.append(name)
            if name in {"on_new_request", "on_request_finished"}:
                self.contexts.append((name, args[0]))
            return target(*args, **kwargs)

        return call


class Watched(Recorder):
    """Checks where stores are cut, and what the adapter makes of it."""

    def __init__(self, manager):
        super().__init__(manager)
        self.cuts = {}

    def prepare_store(self, keys, ctx, *, is_last=False):
        granted = self.inner.prepare_store(keys, ctx, is_last=is_last)
        self.calls.append("prepare_store")
        if granted is not None and granted.keys_left_out:
            cut = min(ctx.key_positions[key] for key in granted.keys_left_out)
            assert all(ctx.key_positions[key] < cut for key in granted.keys_to_store)
            self.cuts[ctx.req_id] = cut
        return granted

    def check(self, connector):
        """In a step, the adapter passes over no block that there was no room for.

        Later it may: over one that a sliding window has let go since.
        """
        for req_id, state in connector._requests.items():
            for index, group in enumerate(state.groups):
                passed = group.next_chunk * connector.geometry.tokens_per_chunk(index)
                assert passed < self.cuts.get(req_id, passed + 1)
        self.cuts.clear()


class Scripted(CPUPrimaryTierOffloadingManager):
    """A primary whose lookups answer as told, key by key, and that may want whole requests."""

    def __init__(self, num_blocks=64, answers=None, policy=None):
        super().__init__(num_blocks)
        self.answers = dict(answers or {})
        self.asked = []
        self.offered = []
        self.policy = policy
        self.pending_work = False
        self.reset_flushes = 0

    def on_new_request(self, req_context):
        context = super().on_new_request(req_context)
        return self.policy or context

    def lookup_many(self, keys, req_context, *, stop_at_miss=False):
        answers = []
        for key in keys:
            self.asked.append(key)
            told = self.answers.get(key)
            answers += [told] if told else super().lookup_many([key], req_context)
            if stop_at_miss and answers[-1] is MISS:
                break
        return answers

    def prepare_store(self, keys, req_context, *, is_last=False):
        self.offered.append(list(keys))
        return super().prepare_store(keys, req_context, is_last=is_last)

    def has_pending_work(self):
        return self.pending_work

    def on_reset_flushed(self):
        self.reset_flushes += 1


@dataclass
class Desk:
    """An adapter, its manager, and short names for what a scheduler and its workers do."""

    num_slots: int = 16
    groups: tuple = (KVGroup(TOKENS_PER_HASH),)
    manager: object = None
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        self.manager = self.manager or CPUPrimaryTierOffloadingManager(self.num_slots)
        self.geometry = ConnectorGeometry(self.groups, TOKENS_PER_HASH, **self.options)
        self.connector = OffloadingConnectorScheduler(self.manager, self.geometry)

    @property
    def primary(self) -> Primary:
        return getattr(self.manager, "_primary", self.manager).core

    @property
    def table(self):
        return self.connector._requests

    def ask(self, request, computed=0):
        return self.connector.get_num_new_matched_tokens(request, computed)

    def allocate(self, request, *tables, load=0):
        self.connector.update_state_after_alloc(request, tables, load)

    def step(self, scheduled=(), *, new=None, tables=None, preempted=()):
        """End a step; `scheduled` maps requests to tokens, whose KV is there afterwards."""
        scheduled = dict(scheduled)
        ids = {request.request_id: count for request, count in scheduled.items()}
        meta = self.connector.build_connector_meta(
            StepOutput(ids, new or {}, tables or {}, tuple(preempted))
        )
        for request, count in scheduled.items():
            request.num_computed_tokens += count
        return meta

    def report(self, *job_ids, failed=(), count=None):
        counts = dict.fromkeys(job_ids, self.geometry.num_workers if count is None else count)
        self.connector.update_connector_output(ConnectorOutput(counts, frozenset(failed)))

    def end(self, request):
        request.ended = True
        return self.connector.request_finished(request)

    # -- whole journeys -------------------------------------------------------------------------

    def prefill(self, request, *tables, computed=0):
        """Start a request without a load and compute its prompt, all in one step."""
        self.ask(request, computed)
        self.allocate(request, *tables)
        request.num_computed_tokens = computed
        count = request.num_prompt_tokens - computed
        return self.step({request: count})

    def store(self, text, *tables, req_id="w", extra=1):
        """Have some request compute and store a text, and go."""
        request = Request(req_id, text, extra)
        meta = self.prefill(request, *tables)
        self.report(*meta.store_jobs)
        self.end(request)
        meta = self.step()
        self.report(*meta.store_jobs)
        return request

    def load(self, request, *tables, computed=0):
        """Start a request with all that can be loaded; return (tokens, job id, job)."""
        tokens, waits = self.ask(request, computed)
        assert waits, tokens
        self.allocate(request, *tables, load=tokens)
        meta = self.step()
        ((job_id, job),) = meta.load_jobs.items()
        return tokens, job_id, job


def only(jobs):
    ((job_id, job),) = jobs.items()
    return job_id, job


def blocks_of(job):
    return job.device.block_ids.tolist()
