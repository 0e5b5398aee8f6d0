"""Settings of every test run; they must be in the environment before jax is imported.

Tests see eight simulated CPU devices, no network, and a compilation cache that all workers of a run
and all later runs share.
"""

from __future__ import annotations

import os
import pathlib
import sys

import hypothesis

ROOT = pathlib.Path(__file__).parent
CACHE = ROOT / ".cache" / "jax"

assert "jax" not in sys.modules, "jax was imported before the root conftest could set it up"

os.environ["JAX_PLATFORMS"] = "cpu"
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()
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
