"""The served models: names, adapters, and the requests to their engines."""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, EasyDeLError
from ed_models.checkpoints.embedding_settings import EmbeddingSettings
from starlette.requests import Request

from ed_esurge.config import ApiKey, SamplingDefaults
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.engine.intake import (
    CheckedPrompt,
    ContextLengthError,
    RequestOptions,
    TokenIdError,
)
from ed_esurge.outputs import LabelSet, RequestOutput
from ed_esurge.sampling import PoolingParams, SamplingParams
from ed_esurge.server.activity import Activity
from ed_esurge.server.detached import DetachedAnswers
from ed_esurge.server.generation.abilities import ABILITIES, POOLS, require_ability
from ed_esurge.server.generation.answer_size import (
    FREE_BYTES,
    NUMBER_BYTES,
    VECTOR_BYTES,
    AnswerSize,
)
from ed_esurge.server.generation.engine import ServedEngine
from ed_esurge.server.generation.logprobs import TokenTexts
from ed_esurge.server.generation.pooled_requests import PooledRequest
from ed_esurge.server.generation.prompts import PromptEncoder, invalid_token
from ed_esurge.server.generation.reply_formats import ReplyFormats
from ed_esurge.server.generation.requests import ChatRequest, GenerationRequest
from ed_esurge.server.http.admission import RESERVATION, Budget, Reservation
from ed_esurge.server.http.body import aside
from ed_esurge.server.http.errors import APIError, engine_unavailable, hide_paths
from ed_esurge.server.http.fields import LLAMA_SAMPLERS, RequestBody, UnknownFieldsPolicy
from ed_esurge.server.http.streaming import RequestLifetime, run_in_turns
from ed_esurge.server.mcp_servers import McpServers
from ed_esurge.server.metrics import ModelMetrics, RequestTimer
from ed_esurge.server.options import AppOptions
from ed_esurge.server.stores import ResponseStore
from ed_esurge.server.tracing import RequestSpan, Tracing

#: Number of prompts, and of their tokens, that a server remembers to explain missed prefixes.
RECENT_PROMPTS, RECENT_TOKENS = 128, 2**20
# Numbers of a vector before the first vector of the model is known.
_WIDTH = 1024


@dataclass(slots=True)
class RecentPrompt:
    """A prompt of the engine, from which `operations.prefixes` explains the use of the cache.

    Attributes:
        label: name of the prompt in the log: the request id, or request id and index.
        model: name of the model.
        owner: the key of the request, see `http.auth.get_owner`.
        variant: adapter and `cache_salt`, whose prompts do not share pages.
        scores_prompt: whether log-probabilities of the prompt are requested.
        items: start and key of each item of an encoder, such as an image.
        tokens: token ids of the prompt, and of its first answer so far.
        size: number of tokens of the prompt.
        time: time of arrival, in seconds.
        cached_tokens: number of prompt tokens read from the cache; None before the first output.
    """

    label: str
    model: str
    owner: str
    variant: tuple[str | None, str | None]
    scores_prompt: bool
    items: tuple[tuple[int, bytes], ...]
    tokens: array[int]
    size: int
    time: float
    cached_tokens: int | None = None

    def add(self, output: RequestOutput) -> None:
        """Add new tokens of the answer."""
        self.cached_tokens = output.num_cached_tokens
        if output.outputs:
            self.tokens.extend(output.outputs[0].token_ids)


class RecentPrompts:
    """The last `RECENT_PROMPTS` prompts, of at most `RECENT_TOKENS` tokens; the oldest first."""

    def __init__(self) -> None:
        self._prompts: deque[RecentPrompt] = deque(maxlen=RECENT_PROMPTS)

    def __iter__(self) -> Iterator[RecentPrompt]:
        return iter(tuple(self._prompts))

    def add(self, prompt: RecentPrompt) -> None:
        """Add a prompt, and drop the oldest beyond the limits."""
        self._prompts.append(prompt)
        tokens = sum(len(one.tokens) for one in self._prompts)
        while tokens > RECENT_TOKENS:
            tokens -= len(self._prompts.popleft().tokens)


