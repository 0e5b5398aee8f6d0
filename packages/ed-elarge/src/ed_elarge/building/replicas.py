"""The replicas of the action `serve`, each in its own process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ed_esurge.engine.channel import SECRET
from ed_esurge.processes.hub import ReplicaHub
from ed_esurge.processes.replica import serve_replica
from ed_esurge.processes.replicated_engine import ReplicatedEngine
from ed_infra.errors import ConfigError

from ed_elarge.building.engines import load_engine_processor
from ed_elarge.config.action_options import ServeOptions
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.model import eLargeModel

#: Role of a replica in the command `join`.
REPLICA = "replica"


@contextmanager
def replicated_engine(
    elm: eLargeModel, name: str, options: ServeOptions
) -> Iterator[ReplicatedEngine]:
    """Start the replicas of the model of a run for the block.

    Args:
        name: Name of the model.
        options: The number of replicas, and the address at which they connect.

    Raises:
        ConfigError: The model is in memory, so other processes cannot load it.
        EasyDeLError: A replica cannot start.
    """
    size, local = options.data_parallel_size, options.data_parallel_size_local
    if elm.has_built("model"):
        raise ConfigError(
            f"data_parallel_size {size} loads the model in {size} processes, and this model is in "
            "memory: save the model, and serve it with a run file of its own"
        )
    run = elm.config
    secret = os.environ.get(SECRET)
    if local is not None and local < size and not secret:
        raise ConfigError(
            f"{SECRET} is not set: set it to the same random value on this host and on the hosts "
            "of the other replicas"
        )
    secret = secret or secrets.token_hex(32)
    address = f"{options.data_parallel_address}:{options.data_parallel_rpc_port}"
    hub = ReplicaHub(address, secret.encode(), ("elarge", "join", "--as", REPLICA), "ed_elarge")
    file = str(Path(run.document.name).absolute())
    engine = ReplicatedEngine(
        name,
        run.esurge,
        elm.part("tokenizer"),
        {"arguments": {"file": file, "sections": dict(run.written)}, "directory": os.getcwd()},
        size,
        lambda facts: load_engine_processor(elm, facts.input_names),
    )
    try:
        hub.start(engine, size if local is None else local)
        yield engine
    finally:
        hub.close()


def join_as_replica(address: str, name: str | None) -> int:
    """Execute the requests of a server until it ends, and return an exit code.

    Args:
        address: `HOST:PORT` of the server.
        name: Name of the model; None: the model that lacks the most replicas.
    """
    from ed_infra.compilation.cache import keep_compiled_programs

    def create(arguments: Mapping[str, Any]) -> Any:
        keep_compiled_programs()
        document = Document(arguments["file"], value=arguments["sections"])
        return eLargeModel.from_run(normalize(document)).part("engine")

    serve_replica(address, name, create)
    return 0
