"""Settings of every test run. They must be in the environment before jax is imported.

Tests have eight simulated CPU devices, no network, and a compilation cache that all workers of a
run and all later runs share. EASYDEL_TEST_PLATFORM=cuda runs tests on a GPU instead; select tests
that need no mesh.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import os
import pathlib
import re
import ssl
import sys
import threading
from collections.abc import Generator, Iterator

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).parent
CACHE = ROOT / ".cache" / "jax"

assert "jax" not in sys.modules, "jax was imported before the root conftest could set it up"

os.environ["JAX_PLATFORMS"] = os.environ.get("EASYDEL_TEST_PLATFORM", "cpu")
_flags = [os.environ.get("XLA_FLAGS", "")]
if "--xla_force_host_platform_device_count" not in _flags[0]:
    _flags.append("--xla_force_host_platform_device_count=8")
# Test programs run for milliseconds, so compilation determines the duration of a run. nightly.yml
# sets the optimization level that users have.
if "--xla_backend_optimization_level" not in _flags[0]:
    _flags.append("--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = " ".join(_flags).strip()
# Number of XLA threads; `ed_infra.compilation.cache` explains the number.
os.environ.setdefault("NPROC", "64")
# Workers share the folder. If an entry is read while another worker writes it, jax warns and
# compiles again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
# The workers of a run use all cores already, and waiting threads of torch occupy a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"

# Each run uses the same examples, and a call that compiles has no time limit.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("default")

#: Resident bytes of a worker above which its compiled programs are dropped after a test file.
MANY_PROGRAMS = 3 << 30
#: Growth of the resident bytes since programs were dropped, after which they are dropped again.
#: Dropping takes two seconds, and a process with all libraries may need 3 GiB without programs.
MANY_MORE_PROGRAMS = 1 << 30
#: Memory mappings of a worker above which its compiled programs are dropped after a test. Linux
#: allows 65,530; XLA ends the process beyond that number, after the programs of about 60 families.
MANY_MAPPINGS = 40_000
#: Growth of the resident bytes after which the mappings are counted again.
GROWTH = 128 << 20

#: Thresholds of the garbage collector. With the thresholds of Python, collections take a tenth of a
#: run, because each walks over all modules of jax and torch.
COLLECTIONS = (50_000, 20, 50)

#: Programs that share a compiler context; a context keeps the constants of its programs.
PROGRAMS_OF_A_CONTEXT = 500


def pytest_configure(config: pytest.Config) -> None:
    """Collect garbage rarely, and compile faster with jaxlib 0.10.

    Later versions of jaxlib need neither flags nor shared contexts. The flags are for default runs
    only: a run of nightly tests compiles as users do.
    """
    gc.set_threshold(*COLLECTIONS)
    if not importlib.metadata.version("jaxlib").startswith("0.10."):
        return
    flags = os.environ["XLA_FLAGS"]
    if config.option.markexpr == "not nightly" and "optimization_level=0" in flags:
        quick = ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
        os.environ["XLA_FLAGS"] = " ".join([flags, *(flag for flag in quick if flag not in flags)])
    share_compiler_contexts()


def pytest_unconfigure() -> None:
    """Collect garbage once, and make the collections cheap that follow in pytest.

    pytest collects garbage five times, which takes seconds for the heap of a worker.
    """
    gc.collect()
    gc.freeze()


def share_compiler_contexts() -> None:
    """Lower many programs in one MLIR context.

    jax 0.10 creates a context for each program. Creating a context takes 2 of the 11 ms that the
    smallest program takes.
    """
    from jax._src.interpreters import mlir

    create, thread = mlir.make_ir_context, threading.local()

    def shared() -> object:
        if getattr(thread, "uses", PROGRAMS_OF_A_CONTEXT) >= PROGRAMS_OF_A_CONTEXT:
            thread.context, thread.uses = create(), 0
        thread.uses += 1
        return thread.context

    mlir.make_ir_context = shared


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Keep the tests of a file on one worker, so that each model is compiled once.

    Tests with an `xdist_group` mark keep it. Tests of several packages start first, because
    they have the longest durations.
    """
    mark_nightly_cases(config, items)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(ROOT).as_posix()))
    items.sort(key=lambda item: item.path.is_relative_to(ROOT / "packages"))
    yield
    if getattr(config.option, "loadgroup", False):  # in a worker of xdist
        for item in items:
            add_group(item)


def add_group(item: pytest.Item) -> None:
    """Append the group of a test to its id, where xdist reads it.

    xdist 3.8 sets an attribute that pytest 9.2 does not read; without the group, it would send
    the tests of a file to all workers, and each worker would build the same fixtures.
    """
    names = {str(mark.args[0]) for mark in item.iter_markers("xdist_group")}
    suffix = "@" + "_".join(sorted(names))
    if not item.nodeid.endswith(suffix):
        item._id = type(item._id).parse(item.nodeid + suffix)


def mark_nightly_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each case that `@pytest.mark.daily("case", ...)` does not list as nightly.

    A case is the id between the brackets; `*` matches any text.

    Raises:
        pytest.UsageError: A listed case does not exist.
    """
    unlisted: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("daily")
        if mark is None:
            continue
        name, _, case = item.nodeid.removesuffix("]").partition("[")
        patterns = {listed: ".*".join(map(re.escape, listed.split("*"))) for listed in mark.args}
        fitting = {listed for listed in mark.args if re.fullmatch(patterns[listed], case)}
        if not fitting:
            item.add_marker(pytest.mark.nightly)
        unlisted[name] = unlisted.get(name, set(mark.args)) - fitting
    wrong = [f"{name}: {sorted(listed)}" for name, listed in unlisted.items() if listed]
    # A command that selects one case collects only that case.
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("daily lists cases that do not exist: " + ", ".join(wrong))


@pytest.fixture(scope="session", autouse=True)
def processes_without_torch() -> None:
    """Hide torch from processes that tests start; see `tests/subprocesses/sitecustomize.py`."""
    path = [str(ROOT / "tests" / "subprocesses"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """Read the certificates of the system once, and not for each HTTP client of a test."""
    create = ssl.create_default_context
    ssl.create_default_context = functools.cache(create)
    yield
    ssl.create_default_context = create


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """Drop the compiled programs of a worker after a test file if they need much memory."""
    yield
    if resident_bytes() > max(MANY_PROGRAMS, _dropped_at[0] + MANY_MORE_PROGRAMS):
        drop_programs()


@pytest.fixture(autouse=True)
def bounded_mappings() -> Iterator[None]:
    """Drop the compiled programs of a worker before the process has too many memory mappings.

    Counting the mappings takes milliseconds, so they are counted only after the memory has grown.
    """
    yield
    resident = resident_bytes()
    if resident <= _counted_at[0] + GROWTH:
        return
    if mappings() > MANY_MAPPINGS:
        drop_programs()
        resident = resident_bytes()
    _counted_at[0] = resident


#: Resident bytes when the mappings were last counted.
_counted_at = [0]
#: Resident bytes after programs were last dropped.
_dropped_at = [0]


def drop_programs() -> None:
    """Drop the compiled programs of this process, and return their memory to the system."""
    if (jax := sys.modules.get("jax")) is not None:
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # only in the library of GNU
            trim(0)
        _dropped_at[0] = resident_bytes()


def mappings() -> int:
    """Return the number of memory mappings of this process; 0 on a system without /proc."""
    maps = pathlib.Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


def resident_bytes() -> int:
    """Return the resident bytes of this process; 0 on a system without /proc."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
