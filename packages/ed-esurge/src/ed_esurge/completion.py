"""From sampled tokens to deltas of a request: text, stop strings, log-probabilities."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ed_esurge.core.request import Request
from ed_esurge.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from ed_esurge.runner.result import TokenScores
from ed_esurge.sampling import SamplingParams
from ed_esurge.tokenizer import Detokenizer, StopStrings


class Completion:
    """The text side of one sequence.

    Args:
        request: the sequence.
        index: which of the `n` completions it is.
        tokenizer: None gives no text.
        stops: stop strings, the engine's own included.
    """

    def __init__(
        self, request: Request, index: int, tokenizer: Any, stops: tuple[str, ...]
    ) -> None:
        self.request, self.index, self.tokenizer = request, index, tokenizer
        params = request.params
        self.finish_reason: FinishReason | None = None
        self.total = 0.0
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt, skip_special_tokens=params.skip_special_tokens
            )
        self._stops = StopStrings(stops, include=params.include_stop_str_in_output)
        self._count = 0

    def take(self, scores: TokenScores) -> CompletionOutput:
        """The delta of one more token; `finish_reason` is set if it is the last."""
        request, params = self.request, self.request.params
        self._count += 1
        # With overlapped execution the request may already have more tokens than this one.
        last = request.finish_reason is not None and self._count == len(request.output)
        by_token = last and request.finish_reason == "stop"
        out = CompletionOutput(self.index, token_ids=[scores.token])
        if self._detokenizer is not None:
            check = self._count >= params.min_tokens
            if not by_token or params.include_stop_str_in_output:
                out.text = self._stops.push(self._detokenizer.push(scores.token), check=check)
            if last and self._stops.found is None:
                out.text += self._stops.push(self._detokenizer.flush(), check=check)
                out.text += self._stops.flush()
        if params.logprobs is not None:
            self.total += scores.logprob
            out.logprobs = [
                position_logprobs(scores, self.tokenizer if params.detokenize else None)
            ]
            out.cumulative_logprob = self.total
        if self._stops.found is not None:
            out.finish_reason, out.stop_reason = "stop", self._stops.found
        elif last:
            out.finish_reason, out.stop_reason = request.finish_reason, request.stop_reason
        self.finish_reason = out.finish_reason
        return out

    def abort(self) -> CompletionOutput:
        """The delta that ends it from outside: the text that was held back."""
        out = CompletionOutput(self.index, finish_reason="abort")
        if self._detokenizer is not None and self._stops.found is None:
            out.text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        if self.request.params.logprobs is not None:
            out.logprobs, out.cumulative_logprob = [], self.total
        self.finish_reason = "abort"
        return out


@dataclass(slots=True)
class Group:
    """A user's request: `n` completions of one prompt.

    Attributes:
        completions: by the id of their sequence.
        prompt_logprobs: filled position by position; handed out with the first delta. None when
            not asked for.
    """

    request_id: str
    params: SamplingParams
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    completions: dict[str, Completion] = field(default_factory=dict)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    started: bool = False

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None for _ in self.prompt_token_ids]

    @property
    def finished(self) -> bool:
        return all(c.finish_reason is not None for c in self.completions.values())

    def mark_scheduled(self) -> None:
        """Note that a step with a sequence of this request begins."""
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = time.monotonic()

    def take_prompt(self, start: int, scores: list[TokenScores], tokenizer: Any) -> None:
        """Note the log-probabilities of the prompt tokens after positions `start` …"""
        assert self.prompt_logprobs is not None, "only requests that asked are scored"
        for position, one in enumerate(scores, start + 1):
            # The last position predicts the first generated token.
            if position < len(self.prompt_token_ids):
                self.prompt_logprobs[position] = position_logprobs(
                    one, tokenizer if self.params.detokenize else None
                )

    def delta(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """Wrap the completions that changed."""
        now = time.monotonic()
        metrics = self.metrics
        new = sum(len(out.token_ids) for out in outputs)
        if new:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
            metrics.num_generated_tokens += new
        requests = [c.request for c in self.completions.values()]
        metrics.num_preemptions = sum(r.num_preemptions for r in requests)
        metrics.num_cached_tokens = requests[0].num_cached or 0
        if self.finished:
            metrics.finished_time = now
        first, self.started = not self.started, True
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            metrics=metrics,
            prompt=self.prompt,
            prompt_logprobs=self.prompt_logprobs if first else None,
            delta=True,
        )


def position_logprobs(scores: TokenScores, tokenizer: Any) -> PositionLogprobs:
    """The chosen token first, then the alternatives by rank."""
    found = {scores.token: Logprob(scores.logprob, scores.rank)}
    for rank, (token, logprob) in enumerate(scores.top, 1):
        found.setdefault(token, Logprob(logprob, rank))
    if tokenizer is not None:
        for token, entry in found.items():
            entry.decoded_token = tokenizer.decode([token])
    return found
