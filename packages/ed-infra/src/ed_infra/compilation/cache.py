"""Compiled programs that outlive a process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ed_infra.compilation.private_files import UntrustedFileError, make_private
from ed_infra.logging import get_logger

logger = get_logger(__name__)

#: When this process began to import what it runs, in seconds since the epoch.
IMPORTED = time.time()
#: Threads of XLA where one process plays several CPU devices.
THREADS = "64"
_lock = threading.Lock()


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
        try:
            make_private(_home() / "jax")  # the cache is code, which another user could write
        except (OSError, UntrustedFileError) as error:
            logger.warning("compiled programs are not kept: %s", error)
            return
        jax.config.update("jax_compilation_cache_dir", str(_home() / "jax"))
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        # A program from the cache starts collectives that do not depend on each other at once, and
        # each waits in a thread on each device. With as many threads as devices, the default, all
        # of them can wait for one that has none.
        os.environ.setdefault("NPROC", THREADS)


def engines_folder() -> Path | None:
    """Where engines keep what they have compiled; None where nothing is kept.

    That is beside jax's cache where `keep_compiled_programs` chose it. Who chose a cache himself
    has jax's alone.
    """
    import jax

    chosen = jax.config.values["jax_compilation_cache_dir"]
    kept = jax.config.values["jax_enable_compilation_cache"] and jax.process_count() == 1
    return _home() / "engines" if kept and chosen == str(_home() / "jax") else None


@contextmanager
def compiled_afresh() -> Iterator[None]:
    """Compile without jax's persistent cache inside.

    What jax has read from its cache on a CPU lacks code, and cannot be written to another file.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    name = "jax_enable_compilation_cache"
    with _lock:
        before = jax.config.values[name]
        jax.config.update(name, False)
        compilation_cache.reset_cache()  # jax asks the setting once
        try:
            yield
        finally:
            jax.config.update(name, before)
            compilation_cache.reset_cache()


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "easydel"
