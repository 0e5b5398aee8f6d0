"""All processes of a run on CPUs read the programs that process 0 wrote to jax's cache."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

PROCESSES = 2
CODE = """
import json, sys
import jax, numpy as np
from ed_infra import distributed
from ed_infra.compilation.cache import keep_compiled_programs
from jax.sharding import NamedSharding, PartitionSpec as P

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
keep_compiled_programs()
distributed.initialize()
here = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), P("x"))
rows = np.arange(8.0).reshape(2, 4)
x = jax.make_array_from_callback(rows.shape, here, lambda index: rows[index])
total = jax.jit(lambda x: (x * 3).sum(), out_shardings=NamedSharding(here.mesh, P()))(x)
names = ("compile_requests_use_cache", "cache_hits")
counts = [events.count(f"/jax/compilation_cache/{name}") for name in names]
print(json.dumps([float(total), *counts]))
"""


def run(home) -> list[list[float]]:
    """Return the sum, the requests of programs and the programs from the cache, per process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    keep = {k: v for k, v in os.environ.items() if not k.startswith("JAX_") and k != "XLA_FLAGS"}
    keep |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home)}
    keep |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(PROCESSES)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CODE],
            env={**keep, "JAX_PROCESS_ID": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.nightly
def test_second_run_of_several_processes_compiles_nothing(tmp_path) -> None:
    first = run(tmp_path)
    assert [total for total, _, _ in first] == [84] * PROCESSES
    assert first[0][1] > first[0][2] == 0, "process 0 compiles; the others may read its programs"
    for total, requests, hits in run(tmp_path):
        assert total == 84
        assert requests == hits > 0
