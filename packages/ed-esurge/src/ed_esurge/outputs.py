"""Outputs of the engine, and their delivery to coroutines. Plain dataclasses without jax; the names
are vLLM's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np
from ed_infra.logging import get_logger

logger = get_logger(__name__)

FinishReason = Literal["stop", "length", "abort", "error"]

#: Upper bounds of the histogram of the tokens of a step.
STEP_SIZES = (1, *(2**power for power in range(3, 15)))


@dataclass(frozen=True, slots=True)
class LabelSet:
    """The labels of a classifier.

    Attributes:
        names: name of each label; None = the checkpoint has no name for the label.
        problem_type: problem of the checkpoint, in Hugging Face's spelling: "regression",
            "single_label_classification", "multi_label_classification", or None.
        score_activation: activation of the score of a pair of texts, for one label; see `scores`.
    """

    names: tuple[str | None, ...]
    problem_type: str | None = None
    score_activation: Literal["identity", "sigmoid"] = "sigmoid"

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probability of each label.

        A softmax of the logits; a sigmoid for several labels per text, and for a single label
        without a problem type. The logits of a regression are returned unchanged.

        Args:
            logits: float [n, labels].
        """
        logits = logits.astype(np.float64)
        if self.problem_type == "regression":
            return logits
        independent = self.problem_type == "multi_label_classification"
        if independent or (self.problem_type is None and len(self.names) == 1):
            return _sigmoid(logits)
        exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return exponents / exponents.sum(axis=-1, keepdims=True)

    def scores(self, logits: np.ndarray) -> np.ndarray:
        """Return the scores of pairs of texts, as `CrossEncoder` of sentence-transformers does.

        Args:
            logits: float [n, 1].

        Returns:
            float [n].
        """
        logits = logits[:, 0].astype(np.float64)
        return logits if self.score_activation == "identity" else _sigmoid(logits)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid, without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits))


