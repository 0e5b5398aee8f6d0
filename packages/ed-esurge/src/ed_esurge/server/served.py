"""One served model: the engine behind it, its names, and the way in that every endpoint takes."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, runtime_checkable

from ed_infra.errors import ConfigError, EasyDeLError, did_you_mean

from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import SamplingParams
from ed_esurge.server.errors import APIError, engine_unavailable
from ed_esurge.server.logprobs import TokenTexts
from ed_esurge.server.metrics import Metrics
from ed_esurge.server.prompts import Prompts
from ed_esurge.server.protocol import GenerationRequest


@runtime_checkable
class ServedEngine(Protocol):
    """What the server needs of an engine; `ed_esurge.engine.AsyncEngine` has it."""

    tokenizer: Any
    model_name: str
    max_model_len: int
    vocab_size: int

    @property
    def is_healthy(self) -> bool:
        """False when the engine's thread is dead or stuck in a step."""
        ...

    def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput]:
        """Deltas of one request. Closing the iterator early aborts the request."""
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
        metrics: where requests are counted.
    """

    def __init__(
        self, engine: ServedEngine, names: Sequence[str], prompts: Prompts, metrics: Metrics
    ) -> None:
        self.engine = engine
        self.names = tuple(names)
        self.prompts = prompts
        self.metrics = metrics
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
            )
            if (value := getattr(request, name)) is not None
        }
        if request.logit_bias:
            self.prompts.check_tokens(list(request.logit_bias), param="logit_bias")
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

    async def generate(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput]:
        """Deltas of one request, counted; whoever stops listening aborts it.

        Raises:
            APIError: 400 when the engine cannot run the request as it is, 503 when it is down or
                gives the request up.
        """
        if not self.engine.is_healthy:
            raise engine_unavailable()
        timer = self.metrics.request(len(prompt), params)
        finished = False
        try:
            async with aclosing(self.engine.generate(prompt, params, request_id)) as stream:
                async for output in stream:
                    timer.observe(output)
                    if any(out.finish_reason == "abort" for out in output.outputs):
                        raise engine_unavailable("the engine gave the request up")
                    finished = output.finished
                    yield output
            if not finished:
                raise engine_unavailable("the engine stopped in the middle of the request")
        except ConfigError as error:
            raise APIError(str(error)) from error
        except EasyDeLError as error:
            raise engine_unavailable(str(error)) from error
        finally:
            if not finished:
                timer.aborted()


def new_id(kind: str) -> str:
    """A request id as OpenAI's look: `cmpl-…`, `chatcmpl-…`."""
    return f"{kind}-{uuid.uuid4().hex}"
