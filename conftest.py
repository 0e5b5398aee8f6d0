"""Settings of every test run; they must be in the environment before jax is imported.

Tests see eight simulated CPU devices, no network, and a compilation cache that all workers of a run
and all later runs share.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import pathlib
import re
import sys
from collections.abc import Iterator

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).parent
CACHE = ROOT / ".cache" / "jax"

assert "jax" not in sys.modules, "jax was imported before the root conftest could set it up"

os.environ["JAX_PLATFORMS"] = "cpu"
_flags = [os.environ.get("XLA_FLAGS", "")]
if "--xla_force_host_platform_device_count" not in _flags[0]:
    _flags.append("--xla_force_host_platform_device_count=8")
# Programs run for milliseconds here, so compilation determines how long a run takes.
# nightly.yml sets the level that users have.
if "--xla_backend_optimization_level" not in _flags[0]:
    _flags.append("--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = " ".join(_flags).strip()
# Threads of XLA; `ed_infra.compilation.cache` says why programs from the cache need so many.
os.environ.setdefault("NPROC", "64")
# Workers share the folder. An entry that is read while it is written does not decompress; jax then
# warns and compiles.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "disabled"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"

# The same examples on each run, and no limit on a call that may compile.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("default")

#: Resident bytes of a worker above which the programs of the files before are dropped.
MANY_PROGRAMS = 3 << 30


def pytest_configure(config: pytest.Config) -> None:
    """Compile in a quarter of the time in a default run; a run of everything compiles as users do.

    jax 0.12 has only one way to emit fusions.
    """
    flag, flags = "--xla_cpu_use_fusion_emitters=false", os.environ["XLA_FLAGS"]
    daily = config.option.markexpr == "not nightly" and "optimization_level=0" in flags
    if daily and flag not in flags and importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] = f"{flags} {flag}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file on one worker, so that no model of theirs is compiled twice.

    Families and the like have groups of their own. Whole products come first: they take longest.
    """
    mark_nightly_cases(config, items)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(ROOT).as_posix()))
    items.sort(key=lambda item: item.path.is_relative_to(ROOT / "packages"))


def mark_nightly_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each case that its test does not list in `@pytest.mark.daily("case", ...)` as nightly.

    A name is the id between the brackets; `*` stands for any text.

    Raises:
        pytest.UsageError: a listed name is no case.
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
    # A command that names one case collects only that one.
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("daily lists cases that do not exist: " + ", ".join(wrong))


@pytest.fixture(scope="session", autouse=True)
def processes_without_torch() -> None:
    """Let processes that tests start begin in half the time: see the file in that folder."""
    path = [str(ROOT / "tests" / "subprocesses"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """Drop compiled programs after a file, where a worker holds many."""
    yield
    jax = sys.modules.get("jax")
    if jax is not None and resident_bytes() > MANY_PROGRAMS:
        jax.clear_caches()
        gc.collect()


def resident_bytes() -> int:
    """Of this process; 0 on a system without /proc."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
