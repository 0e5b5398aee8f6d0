"""Serve a model behind an OpenAI-compatible API, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

from ed_infra.errors import ConfigError
from ed_infra.garbage import pause_collection

from ed_esurge.command.flags import build_options, parse_mapping
from ed_esurge.command.load import add_model_arguments, get_model_name, served_engine
from ed_esurge.command.model_directory import model_directory
from ed_esurge.command.nodes import add_node_arguments, check_nodes, connected_nodes
from ed_esurge.command.replicated import ReplicaStarter, add_replica_arguments, check_replicas
from ed_esurge.config import EngineConfig, ServerLimits, UnknownFields

#: Environment variables with API keys. A command line is readable by every user of the machine.
KEY, ADMIN_KEY = "ESURGE_API_KEY", "ESURGE_ADMIN_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the server, the engine and the model."""
    add_model_arguments(parser, optional=True, answers_early=True)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--also",
        metavar="MODEL",
        nargs="+",
        default=[],
        help="more models for the same server, such as an embedding model or Whisper, with the "
        "same options; each gets an equal share of the memory for pages",
    )
    group.add_argument(
        "--model-dir",
        metavar="DIR",
        help="directory of models that are loaded when a request needs them, and where clients "
        "store derived models",
    )
    group.add_argument(
        "--model-memory",
        type=float,
        metavar="GIB",
        help="memory of the models of --model-dir: weights and pages (default: no limit)",
    )
    group.add_argument(
        "--keep-alive",
        default="5m",
        metavar="TIME",
        help="time without requests after which a model of --model-dir is unloaded, such as 30s "
        "or 1h; -1 = never (default: %(default)s)",
    )
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument(
        "--port", type=int, default=11556, help="0 selects a free port (%(default)s)"
    )
    group.add_argument("--served-model-name", nargs="+", help="names of the model in requests")
    group.add_argument(
        "--api-key-file",
        help=f"JSON list of keys, each with a sha256; or set {KEY} to a single key, and "
        f"{ADMIN_KEY} to the key of the administrative routes",
    )
    group.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="API keys share cached prefixes (default: each key has its own)",
    )
    group.add_argument(
        "--cors-origins", nargs="+", help="origins whose pages may send requests; * = all"
    )
    group.add_argument("--allowed-hosts", nargs="+", help="allowed names in the Host header")
    group.add_argument(
        "--allowed-media-domains",
        nargs="+",
        default=[],
        help="hosts from which images of requests are downloaded (default: none)",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="accept the field chat_template of chat requests: Jinja of clients, in a sandbox",
    )
    group.add_argument(
        "--mcp-config",
        metavar="FILE",
        help="JSON file of MCP servers whose tools /v1/responses may execute (extra: mcp)",
    )
    group.add_argument("--tool-parser-name", default="auto", help="default: %(default)s")
    group.add_argument("--reasoning-parser", default="auto", help="default: %(default)s")
    group.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="LoRA adapters that requests select by NAME as their model; requires --max-loras",
    )
    group.add_argument("--lora-directory", help="directory of adapters that clients may load")
    group.add_argument(
        "--weights-directory", help="directory of checkpoints whose weights administrators may load"
    )
    group.add_argument("--batch-directory", help="directory of files and results of batches")
    group.add_argument("--otlp-traces-endpoint", help="URL of a collector of spans (extra: otel)")
    group.add_argument(
        "--enable-sleep-mode", action="store_true", help="enable /sleep and /wake_up"
    )
    group.add_argument(
        "--unknown-fields",
        choices=get_args(UnknownFields),
        default="warn",
        help="policy for unknown request fields (default: %(default)s)",
    )
    group.add_argument("--log-level", default="info", help="default: %(default)s")
    group.add_argument("--drain-seconds", type=int, default=30, help="default: %(default)s")
    group.add_argument("--ssl-keyfile", help="private key, PEM")
    group.add_argument("--ssl-certfile", help="certificate, PEM")
    group.add_argument("--limits", metavar="JSON", help="see ed_esurge.config.ServerLimits")
    add_replica_arguments(parser)
    add_node_arguments(parser)


