"""The ASGI application: which URL does what. Everything else is in the modules beside."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ed_infra.errors import ConfigError
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ed_esurge.config import ServerLimits
from ed_esurge.server import errors, openapi
from ed_esurge.server.auth import ApiKey, BearerAuth
from ed_esurge.server.body import read
from ed_esurge.server.chat import chat
from ed_esurge.server.completions import complete
from ed_esurge.server.door import Door
from ed_esurge.server.formats import ReplyFormats
from ed_esurge.server.metrics import HTTPMetrics, Metrics
from ed_esurge.server.prompts import Prompts
from ed_esurge.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ed_esurge.server.served import Served, ServedEngine


def create_app(
    engine: Any,
    *,
    served_model_name: str | Sequence[str] | None = None,
    api_key: str | ApiKey | Sequence[str | ApiKey] | None = None,
    chat_template: str | None = None,
    cors_origins: Sequence[str] | None = None,
    allowed_hosts: Sequence[str] | None = None,
    limits: ServerLimits | Mapping[str, Any] | None = None,
    enable_function_calling: bool = True,
    tool_parser_name: str = "auto",
    reasoning_parser: str = "auto",
    oai_like_processor: bool = True,
) -> FastAPI:
    """Build the application that serves one engine.

    Args:
        engine: an `eSurge`, which is then driven by a thread that starts and stops with the
            application, or something like an `AsyncEngine`, which its owner stops.
        served_model_name: what clients call the model; several names are aliases, and answers
            carry the first. None: the model's own name.
        api_key: a key, or several, one of which each request must bring; an `ApiKey` has limits.
            None: anybody may.
        chat_template: Jinja text instead of the tokenizer's own template.
        cors_origins: web origins whose pages may call this server (`["*"]`: all). None: no CORS.
        allowed_hosts: what the `Host` header of a request may name, without ports. None: anything
            (`serve` allows this machine alone where it listens to this machine alone).
        limits: see `ServerLimits`; a mapping of its fields is as good.
        enable_function_calling: False: requests with tools are refused.
        tool_parser_name: how the model writes calls, see `ed_esurge.replies.formats`; "auto": the
            chat template tells.
        reasoning_parser: the same of its thoughts; "none": thoughts stay in the content.
        oai_like_processor: see `Prompts`.

    Raises:
        ConfigError: the engine has no tokenizer, or a parser is not known.
    """
    own = None
    if not isinstance(engine, ServedEngine):
        from ed_esurge.engine import AsyncEngine  # jax: only when there is an engine to drive

        own = engine = AsyncEngine(engine)
    if not isinstance(limits, ServerLimits):
        limits = ServerLimits(**(limits or {}))
    prompts = _prompts(engine, chat_template, oai_like_processor)
    formats = ReplyFormats(
        engine.tokenizer,
        prompts.template_text,
        enable_function_calling=enable_function_calling,
        tool_parser_name=tool_parser_name,
        reasoning_parser=reasoning_parser,
    )
    names = served_model_name or engine.model_name
    names = [names] if isinstance(names, str) else list(names)
    metrics = Metrics(names[0], engine.stats)
    served = Served(engine, names, prompts, formats, metrics, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        start = getattr(engine, "start", None)
        if start is not None:  # which does nothing where its owner has done it
            start()
        try:
            yield
        finally:
            if own is not None:
                await asyncio.to_thread(own.shutdown)

    app = FastAPI(title="ed-esurge", version=_version(), lifespan=lifespan)
    app.openapi = lambda: openapi.document(_version())
    app.state.served = served
    app.state.draining = False
    errors.install(app)
    _health(app, served)
    _openai(app, served)
    _tokens(app, served)
    keys = [api_key] if isinstance(api_key, str | ApiKey) else list(api_key or ())
    if keys:
        known = [ApiKey.of(key) if isinstance(key, str) else key for key in keys]
        app.add_middleware(BearerAuth, keys=known)
    if cors_origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(Door, hosts=allowed_hosts, most=limits.max_concurrent_requests)
    app.add_middleware(HTTPMetrics, metrics=served.metrics)  # outermost: it sees every status
    return app


def _prompts(engine: Any, chat_template: str | None, oai_like_processor: bool) -> Prompts:
    """The encoder of an engine's prompts."""
    if engine.tokenizer is None:
        raise ConfigError(
            "the server speaks text, and this engine has no tokenizer: "
            "build it with eSurge(model, tokenizer=...)"
        )
    return Prompts(
        engine.tokenizer,
        config=engine.config,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        chat_template=chat_template,
        oai_like_processor=oai_like_processor,
    )


def _version() -> str:
    return importlib.metadata.version("ed-esurge")


def _get(app: FastAPI, path: str) -> Callable[[Any], Any]:
    """Register what a GET, or a HEAD, of a path gives."""
    return app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)


def _openai(app: FastAPI, served: Served) -> None:
    """The endpoints of the OpenAI API."""

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": served.created,
            "owned_by": "ed-esurge",
            "root": served.name,
            "max_model_len": served.prompts.max_model_len,
        }

    @_get(app, "/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card(name) for name in served.names]})

    @_get(app, "/v1/models/{model:path}")
    async def get_model(model: str) -> JSONResponse:
        served.check_model(model)
        return JSONResponse(card(model))

    @app.post("/v1/completions", response_model=None)
    async def create_completion(request: Request) -> Response:
        body = await read(request, CompletionRequest, served.limits)
        return await complete(served, body, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(request: Request) -> Response:
        body = await read(request, ChatRequest, served.limits)
        return await chat(served, body, request)


def _tokens(app: FastAPI, served: Served) -> None:
    """Text to tokens and back, as vLLM spells them."""
    prompts = served.prompts

    @app.post("/tokenize")
    async def tokenize(request: Request) -> JSONResponse:
        body = await read(request, TokenizeRequest, served.limits)
        served.check_model(body.model)
        if body.messages is not None:
            tokens = await prompts.conversation(
                body.messages, add_generation_prompt=body.add_generation_prompt
            )
        else:
            (tokens,) = await prompts.encode(
                [body.prompt or ""], add_special_tokens=body.add_special_tokens
            )
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": prompts.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = [served.texts.text_of(token) for token in tokens]
        return JSONResponse(answer)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> JSONResponse:
        body = await read(request, DetokenizeRequest, served.limits)
        served.check_model(body.model)
        prompts.check_tokens(body.tokens, param="tokens")
        return JSONResponse({"prompt": await prompts.decode(body.tokens)})


def _health(app: FastAPI, served: Served) -> None:
    """What orchestrators ask.

    `live` fails when only a restart helps: the engine's thread is dead, or stuck in a step.
    `ready` and `/health` fail then too, and while the server drains.
    """

    def state(*, draining_is_down: bool) -> JSONResponse:
        if not served.engine.is_healthy:
            return JSONResponse({"status": "down", "reason": "the engine is not running"}, 503)
        if draining_is_down and app.state.draining:
            return JSONResponse({"status": "draining", "reason": "the server is stopping"}, 503)
        return JSONResponse({"status": "ok"})

    @_get(app, "/health")
    async def health() -> JSONResponse:
        return state(draining_is_down=True)

    @_get(app, "/health/ready")
    async def ready() -> JSONResponse:
        return state(draining_is_down=True)

    @_get(app, "/health/live")
    async def live() -> JSONResponse:
        return state(draining_is_down=False)

    @_get(app, "/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @_get(app, "/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": _version()})
