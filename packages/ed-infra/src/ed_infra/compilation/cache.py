"""Setup of jax's persistent compilation cache, and the folders for compiled programs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from ed_infra.compilation.private_files import UntrustedFileError, make_private
from ed_infra.logging import get_logger

if TYPE_CHECKING:
    import hashlib

    import numpy as np

logger = get_logger(__name__)

#: Start of the imports of this process, in seconds since the epoch.
IMPORTED = time.time()
#: Threads of XLA in a process with several simulated CPU devices.
_THREADS = "64"
_DESCRIBES_EQUALLY = "describes_cpus_equally"


def keep_compiled_programs() -> None:
    """Enable jax's persistent compilation cache in the user's cache folder.

    Later starts and serving then load compiled programs. Small programs are also stored: there are
    many, and reading one is faster than compiling it. Only commands call this function, never an
    import. Settings of the user have precedence: `JAX_COMPILATION_CACHE_DIR`, with jax's own
    limits, or `JAX_ENABLE_COMPILATION_CACHE=false`.
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
    _describe_cpus_equally()
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        # A program from the cache starts independent collectives at the same time, and each one
        # blocks a thread per device. With one thread per device, the default, this can deadlock.
        os.environ.setdefault("NPROC", _THREADS)


def _describe_cpus_equally() -> None:
    """Let the processes of a run on CPUs read the programs that process 0 wrote to jax's cache.

    Only process 0 writes to the cache. The names of the programs depend on a description of the
    devices, and on CPUs this description differs between processes. Without this function, all
    other processes compile every program at every start.
    """
    from jax._src import cache_key  # there is no public setting

    from ed_infra.compilation.fingerprint import instructions

    name = "_hash_accelerator_config"
    original_hash = getattr(cache_key, name, None)
    if (
        original_hash is None
        or hasattr(original_hash, _DESCRIBES_EQUALLY)
        or len(signature(original_hash).parameters) != 2
    ):
        return

    def describe(hash_obj: hashlib._Hash, devices: np.ndarray) -> None:
        all_devices = [*devices.flat]
        processes = {device.process_index for device in all_devices}
        if len(processes) == 1 or any(device.platform != "cpu" for device in all_devices):
            original_hash(hash_obj, devices)
            return
        places = [f"{d.id} {d.process_index} {d.device_kind}" for d in all_devices]
        hash_obj.update("\0".join([*places, *instructions()]).encode())

    setattr(describe, _DESCRIBES_EQUALLY, True)
    setattr(cache_key, name, describe)


def programs_folder(kind: str) -> Path | None:
    """Return the folder for compiled programs of a kind, or None if they are not stored.

    The folder is next to jax's cache if `keep_compiled_programs` enabled it. With a cache that the
    user configured, only jax stores programs.

    Args:
        kind: name of the folder, such as "engines".
    """
    import jax

    cache_dir = jax.config.values["jax_compilation_cache_dir"]
    cache_enabled = jax.config.values["jax_enable_compilation_cache"]
    return _home() / kind if cache_enabled and cache_dir == str(_home() / "jax") else None


@contextmanager
def compiled_afresh() -> Iterator[None]:
    """Disable jax's persistent cache in this process inside the block. Threads may share the time.

    A program that jax loads from its cache on a CPU contains no code that can be serialized.
    """
    _afresh.enter()
    try:
        yield
    finally:
        _afresh.leave()


class _Afresh:
    """Counts the open blocks of `compiled_afresh`: the first disables the cache, the last restores
    the setting."""

    NAME = "jax_enable_compilation_cache"

    def __init__(self) -> None:
        self._lock, self._blocks, self._before = threading.Lock(), 0, True

    def enter(self) -> None:
        import jax

        with self._lock:
            if self._blocks == 0:
                self._before = jax.config.values[self.NAME]
                self._set(False)
            self._blocks += 1

    def leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                self._set(self._before)

    def _set(self, value: bool) -> None:
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        jax.config.update(self.NAME, value)
        compilation_cache.reset_cache()  # jax reads the setting once


_afresh = _Afresh()


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "easydel"
