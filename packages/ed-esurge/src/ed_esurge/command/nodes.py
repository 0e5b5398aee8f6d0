"""Several processes of one model for `esurge serve`: the flags of nodes, with vLLM's names."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from ed_infra.errors import ConfigError
from ed_infra.options import Options

from ed_esurge.command.flags import Flags
from ed_esurge.server.options import ServerOptions

logger = logging.getLogger(__name__)

#: Seconds in which the other processes must end after the first.
_END_SECONDS = 60.0
#: Exit code of a process whose model has lost another process.
LOST = 1


class NodeOptions(Options):
    """The processes of one model."""

    nnodes: int = 1
    """Number of processes whose devices form the mesh of the model. Without --master-addr, the
    first starts the others on this host."""
    node_rank: int = 0
    """Number of this process; the first, 0, answers requests."""
    master_addr: str | None = None
    """Address of the host of the first process; the command for the other hosts is printed."""
    master_port: int = 29501
    """Port of the first process."""
    end_with_parent: bool = False
    """Whether the process ends when its standard input is closed."""


NodeFlags = Annotated[NodeOptions, Flags("processes of one model", hidden=("end_with_parent",))]


def check_nodes(nodes: NodeOptions, server: ServerOptions) -> None:
    """Check the flags of nodes.

    Raises:
        ConfigError: a number is invalid, or another flag requires one process for each model.
    """
    count, rank = nodes.nnodes, nodes.node_rank
    if count < 1 or not 0 <= rank < count:
        raise ConfigError(
            f"--nnodes {count} must be at least 1, and --node-rank {rank} from 0 to {count - 1}"
        )
    if rank and nodes.master_addr is None:
        raise ConfigError(f"--node-rank {rank} requires --master-addr, the host of process 0")
    if count > 1 and server.model_directory:
        raise ConfigError(
            "--model-dir loads a model when a request needs it, and the processes of --nnodes must "
            "load every model together at the start: name the models with MODEL and --also instead"
        )
    if count > 1 and server.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size {server.data_parallel_size} starts replicas with one process "
            f"each, and --nnodes {count} one model over several: omit one of them, or divide the "
            "devices into replicas by the first of --sharding-axis-dims"
        )


@contextmanager
def connected_nodes(nodes: NodeOptions, words: Sequence[str]) -> Iterator[None]:
    """Connect the processes of the model, and start those of this host, for the block.

    Without `--nnodes`, the cluster is detected.

    Args:
        words: the command line of this process.
    """
    import jax
    from ed_infra import distributed

    count, rank = nodes.nnodes, nodes.node_rank
    if nodes.end_with_parent:
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    if count == 1:
        distributed.initialize()
        yield
        return
    host, port = nodes.master_addr, nodes.master_port
    children: list[subprocess.Popen[bytes]] = []
    closing = threading.Event()
    if host is None:
        host, port = "127.0.0.1", _free_port()
        from ed_esurge.engine.channel import SECRET

        os.environ.setdefault(SECRET, secrets.token_hex(32))
        for number in range(1, count):
            child_words = [*_words(words, number, host, port), "--end-with-parent"]
            children.append(_start(child_words, closing))
    elif not rank:
        command_line = shlex.join(["esurge", *_words(words, 1, host, port)])
        print(f"on the other hosts, with --node-rank 1 to {count - 1}: {command_line}", flush=True)
    try:
        distributed.initialize(f"{host}:{port}", count, rank)
        yield
        closing.set()
        jax.distributed.shutdown()  # waits for the others, which wait for this process
        for child in children:
            child.wait(_END_SECONDS)
    finally:
        closing.set()
        for child in children:
            child.kill()
            child.wait()


def _words(words: Sequence[str], rank: int, host: str, port: int) -> list[str]:
    """Return the arguments of another process. The last value of a flag is used."""
    more = ["--node-rank", str(rank), "--master-addr", host, "--master-port", str(port)]
    return [*words, *more]


def _start(words: Sequence[str], closing: threading.Event) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-m", "ed_esurge", *words],
        stdin=subprocess.PIPE,  # closed at the end of this process, see `_end_with_parent`
        stdout=sys.stderr.fileno(),
        start_new_session=True,  # Ctrl-C reaches the first process only, which drains
    )

    def watch() -> None:
        code = child.wait()
        if not closing.is_set() and code:
            logger.error("a process of the model ended (%s): the server ends", code)
            os._exit(LOST)

    threading.Thread(target=watch, name="node", daemon=True).start()
    return child


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(LOST)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
