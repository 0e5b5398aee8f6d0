"""Imports are cheap and have no side effects; jax is imported only when it is used."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

from tools.bench import imports
from tools.workspace import ROOT, packages, read_toml

MODULES = sorted(module for package in packages() for module in package.modules)
HEAVY = {
    *("jax", "jaxlib", "flax", "optax", "orbax", "transformers", "torch", "tensorflow"),
    *("datasets", "pyarrow", "pandas", "lm_eval", "starlette", "uvicorn"),
}
CONTRACTS = read_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
JAX_FREE = next(c["source_modules"] for c in CONTRACTS if c["id"] == "options")

# Observable state of a process: an import of this project must not change any of it.
OBSERVE = """
import gc, json, logging, os, signal, sys, threading, warnings

def observe():
    import jax
    from jax._src import xla_bridge
    loggers = {
        name: (logger.level, len(logger.handlers), logger.propagate, logger.disabled)
        for name, logger in logging.Logger.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and not name.startswith(OURS)
    }
    root = logging.getLogger()
    return {
        "os.environ": dict(os.environ),
        "logging root": (root.level, len(root.handlers), logging.raiseExceptions),
        "loggers": loggers,
        "warnings": [str(entry) for entry in warnings.filters],
        "excepthook": str(sys.excepthook),
        "signals": {s.name: str(signal.getsignal(s)) for s in signal.valid_signals()
                    if isinstance(s, signal.Signals)},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "sys.path": list(sys.path),
        "jax.config": {k: str(v) for k, v in jax.config.values.items()},
        "jax backends": sorted(xla_bridge._backends),
    }
"""


def python(code: str) -> str:
    """Run code in a fresh interpreter and return its standard output."""
    # The code is passed through standard input: a list of all modules exceeds the argument limit.
    done = subprocess.run(
        [sys.executable, "-"],
        input=textwrap.dedent(code),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(*names: str) -> set[str]:
    """Return the top-level names in `sys.modules` after importing the modules."""
    code = f"import sys, {', '.join(names)}; print(*{{m.split('.')[0] for m in sys.modules}})"
    return set(python(code).split())


@pytest.mark.parametrize("module", MODULES)
def test_importing_a_package_loads_no_heavy_dependency(module: str) -> None:
    assert not loaded_after(module) & HEAVY


def test_option_modules_import_without_jax() -> None:
    assert not loaded_after(*JAX_FREE) & {"jax", "jaxlib", "flax", "transformers", "torch"}


def test_scheduler_modules_import_without_jax() -> None:
    esurge = next(p for p in packages() if p.name == "ed-esurge")
    core = [m for m in esurge.submodules() if m.startswith("ed_esurge.core")]
    assert core
    assert not loaded_after(*core) & {"jax", "jaxlib", "flax", "transformers"}


@pytest.mark.nightly
def test_importing_all_modules_does_not_change_the_process(
    record_property: Callable[[str, object], None],
) -> None:
    """Compare the process before and after importing every module; third parties come first."""
    ours = tuple(MODULES)
    modules = [name for p in packages() for name in p.submodules() if "__main__" not in name]
    first = python(f"""
        import importlib, json, sys
        for name in {modules!r}:
            importlib.import_module(name)
        print(json.dumps([m for m in sys.modules if not m.startswith({ours!r})]))
    """)
    third_parties = json.loads(first.splitlines()[-1])
    second = python(f"""
        OURS = {ours!r}
        {textwrap.indent(OBSERVE, " " * 8).lstrip()}
        import contextlib, importlib
        for name in {third_parties!r}:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        before = observe()
        for name in {modules!r}:
            importlib.import_module(name)
        after = observe()
        print(json.dumps({{key: [before[key], after[key]]
                          for key in before if before[key] != after[key]}}))
    """)
    changed = json.loads(second.splitlines()[-1])
    assert not changed, f"changed by importing {len(modules)} modules"


def test_process_observer_detects_changes() -> None:
    seen = python(f"""
        OURS = {tuple(MODULES)!r}
        {textwrap.indent(OBSERVE, " " * 8).lstrip()}
        before = observe()
        os.environ["SEEN"] = "1"
        logging.basicConfig()
        import jax
        jax.config.update("jax_enable_x64", True)
        jax.devices()
        after = observe()
        print(json.dumps([key for key in before if before[key] != after[key]]))
    """)
    changed = set(json.loads(seen.splitlines()[-1]))
    assert {"os.environ", "logging root", "jax.config", "jax backends"} <= changed


def test_importing_ed_data_stays_within_memory_limits() -> None:
    assert imports.cost("import ed_data")[2] < 8 * 2**20
    assert imports.cost("from ed_data import Mixture; Mixture")[2] < 48 * 2**20
    assert imports.cost("import ed_data.tokens.worker")[2] < 16 * 2**20
