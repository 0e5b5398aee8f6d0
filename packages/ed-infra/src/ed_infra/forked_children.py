"""Forked processes: a compiled function raises an error instead of waiting forever.

XLA and the native library execute programs in threads. A forked child has none of the threads of
its parent, so a compiled function would wait forever for them. The packages start other Python
programs instead of forking, but a program of a user may fork, for example by `multiprocessing` or
by the workers of a data loader.
"""

from __future__ import annotations

import os
from typing import NoReturn

import jax
from jax._src import compiler, xla_bridge  # jax has no public hook for this

from ed_infra.errors import EasyDeLError

_guarded = False


class ForkedProcessError(EasyDeLError):
    """A compiled function was called in a forked child of a process that uses devices."""


def guard_forked_children() -> None:
    """Let compiled functions raise `ForkedProcessError` in children that are forked from now on.

    A child that was forked before this process has used a device is not affected. Arrays of the
    parent remain readable with numpy.
    """
    global _guarded
    if _guarded or not hasattr(os, "register_at_fork"):
        return
    _guarded = True
    os.register_at_fork(after_in_child=_refuse_programs)


def _refuse_programs() -> None:
    if not xla_bridge.backends_are_initialized():
        return
    jax.clear_caches()  # a cached program would run without a call of Python
    compiler.compile_or_get_cached = _refuse
    jax.stages.Compiled.__call__ = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ForkedProcessError(
        f"process {os.getpid()} was forked from a process that uses XLA, so a compiled function "
        "would wait forever: start the process with the method 'spawn' or 'forkserver' "
        "(multiprocessing.get_context('spawn')), or fork before jax uses a device"
    )
