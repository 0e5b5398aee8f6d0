"""One served model: the engine behind it, its names, and the way in that every endpoint takes."""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError
from fastapi import Request

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs
from ed_esurge.server.generation.logprobs import TokenTexts
from ed_esurge.server.generation.prompts import Prompts
from ed_esurge.server.generation.reply_formats import ReplyFormats
from ed_esurge.server.generation.requests import GenerationRequest
from ed_esurge.server.generation.state import ServerState
from ed_esurge.server.http.errors import APIError, engine_unavailable
from ed_esurge.server.http.threads import aside
from ed_esurge.server.http.watch import Watch
from ed_esurge.server.metrics import Metrics, RequestTimer
from ed_esurge.server.tracing import RequestSpan


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

    @property
    def is_sleeping(self) -> bool:
        """Whether the device is lent to others, so that no request can be answered."""
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Lend the device: 1 keeps the weights in host memory, 2 forgets them."""
        ...

    async def wake_up(self) -> None:
        """Take the device again."""
        ...

    def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Deltas of one request. Closing the iterator early aborts the request."""
        ...

    async def embed(
        self,
        prompt_token_ids: list[int],
        pooling_params: PoolingParams,
        request_id: str,
        *,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> RequestOutput:
        """The pooled vector of one prompt; cancelling aborts the request."""
        ...

    async def load_lora_adapter(self, name: str, source: Path) -> None:
        """Serve a LoRA adapter under a name."""
        ...

    async def unload_lora_adapter(self, name: str) -> None:
        """Let no new request use an adapter."""
        ...

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """The loaded adapters."""
        ...

    def compile_structured(self, wanted: StructuredOutputs) -> Future[Any]:
        """Compile the grammar of a structured output. The result, or the call itself, raises a
        ConfigError for what is no grammar."""
        ...

    def replica_stats(self) -> Sequence[Mapping[str, float]]:
        """The numbers of each replica, which `metrics.EngineCollector` exports."""
        ...


class Served:
    """A model as clients see it.

    Args:
        engine: where requests go.
        names: what clients may call the model; the first is its own.
        prompts: the encoder of the model's prompts.
        formats: how the model writes calls and thoughts.
        metrics: where requests are counted.
        state: what it shares with other models of the server.
        adapter_directory: below which clients may name LoRA adapters to load; None: they may not.

    Attributes:
        name: what answers carry.
        lora_name: the adapter that requests go to; None: the model itself.
        owner: whose requests these are, see `auth.owner_of`; empty: nobody's in particular.
        adapter_owners: name of an adapter -> the digests of the keys that may use the adapter. An
            adapter without an entry is for every key.
    """

    def __init__(
        self,
        engine: ServedEngine,
        names: Sequence[str],
        prompts: Prompts,
        formats: ReplyFormats,
        metrics: Metrics,
        state: ServerState,
        adapter_directory: Path | None = None,
    ) -> None:
        self.engine = engine
        self.names = tuple(names)
        self.prompts = prompts
        self.formats = formats
        self.metrics = metrics
        self.state = state
        self.adapter_directory = adapter_directory
        self.name = self.names[0]
        self.lora_name: str | None = None
        self.owner = ""
        self.adapter_owners: dict[str, frozenset[str]] = {}
        self.decoding: asyncio.Task[str | None] | None = None
        """The last look whether a token comes; see `ed_esurge.server.operations.health`."""
        self.texts = TokenTexts(prompts.tokenizer)
        self.created = int(time.time())

    def adapters(self, owner: str) -> dict[str, LoadedAdapter]:
        """Return the loaded adapters that a key may use, by name."""
        return {
            adapter.name: adapter
            for adapter in self.engine.list_lora_adapters()
            if owner in self.adapter_owners.get(adapter.name, (owner,))
        }

    def seen_by(self, owner: str, adapter: str | None = None) -> Served:
        """Return the same model for the requests of one key, with an adapter if one is named."""
        twin = copy.copy(self)
        twin.owner = owner
        if adapter is not None:
            twin.name = twin.lora_name = adapter
        return twin

    def card(self, name: str) -> dict[str, Any]:
        """What `/v1/models` says under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "ed-esurge",
            "root": self.names[0],
            "parent": None,
            "max_model_len": self.prompts.max_model_len,
        }

    async def sampling_params(
        self, request: GenerationRequest, max_tokens: int, **more: Any
    ) -> SamplingParams:
        """Return the engine's options for a request.

        Extensions that were not sent keep the engine's defaults.

        Raises:
            APIError: 400, the model does not know a token id.
        """
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
        listed = 32 * len(request.allowed_token_ids or ())  # bytes, roughly
        return await aside(lambda: SamplingParams(**{**options, **extensions, **more}), listed)

    def check_generations(self, count: int) -> None:
        """Refuse a request for more completions than the limit.

        Raises:
            APIError: 400.
        """
        if count > self.state.limits.max_generations:
            raise APIError(
                f"the request asks for {count} completions, prompts times choices, and this server "
                f"gives {self.state.limits.max_generations} at most: send several requests",
                param="n",
                code="invalid_value",
            )

    def watch(self, request: Request) -> Watch:
        """What may end a request from outside, from now on."""
        return Watch(request.receive, self.state.stopping, self.state.limits.request_timeout)

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
        options = {"priority": request.priority, **self._salt(request.cache_salt)}
        return {name: value for name, value in options.items() if value}

    def _salt(self, own: str | None = None) -> dict[str, str]:
        """Return the `cache_salt` of a request, as a keyword of the engine's methods.

        Keys share no cached prefixes unless the server says so: otherwise a client learns from
        `cached_tokens`, and from the time of an answer, that another key sent the same prompt.
        """
        if self.owner and not self.state.share_prefix_cache:
            return {"cache_salt": f"{self.owner}:{own or ''}"}
        return {} if own is None else {"cache_salt": own}

    async def generate(
        self, prompt: list[int], params: SamplingParams, label: str, **options: Any
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the deltas of one request, and count its tokens. Closing the generator aborts it.

        Args:
            label: what the log and traces call the request. Clients may send equal labels: the
                engine gets an id of its own for each request.
            options: see `queue_options`.

        Raises:
            APIError: 400 when the engine cannot run the request as it is, 500 when it fails on it,
                503 when it is down or gives the request up.
        """
        self._check_there()
        span = self._span(label, prompt, params)
        timer = self.metrics.request(len(prompt), params.n, span)
        request_id = f"{label}-{uuid.uuid4().hex}"
        with self._translated(timer):
            deltas = self.engine.generate(prompt, params, request_id, **options, **self._adapter())
            finished = False
            async with aclosing(deltas) as stream:
                async for output in stream:
                    timer.observe(output)
                    self._check_ended(output)
                    finished = output.finished
                    yield output
            if not finished:
                raise engine_unavailable("the engine stopped in the middle of the request")

    def _check_there(self) -> None:
        if not self.engine.is_healthy:
            raise engine_unavailable()
        if self.engine.is_sleeping:
            raise APIError(
                f"the model {self.name!r} sleeps, and its device is lent to others: POST /wake_up, "
                "or try again later",
                status=503,
                code="engine_sleeping",
            )

    def _span(
        self, request_id: str, prompt: list[int], params: SamplingParams | PoolingParams
    ) -> RequestSpan | None:
        tracing = self.state.tracing
        if tracing is None:
            return None
        return tracing.request(request_id, self.name, len(prompt), params)

    def _adapter(self) -> dict[str, Any]:
        return {} if self.lora_name is None else {"lora_name": self.lora_name}

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
            timer.over()

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
            span = self._span(f"{name}-{place}", prompt, params)
            timer = self.metrics.request(len(prompt), span=span)
            with self._translated(timer):
                output = await self.engine.embed(
                    prompt, params, f"{name}-{place}", **self._salt(), **self._adapter()
                )
                timer.observe(output)
                self._check_ended(output)
            assert output.pooled is not None, "a pooled request ends with its vector"
            return output.pooled

        self._check_there()
        try:
            async with asyncio.TaskGroup() as group:
                jobs = [group.create_task(one(*item)) for item in enumerate(prompts)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return np.stack([job.result() for job in jobs])


def new_id(kind: str, wanted: str | None) -> str:
    """Return the id of an answer, as OpenAI's look: `cmpl-…`, `chatcmpl-…`.

    Args:
        wanted: the client's own label instead of a random part. Nothing is found by such an id.
    """
    return f"{kind}-{wanted or uuid.uuid4().hex}"
