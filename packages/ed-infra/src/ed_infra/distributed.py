"""Joining the processes of a run that spans hosts. Called by programs, never at import."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

from ed_infra.errors import ConfigError

# One of these in the environment says that a launcher started several processes.
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
    """Join the other processes of the run, where there are any.

    Without arguments the cluster is detected (SLURM, Open MPI, GKE, TPU pods); a lone process is
    left alone. Joining twice is fine.

    Args:
        coordinator_address: `host:port` of process 0; or `JAX_COORDINATOR_ADDRESS`.
        num_processes: how many; or `JAX_NUM_PROCESSES`.
        process_id: which one this is, from 0; or `JAX_PROCESS_ID`.

    Returns:
        Whether this process is part of a run of several.

    Raises:
        ConfigError: some of the three are given and others are missing.
    """
    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    env = os.environ
    given = {
        "coordinator_address": coordinator_address or env.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _number(num_processes, env, "JAX_NUM_PROCESSES"),
        "process_id": _number(process_id, env, "JAX_PROCESS_ID"),
    }
    missing = [name for name, value in given.items() if value is None]
    if not missing:
        if given["num_processes"] == 1:
            return False
        jax.distributed.initialize(**given)  # type: ignore[arg-type]
        return True
    if len(missing) < len(given):
        present = [name for name in given if name not in missing]
        raise ConfigError(
            f"distributed.initialize: {', '.join(present)} given, {', '.join(missing)} missing: "
            "give all three, or none to detect the cluster"
        )
    if not _launched(env):
        return False
    jax.distributed.initialize()
    return jax.process_count() > 1


def _number(value: int | None, env: Mapping[str, str], name: str) -> int | None:
    if value is not None or name not in env:
        return value
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(f"{name} = {env[name]!r} is not a number") from None


def _launched(env: Mapping[str, str]) -> bool:
    if not any(name in env for name in _LAUNCHERS):
        return False
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        if name in env:
            return int(env[name]) > 1
    return "," in env.get("TPU_WORKER_HOSTNAMES", "") or "MEGASCALE_COORDINATOR_ADDRESS" in env


def is_main() -> bool:
    """Tell whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process is here; returns at once in a run of one."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