class ServerState:
    """The state that all models of a server share.

    Args:
        options: options of the server, which handlers read as `options`.
        tracing: exporter of the spans of requests; None = no tracing.
        keys: the API keys of the server.
        mcp: the MCP servers of the operator.

    Attributes:
        budget: the bytes of requests and answers in flight.
        most_answer_bytes: limit of the bytes of an answer.
        draining: whether the server is stopping.
        stopping: set when the server aborts the running requests.
        responses: the stored responses.
        detached: the unfinished responses without a connection.
        all_models: returns the models of the server.
        recent_prompts: the last prompts of all models.
        is_model: returns whether a name belongs to a model, loaded or not, or to a derived model.
    """

    def __init__(
        self,
        options: AppOptions,
        tracing: Tracing | None = None,
        keys: Sequence[ApiKey] = (),
        mcp: McpServers | None = None,
    ) -> None:
        self.options, limits = options, options.limits
        weights = options.weights_directory
        self.weights_directory = None if weights is None else Path(weights)
        self.mcp = mcp or McpServers({})
        self.detached = DetachedAnswers(limits.max_background_responses)
        self.trust_request_chat_template = options.trust_request_chat_template
        self.limits, self.tracing = limits, tracing
        self.budget = Budget(limits.max_bytes_in_flight)
        self.most_answer_bytes = max(limits.answer_bytes, FREE_BYTES)
        self.enable_sleep_mode = options.enable_sleep_mode
        self.keys, self.share_prefix_cache = tuple(keys), options.share_prefix_cache
        self.unknown_fields = UnknownFieldsPolicy(options.unknown_fields)
        self.draining = False
        self.stopping = asyncio.Event()
        self.responses = ResponseStore(limits.max_stored_responses)
        self.recent_prompts = RecentPrompts()
        self.all_models: Callable[[], tuple[ServedModel, ...]] = tuple
        self.is_model: Callable[[str], bool] = lambda name: False

    def reservation(self, request: Request) -> Reservation:
        """Return the reserved bytes of a request."""
        return request.scope.get(RESERVATION) or Reservation(self.budget)


