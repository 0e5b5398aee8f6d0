"""The compiled train step of an earlier process, which a later start loads instead of tracing.

A stored step belongs to a fingerprint of everything that determines the program: the structure of
the state, the optimizer, the options, the shapes and shardings of all arrays, the sources of the
packages, versions and machine. The functions of a method receive the whole run of the method, which
has no fingerprint. Therefore a step is stored only if these functions read nothing but the options
and the placement of arrays, which the configuration of the model determines.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
from ed_infra.compilation.cache import compiled_afresh, programs_folder
from ed_infra.compilation.programs import Programs
from ed_infra.outputs import Metric
from ed_infra.sharding.placement import ShardedConfig
from ed_layers.dropout import disable_dropout
from ed_layers.programs import open_programs

from ed_trainers.checkpoints.run_record import LOOP_OPTIONS
from ed_trainers.contract import Batch, Loss, MethodRun, Models
from ed_trainers.options.base import TrainingArguments

TRAINING_PACKAGES = ("ed_infra", "ed_layers", "ed_models", "ed_trainers")
_NAME = "step"


class ObservedRun:
    """The run of a method while its functions are traced. It notes which data they read.

    Attributes:
        is_described: whether they have read nothing but data that the fingerprint contains.
    """

    _DESCRIBED = ("arguments", "rows", "name", "placement")

    def __init__(self, run: MethodRun[Any]):
        self._run = run
        self.is_described = True

    def __getattr__(self, name: str) -> Any:
        if name not in self._DESCRIBED:
            self.is_described = False
        return getattr(self._run, name)

    def loss(self, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
        """Return the sums over a batch; see `Method.loss`."""
        with disable_dropout(self._run.arguments.disable_dropout):
            return self._run.record.loss(self, models, batch, key)

    def statistics(self, models: Models, batch: Batch, key: jax.Array | None) -> dict[str, Metric]:
        """Return the statistics of a batch; see `Method.statistics`."""
        function = self._run.record.statistics
        if function is None:
            return {}
        with disable_dropout(self._run.arguments.disable_dropout):
            return function(self, models, batch, key)


class StoredStep:
    """A jitted step whose programs are loaded from files, or compiled and written to files.

    Each shape of a batch has a program. Without a folder of programs, and for methods that read
    more than options, the step is the jitted function.

    Args:
        function: the jitted function of the leaves, the frozen leaves, the batch and the totals.
        run: the run of the method, as `function` reads it.
        config: configuration of the model.
        arguments: options of the method.
        parts: all other data that determines the program, except the arguments of the call.
    """

    def __init__(
        self,
        function: jax.stages.Wrapped,
        run: ObservedRun,
        config: ShardedConfig,
        arguments: TrainingArguments,
        parts: tuple[object, ...],
    ):
        self._function, self._run, self._config = function, run, config
        options = {k: v for k, v in sorted(dict(arguments).items()) if k not in LOOP_OPTIONS}
        self._parts = (type(arguments), options, *parts)
        self._made: dict[tuple[object, ...], Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        shapes = tuple(array.shape for array in arguments[2].values())
        function = self._made.get(shapes)
        if function is None:
            function = self._made[shapes] = self._make(arguments)
        try:
            return function(*arguments)
        except (TypeError, ValueError):
            if function is self._function:
                raise
            # The arrays have another placement than at the first call: jit compiles for both.
            self._made[shapes] = self._function
            return self._function(*arguments)

    def lower(self, *arguments: object) -> jax.stages.Lowered:
        """Return the lowered program for such arguments."""
        return self._function.lower(*arguments)

    def _make(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        programs = self._programs(arguments)
        if programs is None:
            return self._function
        stored = programs.load(_NAME)
        if stored is not None:
            return stored
        lowered = self._function.lower(*arguments)
        if not self._run.is_described:
            return self._function
        # On CPUs, a program from jax's cache contains no code that can be serialized.
        on_cpu = self._config.mesh.devices.flat[0].platform == "cpu"
        with compiled_afresh() if on_cpu else nullcontext():
            compiled = lowered.compile()
        programs.write({_NAME: compiled})
        return compiled

    def _programs(self, arguments: tuple[Any, ...]) -> Programs[Any] | None:
        home = programs_folder("steps")
        if home is None:
            return None
        leaves, structure = jax.tree.flatten(arguments)
        # Texts, because a fingerprint also describes which arrays share one object as sharding.
        like = [f"{x.dtype}{x.shape} {x.weak_type} {x.sharding}" for x in leaves]
        parts = (*self._parts, self._config.mesh, like, str(structure))
        return open_programs(self._config, home, parts, TRAINING_PACKAGES)
