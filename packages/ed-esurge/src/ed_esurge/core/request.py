"""The state of one sequence in the scheduler."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ed_esurge.core.commands import EncoderInput, TokenRules
from ed_esurge.core.plan import NewSequence, PlanRow
from ed_esurge.outputs import FinishReason
from ed_esurge.sampling import PoolingParams, SamplingParams


class RequestError(Exception):
    """Error of the engine for one sequence; the other sequences can continue.

    `__cause__` is the original exception.

    Attributes:
        request_id: id of the failed sequence.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(f"sequence {request_id!r} failed")
        self.request_id = request_id


class Status(enum.Enum):
    """State of a request: queued (new or preempted), running, or finished."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A sequence: its tokens, the pages with their keys and values, and its finish reason.

    A user's request with `n` completions consists of `n` sequences.

    Attributes:
        request_id: id, unique in the scheduler.
        prompt: token ids, at least one.
        params: sampling or pooling options.
        eos_token_ids: ids that end the sequence (empty with `ignore_eos`).
        max_tokens: maximum number of generated tokens; prompt + max_tokens fits the context. 0: the
            request ends after its prompt (always the case for a pooled request).
        priority: priority under the `priority` policy; smaller is scheduled first.
        arrival: number of the request in order of arrival, the tie-break of the scheduler.
        seed: 32-bit seed of the sampling keys.
        bad_token_ids: token sequences that may not be generated.
        rules: rules of the checkpoint for the tokens; None = no rules.
        salt: prefix of the prefix-cache keys.
        adapter: number of the LoRA adapter; 0 = none.
        encoder_inputs: inputs of the model's encoder, in the order of their placeholder tokens.
        positions: see `NewSequence.positions`.
        output: generated token ids.
        num_computed: number of tokens of `prompt + output` with keys and values in `pages`.
        pages: group -> page numbers, in order of position; see `ed_esurge.core.pages`.
        page_keys: prefix-cache keys of the full pages computed so far.
        slot: slot of the running sequence, None otherwise; see `NewSequence`.
        num_cached: number of prompt tokens found in the prefix cache at the first admission.
        state_slot: slot of the recurrent state of the running sequence, None otherwise; see
            `ed_esurge.core.drafts`.
        state_stop: number of tokens before the latest recurrent state that was restored or saved.
        branch_stop: number of tokens, in whole pages, that an earlier prompt also had.
        restored_state: key of the recurrent state from which the sequence continued.
        output_state: key of the latest recurrent state of the output.
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
    rules: TokenRules | None = None
    salt: bytes = b""
    adapter: int = 0
    encoder_inputs: tuple[EncoderInput, ...] = ()
    positions: np.ndarray | None = None
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    num_computed: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)
    page_keys: list[bytes] = field(default_factory=list)
    slot: int | None = None
    state_slot: int | None = None
    num_cached: int | None = None
    state_stop: int = 0
    branch_stop: int = 0
    restored_state: bytes | None = None
    output_state: bytes | None = None
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    scored: bool = field(init=False)
    """Whether the log-probabilities of the prompt are requested."""
    pooled: bool = field(init=False)
    """Whether a pooled vector is requested instead of tokens."""
    tracked: bool = field(init=False)
    """Whether the host must read each token before the device samples the next one. True if the
    allowed tokens or the logits depend on the previous tokens."""
    single_step: bool = field(init=False)
    """Whether each decode step of the sequence needs a program of its own: the sequence is tracked,
    or filters need the whole distribution."""
    branches: bool = field(init=False)
    """Whether the sequence is a beam: the engine appends its tokens, and may fork the sequence."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.request_id!r} has an empty prompt: give one token")
        self.pooled = isinstance(self.params, PoolingParams)
        self.scored = (
            isinstance(self.params, SamplingParams) and self.params.prompt_logprobs is not None
        )
        sampling = self.params if isinstance(self.params, SamplingParams) else None
        self.branches = sampling is not None and sampling.use_beam_search
        structured = sampling is not None and sampling.structured_outputs is not None
        self.tracked = self.adjusted or self.branches or structured
        self.single_step = self.tracked or (sampling is not None and sampling.filtered)
        if self.pooled:
            self.max_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def adjusted(self) -> bool:
        """Whether sampler state on the device changes the logits before sampling."""
        params = self.params
        return isinstance(params, SamplingParams) and is_adjusted(
            params, self.bad_token_ids, self.rules
        )

    @property
    def reads_prefixes(self) -> bool:
        """Whether the sequence may reuse the cached pages of an equal prefix."""
        return reads_prefixes(self.params)

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Return the token ids at positions `start` … `stop - 1` of prompt and output."""
        edge = len(self.prompt)
        if stop <= edge:
            return self.prompt[start:stop]
        if start >= edge:
            return self.output[start - edge : stop - edge]
        return [*self.prompt[start:], *self.output[: stop - edge]]

    def take(self, tokens: Sequence[int]) -> int:
        """Append sampled tokens up to the token that ends the request.

        Sets `finish_reason` if a token ends the request.

        Returns:
            the number of appended tokens.
        """
        params = self.params
        assert isinstance(params, SamplingParams), "a pooled request samples nothing"
        output = self.output
        for count, token in enumerate(tokens, 1):
            output.append(token)
            length = len(output)
            if self.rules is not None and self.rules.forces_end(length - 1, self.max_tokens):
                self.finish_reason = "length"
                return count
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

    def fork(self, request_id: str) -> Request:
        """Return a new sequence with the same tokens."""
        return replace(
            self,
            request_id=request_id,
            output=[*self.output],
            status=Status.WAITING,
            num_computed=0,
            pages={},
            page_keys=[*self.page_keys],
            slot=None,
            state_slot=None,
            restored_state=None,
            output_state=None,
        )

    def row(
        self, count: int, pages: Mapping[str, Sequence[int]], features: Sequence[int] = ()
    ) -> PlanRow:
        """Return the row of the next `count` tokens.

        Args:
            pages, features: see `PlanRow`.
        """
        start = self.num_computed
        stop = start + count
        slot = self.slot
        assert slot is not None, "a running request has a slot"
        edge = len(self.prompt)
        if start >= edge and stop == edge + len(self.output):  # a decode, the usual row
            return PlanRow(self.request_id, slot, start, self.output[start - edge :], pages, 1)
        return PlanRow(
            self.request_id,
            slot,
            start,
            self.tokens(start, stop),
            pages,
            1 if stop == self.num_tokens and self.max_tokens else 0,
            # Scores are delivered with the first token: a preempted request is not scored again.
            self.scored and start < edge - 1 and not self.output,
            self.pooled,
            features,
        )

    def start(self) -> NewSequence:
        """Return the data of this sequence, which has received a slot."""
        assert self.slot is not None, "a running request has a slot"
        return NewSequence(
            self.request_id,
            self.slot,
            self.tokens(0, self.num_tokens),
            len(self.prompt),
            self.params,
            self.seed,
            self.end_token_ids(),
            self.bad_token_ids,
            self.adapter,
            self.rules,
            self.max_tokens,
            self.positions,
        )

    def end_token_ids(self) -> tuple[int, ...]:
        """Return the ids that may not be sampled before `min_tokens` tokens."""
        if not isinstance(self.params, SamplingParams):
            return ()
        return tuple(sorted(self.eos_token_ids.union(self.params.stop_token_ids)))


def reads_prefixes(params: SamplingParams | PoolingParams) -> bool:
    """Return whether a request may use the prefix cache."""
    if isinstance(params, PoolingParams):
        return params.pooling == "last"
    return params.prompt_logprobs is None


def is_adjusted(
    params: SamplingParams, bad_token_ids: Sequence[Sequence[int]], rules: TokenRules | None
) -> bool:
    """Return whether the options change the logits of a sequence before sampling."""
    return bool(
        params.penalized
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.min_tokens
        or bad_token_ids
        or rules is not None
        or params.mirostat
        or params.dry_multiplier
        or params.thinking_budget is not None
    )
