"""Replicas over several processes.

Every process has a scheduler for each replica and executes the same commands, so that all processes
plan the same steps. Only the processes whose devices hold a replica run its steps. The results are
sent to the other processes before any process reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
from ed_infra.errors import ConfigError, EasyDeLError
from jax.sharding import Mesh
from tqdm import tqdm

from ed_esurge.core.commands import Command
from ed_esurge.core.plan import StepPlan
from ed_esurge.engine.channel import channel
from ed_esurge.engine.loop import EngineLoop
from ed_esurge.engine.replicas import Replicas
from ed_esurge.engine.transport import Leading, processes_of
from ed_esurge.engine.wire import decode, encode
from ed_esurge.runner.model_runner import ModelRunner
from ed_esurge.runner.result import StepParts, StepResult
from ed_esurge.runner.weights import Weights

Refusal = tuple[str, BaseException | None]
"""Id of a sequence that failed before a step, and its error."""


class FarWeights(Weights):
    """The weights of a remote replica. They are present exactly when the local weights are."""

    def __init__(self, near: Weights) -> None:
        self._near = near

    @property
    def there(self) -> bool:
        return self._near.there

    def replace(self, new: object, *, copy: bool = True) -> None:
        """Do nothing: the remote process replaces the weights."""

    def drop(self) -> None:
        """Do nothing: the remote process drops the weights."""

    def to_host(self) -> None:
        """Do nothing: the remote process moves the weights."""

    def from_host(self) -> None:
        """Do nothing: the remote process moves the weights."""

    def are_finite(self) -> bool:
        return True


class FarRunner(ModelRunner):
    """Placeholder for the runner of a replica on devices of other processes.

    Args:
        near: a runner of this process with the same sizes.
    """

    def __init__(self, near: ModelRunner) -> None:
        self.model, self.buckets, self.num_pages = near.model, near.buckets, near.num_pages
        self.weights = FarWeights(near.weights)
        self.host = None
        self._allocated = True

    @property
    def num_traces(self) -> int:
        """Always 0: this process traces nothing for a remote replica."""
        return 0

    @property
    def allocated(self) -> bool:
        return self._allocated

    def allocate(self) -> None:
        """Mark the pages as allocated."""
        self._allocated = True

    def free(self) -> None:
        """Mark the pages as freed."""
        self._allocated = False

    def run(self, plan: StepPlan) -> StepResult:
        """Return an empty result, which `SharedReplicas` replaces by the received result."""
        return StepResult(plan, None, ())

    def hold(self, params: object) -> None:
        """Do nothing: the remote process holds the grammar."""

    def load_adapter(self, number: int, place: int, adapter: object) -> None:
        """Do nothing: the remote process loads the adapter."""

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Do nothing: the remote process compiles the programs."""


class SharedLoop(EngineLoop):
    """The loop of one replica in an engine of several processes."""

    refusals: tuple[Refusal, ...] = ()
    """Failures since the last exchange between the processes. Each failure prevented a step."""

    def _refused(self, request_id: str, error: BaseException | None) -> None:
        self.refusals += ((request_id, error),)
        super()._refused(request_id, error)

    def outcome(self) -> tuple[tuple[Refusal, ...], StepParts | None]:
        """Return the outcome of the local steps: refusals, and results of the running step."""
        return self.refusals, None if self._pending is None else self._pending.parts()

    def take_outcome(self, refusals: Sequence[Refusal], parts: StepParts | None) -> None:
        """Apply the outcome of a remote replica.

        Each refusal corresponds to one launch in the remote process. This process repeats these
        launches, so its plan of the running step is the same.
        """
        for refusal in refusals:
            self.launch()
            self._pending = None
            super()._refused(*refusal)
        if parts is not None:
            self.launch()
            if self._pending is None:
                raise EasyDeLError("the processes of this engine no longer plan the same steps")
            self._pending = StepResult.of_parts(self._pending.plan, parts)

    def _weights_are_finite(self) -> bool:
        mine = super()._weights_are_finite()
        return all(each == b"1" for each in channel().gather(b"1" if mine else b"0"))


class SharedReplicas(Leading, Replicas):
    """Replicas over several processes; see the module docstring.

    Args:
        loops: one loop for each replica.
        meshes: the mesh of each replica.
    """

    def __init__(self, loops: Sequence[SharedLoop], meshes: Sequence[Mesh]) -> None:
        super().__init__(loops)
        here = jax.process_index()
        self._shared = tuple(loops)
        self._near = [here in processes_of(mesh) for mesh in meshes]
        # If several processes hold parts of a replica, the first one sends its outcome.
        self._speaks = [here == processes_of(mesh)[0] for mesh in meshes]

    @property
    def runner(self) -> ModelRunner:
        """The runner of a local replica, for properties that all replicas share."""
        return self._shared[self._near.index(True)].runner

    def _tell_all(self, command: Command) -> None:
        self._compare_notes()  # the command may require the results of a running step
        super()._tell_all(command)

    def _done(self) -> list[EngineLoop]:
        """Return all loops with a running step. Every process must wait for the same steps."""
        self._compare_notes()
        self._collect()
        return [loop for loop in self._shared if loop.in_flight]

    def _compare_notes(self) -> None:
        mine = {
            index: self._shared[index].outcome()
            for index, speaks in enumerate(self._speaks)
            if speaks
        }
        for theirs in channel().gather(encode(mine)):
            for index, outcome in decode(theirs).items():
                loop = self._shared[index]
                if not self._near[index]:
                    loop.take_outcome(*outcome)
                loop.refusals = ()


def agreed(sizes: Callable[[], Sequence[dict[str, int]]]) -> dict[str, int]:
    """Return the minimum of the pool sizes over all processes. A collective operation.

    Args:
        sizes: function that returns group -> pages for each replica of this process.

    Raises:
        ConfigError: a process has too little memory; all processes raise the error.
    """
    try:
        mine: list[dict[str, int]] | str = list(sizes())
    except ConfigError as error:
        mine = str(error)
    pools: list[dict[str, int]] = []
    for each in channel().gather(encode(mine)):
        theirs = decode(each)
        if isinstance(theirs, str):
            raise ConfigError(theirs)
        pools += theirs
    return {name: min(pool[name] for pool in pools) for name in pools[0]}
