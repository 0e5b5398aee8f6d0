"""`import ed_infra` is fast, and importing its modules does not change the process."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

OBSERVE = """
import importlib, json, logging, os, pkgutil, signal, sys, threading, time, warnings

def observe():
    loggers = {
        name: (logger.level, len(logger.handlers), logger.propagate, logger.disabled)
        for name, logger in logging.Logger.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and not name.startswith("easydel")
    }
    jax = sys.modules.get("jax")
    backends = sys.modules.get("jax._src.xla_bridge")
    return {
        "os.environ": dict(os.environ),
        "root logger": (logging.root.level, len(logging.root.handlers)),
        "loggers": loggers,
        "warnings": [str(entry) for entry in warnings.filters],
        "hooks": (str(sys.excepthook), str(sys.displayhook), [str(f) for f in sys.meta_path]),
        "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "sys.path": list(sys.path),
        "jax.config": {k: str(v) for k, v in jax.config.values.items()} if jax else {},
        "jax backends": sorted(backends._backends) if backends else [],
    }
"""


def python(code: str) -> Any:
    """Run code in a fresh interpreter; returns the JSON of its last line."""
    program = OBSERVE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_ed_infra_loads_no_heavy_modules(record_property: Callable[[str, object], None]):
    seen = python("""
        before, modules, start = observe(), set(sys.modules), time.perf_counter()
        import ed_infra
        seconds, after = time.perf_counter() - start, observe()
        new = sorted(set(sys.modules) - modules)
        print(json.dumps({"changed": [k for k in before if before[k] != after[k]],
                          "new": new, "seconds": seconds, "names": len(dir(ed_infra))}))
    """)
    assert not seen["changed"]
    heavy = {"jax", "flax", "numpy", "transformers", "pydantic", "torch", "fsspec"}
    assert not heavy & {name.split(".")[0] for name in seen["new"]}
    assert len(seen["new"]) < 30, seen["new"]
    record_property(
        "summary",
        f"import ed_infra: {len(seen['new'])} modules, {1000 * seen['seconds']:.1f} ms "
        f"({seen['names']} names, loaded when they are used)",
    )


@pytest.mark.nightly
def test_importing_every_ed_infra_module_has_no_side_effects(
    record_property: Callable[[str, object], None],
):
    """Every module of the package, against a process that has imported the same third parties."""
    third_parties = python("""
        import ed_infra
        names = [m.name for m in pkgutil.iter_modules(ed_infra.__path__, "ed_infra.")]
        for name in names:
            importlib.import_module(name)
        print(json.dumps([m for m in sys.modules if not m.startswith("ed_infra")]))
    """)
    seen = python(f"""
        import contextlib
        for name in {third_parties!r}:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        before, start = observe(), time.perf_counter()
        import ed_infra
        names = [m.name for m in pkgutil.iter_modules(ed_infra.__path__, "ed_infra.")]
        for name in names:
            importlib.import_module(name)
        seconds, after = time.perf_counter() - start, observe()
        print(json.dumps({{"changed": {{k: [before[k], after[k]] for k in before
                                        if before[k] != after[k]}},
                           "own": len(names), "seconds": seconds}}))
    """)
    assert not seen["changed"]
    record_property(
        "summary",
        f"all {seen['own']} modules of ed_infra: {1000 * seen['seconds']:.0f} ms of their own, "
        f"beside {len(third_parties)} of third parties",
    )
