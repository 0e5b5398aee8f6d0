"""Compiled programs are kept between runs: a second start, and serving, need not compile again."""

from __future__ import annotations

import os
from pathlib import Path


def enable() -> None:
    """Point jax's persistent compilation cache at the user's cache folder.

    Only a run does this, never an import. What the user has set himself stands:
    `JAX_COMPILATION_CACHE_DIR`, or `JAX_ENABLE_COMPILATION_CACHE=false` for none.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(home) / "easydel" / "jax"))
