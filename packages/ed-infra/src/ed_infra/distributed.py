"""Initialization and collectives of a run with several processes. Programs call it, not imports."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike

from ed_infra import logging as ed_logging
from ed_infra.errors import ConfigError, EasyDeLError

T = TypeVar("T")
logger = ed_logging.get_logger(__name__)

# First byte of the reply in `from_main`.
_DONE, _FAILED = b"\0", b"\1"
# Seconds between two attempts to reach process 0, and of all attempts.
_TRY, _REACH = 0.02, 60.0
# A launcher that starts several processes sets one of these variables.
_LAUNCHERS = (
    "SLURM_JOB_ID",
    "OMPI_COMM_WORLD_SIZE",
    "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_COORDINATOR_ADDRESS",
)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> bool:
    """Connect the processes of a run.

    Without arguments the cluster is detected (SLURM, Open MPI, GKE, TPU pods). The function does
    nothing for a single process or at a second call. Afterwards only process 0 logs messages below
    the level of errors.

    Args:
        coordinator_address: `host:port` of process 0, or `JAX_COORDINATOR_ADDRESS`.
        num_processes: Number of processes, or `JAX_NUM_PROCESSES`.
        process_id: Number of this process, from 0, or `JAX_PROCESS_ID`.

    Returns:
        Whether the run has several processes.

    Raises:
        ConfigError: Only one or two of the three arguments are set.
    """
    if jax.distributed.is_initialized():
        return _set_up_logging()
    env = os.environ
    settings = {
        "coordinator_address": coordinator_address or env.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _number(num_processes, env, "JAX_NUM_PROCESSES"),
        "process_id": _number(process_id, env, "JAX_PROCESS_ID"),
    }
    missing = [name for name, value in settings.items() if value is None]
    if not missing:
        if settings["num_processes"] == 1:
            return False
        _connect(**settings)
        return _set_up_logging()
    if len(missing) < len(settings):
        present = [name for name in settings if name not in missing]
        raise ConfigError(
            f"distributed.initialize: {', '.join(present)} given, {', '.join(missing)} missing: "
            "set all three, or none of them to detect the cluster"
        )
    if not _has_launcher(env):
        return False
    _connect()
    return _set_up_logging()


def _connect(**settings: Any) -> None:
    """Connect the processes."""
    if settings.get("process_id"):
        _await_coordinator(settings["coordinator_address"])
    jax.distributed.initialize(**settings)
    if jax.default_backend() == "cpu":
        # The CPU connects the processes at their first collective operation, and waits 30 seconds
        # for each. Here all processes are present; later, one of them may be slower.
        broadcast(np.int64(0))


def _await_coordinator(address: str) -> None:
    """Wait until process 0 accepts connections.

    A client of jax that comes earlier tries again only after a second. After `_REACH` seconds jax
    waits, and reports why process 0 cannot be reached.
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + _REACH
    while port.isdecimal() and time.monotonic() < end:
        try:
            address_info = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[
                0
            ]
            with socket.socket(*address_info[:3]) as client:
                client.settimeout(1.0)
                # A socket can connect to itself if it has the port for which it waits.
                client.bind(("", 0))
                if client.getsockname()[1] != int(port):
                    client.connect(address_info[4])
                    return
        except OSError:
            time.sleep(_TRY)


def _set_up_logging() -> bool:
    """Log messages below the level of errors only on process 0."""
    ed_logging.set_process(jax.process_index())
    logger.info(
        "%d processes, %d devices (%d here)",
        jax.process_count(),
        jax.device_count(),
        jax.local_device_count(),
    )
    return jax.process_count() > 1


def _number(value: int | None, env: Mapping[str, str], name: str) -> int | None:
    if value is not None or name not in env:
        return value
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(f"{name} = {env[name]!r} is not a number") from None


def _has_launcher(env: Mapping[str, str]) -> bool:
    if not any(name in env for name in _LAUNCHERS):
        return False
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        if name in env:
            return int(env[name]) > 1
    return "," in env.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in env


def is_main() -> bool:
    """Return whether this process writes files and prints."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process reaches this call; a single process does not wait."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def broadcast(tree: T) -> T:
    """Return process 0's values on every process; collective.

    Args:
        tree: A pytree of numpy arrays and numbers, with equal structure, shapes and dtypes on all
            processes.

    Returns:
        The same structure with numpy arrays; `tree` itself in a single process.
    """
    if jax.process_count() == 1:
        return tree
    from jax.experimental import multihost_utils

    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def broadcast_bytes(data: bytes | None = None) -> bytes:
    """Return process 0's bytes on every process; collective.

    Args:
        data: The bytes of process 0; other processes may pass None.

    Raises:
        ConfigError: Process 0 passes None. The other processes raise the error as well.
    """
    size = int(broadcast(np.int64(-1 if data is None else len(data))))
    if size < 0:
        raise ConfigError("broadcast_bytes: process 0 gave no bytes")
    if jax.process_count() == 1:
        return data or b""
    buffer = np.zeros(size, np.uint8)
    if is_main():
        buffer[:] = np.frombuffer(data or b"", np.uint8)
    return broadcast(buffer).tobytes() if size else b""


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes of all processes, in order, on every process; collective."""
    if jax.process_count() == 1:
        return [data]
    from jax.experimental import multihost_utils

    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    buffer = np.zeros(max(int(sizes.max()), 1), np.uint8)
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(buffer))
    return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]


def from_main(function: Callable[[], ArrayLike]) -> np.ndarray:
    """Call a function on process 0 only, and return its array on every process; collective.

    The array is sent in numpy's format, never as a pickle.

    Args:
        function: Returns an array of numbers; two calls may return different arrays.

    Raises:
        BaseException: On process 0, the exception of the function.
        EasyDeLError: On the other processes, with the message of that exception.
    """
    if jax.process_count() == 1:
        return np.asarray(function())
    if not is_main():
        answer = broadcast_bytes()
        if answer[:1] == _FAILED:
            reason = answer[1:].decode("utf-8", "replace")
            raise EasyDeLError(f"process 0 failed, so this process ends too: {reason}")
        return np.load(io.BytesIO(answer[1:]), allow_pickle=False)
    buffer = io.BytesIO(_DONE)
    buffer.seek(1)
    try:
        value = np.asarray(function())
        np.save(buffer, value, allow_pickle=False)
    except BaseException as error:
        broadcast_bytes(_FAILED + f"{type(error).__name__}: {error}".encode())
        raise
    broadcast_bytes(buffer.getvalue())
    return value


def on_host(array: jax.Array) -> np.ndarray:
    """Return a complete array as numpy; collective if other processes have parts of it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
