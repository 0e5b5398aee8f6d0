"""A scripted engine without a model, for tests of the server, clients and adapters.

Its answers are scripted, so that tests know the expected output. Its interface, deltas and metrics
are those of `ed_esurge.engine.AsyncEngine`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError, ConfigError
from flax import nnx

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import AdapterTable, LoadedAdapter
from ed_esurge.engine.intake import CheckedPrompt, check_params_token_ids
from ed_esurge.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs
from ed_esurge.tokenizer import StopStringSearch, Tokenizer

if TYPE_CHECKING:
    from ed_models.speech import Transcript

    from ed_esurge.grammars.store import Grammars

#: Tokens that the scripted engine creates before another request has its turn.
_STEP_TOKENS = 16
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('a conversation starts with the user') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """Return a tokenizer with one token per byte, `<s>` before each text, and `</s>`.

    Every non-ASCII character consists of several tokens: the hardest case for streams of text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast


class ScriptedEngine:
    """Answers every prompt with a known text, one token per delta.

    Args:
        reply: text of choice number `i` of a prompt; it ends with the end-of-sequence token.
        delay: seconds between tokens.
        config: options for long prompts and the order of the queue. By default, prompts that do not
            fit are rejected.
        fail_after: number of tokens after which the engine simulates a failure of its thread.

    Attributes:
        requests: sampling parameters by request id, in order of arrival.
        options: queue options (`priority`, `cache_salt`, `lora_name`) by request id.
        aborted: ids of the aborted requests.
        resets: number of resets of the prefix cache.
    """

    def __init__(
        self,
        reply: Callable[[list[int], int], str] = lambda prompt, choice: f"Grüße 世界 🌍 {choice}",
        *,
        tokenizer: Tokenizer | None = None,
        max_model_len: int = 256,
        config: EngineConfig | None = None,
        delay: float = 0.0,
        fail_after: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer if tokenizer is not None else byte_tokenizer()
        self.model_name = "scripted"
        self.max_model_len = max_model_len
        self.config = config or EngineConfig(strict_context=True)
        self.vocab_size = len(self.tokenizer)
        self.is_healthy = True
        self.requests: dict[str, SamplingParams] = {}
        self.options: dict[str, dict[str, object]] = {}
        self.aborted: list[str] = []
        self.resets = 0
        self._reply = reply
        self._delay = delay
        self._fail_after = fail_after
        self._running = 0
        self.is_sleeping = False
        self._adapters = AdapterTable(self.config.max_loras)
        self._grammars: Grammars | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scripted-engine")

    def compile_structured(self, structured_outputs: StructuredOutputs) -> Future[Any]:
        """Compile a grammar. The scripted answer does not follow the grammar."""
        if self._grammars is None:
            from ed_esurge.grammars.store import Grammars

            self._grammars = Grammars(self.tokenizer, self.vocab_size, ())
        return self._grammars.submit(structured_outputs)

    def stats(self) -> dict[str, float]:
        """Return the metrics of the engine for `/metrics`."""
        return {"num_requests_running": self._running, "num_requests_waiting": 0}

    def replica_stats(self) -> list[dict[str, float]]:
        """Return the metrics of each replica: a list with one entry."""
        return [self.stats()]

    async def generate(
        self,
        prompt_token_ids: list[int] | CheckedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        **options: object,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the deltas of the scripted answer, choice by choice and token by token."""
        prompt_token_ids = _tokens(prompt_token_ids)
        check_params_token_ids(sampling_params, self.vocab_size)
        self.requests[request_id] = sampling_params
        self.options[request_id] = options
        metrics = RequestMetrics(arrival_time=time.monotonic())
        self._running += 1
        done = False
        try:
            # The real engine creates both in its thread as well.
            run = partial(asyncio.get_running_loop().run_in_executor, self._thread)
            scores = await run(_prompt_logprobs, prompt_token_ids, sampling_params)
            num_sent = 0
            for choice in range(sampling_params.n):
                reply = self._reply(prompt_token_ids, choice)
                completion = _completion(self.tokenizer, reply, choice, sampling_params)
                async for out in _read_in_steps(completion, run):
                    await asyncio.sleep(self._delay)
                    if num_sent == self._fail_after:
                        self.is_healthy = False
                        return
                    first = num_sent == 0
                    num_sent += 1
                    self._stamp(metrics, first)
                    last = done = out.finished and choice == sampling_params.n - 1
                    yield RequestOutput(
                        request_id=request_id,
                        prompt_token_ids=prompt_token_ids,
                        outputs=[out],
                        finished=last,
                        metrics=metrics,
                        prompt_logprobs=scores if first else None,
                        delta=True,
                    )
        finally:
            self._running -= 1
            if not done:
                self.aborted.append(request_id)

    async def reset_prefix_cache(self) -> None:
        """Count the call. The scripted engine has no cache."""
        self.resets += 1

    async def sleep(self, level: int = 1) -> None:
        """Set the sleeping state. The scripted engine has no device memory."""
        self.is_sleeping = True

    async def wake_up(self) -> None:
        """Clear the sleeping state."""
        self.is_sleeping = False

    async def load_lora_adapter(self, name: str, source: Path) -> None:
        """Load any directory with an `adapter_config.json` as an adapter."""
        if not (source / "adapter_config.json").is_file():
            raise CheckpointError(f"{source} holds no adapter_config.json")
        self._adapters.add(name, 1, str(source), ())

    async def unload_lora_adapter(self, name: str) -> None:
        """Unload an adapter."""
        self._adapters.remove(name)

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """Return the loaded adapters, in loading order."""
        return list(self._adapters)

    async def embed(
        self,
        prompt_token_ids: list[int] | CheckedPrompt,
        pooling_params: PoolingParams,
        request_id: str,
        **options: object,
    ) -> RequestOutput:
        """Return a vector with the counts of the first eight bytes of the vocabulary."""
        prompt_token_ids = _tokens(prompt_token_ids)
        self.options[request_id] = options
        await asyncio.sleep(self._delay)
        vector = np.bincount(np.asarray(prompt_token_ids) % 8, minlength=8).astype(np.float32)
        if pooling_params.normalize:
            vector /= np.linalg.norm(vector)
        output = CompletionOutput(0, finish_reason="stop")
        metrics = RequestMetrics(time.monotonic())
        return RequestOutput(
            request_id, prompt_token_ids, [output], True, metrics, delta=True, pooled=vector
        )

    @staticmethod
    def _stamp(metrics: RequestMetrics, first: bool) -> None:
        now = time.monotonic()
        if first:
            metrics.first_scheduled_time = metrics.first_token_time = now
        metrics.last_token_time = now
        metrics.num_generated_tokens += 1


def _tokens(prompt: list[int] | CheckedPrompt) -> list[int]:
    return prompt.token_ids if isinstance(prompt, CheckedPrompt) else prompt


def _position(token: int, place: int, count: int) -> PositionLogprobs:
    """Return log-probabilities: 1/2 for the token, 1/4, 1/8, … for the alternatives."""
    position = {token: Logprob(math.log(0.5), rank=1)}
    for step in range(1, count):
        position[(token + step) % 256] = Logprob(math.log(0.5) * (step + 1), rank=step + 1)
    return position


async def _read_in_steps(
    outputs: Iterator[CompletionOutput], run: Callable[..., Awaitable[list[CompletionOutput]]]
) -> AsyncGenerator[CompletionOutput]:
    """Yield outputs that a thread creates, a few at a time, so that requests take turns."""
    while step := await run(list, islice(outputs, _STEP_TOKENS)):
        for out in step:
            yield out


def _prompt_logprobs(
    prompt: list[int], params: SamplingParams
) -> list[PositionLogprobs | None] | None:
    count = params.prompt_logprobs
    if count is None:
        return None
    positions = [_position(token, place, count) for place, token in enumerate(prompt[1:])]
    return [None, *positions]


def _completion(
    tokenizer: Tokenizer, reply: str, index: int, params: SamplingParams
) -> Iterator[CompletionOutput]:
    """Yield the text of each token in whole characters, up to a stop string or `max_tokens`."""
    reply = reply.encode("utf-8", "replace").decode()  # tokens spell no lone surrogate
    tokens = tokenizer(reply, add_special_tokens=False)["input_ids"]
    if not params.ignore_eos:
        tokens = [*tokens, tokenizer.eos_token_id]
    limit = min(len(tokens), params.max_tokens or len(tokens))
    search = StopStringSearch(
        params.stop,
        include=params.include_stop_str_in_output,
        thoughts=params.thought_texts,
    )
    num_written, total = 0, 0.0
    for place in range(limit):
        ended = tokens[place] == tokenizer.eos_token_id
        text = tokenizer.decode(
            tokens[: place + (not ended)], skip_special_tokens=params.skip_special_tokens
        )
        done: FinishReason | None = None
        if ended:
            done = "stop"
        elif place == limit - 1:
            done = "length"
        else:
            text = text.rstrip("\ufffd")
        piece = search.push(text[num_written:])
        num_written = max(num_written, len(text))
        if search.found is not None:
            done = "stop"
        elif done is not None:
            piece += search.flush()
        total += math.log(0.5)
        logprobs = None
        if params.logprobs is not None:
            logprobs = [_position(tokens[place], place, params.logprobs)]
        yield CompletionOutput(
            index=index,
            text=piece,
            token_ids=[tokens[place]],
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else total,
            finish_reason=done,
            stop_reason=search.found,
        )
        if done is not None:
            return


# A template that renders all its inputs as JSON.
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message | tojson }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think %}<think>\n{% endif %}{% endif %}"
    "{# <tool_call> <think> #}"
)
TOOL_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL_CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOOL_REPLIES = {
    "call": f"<think>\nI look it up.\n</think>\n\nOne moment.\n{TOOL_CALLS}",
    "only": TOOL_CALLS,
    "plain": "It is <b>sunny</b>.",
    "broken": '<tool_call>\n{"name": "weather", "arguments": {city}}\n</tool_call>',
    "unknown": '<tool_call>\n{"name": "storm", "arguments": {}}\n</tool_call>',
    "inside": "I look.\n</think>\n\nSunny.",
}


class NamedReplies(ScriptedEngine):
    """Answers with the entry of `TOOL_REPLIES` that the prompt names: `reply call`.

    Attributes:
        prompts: prompts of the requests, in order.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(self._answer, max_model_len=8192, **options)
        self.prompts: list[str] = []

    def _answer(self, prompt: list[int], choice: int) -> str:
        text = self.tokenizer.decode(prompt)
        self.prompts.append(text)
        return next(TOOL_REPLIES[name] for name in TOOL_REPLIES if f"reply {name}" in text)


class _EmptyModel(nnx.Module):
    """A model without weights, with the vocabulary of `byte_tokenizer`."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=258)


class ScriptedTranscriber:
    """A model for speech without weights: each second of a recording has one word.

    Args:
        delay: seconds of each attempt, one for each second of the recording.

    Attributes:
        attempts: number of attempts so far.
    """

    sampling_rate = 16000
    task = TaskType.CTC
    options: frozenset[str] = frozenset()
    languages: tuple[str, ...] = ()

    def __init__(self, delay: float = 0.0) -> None:
        self.processor = SimpleNamespace(tokenizer=byte_tokenizer(None))
        self.model = _EmptyModel()
        self.attempts, self._delay = 0, delay

    def transcribe(
        self,
        samples: np.ndarray,
        *,
        seed: int = 0,
        on_segment: Callable[[Any], object] = lambda segment: None,
        on_attempt: Callable[[], object] = lambda: None,
        **options: object,
    ) -> Transcript:
        """Return one segment for each second."""
        from ed_models.speech import Segment, Transcript

        for name, value in options.items():
            raise ConfigError(f"{name}={value!r} has no effect")
        segments = []
        for second in range(math.ceil(len(samples) / self.sampling_rate)):
            on_attempt()
            self.attempts += 1
            time.sleep(self._delay)
            segments.append(Segment(second, second, second + 1, f"word{second}", (second % 256,)))
            on_segment(segments[-1])
        text = " ".join(segment.text for segment in segments)
        return Transcript(text, None, len(samples) / self.sampling_rate, tuple(segments))
