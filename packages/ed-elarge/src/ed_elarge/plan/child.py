"""A child process with jax on simulated CPU devices: compiled steps, and shapes of model classes.

The parent sends one request as JSON; the last line of the child's output is the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ed_infra.errors import ConfigError

from ed_elarge.config.run_config import RunConfig


def ask_child(
    run: RunConfig,
    question: str,
    *,
    devices: int,
    time_limit: float,
    sections: Mapping[str, Any] | None = None,
    accelerator_flags: Sequence[str] | None = None,
    **details: object,
) -> dict[str, Any]:
    """Return the answer of a child process.

    Args:
        run: the run; the child validates the same sections again.
        question: a key of `ed_elarge.plan.answers.SHAPE_ANSWERS`.
        devices: number of simulated devices.
        time_limit: seconds, after which the child is killed.
        sections: sections that replace those of the run.
        accelerator_flags: flags of XLA for described devices; None = simulated CPU devices.
        details: further values of the request.

    Raises:
        ConfigError: the child failed, or exceeded the time limit.
    """
    values = {**run.to_dict(), **(sections or {})}
    request = json.dumps(
        {"question": question, "name": run.document.name, "run": values, **details},
        default=str,
    )
    flags = os.environ.get("XLA_FLAGS", "").split()
    xla_flags = [f for f in flags if not f.startswith("--xla_force_host_platform_device_count")]
    if accelerator_flags is None:
        # This pass fails on reductions in bfloat16, and only the execution of a program needs it.
        xla_flags.append("--xla_disable_hlo_passes=all-reduce-promotion")
        xla_flags = [f for f in xla_flags if not f.startswith("--xla_backend_optimization_level")]
        xla_flags.append("--xla_backend_optimization_level=0")  # the program is never executed
    xla_flags += accelerator_flags or ()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ED_LAYERS_NATIVE": "0",
        "TPU_SKIP_MDS_QUERY": "1",  # libtpu requests no metadata server
        # A program for described devices cannot be read back from the cache.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": " ".join([*xla_flags, f"--xla_force_host_platform_device_count={devices}"]),
    }
    command = [sys.executable, "-m", "ed_elarge.plan.answers"]
    try:
        done = subprocess.run(
            command,
            input=request,
            capture_output=True,
            text=True,
            timeout=time_limit,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the child process of the plan needed more than {time_limit:g} s: raise --time-limit, "
            "or plan fewer devices"
        ) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"the child process of the plan failed: {last}")
    return json.loads(lines[-1])
