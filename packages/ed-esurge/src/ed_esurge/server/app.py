"""The ASGI application: models, middleware and routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ed_infra.chats import read_chat_template
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.config import ApiKey, EngineConfig
from ed_esurge.server import openapi
from ed_esurge.server.batches.worker import running
from ed_esurge.server.endpoints import get_batched_endpoints, list_endpoints
from ed_esurge.server.generation.engine import ServedEngine
from ed_esurge.server.generation.images import ChatImages
from ed_esurge.server.generation.media import ChatMedia
from ed_esurge.server.generation.models import ServedModel, ServerState
from ed_esurge.server.generation.prompts import PromptEncoder
from ed_esurge.server.generation.recordings import ChatRecordings
from ed_esurge.server.generation.reply_formats import ReplyFormats
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http import errors
from ed_esurge.server.http.admission import Admission
from ed_esurge.server.http.auth import BearerAuth
from ed_esurge.server.http.body import in_thread
from ed_esurge.server.http.fields import HEADER, TOOLS_HEADER
from ed_esurge.server.mcp_servers import McpServers, read_mcp_config
from ed_esurge.server.metrics import HTTPMetrics, ServerMetrics
from ed_esurge.server.operations.health import server_version
from ed_esurge.server.options import AppOptions
from ed_esurge.server.routing import NamedRoute, build_route
from ed_esurge.server.stores import BatchStore
from ed_esurge.server.tracing import TraceContext, Tracing, provider_for

if TYPE_CHECKING:
    from ed_esurge.engine import AsyncEngine, eSurge

Engine: TypeAlias = "ServedEngine | eSurge"
Engines: TypeAlias = "Engine | Mapping[str, Engine]"


def create_app(engine: Engines, options: AppOptions | None = None, **keywords: object) -> Starlette:
    """Create the application that serves one or several engines.

    Args:
        engine: an `eSurge`, which a background thread of the application runs, or a `ServedEngine`
            such as `AsyncEngine`, which its owner stops. A mapping of names to engines serves
            several models; requests without a model name use the first.
        options: see `AppOptions`.
        keywords: fields of `AppOptions`; they have precedence over `options`. The limits may be a
            mapping, and `model_directory` is a `ModelLoading`: with it, `engine` may be an empty
            mapping.

    Raises:
        ConfigError: an option is invalid, an engine has no tokenizer, or two models have the same
            name.
        KeywordError: a keyword is no field of `AppOptions`.
    """
    options = AppOptions.merge("create_app", options, keywords)
    limits, loading = options.limits, options.model_directory
    if isinstance(loading, str):
        raise ConfigError(
            f"model_directory={loading!r} does not state how models are loaded: pass a "
            "`ed_esurge.frontends.library.loading.ModelLoading`, or use `esurge serve --model-dir`"
        )
    chat_template = options.chat_template
    if chat_template is not None:
        chat_template = read_chat_template(chat_template)
    owned_engines: list[AsyncEngine] = []
    tracing = None
    if options.otlp_traces_endpoint is not None:
        tracing = Tracing(provider_for(options.otlp_traces_endpoint))
    keys = _build_keys(options)
    mcp_servers = {} if options.mcp_config is None else read_mcp_config(options.mcp_config)
    state = ServerState(options, tracing, keys, McpServers(mcp_servers))
    metrics = ServerMetrics()

    def model(
        engine: Engine, names: str | Sequence[str] | None, *, starts: bool = False
    ) -> ServedModel:
        if isinstance(engine, ServedEngine):
            served: ServedEngine = engine
        else:
            from ed_esurge.engine import AsyncEngine  # imports jax, which other engines do not need

            served = AsyncEngine(engine)
            if starts:
                owned_engines.append(served)
        prompts = _prompts(served, chat_template, options)
        if options.trust_request_chat_template:
            prompts.renderer.start()
        formats = ReplyFormats(
            prompts.tokenizer,
            prompts.template_text,
            enable_function_calling=options.enable_function_calling,
            tool_parser_name=options.tool_parser_name,
            reasoning_parser=options.reasoning_parser,
        )
        model_names = names or served.model_name
        model_names = [model_names] if isinstance(model_names, str) else list(model_names)
        counted = metrics.of(model_names[0], served.replica_stats, _page_options(served.config))
        directory = None if options.lora_directory is None else Path(options.lora_directory)
        return ServedModel(served, model_names, prompts, formats, counted, state, directory)

    if isinstance(engine, Mapping):
        if options.served_model_name is not None or not (engine or loading):
            raise ConfigError(
                "several models require a non-empty mapping of names to engines: omit "
                "served_model_name"
            )
        models = [model(model_engine, name, starts=True) for name, model_engine in engine.items()]
    else:
        models = [model(engine, options.served_model_name, starts=True)]
    folder = options.batch_directory
    batches = None if folder is None else BatchStore(folder, limits)
    server = ServedModels(models, state, metrics, batches)
    if loading is not None:
        server.further = loading.open(server, model)
    endpoints = list_endpoints()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for model in models:
            start = getattr(model.engine, "start", None)
            if start is not None:  # has no effect on a running engine
                start()
        async with nullcontext() if server.further is None else server.further.run():
            try:
                async with running(server, get_batched_endpoints()):
                    yield
            finally:
                await state.detached.close()
                await state.mcp.close()
                for owned_engine in owned_engines:
                    await asyncio.to_thread(owned_engine.shutdown)
                if tracing is not None:
                    await asyncio.to_thread(tracing.shutdown)

    app = Starlette(lifespan=lifespan, exception_handlers=errors.ERROR_HANDLERS)
    app.state.server = server
    app.state.apis = {one.api for one in endpoints if one.api is not None}
    app.router.routes.append(NamedRoute("/openapi.json", _openapi, methods=["GET", "HEAD"]))
    for endpoint in endpoints:
        app.router.routes.append(build_route(server, endpoint))
    if keys:
        open_paths = {endpoint.path for endpoint in endpoints if endpoint.access == "open"}
        app.add_middleware(
            BearerAuth,
            keys=keys,
            open_paths=open_paths,
            max_requests=limits.max_concurrent_requests,
        )
    origins = options.browser_origins
    if origins is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", HEADER, TOOLS_HEADER],
        )
    if tracing is not None:
        app.add_middleware(TraceContext)
    app.add_middleware(
        Admission,
        hosts=options.allowed_hosts,
        origins=origins or (),
        max_requests=limits.max_concurrent_requests,
        budget=state.budget,
    )
    app.add_middleware(HTTPMetrics, metrics=metrics)  # outermost, to count every status
    return app


def _page_options(config: EngineConfig) -> dict[str, object]:
    """Return the options for `cache_config_info`, with vLLM's names."""
    return {
        "block_size": config.page_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.hbm_utilization,
        "cpu_offload_gb": config.kv_offloading_size or 0,
        "max_loras": config.max_loras,
    }


