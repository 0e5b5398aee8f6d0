"""Replicas over several processes: each process knows all of them, and runs those that lie on its
devices.

Every process has a scheduler of each replica and takes the same commands, so that all plan the same
steps. The device's work is done where the replica lies, and its results go to the others before
anybody reads them.
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
from ed_esurge.engine.hosts import Leading, processes_of
from ed_esurge.engine.loop import EngineLoop
from ed_esurge.engine.replicas import Replicas
from ed_esurge.engine.wire import decode, encode
from ed_esurge.runner.model_runner import ModelRunner
from ed_esurge.runner.result import StepParts, StepResult
from ed_esurge.runner.weights import Weights

Refusal = tuple[str, BaseException | None]
"""A sequence that failed before a step, and why."""


class FarWeights(Weights):
    """The weights of a replica that lies elsewhere: they are there as those are that lie here."""

    def __init__(self, near: Weights) -> None:
        self._near = near

    @property
    def there(self) -> bool:
        return self._near.there

    def replace(self, new: object, *, copy: bool = True) -> None:
        """Done elsewhere."""

    def drop(self) -> None:
        """Done elsewhere."""

    def to_host(self) -> None:
        """Done elsewhere."""

    def from_host(self) -> None:
        """Done elsewhere."""

    def are_finite(self) -> bool:
        return True


class FarRunner(ModelRunner):
    """Stands for the runner of a replica that lies on devices of other processes.

    Args:
        near: a runner of this process, equal but for where it is.
    """

    def __init__(self, near: ModelRunner) -> None:
        self.model, self.buckets, self.num_pages = near.model, near.buckets, near.num_pages
        self.weights = FarWeights(near.weights)
        self.host = None
        self._allocated = True

    @property
    def num_traces(self) -> int:
        """Nothing is traced here."""
        return 0

    @property
    def allocated(self) -> bool:
        return self._allocated

    def allocate(self) -> None:
        """Note that the pages are there."""
        self._allocated = True

    def free(self) -> None:
        """Note that they are not."""
        self._allocated = False

    def run(self, plan: StepPlan) -> StepResult:
        """Nothing that can be read: `SharedReplicas` puts the results in its place."""
        return StepResult(plan, None, ())

    def hold(self, params: object) -> None:
        """Grammars are used elsewhere."""

    def load_adapter(self, number: int, place: int, adapter: object) -> None:
        """Done elsewhere."""

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Done elsewhere."""


class SharedLoop(EngineLoop):
    """The loop of a replica of several processes, in one of them."""

    refusals: tuple[Refusal, ...] = ()
    """Since the processes last compared notes: each prevented a step."""

    def _refused(self, request_id: str, error: BaseException | None) -> None:
        self.refusals += ((request_id, error),)
        super()._refused(request_id, error)

    def outcome(self) -> tuple[tuple[Refusal, ...], StepParts | None]:
        """Return what became of the steps that were started here: refusals, and the numbers of the
        step in flight."""
        return self.refusals, None if self._pending is None else self._pending.parts()

    def take_outcome(self, refusals: Sequence[Refusal], parts: StepParts | None) -> None:
        """Go on as the process did that has the replica.

        There each refusal came of a launch, of which the first was made here, too. The plan of the
        step in flight is the same here.
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
    """See the module.

    Args:
        loops: one for each replica.
        meshes: where each lies.
    """

    def __init__(self, loops: Sequence[SharedLoop], meshes: Sequence[Mesh]) -> None:
        super().__init__(loops)
        here = jax.process_index()
        self._shared = tuple(loops)
        self._near = [here in processes_of(mesh) for mesh in meshes]
        # Of several processes that have parts of a replica, the first speaks.
        self._speaks = [here == processes_of(mesh)[0] for mesh in meshes]

    @property
    def runner(self) -> ModelRunner:
        """That of a replica in this process, for what is true of all."""
        return self._shared[self._near.index(True)].runner

    def _tell_all(self, command: Command) -> None:
        self._compare_notes()  # the command may want the results of a step in flight
        super()._tell_all(command)

    def _done(self) -> list[EngineLoop]:
        """All that have begun: processes that wait for the same steps stay together."""
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
    """The least of the pools' sizes that processes have room for; collective.

    Args:
        sizes: gives, of each replica of this process, group -> pages.

    Raises:
        ConfigError: a process has no room; all of them raise it.
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