def build_certificate_fields(certificate: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the part of an entry of `/v1/models` with the certificate of a model."""
    return {} if certificate is None else {"certificate": dict(certificate)}


class ServedModel:
    """A served model.

    Args:
        engine: the engine of the model.
        names: names of the model in requests. Answers contain the first name.
        prompts: the encoder of the model's prompts.
        formats: the formats of the model's replies.
        metrics: the counters of the model.
        state: the state shared with the other models of the server.
        adapter_directory: directory of the LoRA adapters that clients may load; None = clients
            cannot load adapters.

    Attributes:
        name: the name in answers.
        abilities: what the model can do.
        lora_name: the adapter of the requests; None = the base model.
        owner: the owner of the requests, see `http.auth.get_owner`; empty without a key.
        adapter_owners: name of an adapter -> digests of the keys that may use the adapter. Every
            key may use an adapter without an entry.
        adapter_lock: held while an adapter is loaded or unloaded.
        activity: the running requests of a model that is loaded on demand, and how long the model
            stays loaded; None = the model is never unloaded.
        load_seconds: seconds in which the request waited for the model.
        sampling_defaults: values of sampling options that a request omits, by name.
        derivation: changes the chat requests of a model that is derived from this model.
    """

    def __init__(
        self,
        engine: ServedEngine,
        names: Sequence[str],
        prompts: PromptEncoder,
        formats: ReplyFormats,
        metrics: ModelMetrics,
        state: ServerState,
        adapter_directory: Path | None = None,
    ) -> None:
        self.activity: Activity | None = None
        self.load_seconds = 0.0
        self.derivation: Callable[[ChatRequest], ChatRequest] | None = None
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
        self.abilities = frozenset(ability for ability in ABILITIES if ability.has(self))
        self.adapter_owners: dict[str, frozenset[str]] = {}
        self.adapter_lock = asyncio.Lock()
        self.decoding: asyncio.Task[str | None] | None = None
        """The last decode check; see `operations.health`."""
        self.texts = TokenTexts(prompts.tokenizer)
        self._id_texts = TokenTexts(prompts.tokenizer, as_ids=True)
        self.created = int(time.time())
        self._widths: dict[bool, int] = {}
        stored = getattr(engine, "sampling_defaults", None)
        values = stored.values if stored and state.options.generation_config == "auto" else {}
        self.sampling_defaults = values | state.options.override_generation_config.values

    def texts_for(self, request: GenerationRequest) -> TokenTexts:
        """Return the texts of tokens in the log-probabilities of an answer."""
        return self._id_texts if request.return_tokens_as_token_ids else self.texts

    @property
    def task(self) -> TaskType:
        """The task of the model."""
        return getattr(self.engine, "task", TaskType.CAUSAL_LM)

    @property
    def labels(self) -> LabelSet | None:
        """The labels of a classifier; None for other models."""
        return getattr(self.engine, "labels", None)

    @property
    def embedding_settings(self) -> EmbeddingSettings:
        """The prompts of an embedding model; no prompts for other models."""
        return getattr(self.engine, "embedding_settings", None) or EmbeddingSettings()

    def adapters(self, owner: str) -> dict[str, LoadedAdapter]:
        """Return the loaded adapters that a key may use, by name."""
        return {
            adapter.name: adapter
            for adapter in self.engine.list_lora_adapters()
            if owner in self.adapter_owners.get(adapter.name, (owner,))
        }

    def drop_adapter_owners(self) -> None:
        """Forget the owners of adapters that are not loaded."""
        loaded = {adapter.name for adapter in self.engine.list_lora_adapters()}
        for name in self.adapter_owners.keys() - loaded:
            del self.adapter_owners[name]

    def seen_by(self, owner: str, adapter: str | None = None) -> ServedModel:
        """Return the model for the requests of one key, optionally with an adapter."""
        twin = copy.copy(self)
        twin.owner = owner
        if adapter is not None:
            twin.name = twin.lora_name = adapter
        return twin

    def card(self, name: str) -> dict[str, Any]:
        """Return the entry of `/v1/models` for one of the names."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "ed-esurge",
            "root": self.names[0],
            "parent": None,
            "max_model_len": self.prompts.max_model_len,
            **build_certificate_fields(getattr(self.engine, "certificate", None)),
        }

    def get_omitted_defaults(self, request: RequestBody, *names: str) -> dict[str, float]:
        """Return the default values of those sampling options that a request omits."""
        omitted = set(names) - request.model_fields_set
        return {name: value for name, value in self.sampling_defaults.items() if name in omitted}

    async def sampling_params(
        self, request: GenerationRequest, max_tokens: int, **more: object
    ) -> SamplingParams:
        """Return the sampling options of a request. Omitted options have default values."""
        extensions = {
            name: value
            for name in (
                "top_k",
                "min_p",
                "repetition_penalty",
                *LLAMA_SAMPLERS,
                "min_tokens",
                "stop_token_ids",
                "ignore_eos",
                "include_stop_str_in_output",
                "skip_special_tokens",
                "logit_bias",
                "allowed_token_ids",
                "bad_words",
                "forced_bos_token_id",
            )
            if (value := getattr(request, name)) is not None
        }
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
        if not request.use_beam_search:
            options |= self.get_omitted_defaults(request, *SamplingDefaults.model_fields)
        listed = 32 * len(request.allowed_token_ids or ())  # approximate number of bytes
        return await aside(lambda: SamplingParams(**{**options, **extensions, **more}), listed)

    def check_generations(self, count: int) -> None:
        """Reject a request for more completions than the limit.

        Raises:
            APIError: 400.
        """
        if count > self.state.limits.max_generations:
            raise APIError(
                f"the request has {count} completions (prompts times choices), and the limit of "
                f"this server is {self.state.limits.max_generations}: send several requests",
                param="n",
                code="invalid_value",
            )

    def lifetime(self, request: Request) -> RequestLifetime:
        """Return the lifetime of a request that starts now."""
        return RequestLifetime(request, self.state.stopping, self.state.limits.request_timeout)

    def answer_size(self, request: Request) -> AnswerSize:
        """Return the counter of the bytes of an answer."""
        state = self.state
        return AnswerSize(request, state.most_answer_bytes, state.reservation(request))

    def pooled_size(
        self, request: Request, prompts: Sequence[CheckedPrompt], *, each_token: bool = False
    ) -> AnswerSize:
        """Check the bound of an answer with vectors, and count its bytes.

        The width of the vectors is that of the last answer of the model.

        Args:
            each_token: whether each token has a vector.

        Raises:
            APIError: 400, the answer would be too large; 503, too many bytes are in flight.
        """
        size = self.answer_size(request)
        rows = sum(map(len, prompts)) if each_token else len(prompts)
        width = self._widths.get(each_token, _WIDTH)
        count = rows * (width * NUMBER_BYTES + VECTOR_BYTES)
        remedy = f"send fewer or shorter texts (the answer has {rows} vectors of {width} numbers)"
        size.check(count, "input", remedy)
        size.add(count)
        return size

    def queue_options(self, request: GenerationRequest | PooledRequest) -> RequestOptions:
        """Return the keyword arguments of the engine that queue a request.

        Raises:
            APIError: 400, the priority would have no effect.
        """
        if request.priority and self.engine.config.scheduling_policy != "priority":
            raise APIError(
                "this server schedules requests in order of arrival, so a priority has no effect: "
                "omit it, or start the engine with scheduling_policy: priority",
                param="priority",
            )
        options = self._options(request.cache_salt)
        if request.priority:
            options["priority"] = request.priority
        return options

    def _options(self, salt: str | None = None) -> RequestOptions:
        """Return the adapter and the `cache_salt` of a request as keyword arguments.

        By default, keys do not share cached prefixes. Otherwise `cached_tokens` and the response
        time would reveal that another key sent the same prompt.
        """
        options = RequestOptions()
        if self.owner and not self.state.share_prefix_cache:
            options["cache_salt"] = f"{self.owner}:{salt or ''}"
        elif salt:
            options["cache_salt"] = salt
        if self.lora_name is not None:
            options["lora_name"] = self.lora_name
        return options

    async def generate(
        self,
        prompt: CheckedPrompt,
        params: SamplingParams,
        label: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the deltas of one request, and count its tokens.

        Closing the generator aborts the request.

        Args:
            label: name of the request in the log and in traces. Clients may send equal labels, so
                the engine receives a unique id.
            options: see `queue_options`; and the images of the prompt, `encoder_inputs`.

        Raises:
            APIError: 400, the request is invalid; 500, the request failed; 503, the engine does
                not run, or aborted the request.
        """
        self.check_running()
        span = self._span(label, prompt, params)
        timer = self.metrics.request(
            len(prompt), params.n, span, max_tokens=params.max_tokens, adapter=self.lora_name
        )
        request_id = f"{label}-{uuid.uuid4().hex}"
        recent_prompt = self._remember(label, prompt, params, options)
        with self._translate_errors(timer):
            deltas = self.engine.generate(prompt, params, request_id, **options)
            finished = False
            async with aclosing(deltas) as stream:
                async for output in stream:
                    timer.observe(output)
                    recent_prompt.add(output)
                    self._check_ended(output)
                    finished = output.finished
                    yield output
            if not finished:
                raise engine_unavailable("the engine stopped in the middle of the request")

    def _remember(
        self, label: str, prompt: CheckedPrompt, params: SamplingParams, options: RequestOptions
    ) -> RecentPrompt:
        recent_prompt = RecentPrompt(
            label=label,
            model=self.names[0],
            owner=self.owner,
            variant=(self.lora_name, options.get("cache_salt")),
            scores_prompt=params.prompt_logprobs is not None,
            items=tuple((item.start, item.key) for item in options.get("encoder_inputs", ())),
            tokens=array("i", prompt.token_ids),
            size=len(prompt),
            time=time.monotonic(),
        )
        self.state.recent_prompts.add(recent_prompt)
        return recent_prompt

    def check_running(self) -> None:
        """Raise APIError: 503, the engine does not run, or sleeps."""
        if not self.engine.is_healthy:
            raise engine_unavailable()
        if self.engine.is_sleeping:
            raise APIError(
                f"the model {self.name!r} sleeps: POST /wake_up, or try again later",
                status=503,
                code="engine_sleeping",
            )

    def _span(
        self, request_id: str, prompt: CheckedPrompt, params: SamplingParams | PoolingParams
    ) -> RequestSpan | None:
        tracing = self.state.tracing
        if tracing is None:
            return None
        return tracing.request(request_id, self.name, len(prompt), params)

    @contextmanager
    def _translate_errors(self, timer: RequestTimer) -> Iterator[None]:
        """Convert errors of the engine to errors of the API, and end the metrics of the request."""
        try:
            yield
        except TokenIdError as error:
            raise invalid_token(error, error.field) from None
        except ContextLengthError as error:  # a truncated conversation with images
            raise APIError(str(error), param="messages", code="context_length_exceeded") from None
        except ConfigError as error:
            raise APIError(hide_paths(error)) from error
        except EasyDeLError as error:
            raise engine_unavailable(hide_paths(error)) from error
        finally:
            timer.over()

    @staticmethod
    def _check_ended(output: RequestOutput) -> None:
        """Raise APIError if the engine aborted the request, or failed on it."""
        for out in output.outputs:
            if out.finish_reason == "abort":
                raise engine_unavailable("the engine aborted the request")
            if out.finish_reason == "error":
                message = output.error or "the engine failed on this request"
                raise APIError(message, status=500, code="internal_error")

    async def vectors(
        self,
        prompts: Sequence[CheckedPrompt],
        params: PoolingParams | Sequence[PoolingParams],
        name: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> np.ndarray:
        """Return the pooled vectors of prompts, [n, d] float32; see `pool_prompts`."""
        return np.stack(await self.pool_prompts(prompts, params, name, **options))

    async def pool_prompts(
        self,
        prompts: Sequence[CheckedPrompt],
        params: PoolingParams | Sequence[PoolingParams],
        name: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[np.ndarray]:
        """Return the pooled vector of each prompt, or the vectors of its tokens; float32.

        Args:
            params: options for all prompts, or for each prompt.
            name: name of the request in the log and in traces.
            options: see `queue_options`.

        Raises:
            APIError: see `generate`.
        """
        require_ability(self, POOLS)
        options = options or self._options()
        name = f"{name or new_id('embd', None)}-{uuid.uuid4().hex}"

        prompt_params = [params] * len(prompts) if isinstance(params, PoolingParams) else params

        async def one(place: int, prompt: CheckedPrompt, params: PoolingParams) -> np.ndarray:
            span = self._span(f"{name}-{place}", prompt, params)
            timer = self.metrics.request(len(prompt), span=span, adapter=self.lora_name)
            with self._translate_errors(timer):
                output = await self.engine.embed(prompt, params, f"{name}-{place}", **options)
                timer.observe(output)
                self._check_ended(output)
            assert output.pooled is not None, "the last output of a pooled request has the vector"
            self._widths[params.task == "token_embed"] = output.pooled.shape[-1]
            return output.pooled

        self.check_running()
        items = zip(range(len(prompts)), prompts, prompt_params, strict=True)
        return await run_in_turns(one(*item) for item in items)


def new_id(kind: str, label: str | None) -> str:
    """Return the id of an answer in the format of its API: `chatcmpl-…`, `resp_…`, `msg_…`.

    Args:
        label: label of the client, which replaces the random part.
    """
    separator = "_" if kind in ("msg", "resp") else "-"
    return f"{kind}{separator}{label or uuid.uuid4().hex}"