def _build_keys(options: AppOptions) -> list[ApiKey]:
    keys: list[ApiKey] = []
    for key in options.with_read_keys().api_key or ():
        keys.append(key if isinstance(key, ApiKey) else ApiKey.of(key.get_secret_value()))
    admin = options.admin_api_key
    if admin is not None:
        keys.append(ApiKey.of(admin.get_secret_value(), admin=True))
    return keys


def _prompts(
    engine: ServedEngine,
    chat_template: str | None,
    options: AppOptions,
) -> PromptEncoder:
    if engine.tokenizer is None:
        raise ConfigError(
            "the server requires a tokenizer, and this engine has none: "
            "build the engine with eSurge(model, tokenizer=...)"
        )
    processor = getattr(engine, "processor", None)
    form = getattr(engine, "recording_form", None)
    if form is None:
        names = getattr(engine, "input_names", ())
        hosts = options.allowed_media_domains
        media: ChatMedia[Any] = ChatImages(names, processor, hosts)
    else:
        media = ChatRecordings(form, processor, engine.tokenizer, engine.max_model_len)
    media.start()
    if getattr(engine.tokenizer, "chat_template", None) is None:
        chat_template = chat_template or getattr(processor, "chat_template", None)
    return PromptEncoder(
        engine.tokenizer,
        media=media,
        config=engine.config,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        chat_template=chat_template,
        oai_like_processor=options.oai_like_processor,
        volatile_lines=options.volatile_lines,
        encoder_decoder=getattr(engine, "task", None) == TaskType.SEQUENCE_TO_SEQUENCE,
    )


async def _openapi(_: Request) -> Response:
    text = await in_thread(partial(openapi.render_document, server_version()))
    return Response(text, media_type="application/json")