def append_text(owner: object, name: str, piece: str) -> None:
    """Append a piece to an attribute with text, in constant time for each character.

    `owner.name += piece` copies the text, because the attribute refers to the text as well. CPython
    extends a text in place if a local variable has the only reference.
    """
    text: str = getattr(owner, name)
    setattr(owner, name, "")
    text += piece
    setattr(owner, name, text)


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position.

    Attributes:
        logprob: natural logarithm of the token's probability under the model (temperature 1, no
            penalty).
        rank: rank by probability; 1 for the most probable token.
        decoded_token: text of the token, or None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> Logprob: the sampled token first, then the alternatives by rank."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request.

    Attributes:
        index: 0 … n-1.
        text: text of the completion; in a delta only the new text.
        token_ids: tokens of the completion; in a delta only the new tokens. The token that ended
            the completion is included; `text` excludes the text of that token.
        logprobs: one dict per token of `token_ids`, or None when not requested.
        cumulative_logprob: sum over the whole completion so far, or None without logprobs.
        finish_reason: None while running; "stop" (end of sequence, stop token or string),
            "length", "abort", "error" (see `RequestOutput.error`).
        stop_reason: the stop string or stop token id that ended the completion; None for end of
            sequence.
        routed_experts: experts of each token but the last one, prompt included, int16 [tokens,
            layers, k], -1 for layers without experts; in the last delta. None unless the engine
            returns experts (`Records.experts`).
        sampling_masks: for each token of `token_ids` the tokens from which it was sampled, in
            ascending order, int32. None unless the engine returns masks (`Records.masks`).
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    routed_experts: np.ndarray | None = None
    sampling_masks: list[np.ndarray] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, new: CompletionOutput) -> None:
        """Append a later delta of this completion, in place."""
        append_text(self, "text", new.text)
        self.token_ids += new.token_ids
        if new.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += new.logprobs
        self.cumulative_logprob = new.cumulative_logprob
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason
        self.routed_experts = new.routed_experts
        if new.sampling_masks is not None:
            self.sampling_masks = [] if self.sampling_masks is None else self.sampling_masks
            self.sampling_masks += new.sampling_masks


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request in seconds of `time.monotonic()`, and its token counts.

    A time is None until the event has happened.

    Attributes:
        num_cached_tokens: number of prompt tokens read from the prefix cache.
        num_preemptions: number of times the request lost its pages and was recomputed.
        num_generated_tokens: number of generated tokens over all completions of the request.
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
    """The output of a request: complete (`delta=False`), or the new part (`delta=True`).

    `generate` returns complete outputs. `step`, `stream` and `AsyncEngine.generate` return deltas.
    A delta lists only the completions that changed. The first delta has the `prompt_logprobs`.

    Attributes:
        prompt: the text of the prompt; None for a prompt of token ids.
        prompt_token_ids: the token ids of the prompt after truncation.
        prompt_logprobs: one entry per prompt token; the first is None. None when not requested.
        finished: whether all completions have a finish reason. No output follows.
        pooled: the vector [d] of a request with `PoolingParams`, float32. The task `token_embed`
            has one vector of each token, [n, d]. The only output of such a request has one
            completion without tokens, which has the finish reason.
        error: the error message, if a completion has the finish reason "error".
        seed: value of `SamplingParams(seed=...)` that reproduces the tokens; None for a pooled
            request.
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

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens in `outputs`."""
        return sum([len(out.token_ids) for out in self.outputs])

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were read from the prefix cache."""
        return self.metrics.num_cached_tokens

    # EasyDeL's names.

    def get_text(self) -> str:
        """Return the text of the first completion; of a delta, its new text."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def delta_text(self) -> str:
        """The new text of the first completion; the text of an output that is no delta."""
        return self.get_text()

    @property
    def accumulated_text(self) -> str:
        """The text of the first completion so far; the deltas of `eSurge.stream` know it."""
        return self.get_text()

    @property
    def num_generated_tokens(self) -> int:
        """Number of generated tokens of the request so far."""
        return self.metrics.num_generated_tokens

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second from the arrival to the last token; 0 without a token."""
        last = self.metrics.last_token_time
        seconds = 0.0 if last is None else last - self.metrics.arrival_time
        return self.metrics.num_generated_tokens / seconds if seconds > 0 else 0.0

    def add(self, new: RequestOutput) -> None:
        """Append a later delta to this output, in place."""
        mine = {out.index: out for out in self.outputs}
        for out in new.outputs:
            old = mine.get(out.index)
            if old is None:
                fresh = replace(out, token_ids=list(out.token_ids))
                if out.logprobs is not None:
                    fresh.logprobs = list(out.logprobs)
                if out.sampling_masks is not None:
                    fresh.sampling_masks = list(out.sampling_masks)
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


@dataclass(slots=True)
class StreamedOutput(RequestOutput):
    """A delta of `eSurge.stream`, which knows the text before it.

    Attributes:
        texts: texts of all deltas of the first completion, which the deltas of a request share.
        text_count: number of texts up to this delta.
    """

    texts: list[str] = field(default_factory=list, compare=False, repr=False)
    text_count: int = field(default=0, compare=False, repr=False)

    @property
    def accumulated_text(self) -> str:
        """The text of the first completion so far."""
        return "".join(self.texts[: self.text_count])


def accumulate_texts(deltas: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
    """Yield the deltas of one request, with the text before each."""
    texts: list[str] = []
    for delta in deltas:
        texts += [out.text for out in delta.outputs if out.index == 0]
        values = {name.name: getattr(delta, name.name) for name in fields(RequestOutput)}
        yield StreamedOutput(**values, texts=texts, text_count=len(texts))


OutputItem = RequestOutput | BaseException


class Follower:
    """Queue of the outputs of one request, in the event loop of the waiting coroutine."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: deque[OutputItem] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.over = False
        """Whether the last output or an error was read."""

    def put(self, item: OutputItem) -> None:
        """Append an output. Must be called in the event loop."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """Return the next delta. Deltas of several steps are merged if the reader is slower."""
        while not self._items:
            self._waiter = self.loop.create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, RequestOutput):
            while self._items and isinstance(following := self._items[0], RequestOutput):
                item.add(following)
                self._items.popleft()
            self.over = item.finished
            return item
        self.over = True
        raise item


def hand_over(items: Iterable[tuple[Follower, OutputItem]]) -> None:
    """Pass outputs from the engine's thread to their followers.

    One call per event loop, because each call wakes the loop.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Follower, OutputItem]]] = {}
    for follower, item in items:
        by_loop.setdefault(follower.loop, []).append((follower, item))
    for loop, batch in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, batch)
        except RuntimeError:
            logger.debug("the loop of a request has closed: its output is dropped")


def _put(batch: list[tuple[Follower, OutputItem]]) -> None:
    for follower, item in batch:
        follower.put(item)


def refuse(waiting: Follower | Future[None], error: BaseException) -> None:
    """Deliver an error."""
    if isinstance(waiting, Future):
        waiting.set_exception(error)
    else:
        hand_over([(waiting, error)])
