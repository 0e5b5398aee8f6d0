"""The replicas of `esurge serve`, whose options have vLLM's names, and `esurge join`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from ed_infra.errors import ConfigError

from ed_esurge.command.load import (
    ModelArguments,
    get_model_name,
    get_processor,
    get_tokenizer,
    parse_mesh_dims,
    parse_quantization,
    served_engine,
)
from ed_esurge.config import EngineConfig
from ed_esurge.server.options import ServerOptions


def check_replicas(engine: EngineConfig, options: ServerOptions) -> None:
    """Check the options of replicas.

    Raises:
        ConfigError: an option of the engine, or a missing secret, requires one process.
    """
    size, local = options.data_parallel_size, options.data_parallel_size_local
    if size == 1 and local != 0:
        return
    if engine.enable_prompt_embeds:
        raise ConfigError("--enable-prompt-embeds requires one process: omit --data-parallel-size")
    from ed_esurge.engine.channel import SECRET

    if local is not None and local < size and not os.environ.get(SECRET):
        raise ConfigError(
            f"{SECRET} is not set: set it to the same random value on this host and on the hosts "
            "of the other replicas"
        )


class ReplicaStarter:
    """Starts the replicas of each model of a server.

    Args:
        options: the options of the server.
    """

    def __init__(self, options: ServerOptions) -> None:
        from ed_esurge.engine.channel import SECRET
        from ed_esurge.processes.hub import ReplicaHub

        secret = os.environ.get(SECRET) or secrets.token_hex(32)
        address = f"{options.data_parallel_address}:{options.data_parallel_rpc_port}"
        self._options = options
        self.hub = ReplicaHub(address, secret.encode())

    def engine(self, arguments: ModelArguments) -> Any:
        """Start the replicas of one model, and return their engine.

        Raises:
            EasyDeLError: an option is invalid, or a replica cannot start.
        """
        from ed_esurge.processes.replicated_engine import ReplicatedEngine

        parse_quantization(arguments)
        parse_mesh_dims(arguments.sharding_axis_dims, arguments.tensor_parallel_size)
        message = arguments.model_dump(mode="json", exclude_unset=True)
        size, local = self._options.data_parallel_size, self._options.data_parallel_size_local
        engine = ReplicatedEngine(
            get_model_name(arguments.model),
            arguments.engine,
            get_tokenizer(arguments),
            {"arguments": message, "directory": os.getcwd()},
            size,
            lambda facts: get_processor(arguments, facts.input_names),
        )
        self.hub.start(engine, size if local is None else local)
        return engine


def join(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="The address that the server prints.")
    ],
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model of the server; default: the model that lacks the most replicas.",
        ),
    ] = None,
) -> None:
    """Start a replica for a server on another host (`esurge serve --data-parallel-size`).

    The replica executes requests until the server ends.
    """
    from ed_esurge.processes.replica import serve_replica

    def create(arguments: Mapping[str, Any]) -> Any:
        return served_engine(ModelArguments.model_validate(arguments))

    serve_replica(address, model_name, create)
