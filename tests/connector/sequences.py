"""What a miniature of a scheduler moves: requests, which are texts, and copies on workers."""

from dataclasses import dataclass, field

TOKENS_PER_HASH = 2


@dataclass(eq=False)
class Sequence:
    """A request: `text` is prompt and output so far, one letter a token.

    Its first `found_tokens` were on the device when it began; a load was to fill those up to
    `known_tokens`.
    """

    request_id: str
    text: str
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    found_tokens: int = 0
    known_tokens: int = 0
    kv_transfer_params: None = None
    ended: bool = False
    tables: list = field(default_factory=list)

    @property
    def num_tokens(self):
        return len(self.text)

    @property
    def block_hashes(self):
        ends = range(TOKENS_PER_HASH, len(self.text) + 1, TOKENS_PER_HASH)
        return [self.text[:end].encode() for end in ends]

    def is_finished(self):
        return self.ended


@dataclass(eq=False)
class Copy:
    """One job on one worker; `outcome` is None until it was performed."""

    worker: int
    job_id: int
    job: object
    is_store: bool
    outcome: bool | None = None

    @property
    def blocks(self):
        return self.job.device.block_ids.tolist()
