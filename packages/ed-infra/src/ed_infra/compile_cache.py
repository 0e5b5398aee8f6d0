"""Compiled programs that outlive a process."""

from __future__ import annotations

import os
from pathlib import Path


def keep_compiled_programs() -> None:
    """Point jax's persistent compilation cache at the user's cache folder.

    A second start, and serving, then need not compile again. Small programs are kept too: there
    are many, and each costs more to compile than to read. Only a command does this, never an
    import. What the user has set himself stands: `JAX_COMPILATION_CACHE_DIR` (with jax's own
    limits of what is kept), or `JAX_ENABLE_COMPILATION_CACHE=false` for none.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "easydel" / "jax"))
