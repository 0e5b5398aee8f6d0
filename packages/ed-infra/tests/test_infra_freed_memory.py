"""A step on a CPU uses the memory that the step before freed, until it is given back."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ed_infra import freed_memory
from ed_infra.host_memory import settle

#: Prints the page faults of a step before `keep`, while memory is kept, and after `give_back`, and
#: the resident MiB before and after `give_back`. A step has 128 MiB of temporary memory.
PROGRAM = """
import json, resource
import jax, jax.numpy as jnp
from pathlib import Path
from ed_infra import freed_memory

ASYNCHRONOUS
def total(x):
    y = jax.lax.optimization_barrier(x * 2)
    return jnp.vdot(y, y[::-1])

step = jax.jit(total)
x = jnp.arange(1 << 24, dtype=jnp.float32)
step(x).block_until_ready()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        step(x).block_until_ready()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256

found = [faults()]
freed_memory.keep()
step(x).block_until_ready()
found.append(faults())
found.append(resident())
freed_memory.give_back()
found.append(resident())
found.append(faults())
print(json.dumps(found))
"""


def found(begin: str, **environment: str) -> list[float]:
    """Return what the program prints in a process with one device."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("ASYNCHRONOUS", begin)],
        env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="`mallopt` is a function of glibc")
def test_steps_use_the_memory_that_was_freed():
    before, kept, held, left, after = found("freed_memory.compute_in_calling_thread()")
    assert before > 30000, "a step gets new pages of 4 KiB"
    assert kept < before / 4, "a few steps grow the memory, and the others fit in"
    assert held - left > 100, "MiB are returned to the system"
    assert after > before / 8


@pytest.mark.nightly
@pytest.mark.parametrize("environment", [{}, {"MALLOC_TOP_PAD_": "131072"}])
def test_settings_of_the_user_stay(environment):
    begin = "freed_memory.compute_in_calling_thread()" if environment else ""
    before, kept, *_ = found(begin, **environment)
    assert kept > before / 2


def test_settled_objects_are_excluded_without_a_collection() -> None:
    """A full collection would stop all threads of a server."""
    phases: list[str] = []
    record = lambda phase, info: phases.append(phase)  # noqa: E731
    gc.disable()
    gc.callbacks.append(record)
    try:
        settle()
        assert not phases
        assert gc.get_freeze_count() > 1000
    finally:
        gc.callbacks.remove(record)
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize(("variable", "calls"), [("OTHER", 1), ("MALLOC_ARENA_MAX", 0)])
def test_threads_share_two_heaps_unless_the_user_sets_options(monkeypatch, variable, calls):
    values = []
    library = SimpleNamespace(mallopt=lambda *value: values.append(value))
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(freed_memory.platform, "libc_ver", lambda: ("glibc", "2.40"))
    monkeypatch.setattr(freed_memory.os, "environ", {variable: "4"})
    freed_memory.limit_arenas()
    assert values == [(-8, 2)] * calls
