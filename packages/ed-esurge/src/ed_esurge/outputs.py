"""What the engine gives back. Plain dataclasses: no jax, names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position.

    Attributes:
        logprob: natural logarithm of its probability under the model (temperature 1, no penalty).
        rank: 1 for the most probable token.
        decoded_token: its text, or None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""token id -> Logprob; the chosen token first, then the alternatives by rank."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request.

    Attributes:
        index: 0 … n-1.
        text: text; in a delta only what is new.
        token_ids: tokens; in a delta only the new ones. The token that ended the completion is
            included here, its text is not.
        logprobs: one dict per token of `token_ids`, or None when not asked for.
        cumulative_logprob: sum over the whole completion so far, or None without logprobs.
        finish_reason: None while running; "stop" (end of sequence, stop token or string),
            "length", "abort", "error" (see `RequestOutput.error`).
        stop_reason: the stop string or stop token id that ended it; None for end of sequence.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, new: CompletionOutput) -> None:
        """Append a later delta of this completion, in place."""
        self.text += new.text
        self.token_ids += new.token_ids
        if new.logprobs is not None:
            self.logprobs = (self.logprobs or []) + new.logprobs
        self.cumulative_logprob = new.cumulative_logprob
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """Times on the engine's monotonic clock (seconds, `time.monotonic()`), None until they are.

    Attributes:
        num_cached_tokens: prompt tokens that came from the prefix cache.
        num_preemptions: how often the request lost its pages and was computed anew.
        num_generated_tokens: over all completions of the request.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_generated_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, whole (`delta=False`, from `generate`) or what is new since the
    last output (`delta=True`, from `step`, `stream` and `AsyncEngine.generate`).

    A delta lists only the completions that changed; `prompt_logprobs` come with the first one.

    Attributes:
        prompt: the text of the prompt, if it was text.
        prompt_token_ids: what the model saw: after truncation.
        prompt_logprobs: one entry per prompt token; the first is None. None when not asked for.
        finished: all completions have a finish reason; no output follows.
        pooled: the vector [d] of a request with `PoolingParams`, float32. Its one output has one
            completion without tokens, which says how the request ended.
        error: what went wrong, where a completion has the finish reason "error".
        seed: `SamplingParams(seed=...)` that gives these tokens again; None of a pooled request.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt: str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    delta: bool = False
    pooled: np.ndarray | None = None
    error: str | None = None
    seed: int | None = None

    def add(self, new: RequestOutput) -> None:
        """Append a later delta to this output, in place."""
        mine = {out.index: out for out in self.outputs}
        for out in new.outputs:
            old = mine.get(out.index)
            if old is None:
                fresh = replace(out, token_ids=list(out.token_ids))
                if out.logprobs is not None:
                    fresh.logprobs = list(out.logprobs)
                self.outputs.append(fresh)
                continue
            old.add(out)
        self.outputs.sort(key=lambda out: out.index)
        self.finished = new.finished
        self.metrics = new.metrics
        if self.prompt_logprobs is None:
            self.prompt_logprobs = new.prompt_logprobs
        if self.pooled is None:
            self.pooled = new.pooled
        self.error = self.error or new.error
