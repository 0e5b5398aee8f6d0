"""The replicas of `esurge serve`, whose options have vLLM's names."""

from __future__ import annotations

import argparse
import os
import secrets
from typing import Any

from ed_infra.errors import ConfigError

from ed_esurge.command.flags import build_options
from ed_esurge.command.load import (
    add_model_arguments,
    get_model_name,
    get_processor,
    get_tokenizer,
    parse_mesh_dims,
    parse_quantization,
)
from ed_esurge.config import EngineConfig
from ed_esurge.engine.channel import SECRET
from ed_esurge.server.options import ServerOptions


def check_replicas(values: argparse.Namespace, options: ServerOptions) -> None:
    """Check the options of replicas.

    Raises:
        ConfigError: an option of the engine, or a missing secret, requires one process.
    """
    size, local = options.data_parallel_size, options.data_parallel_size_local
    if size == 1 and local != 0:
        return
    if build_options(values, EngineConfig).enable_prompt_embeds:
        raise ConfigError("--enable-prompt-embeds requires one process: omit --data-parallel-size")
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
        from ed_esurge.processes.hub import ReplicaHub

        secret = os.environ.get(SECRET) or secrets.token_hex(32)
        address = f"{options.data_parallel_address}:{options.data_parallel_rpc_port}"
        self._options = options
        self.hub = ReplicaHub(address, secret.encode())

    def engine(self, values: argparse.Namespace) -> Any:
        """Start the replicas of one model, and return their engine.

        Raises:
            EasyDeLError: an option is invalid, or a replica cannot start.
        """
        from ed_esurge.processes.replicated_engine import ReplicatedEngine

        options = build_options(values, EngineConfig)
        parse_quantization(values)
        parse_mesh_dims(values.sharding_axis_dims, values.tensor_parallel_size)
        parser = argparse.ArgumentParser()
        add_model_arguments(parser)
        model_arguments = vars(parser.parse_args([values.model]))
        arguments = {name: getattr(values, name) for name in model_arguments}
        size, local = self._options.data_parallel_size, self._options.data_parallel_size_local
        engine = ReplicatedEngine(
            get_model_name(values.model),
            options,
            get_tokenizer(values),
            {"arguments": arguments, "directory": os.getcwd()},
            size,
            lambda facts: get_processor(values, facts.input_names),
        )
        self.hub.start(engine, size if local is None else local)
        return engine
