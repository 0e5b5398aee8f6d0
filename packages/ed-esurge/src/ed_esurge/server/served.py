"""One served model: the engine behind it, its names, and the way in that every endpoint takes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError, did_you_mean
from fastapi import Request

from ed_esurge.config import EngineConfig, ServerLimits
from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs
from ed_esurge.server.errors import APIError, engine_unavailable
from ed_esurge.server.formats import ReplyFormats
from ed_esurge.server.logprobs import TokenTexts
from ed_esurge.server.metrics import Metrics, RequestTimer
from ed_esurge.server.prompts import Prompts
from ed_esurge.server.protocol import GenerationRequest
from ed_esurge.server.store import ResponseStore
from ed_esurge.server.watch import Watch


@runtime_checkable
class ServedEngine(Protocol):
    """What the server needs of an engine; `ed_esurge.engine.AsyncEngine` has it."""

    tokenizer: Any
    model_name: str
    max_model_len: int
    vocab_size: int
    config: EngineConfig

    @property
    def is_healthy(self) -> bool:
        """False when the engine's thread is dead or stuck in a step."""
        ...

    def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Deltas of one request. Closing the iterator early aborts the request."""
        ...

    async def embed(
        self, prompt_token_ids: list[int], pooling_params: PoolingParams, request_id: str
    ) -> RequestOutput:
        """The pooled vector of one prompt; cancelling aborts the request."""
        ...

    def check_structured(self, wanted: StructuredOutputs) -> None:
        """Compile the grammar of a structured output. Raises ConfigError: it is none."""
        ...

    def stats(self) -> Mapping[str, float]:
        """The numbers that `ed_esurge.server.metrics.EngineCollector` exports."""
        ...


class Served:
    """A model as clients see it.

    Args:
        engine: where requests go.
        names: what clients may call the model; the first is its own.
        prompts: the encoder of the model's prompts.
        formats: how the model writes calls and thoughts.
        metrics: where requests are counted.
        limits: what clients may ask for at once.
    """

    def __init__(
        self,
        engine: ServedEngine,
        names: Sequence[str],
        prompts: Prompts,
        formats: ReplyFormats,
        metrics: Metrics,
        limits: ServerLimits,
    ) -> None:
        self.engine = engine
        self.names = tuple(names)
        self.prompts = prompts
        self.formats = formats
        self.metrics = metrics
        self.limits = limits
        self.stopping = asyncio.Event()
        """Set when the server, asked to stop, waits no longer for what runs."""
        self.responses = ResponseStore(limits.max_stored_responses)
        self.draining = False
        """The server was asked to stop."""
        self.decoding: asyncio.Task[str | None] | None = None
        """The last look whether a token comes; see `ed_esurge.server.health`."""
        self.texts = TokenTexts(prompts.tokenizer)
        self.created = int(time.time())

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here; no name means the one that is.

        Raises:
            APIError: 404 `model_not_found`.
        """
        if name is not None and name not in self.names:
            hint = did_you_mean(name, self.names) or f"; this server has {self.name!r}"
            raise APIError(
                f"the model {name!r} does not exist{hint}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def sampling_params(
        self, request: GenerationRequest, max_tokens: int, **more: Any
    ) -> SamplingParams:
        """The engine's options for a request; extensions that were not sent keep its defaults."""
        extensions = {
            name: value
            for name in (
                "top_k",
                "min_p",
                "repetition_penalty",
                "min_tokens",
                "stop_token_ids",
                "ignore_eos",
                "include_stop_str_in_output",
                "skip_special_tokens",
                "logit_bias",
                "allowed_token_ids",
                "bad_words",
            )
            if (value := getattr(request, name)) is not None
        }
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            self.prompts.check_tokens(list(getattr(request, name) or ()), param=name)
        options = {
            "n": request.n,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop": tuple(request.stop),
            "presence_penalty": request.presence_penalty,
            "frequency_penalty": request.frequency_penalty,
            "max_tokens": max_tokens,
        }
        return SamplingParams(**{**options, **extensions, **more})

    def check_generations(self, count: int) -> None:
        """Refuse a request for more completions than the limit.

        Raises:
            APIError: 400.
        """
        if count > self.limits.max_generations:
            raise APIError(
                f"the request asks for {count} completions, prompts times choices, and this server "
                f"gives {self.limits.max_generations} at most: send several requests",
                param="n",
                code="invalid_value",
            )

    def watch(self, request: Request) -> Watch:
        """What may end a request from outside, from now on."""
        return Watch(request.receive, self.stopping, self.limits.request_timeout)

    def queue_options(self, request: GenerationRequest) -> dict[str, Any]:
        """How the engine queues a request: keywords of its `generate`, where there are any.

        Raises:
            APIError: 400, for a priority that would have no effect.
        """
        if request.priority and self.engine.config.scheduling_policy != "priority":
            raise APIError(
                "this server answers in order of arrival, so a priority has no effect: leave it at "
                "0, or start the engine with scheduling_policy: priority",
                param="priority",
            )
        options = {"priority": request.priority, "cache_salt": request.cache_salt}
        return {name: value for name, value in options.items() if value}

    async def generate(
        self, prompt: list[int], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput]:
        """Deltas of one request, counted; whoever stops listening aborts it.

        Args:
            options: see `queue_options`.

        Raises:
            APIError: 400 when the engine cannot run the request as it is, 500 when it fails on it,
                503 when it is down or gives the request up.
        """
        if not self.engine.is_healthy:
            raise engine_unavailable()
        timer = self.metrics.request(len(prompt), params.n)
        with self._translated(timer):
            deltas = self.engine.generate(prompt, params, request_id, **options)
            finished = False
            async with aclosing(deltas) as stream:
                async for output in stream:
                    timer.observe(output)
                    self._check_ended(output)
                    finished = output.finished
                    yield output
            if not finished:
                raise engine_unavailable("the engine stopped in the middle of the request")

    @contextmanager
    def _translated(self, timer: RequestTimer) -> Iterator[None]:
        """Errors of the engine as those of the API; a request without its own end was aborted."""
        try:
            yield
        except ConfigError as error:
            raise APIError(str(error)) from error
        except EasyDeLError as error:
            raise engine_unavailable(str(error)) from error
        finally:
            timer.aborted()

    @staticmethod
    def _check_ended(output: RequestOutput) -> None:
        """Raise APIError where the engine ended a request itself."""
        for out in output.outputs:
            if out.finish_reason == "abort":
                raise engine_unavailable("the engine gave the request up")
            if out.finish_reason == "error":
                said = output.error or "the engine failed on this request"
                raise APIError(said, status=500, code="internal_error")

    async def vectors(self, prompts: Sequence[list[int]], params: PoolingParams) -> np.ndarray:
        """The pooled vectors of prompts, [n, d] float32.

        Raises:
            APIError: as `generate`.
        """
        name = new_id("embd", None)

        async def one(place: int, prompt: list[int]) -> np.ndarray:
            timer = self.metrics.request(len(prompt))
            with self._translated(timer):
                output = await self.engine.embed(prompt, params, f"{name}-{place}")
                timer.observe(output)
                self._check_ended(output)
            assert output.pooled is not None, "a pooled request ends with its vector"
            return output.pooled

        if not self.engine.is_healthy:
            raise engine_unavailable()
        try:
            async with asyncio.TaskGroup() as group:
                jobs = [group.create_task(one(*item)) for item in enumerate(prompts)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return np.stack([job.result() for job in jobs])


def new_id(kind: str, wanted: str | None) -> str:
    """A request id as OpenAI's look: `cmpl-…`, `chatcmpl-…`; the rest may be the client's."""
    return f"{kind}-{wanted or uuid.uuid4().hex}"