def create_engines(
    values: argparse.Namespace, create: Callable[[argparse.Namespace], Any] = served_engine
) -> Any:
    """Create the engine of the arguments; with `--also`, several engines by name.

    Args:
        create: creates the engine of one model.

    Raises:
        EasyDeLError: see `served_engine`; or two models have the same name.
    """
    if values.model is None:
        return {}
    models = [values.model, *values.also]
    if len(models) == 1:
        return create(values)
    names = [get_model_name(model) for model in models]
    if len(set(names)) < len(names):
        raise ConfigError(f"two models have the same name ({', '.join(names)}): rename a directory")
    options = build_options(values, EngineConfig)
    engines = {}
    for place, (name, model) in enumerate(zip(names, models, strict=True), 1):
        # On an accelerator, each engine uses the memory that remains below its `hbm_utilization`.
        overrides = {
            "model": model,
            "hbm_utilization": str(options.hbm_utilization * place / len(models)),
            "cpu_cache_gib": str(options.cpu_cache_gib / len(models)),
        }
        if options.kv_offloading_size is not None:
            overrides["kv_offloading_size"] = str(options.kv_offloading_size / len(models))
        if place > 1:
            overrides |= {"tokenizer": None, "revision": None}
        engines[name] = create(argparse.Namespace(**{**vars(values), **overrides}))
    return engines


def parse_adapters(modules: Sequence[str]) -> dict[str, str]:
    """Return name -> directory of the adapters of `--lora-modules`.

    Raises:
        ConfigError: an entry has another form than NAME=PATH, or two entries have one name.
    """
    adapters: dict[str, str] = {}
    for entry in modules:
        name, _, path = entry.partition("=")
        if not name or not path or name in adapters:
            raise ConfigError(f"--lora-modules needs different NAME=PATH entries, got {entry!r}")
        adapters[name] = path
    return adapters


def _server() -> Callable[..., None]:
    from ed_esurge.server import serve

    return serve


def run(values: argparse.Namespace) -> int:
    """Load and serve the models, in this process or in several."""
    if values.model is None and (values.model_dir is None or values.also or values.lora_modules):
        raise ConfigError("name a MODEL, or a directory of models with --model-dir")
    if values.model is None and values.served_model_name:
        raise ConfigError("--served-model-name requires a MODEL")
    if values.also and values.served_model_name:
        raise ConfigError(
            "--served-model-name requires one model: with --also, each model has its own name"
        )
    on_demand = model_directory(values)
    limits = ServerLimits(**parse_mapping(values.limits, "--limits"))
    key = os.environ.get(KEY)
    keys = []
    if values.api_key_file:
        from ed_esurge.server.http.auth import read_keys

        keys = read_keys(values.api_key_file)
    adapters = parse_adapters(values.lora_modules)
    if adapters and values.also:
        raise ConfigError("--lora-modules requires one model: leave --also out")
    if adapters and values.max_loras is None:
        values.max_loras = str(len(adapters))
    check_replicas(values)
    check_nodes(values)
    with ExitStack() as stack:
        with pause_collection(), ThreadPoolExecutor(1) as aside:
            serving = aside.submit(_server)  # imports the server while the engine is built
            engines = stack.enter_context(_running_engines(values))
            serve = serving.result()
            for name, directory in adapters.items():
                loading = engines.load_lora_adapter(name, directory)
                if loading is not None:  # of replicas
                    asyncio.run(loading)
        serve(
            engines,
            values.host,
            values.port,
            served_model_name=values.served_model_name,
            api_key=[*keys, *([key] if key else [])] or None,
            cors_origins=values.cors_origins,
            allowed_hosts=values.allowed_hosts,
            limits=limits,
            tool_parser_name=values.tool_parser_name,
            reasoning_parser=values.reasoning_parser,
            lora_directory=values.lora_directory,
            weights_directory=values.weights_directory,
            batch_directory=values.batch_directory,
            otlp_traces_endpoint=values.otlp_traces_endpoint,
            enable_sleep_mode=values.enable_sleep_mode,
            unknown_fields=values.unknown_fields,
            admin_api_key=os.environ.get(ADMIN_KEY),
            share_prefix_cache=values.share_prefix_cache,
            allowed_media_domains=values.allowed_media_domains,
            model_directory=on_demand,
            trust_request_chat_template=values.trust_request_chat_template,
            mcp_config=values.mcp_config,
            log_level=values.log_level,
            drain_seconds=values.drain_seconds,
            ssl_keyfile=values.ssl_keyfile,
            ssl_certfile=values.ssl_certfile,
        )
    return 0


@contextmanager
def _running_engines(values: argparse.Namespace) -> Iterator[Any]:
    """Create the engines: in this process, or in the processes of replicas."""
    if values.data_parallel_size == 1 and values.data_parallel_size_local is None:
        with connected_nodes(values):
            yield create_engines(values)
        return
    starter = ReplicaStarter(values)
    try:
        yield create_engines(values, starter.engine)
    finally:
        starter.hub.close()
