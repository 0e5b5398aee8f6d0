"""Several processes of one model for `esurge serve`: the flags of nodes, with vLLM's names."""

from __future__ import annotations

import argparse
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

from ed_infra.errors import ConfigError

from ed_esurge.engine.channel import SECRET

logger = logging.getLogger(__name__)

#: Seconds in which the other processes must end after the first.
_END_SECONDS = 60.0
#: Exit code of a process whose model has lost another process.
LOST = 1


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of nodes."""
    group = parser.add_argument_group("processes of one model")
    group.add_argument(
        "--nnodes",
        type=int,
        default=1,
        metavar="INT",
        help="number of processes whose devices form the mesh of the model. Without --master-addr, "
        "the first starts the others on this host (default: %(default)s)",
    )
    group.add_argument(
        "--node-rank",
        type=int,
        default=0,
        metavar="INT",
        help="number of this process; the first, 0, answers requests (default: %(default)s)",
    )
    group.add_argument(
        "--master-addr",
        metavar="HOST",
        help="address of the host of the first process; the command for the other hosts is printed",
    )
    group.add_argument(
        "--master-port",
        type=int,
        default=29501,
        metavar="PORT",
        help="port of the first process (default: %(default)s)",
    )
    group.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)


def check_nodes(values: argparse.Namespace) -> None:
    """Check the flags of nodes.

    Raises:
        ConfigError: a number is invalid, or another flag requires one process for each model.
    """
    count, rank = values.nnodes, values.node_rank
    if count < 1 or not 0 <= rank < count:
        raise ConfigError(
            f"--nnodes {count} must be at least 1, and --node-rank {rank} from 0 to {count - 1}"
        )
    if rank and values.master_addr is None:
        raise ConfigError(f"--node-rank {rank} requires --master-addr, the host of process 0")
    if count > 1 and values.model_directory:
        raise ConfigError(
            "--model-dir loads a model when a request needs it, and the processes of --nnodes must "
            "load every model together at the start: name the models with MODEL and --also instead"
        )
    if count > 1 and values.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size {values.data_parallel_size} starts replicas with one process "
            f"each, and --nnodes {count} one model over several: omit one of them, or divide the "
            "devices into replicas by the first of --sharding-axis-dims"
        )


@contextmanager
def connected_nodes(values: argparse.Namespace) -> Iterator[None]:
    """Connect the processes of the model, and start those of this host, for the block.

    Without `--nnodes`, the cluster is detected.
    """
    import jax
    from ed_infra import distributed

    count, rank = values.nnodes, values.node_rank
    if values.end_with_parent:
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    if count == 1:
        distributed.initialize()
        yield
        return
    host, port = values.master_addr, values.master_port
    children: list[subprocess.Popen[bytes]] = []
    closing = threading.Event()
    if host is None:
        host, port = "127.0.0.1", _free_port()
        os.environ.setdefault(SECRET, secrets.token_hex(32))
        for number in range(1, count):
            words = [*_words(values, number, host, port), "--end-with-parent"]
            children.append(_start(words, closing))
    elif not rank:
        command_line = shlex.join(["esurge", *_words(values, 1, host, port)])
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


def _words(values: argparse.Namespace, rank: int, host: str, port: int) -> list[str]:
    """Return the arguments of another process. The last value of a flag is used."""
    more = ["--node-rank", str(rank), "--master-addr", host, "--master-port", str(port)]
    return [*values.words, *more]


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
