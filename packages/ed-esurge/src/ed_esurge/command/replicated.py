"""The replicas of `esurge serve`: the flags of data parallelism, with vLLM's names."""

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


def add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of replicas."""
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--data-parallel-size",
        "-dp",
        type=int,
        default=1,
        metavar="INT",
        help="number of replicas of each model, each in its own process; a lost replica is "
        "started again (default: %(default)s)",
    )
    group.add_argument(
        "--data-parallel-size-local",
        type=int,
        metavar="INT",
        help="number of replicas on this host (default: all); `esurge join` starts the others",
    )
    group.add_argument(
        "--data-parallel-address",
        default="127.0.0.1",
        metavar="HOST",
        help="address of this host at which replicas connect (default: %(default)s)",
    )
    group.add_argument(
        "--data-parallel-rpc-port",
        type=int,
        default=0,
        metavar="PORT",
        help="port at which replicas connect; 0 selects a free port (default: %(default)s)",
    )


def check_replicas(values: argparse.Namespace) -> None:
    """Check the flags of replicas.

    Raises:
        ConfigError: a number is invalid, or another flag requires one process.
    """
    size, local = values.data_parallel_size, values.data_parallel_size_local
    if size < 1:
        raise ConfigError(f"--data-parallel-size {size} must be at least 1")
    if local is not None and not 0 <= local <= size:
        raise ConfigError(
            f"--data-parallel-size-local {local} must be from 0 to --data-parallel-size {size}"
        )
    if size == 1 and local != 0:
        return
    if values.model is None or values.model_dir is not None:
        raise ConfigError(
            "--data-parallel-size requires a MODEL, which each replica loads at its start: name "
            "further models with --also instead of --model-dir"
        )
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
        values: the arguments of the command.
    """

    def __init__(self, values: argparse.Namespace) -> None:
        from ed_esurge.processes.hub import ReplicaHub

        secret = os.environ.get(SECRET) or secrets.token_hex(32)
        address = f"{values.data_parallel_address}:{values.data_parallel_rpc_port}"
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
        size, local = values.data_parallel_size, values.data_parallel_size_local
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
