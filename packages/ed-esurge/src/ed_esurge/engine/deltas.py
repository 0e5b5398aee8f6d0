"""Conversion of sampled tokens to deltas of a request: text, stop strings, log-probabilities,
vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ed_esurge.core.commands import Add
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
from ed_esurge.tokenizer import Detokenizer, StopStringSearch, Tokenizer


class DeltaWriter:
    """Creates the deltas of one sampling sequence.

    Args:
        request: the sequence.
        params: sampling options.
        index: index of the completion, 0 … n-1.
        tokenizer: tokenizer of the output; None produces no text.
        stops: stop strings, including those of the engine.
    """

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        index: int,
        tokenizer: Tokenizer | None,
        stops: tuple[str, ...],
    ) -> None:
        self.request, self.params, self.index = request, params, index
        self.tokenizer = tokenizer if params.detokenize else None
        self.finish_reason: FinishReason | None = None
        self.total = 0.0
        self._detokenizer: Detokenizer | None = None
        if self.tokenizer is not None:
            self._detokenizer = Detokenizer(
                self.tokenizer, request.prompt, skip_special_tokens=params.skip_special_tokens
            )
        self._stops = StopStringSearch(
            params.stop if stops else (),
            include=params.include_stop_str_in_output,
            thoughts=params.thought_texts,
            everywhere=[stop for stop in stops if stop not in params.stop],
        )
        self._count = 0
        self._experts: list[tuple[int, np.ndarray]] = []

    def keep_experts(self, start: int, experts: np.ndarray) -> None:
        """Store the experts of the tokens from position `start` on, int16 [n, layers, k]."""
        self._experts.append((start, experts))

    def take(
        self, scores: Sequence[TokenScores], masks: Sequence[np.ndarray] | None = None
    ) -> CompletionOutput:
        """Return the delta of the next tokens, with `finish_reason` if they end the completion.

        An empty list ends a sequence that samples no tokens.

        Args:
            scores: the tokens.
            masks: the tokens from which each token was sampled; None without records.
        """
        request, params = self.request, self.params
        out = CompletionOutput(self.index)
        if params.logprobs is not None:
            out.logprobs = []
        for one in scores:
            self._count += 1
            # With overlapped execution the request may already have later tokens.
            last = request.finish_reason is not None and self._count == len(request.output)
            out.token_ids.append(one.token)
            if self._detokenizer is not None:
                self._write(out, one.token, last)
            if out.logprobs is not None:
                self.total += one.logprob
                out.logprobs.append(position_logprobs(one, self.tokenizer))
                out.cumulative_logprob = self.total
            if self._stops.found is not None:
                break
        if masks is not None:
            out.sampling_masks = [*masks[: len(out.token_ids)]]
        if self._stops.found is not None:
            out.finish_reason, out.stop_reason = "stop", self._stops.found
        elif request.finish_reason is not None and self._count == len(request.output):
            out.finish_reason, out.stop_reason = request.finish_reason, request.stop_reason
        self.finish_reason = out.finish_reason
        if out.finish_reason is not None:
            out.routed_experts = self._routed_experts()
        return out

    def _routed_experts(self) -> np.ndarray | None:
        """Return the experts of all tokens but the last one, which the model has not read. A token
        that was computed again has the later experts."""
        if not self._experts:
            return None
        tokens = len(self.request.prompt) + self._count - 1
        routed_experts = np.full((tokens, *self._experts[0][1].shape[1:]), -1, np.int16)
        for start, experts in self._experts:
            routed_experts[start : start + len(experts)] = experts[: max(tokens - start, 0)]
        return routed_experts

    def _write(self, out: CompletionOutput, token: int, last: bool) -> None:
        """Append the text of a token to a delta, except for the token that ended the sequence."""
        assert self._detokenizer is not None, "only sequences with text are written"
        check = self._count >= self.params.min_tokens
        ended_by_it = last and self.request.finish_reason == "stop"
        if not ended_by_it or self.params.include_stop_str_in_output:
            out.text += self._stops.push(self._detokenizer.push(token), check=check)
        if last and self._stops.found is None:
            out.text += self._stops.push(self._detokenizer.flush(), check=check)
            out.text += self._stops.flush()

    def end(self, reason: FinishReason) -> CompletionOutput:
        """Return the delta of an aborted or failed sequence, for "abort" with the withheld text."""
        out = CompletionOutput(self.index, finish_reason=reason)
        aborted = reason == "abort"
        if aborted and self._detokenizer is not None and self._stops.found is None:
            out.text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        if self.params.logprobs is not None:
            out.logprobs, out.cumulative_logprob = [], self.total
        self.finish_reason = reason
        return out


@dataclass(slots=True)
class OpenRequest:
    """An unfinished user request: `n` writers of one prompt, or one pooled sequence.

    Attributes:
        add: the command that queued the request.
        sequences: sequences of the request by id.
        writers: writers by sequence id; empty for a pooled request.
        prompt_logprobs: log-probabilities of the prompt, filled by position and delivered with the
            first delta. None when not requested.
        keep_alive: object to keep alive while the request is open.
    """

    add: Add
    sequences: dict[str, Request]
    writers: dict[str, DeltaWriter]
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    prompt_tokenizer: Tokenizer | None = None
    started: bool = False
    closed: bool = False
    seed: int | None = None
    keep_alive: object = None

    @classmethod
    def of(
        cls, add: Add, arrival: int, seeds: Sequence[int], tokenizer: Tokenizer | None
    ) -> OpenRequest:
        """Create the sequences of a request.

        Args:
            add: the command that queues the request.
            arrival: arrival number of the first sequence.
            seeds: seed of each sequence.
            tokenizer: tokenizer of the output; None produces no text.
        """
        sequences: dict[str, Request] = {}
        writers: dict[str, DeltaWriter] = {}
        for index, seed in enumerate(seeds):
            params = add.params
            if index and isinstance(params, SamplingParams):
                # One of n sequences scores the prompt; the others share its pages.
                params = params.replace(prompt_logprobs=None)
            request = Request(
                f"{add.request_id}#{index}",
                add.token_ids,
                params,
                eos_token_ids=add.eos_token_ids,
                max_tokens=add.max_tokens,
                priority=add.priority,
                arrival=arrival + index,
                seed=seed,
                bad_token_ids=add.bad_token_ids,
                rules=add.rules,
                salt=add.salt,
                adapter=add.adapter,
                encoder_inputs=add.encoder_inputs,
                positions=add.positions,
            )
            sequences[request.request_id] = request
            if isinstance(params, SamplingParams):
                writer = DeltaWriter(request, params, index, tokenizer, add.stops)
                writers[request.request_id] = writer
        opened = cls(add, sequences, writers, RequestMetrics(add.arrival_time))
        params = add.params
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            opened.prompt_logprobs = [None for _ in add.token_ids]
            opened.prompt_tokenizer = tokenizer if params.detokenize else None
        return opened

    @property
    def finished(self) -> bool:
        if self.closed:
            return True
        writers = self.writers.values()
        return bool(writers) and all(writer.finish_reason is not None for writer in writers)

    def mark_scheduled(self) -> None:
        """Record the time of the first step with a sequence of this request."""
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = time.monotonic()

    def take_prompt(self, start: int, scores: Sequence[TokenScores]) -> None:
        """Store the log-probabilities of the prompt tokens after positions `start` …"""
        assert self.prompt_logprobs is not None, "only requests that asked are scored"
        for position, one in enumerate(scores, start + 1):
            # The last position predicts the first generated token.
            if position < len(self.prompt_logprobs):
                self.prompt_logprobs[position] = position_logprobs(one, self.prompt_tokenizer)

    def end(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """Return the last delta of an aborted or failed request.

        Args:
            reason: "abort" or "error".
            error: error message.
        """
        running = [writer for writer in self.writers.values() if writer.finish_reason is None]
        ended = [writer.end(reason) for writer in running]
        if not self.writers:
            ended = [CompletionOutput(0, finish_reason=reason)]
        self.closed = True
        output = self.delta(ended)
        output.error = error
        return output

    def build_pooled_output(self, vector: np.ndarray) -> RequestOutput:
        """Return the only output of a pooled request."""
        self.closed = True
        output = self.delta([CompletionOutput(0, finish_reason="stop")])
        output.pooled = vector
        return output

    def delta(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """Return a delta with the completions that changed."""
        now = time.monotonic()
        metrics = self.metrics
        new = sum([len(out.token_ids) for out in outputs])
        if new:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
            metrics.num_generated_tokens += new
        requests = self.sequences.values()
        metrics.num_preemptions = sum([r.num_preemptions for r in requests])
        metrics.num_cached_tokens = next(iter(requests)).num_cached or 0
        finished = self.finished
        if finished:
            metrics.finished_time = now
        first, self.started = not self.started, True
        return RequestOutput(
            request_id=self.add.request_id,
            prompt_token_ids=self.add.token_ids,
            outputs=outputs,
            finished=finished,
            metrics=metrics,
            seed=self.seed,
            prompt=self.add.prompt,
            prompt_logprobs=self.prompt_logprobs if first else None,
            delta=True,
        )


def position_logprobs(scores: TokenScores, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """Return the log-probabilities of a position: the sampled token, then alternatives by rank."""
    entries = {scores.token: Logprob(scores.logprob, scores.rank)}
    for rank, (token, logprob) in enumerate(scores.top, 1):
        entries.setdefault(token, Logprob(logprob, rank))
    if tokenizer is not None:
        for token, entry in entries.items():
            entry.decoded_token = tokenizer.decode([token])
    return entries
