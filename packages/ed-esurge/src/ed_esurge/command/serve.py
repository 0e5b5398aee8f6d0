"""Serve a model behind an OpenAI-compatible API, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from ed_infra.errors import ConfigError
from ed_infra.garbage import pause_collection

from ed_esurge.command.flags import add_server_options, build_options, build_server_options
from ed_esurge.command.load import (
    add_model_arguments,
    check_model_names,
    get_model_name,
    served_engine,
)
from ed_esurge.command.model_directory import model_directory
from ed_esurge.command.nodes import add_node_arguments, check_nodes, connected_nodes
from ed_esurge.command.replicated import ReplicaStarter, check_replicas
from ed_esurge.config import EngineConfig
from ed_esurge.server.options import ServerOptions

#: Environment variables with API keys. A command line is readable by every user of the machine.
KEY, ADMIN_KEY = "ESURGE_API_KEY", "ESURGE_ADMIN_API_KEY"
#: Field of `ServerOptions` without a generated flag -> the reason.
OMITTED = {
    "api_key": f"the variable {KEY} has the key",
    "admin_api_key": f"the variable {ADMIN_KEY} has the key",
    "chat_template": "a flag of all commands replaces the template of the tokenizer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the server, the engine and the model."""
    add_model_arguments(parser, optional=True, answers_early=True)
    add_server_options(parser, OMITTED)
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
    check_model_names(names)
    options = build_options(values, EngineConfig)
    engines = {}
    for place, (name, model) in enumerate(zip(names, models, strict=True), 1):
        shares = options.share_memory(place, len(models))
        overrides = {"model": model, **{key: str(value) for key, value in shares.items()}}
        if place > 1:
            overrides |= {"tokenizer": None, "revision": None}
        engines[name] = create(argparse.Namespace(**{**vars(values), **overrides}))
    return engines


def _server() -> ModuleType:
    from ed_esurge.server import launch

    return launch


def run(values: argparse.Namespace) -> int:
    """Load and serve the models, in this process or in several."""
    directory, key = values.model_directory, os.environ.get(KEY)
    if values.model is None and (directory is None or values.also or values.lora_modules):
        raise ConfigError("name a MODEL, or a directory of models with --model-dir")
    if values.model is None and values.served_model_name:
        raise ConfigError("--served-model-name requires a MODEL")
    options = build_server_options(
        values, OMITTED, api_key=key or None, admin_api_key=os.environ.get(ADMIN_KEY) or None
    )
    on_demand = model_directory(values)
    options = options.with_read_keys()
    if on_demand is not None:
        options = options.replace(model_directory=on_demand)
    if options.lora_modules and values.max_loras is None:
        values.max_loras = str(len(options.lora_modules))
    check_replicas(values, options)
    check_nodes(values)
    with ExitStack() as stack:
        with pause_collection(), ThreadPoolExecutor(1) as aside:
            serving = aside.submit(_server)  # imports the server while the engine is built
            engines = stack.enter_context(_running_engines(values, options))
            launch = serving.result()
            launch.load_adapters(engines, options.lora_modules)
        launch.serve(engines, options=options)
    return 0


@contextmanager
def _running_engines(values: argparse.Namespace, options: ServerOptions) -> Iterator[Any]:
    """Create the engines: in this process, or in the processes of replicas."""
    if not options.replicated:
        with connected_nodes(values):
            yield create_engines(values)
        return
    starter = ReplicaStarter(options)
    try:
        yield create_engines(values, starter.engine)
    finally:
        starter.hub.close()
