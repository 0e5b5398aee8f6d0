"""Serve a model behind an OpenAI-compatible API, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer
from ed_infra.errors import ConfigError
from ed_infra.host_memory import pause_collection

from ed_esurge.command.flags import Flags
from ed_esurge.command.load import (
    MODEL_HELP,
    ModelArguments,
    ModelFlags,
    check_model_names,
    get_model_name,
    served_engine,
)
from ed_esurge.command.model_directory import model_directory
from ed_esurge.command.nodes import NodeFlags, NodeOptions, check_nodes, connected_nodes
from ed_esurge.command.program import WORDS_KEY, is_quiet, show_object, show_result
from ed_esurge.command.replicated import ReplicaStarter, check_replicas
from ed_esurge.config import EngineConfig
from ed_esurge.server.options import ListenOptions, ServerOptions

ListenT = TypeVar("ListenT", bound=ListenOptions)

#: Environment variables with API keys. A command line is readable by every user of the machine.
KEY, ADMIN_KEY = "ESURGE_API_KEY", "ESURGE_ADMIN_API_KEY"
#: Field of `ServerOptions` without a generated flag -> what to use instead.
OMITTED = {
    "api_key": f"set the variable {KEY}, or --api-key-file; a flag is readable by every user",
    "admin_api_key": f"set the variable {ADMIN_KEY}; a flag is readable by every user",
    "chat_template": "a flag of all commands replaces the template of the tokenizer",
}


def _get_engine_defaults(values: Mapping[str, Any]) -> Mapping[str, object]:
    adapters = values["lora_modules"]
    return {"compile_in_background": True} | ({"max_loras": len(adapters)} if adapters else {})


def _get_keys(values: Mapping[str, Any]) -> Mapping[str, object]:
    keys = {"api_key": os.environ.get(KEY), "admin_api_key": os.environ.get(ADMIN_KEY)}
    return {name: key for name, key in keys.items() if key}


def serve(
    ctx: typer.Context,
    loading: ModelFlags,
    engine: Annotated[
        EngineConfig, Flags("engine", has_words=False, defaults=_get_engine_defaults)
    ],
    server: Annotated[
        ServerOptions,
        Flags(
            "server",
            short={"data_parallel_size": ("-dp",)},
            omitted=OMITTED,
            defaults=_get_keys,
        ),
    ],
    nodes: NodeFlags,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
) -> None:
    """Serve a model behind an OpenAI-compatible API, until SIGTERM or Ctrl-C.

    With --json, the object is printed when the server accepts requests: its URL and its models.
    """
    if model is None and (server.model_directory is None or server.also or server.lora_modules):
        raise ConfigError("name a MODEL, or a directory of models with --model-dir")
    if model is None and server.served_model_name:
        raise ConfigError("--served-model-name requires a MODEL")
    arguments = loading.replace(model=model or "", engine=engine)
    on_demand = model_directory(arguments, server)
    options = lower_log_level(server.with_read_keys())
    if is_quiet() and "silent_mode" not in engine.model_fields_set:
        engine = engine.replace(silent_mode=True)
        arguments = arguments.replace(engine=engine)
    if on_demand is not None:
        options = options.replace(model_directory=on_demand)
    check_replicas(engine, options)
    check_nodes(nodes, server)
    with ExitStack() as stack:
        with pause_collection(), ThreadPoolExecutor(1) as aside:
            serving = aside.submit(_server)  # imports the server while the engine is built
            running = _running_engines(arguments, options, nodes, ctx.meta[WORDS_KEY])
            engines = stack.enter_context(running)
            launch = serving.result()
            launch.load_adapters(engines, options.lora_modules)
        launch.serve(engines, options=options, on_ready=show_address)


def show_address(url: str, names: Sequence[str]) -> None:
    """Print the result of a server: its address, and with `--json` also its models."""
    from ed_esurge.server.launch import ready_line

    show_result(ready_line(url))
    show_object({"url": url, "models": list(names)})


def lower_log_level(options: ListenT) -> ListenT:
    """Return options whose log has no requests if the command has `--quiet`."""
    is_set = "log_level" in options.model_fields_set
    return options.replace(log_level="warning") if is_quiet() and not is_set else options


def create_engines(
    arguments: ModelArguments,
    options: ServerOptions,
    create: Callable[[ModelArguments], Any] = served_engine,
) -> Any:
    """Create the engine of the arguments; with `--also`, several engines by name.

    Args:
        create: creates the engine of one model.

    Raises:
        EasyDeLError: see `served_engine`; or two models have the same name.
    """
    if not arguments.model:
        return {}
    models = [arguments.model, *options.also]
    if len(models) == 1:
        return create(arguments)
    names = [get_model_name(model) for model in models]
    check_model_names(names)
    engines = {}
    for place, (name, model) in enumerate(zip(names, models, strict=True), 1):
        shares = arguments.engine.share_memory(place, len(models))
        changes: dict[str, object] = {"model": model, "engine": arguments.engine.replace(**shares)}
        if place > 1:
            changes |= {"tokenizer": None, "revision": None}
        engines[name] = create(arguments.replace(is_one_of_several=True, **changes))
    return engines


def _server() -> ModuleType:
    from ed_esurge.server import launch

    return launch


@contextmanager
def _running_engines(
    arguments: ModelArguments, options: ServerOptions, nodes: NodeOptions, words: list[str]
) -> Iterator[Any]:
    """Create the engines: in this process, or in the processes of replicas."""
    if not options.replicated:
        with connected_nodes(nodes, words):
            yield create_engines(arguments, options)
        return
    starter = ReplicaStarter(options)
    try:
        yield create_engines(arguments, options, starter.engine)
    finally:
        starter.hub.close()
