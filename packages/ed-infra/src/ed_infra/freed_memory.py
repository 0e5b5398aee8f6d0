"""Memory that the steps of training on a CPU free and need again.

XLA allocates the temporary memory of a program when the program starts, and frees it at the end.
The C library returns so much memory to the system immediately. The next step then gets new pages,
which the system fills with zeros, one page fault for each: a sixth of the time of a step of a small
model. `keep` lets the C library keep these pages, and `give_back` ends this.

The C library keeps only the memory of the main thread. Programs must therefore be executed by the
thread that calls them (`compute_in_calling_thread`), and that must be the main thread.

A server has many threads and no such steps: `limit_arenas` lets them share their free memory.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

import jax

_ASYNCHRONOUS = "jax_cpu_enable_async_dispatch"
#: Parameters of glibc's `mallopt`: the size of free memory above which memory is returned, and the
#: number of allocations that are separate mappings.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
#: The parameter for the number of heaps.
_ARENA_MAX = -8
_NEVER = -1
#: glibc's default of `_MMAP_MAX`, and the greatest threshold that it selects by itself.
_MMAP_MAX_DEFAULT, _GREATEST_THRESHOLD = 65536, 64 << 20

_keeps_memory = False


def compute_in_calling_thread() -> None:
    """Let jax execute programs of a CPU in the calling thread. Call before jax has devices.

    A call then returns after the computation. Programs of several devices are not affected.
    """
    jax.config.update(_ASYNCHRONOUS, False)


def has_one_cpu() -> bool:
    """Whether the only device of the run is a CPU."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


def computes_in_calling_thread() -> bool:
    """Whether programs have ended when their calls return."""
    return has_one_cpu() and not jax.config.values[_ASYNCHRONOUS]


def keep() -> None:
    """Keep freed memory for later allocations, from now on. Call after programs were compiled.

    The function does nothing unless programs compute in the calling thread and this is the main
    one. It needs glibc, and the user's options of glibc (`MALLOC_*`, `GLIBC_TUNABLES`) win.
    """
    global _keeps_memory
    if _keeps_memory or not _applies():
        return
    c = ctypes.CDLL(None)
    _keeps_memory = bool(c.mallopt(_MMAP_MAX, 0) and c.mallopt(_TRIM_THRESHOLD, _NEVER))


def give_back() -> None:
    """Return the kept memory to the system, and keep no more."""
    global _keeps_memory
    if not _keeps_memory:
        return
    _keeps_memory = False
    c = ctypes.CDLL(None)
    c.mallopt(_MMAP_MAX, _MMAP_MAX_DEFAULT)
    c.mallopt(_TRIM_THRESHOLD, _GREATEST_THRESHOLD)
    c.malloc_trim(0)


def limit_arenas() -> None:
    """Let all threads share two heaps of glibc, unless the user sets options of glibc.

    Otherwise each thread gets a heap, and each heap keeps memory between the bytes that are in use.
    """
    if _has_default_glibc():
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 2)


def _applies() -> bool:
    return (
        computes_in_calling_thread()
        and threading.current_thread() is threading.main_thread()
        and _has_default_glibc()
    )


def _has_default_glibc() -> bool:
    """Return whether the C library is glibc, and the user has set no options of it."""
    return platform.libc_ver()[0] == "glibc" and not any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    )
