"""Checks of the outputs of a replica. A replica with a fault or an intruder may send anything."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from ed_infra.errors import EasyDeLError

from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from ed_esurge.sampling import PoolingParams, SamplingParams

#: Maximum characters of the text of one token, and of other texts such as an error.
MAX_TOKEN_TEXT, MAX_TEXT = 4096, 2**16
#: Bytes of one token or log-probability in a message, at most.
_ENTRY_BYTES = 256
#: Outputs of a request without a token, at most.
_EMPTY_OUTPUTS = 64
_TIMES = ("first_scheduled_time", "first_token_time", "last_token_time", "finished_time")
_COUNTS = ("num_cached_tokens", "num_preemptions", "num_generated_tokens")
_REASONS = ("stop", "length", "abort", "error")


class ReplicaMessageError(EasyDeLError):
    """A replica sent a message that no correct replica sends."""


def require(condition: object, problem: str) -> None:
    """Raise `ReplicaMessageError` unless a condition holds."""
    if not condition:
        raise ReplicaMessageError(f"a replica sent an invalid message: {problem}")


def is_count(value: object, limit: int) -> bool:
    """Return whether a value is an integer from 0 to a limit."""
    return type(value) is int and 0 <= value <= limit


def is_text(value: object, limit: int = MAX_TEXT) -> bool:
    """Return whether a value is a text of at most `limit` characters."""
    return isinstance(value, str) and len(value) <= limit


class AnswerCheck:
    """Checks all outputs of one request.

    Args:
        request_id: id of the request.
        prompt: the prompt.
        params: options of the request.
        vocab_size: number of tokens of the vocabulary.

    Attributes:
        head_bytes: maximum bytes of the outputs in a message without their arrays.
    """

    def __init__(
        self,
        request_id: str,
        prompt: CheckedPrompt,
        params: SamplingParams | PoolingParams,
        vocab_size: int,
    ) -> None:
        self._name, self._prompt, self._params = request_id, prompt, params
        self._vocab = vocab_size
        self._sampling = params if isinstance(params, SamplingParams) else None
        self._completions = 1 if self._sampling is None else self._sampling.n
        self.restart()
        self.head_bytes = _ENTRY_BYTES * self._count_entries()

    def restart(self) -> None:
        """Expect the first output again, from another replica."""
        self._tokens = [0] * self._completions
        self._characters = self._empty = 0
        self._ended: set[int] = set()
        self._started = False

    def _count_entries(self) -> int:
        """Return the number of tokens and log-probabilities of the answer, at most."""
        if self._sampling is None:
            return len(self._prompt)
        entries = len(self._prompt) * (2 + (self._sampling.prompt_logprobs or 0))
        tokens = self._completions * self._prompt.max_tokens
        return entries + tokens * (2 + (self._sampling.logprobs or 0))

    def check(self, output: object, arrival: float) -> RequestOutput:
        """Return an output of a replica after validation.

        The prompt and the id become those of the request, and the times become times of this
        process from the arrival to the present.

        Args:
            output: the output, whose times have the clock of this process.
            arrival: time of the request, monotonic.

        Raises:
            ReplicaMessageError: no correct replica sends this output.
        """
        require(isinstance(output, RequestOutput), "an output of another type")
        assert isinstance(output, RequestOutput), "checked"
        require(
            isinstance(output.finished, bool) and isinstance(output.outputs, list), "wrong types"
        )
        require(0 < len(output.outputs) <= self._completions, "a wrong number of completions")
        for one in output.outputs:
            self._check_completion(one)
        ended = len(self._ended) == self._completions
        failed = any(one.finish_reason in ("abort", "error") for one in output.outputs)
        require(ended == output.finished or (failed and output.finished), "a wrong end")
        self._empty += not any(one.token_ids for one in output.outputs)
        require(self._empty <= _EMPTY_OUTPUTS + self._completions, "many outputs without tokens")
        require(output.error is None or is_text(output.error), "an error that is no text")
        self._check_prompt_logprobs(output)
        self._check_vector(output)
        self._check_metrics(output.metrics, arrival)
        output.request_id, output.delta = self._name, True
        output.prompt_token_ids = self._prompt.token_ids
        output.prompt = None if self._started else self._prompt.text
        output.seed = None if self._sampling is None else self._sampling.seed
        self._started = True
        return output

    def _check_completion(self, out: object) -> None:
        require(isinstance(out, CompletionOutput), "a completion of another type")
        assert isinstance(out, CompletionOutput), "checked"
        require(is_count(out.index, self._completions - 1), "a completion with a wrong index")
        require(out.index not in self._ended, "an output of a finished completion")
        require(isinstance(out.token_ids, list) and isinstance(out.text, str), "wrong types")
        are_valid = all(is_count(token, self._vocab - 1) for token in out.token_ids)
        require(are_valid, "a token outside the vocabulary")
        tokens = self._tokens[out.index] = self._tokens[out.index] + len(out.token_ids)
        most = 0 if self._sampling is None else self._prompt.max_tokens
        require(tokens <= most, "more tokens than the request allows")
        self._characters += len(out.text)
        most_text = MAX_TOKEN_TEXT * (sum(self._tokens) + self._completions)
        require(self._characters <= most_text, "more text than the tokens have")
        require(out.finish_reason is None or out.finish_reason in _REASONS, "a wrong reason")
        reason = out.stop_reason
        require(reason is None or type(reason) in (int, str), "a wrong reason of the stop")
        require(not isinstance(reason, str) or is_text(reason), "a long reason of the stop")
        require(out.routed_experts is None and out.sampling_masks is None, "records of a trainer")
        self._check_logprobs(out)
        if out.finish_reason is not None:
            self._ended.add(out.index)

    def _check_logprobs(self, out: CompletionOutput) -> None:
        total = out.cumulative_logprob
        require(total is None or _is_number(total), "a log-probability that is no number")
        if out.logprobs is None:
            return
        is_requested = self._sampling is not None and self._sampling.logprobs is not None
        require(
            is_requested and isinstance(out.logprobs, list), "log-probabilities without a request"
        )
        require(len(out.logprobs) == len(out.token_ids), "a wrong number of log-probabilities")
        for token, position in zip(out.token_ids, out.logprobs, strict=True):
            self._check_position(position)
            require(token in position, "log-probabilities without the token")

    def _check_position(self, position: object) -> None:
        require(isinstance(position, dict) and position, "a wrong log-probability")
        assert isinstance(position, dict), "checked"
        for token, entry in position.items():
            require(is_count(token, self._vocab - 1), "a token outside the vocabulary")
            require(isinstance(entry, Logprob) and _is_number(entry.logprob), "a wrong value")
            rank, text = entry.rank, entry.decoded_token
            require(rank is None or is_count(rank, self._vocab), "a wrong rank")
            require(text is None or is_text(text, MAX_TOKEN_TEXT), "a wrong text of a token")

    def _check_prompt_logprobs(self, output: RequestOutput) -> None:
        if output.prompt_logprobs is None:
            return
        is_requested = self._sampling is not None and self._sampling.prompt_logprobs is not None
        require(
            is_requested and isinstance(output.prompt_logprobs, list),
            "log-probabilities of the prompt",
        )
        require(len(output.prompt_logprobs) == len(self._prompt), "a wrong length of the prompt")
        for position in output.prompt_logprobs:
            if position is not None:
                self._check_position(position)

    def _check_vector(self, output: RequestOutput) -> None:
        vector = output.pooled
        if vector is None:
            complete = self._sampling is None and output.finished and output.error is None
            aborted = output.outputs[0].finish_reason == "abort"
            require(not complete or aborted, "an answer without a vector")
            return
        params = self._params
        require(isinstance(params, PoolingParams), "a vector without a request")
        assert isinstance(params, PoolingParams), "checked"
        dimensions = 2 if params.task == "token_embed" else 1
        right = isinstance(vector, np.ndarray) and vector.dtype.kind == "f"
        require(right and vector.ndim == dimensions and vector.size, "a vector of a wrong shape")
        require(dimensions == 1 or len(vector) <= len(self._prompt), "more vectors than tokens")

    def _check_metrics(self, metrics: Any, arrival: float) -> None:
        require(isinstance(metrics, RequestMetrics), "metrics of another type")
        now = time.monotonic()
        previous = metrics.arrival_time = arrival
        for name in _TIMES:
            value = getattr(metrics, name)
            if value is None:
                continue
            require(_is_number(value), "a time that is no number")
            previous = min(max(value, previous), now)
            setattr(metrics, name, previous)
        for name in _COUNTS:
            require(is_count(getattr(metrics, name), 2**53), "a count that is no number")
        metrics.num_cached_tokens = min(metrics.num_cached_tokens, len(self._prompt))


def _is_number(value: object) -> bool:
    """Return whether a value is a number, or minus infinity as the logarithm of 0."""
    return isinstance(value, float | int) and -math.inf <= value < math.inf
