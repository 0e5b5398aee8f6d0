"""One sequence that the scheduler moves from its prompt to its last token."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from ed_esurge.outputs import FinishReason
from ed_esurge.sampling import PoolingParams, SamplingParams


class RequestError(Exception):
    """The engine's own work for one sequence failed (the cause says how); others can go on.

    Attributes:
        request_id: whose.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(f"sequence {request_id!r} failed")
        self.request_id = request_id


class Status(enum.Enum):
    """Where a request is: in the queue (new or preempted), in the running set, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A sequence: tokens, the pages that hold their keys and values, and how it ended.

    A user's request with `n` completions is `n` of these.

    Attributes:
        request_id: unique in the scheduler.
        prompt: token ids, at least one.
        params: how to sample, or what to pool.
        eos_token_ids: ids that end it (empty with `ignore_eos`).
        max_tokens: most tokens to generate; prompt + max_tokens fits the context. 0: the request
            ends with its prompt (a pooled one always does).
        priority: smaller goes first under the `priority` policy.
        arrival: number of the request in order of arrival: the scheduler's tie-break.
        seed: 32-bit seed of its sampling keys.
        bad_token_ids: token sequences that may not be generated.
        salt: what the prefix-cache keys begin with.
        adapter: number of its LoRA adapter; 0 = none.
        output: generated token ids.
        num_computed: how many of `prompt + output` have keys and values in `pages`.
        pages: group -> page numbers, in order of position; see `ed_esurge.core.pages`.
        page_keys: prefix-cache keys of the full pages, as far as they were computed.
        slot: what it leases while running; see `NewSequence`.
        num_cached: prompt tokens found in the prefix cache at the first admission.
    """

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams | PoolingParams
    eos_token_ids: frozenset[int] = frozenset()
    max_tokens: int = 16
    priority: int = 0
    arrival: int = 0
    seed: int = 0
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    salt: bytes = b""
    adapter: int = 0
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    page_keys: list[bytes] = field(default_factory=list)
    slot: int | None = None
    num_cached: int | None = None
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    scored: bool = field(init=False)
    """Log-probabilities of the prompt are wanted."""
    pooled: bool = field(init=False)
    """A vector is wanted, and no token."""
    tracked: bool = field(init=False)
    """The host must know each token before the next is sampled, to say what may come next."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.request_id!r} has an empty prompt: give one token")
        self.pooled = isinstance(self.params, PoolingParams)
        self.scored = (
            isinstance(self.params, SamplingParams) and self.params.prompt_logprobs is not None
        )
        self.tracked = self.adjusted or (
            isinstance(self.params, SamplingParams) and self.params.structured_outputs is not None
        )
        if self.pooled:
            self.max_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def adjusted(self) -> bool:
        """Whether the logits are changed before sampling, by what is kept on the device."""
        params = self.params
        return isinstance(params, SamplingParams) and is_adjusted(params, self.bad_token_ids)

    @property
    def reads_prefixes(self) -> bool:
        """Whether pages of others may stand for its beginning, which is then not computed."""
        return reads_prefixes(self.params)

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Token ids of the positions `start` … `stop - 1`, over prompt and output."""
        edge = len(self.prompt)
        if stop <= edge:
            return self.prompt[start:stop]
        if start >= edge:
            return self.output[start - edge : stop - edge]
        return [*self.prompt[start:], *self.output[: stop - edge]]

    def take(self, tokens: Sequence[int]) -> int:
        """Append sampled tokens up to the one that ends the request, and return how many.

        Sets `finish_reason` if one of them ends it.
        """
        params = self.params
        assert isinstance(params, SamplingParams), "a pooled request samples nothing"
        output = self.output
        for count, token in enumerate(tokens, 1):
            output.append(token)
            length = len(output)
            if length >= params.min_tokens:
                if token in self.eos_token_ids:
                    self.finish_reason = "stop"
                    return count
                if token in params.stop_token_ids:
                    self.finish_reason, self.stop_reason = "stop", token
                    return count
            if length >= self.max_tokens:
                self.finish_reason = "length"
                return count
        return len(tokens)

    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that may not be sampled before `min_tokens` tokens."""
        if not isinstance(self.params, SamplingParams):
            return ()
        return tuple(sorted(self.eos_token_ids.union(self.params.stop_token_ids)))


def reads_prefixes(params: SamplingParams | PoolingParams) -> bool:
    """Whether a request may leave out what others have computed of its prompt."""
    if isinstance(params, PoolingParams):
        return params.pooling == "last"
    return params.prompt_logprobs is None


def is_adjusted(params: SamplingParams, bad_token_ids: Sequence[Sequence[int]]) -> bool:
    """Whether the logits of a sequence are adjusted at all."""
    return bool(
        params.penalized
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.min_tokens
        or bad_token_ids
    )
