"""Several replicas of a model behind one loop. Each has a scheduler, pages and a prefix cache.

With several processes, every process has a loop for each replica and executes the same commands, so
that all processes plan the same steps. Only the processes whose devices hold a replica run its
steps. The results are sent to the other processes before any process reads them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

from ed_infra.errors import EasyDeLError
from tqdm import tqdm

from ed_esurge.core.adapters import AdapterTable
from ed_esurge.core.commands import Abort, Add, Command, LoadAdapter, UnloadAdapter
from ed_esurge.core.prefix_cache import prompt_keys
from ed_esurge.core.request import reads_prefixes
from ed_esurge.core.router import ReplicaRouter
from ed_esurge.core.scheduler import Scheduler
from ed_esurge.engine.loop import EngineLoop
from ed_esurge.engine.transport import Transport
from ed_esurge.outputs import RequestOutput
from ed_esurge.runner.protocol import Runner
from ed_esurge.sampling import SamplingParams

# Seconds between two checks while the devices of all replicas are busy.
POLLING_INTERVAL = 5e-5


class Replicas:
    """Runs the loops of several replicas behind the interface of one loop. Not thread-safe.

    A request with all its completions goes to one replica. Other commands go to all replicas. The
    replicas step independently: their devices work concurrently, and a replica starts its next step
    as soon as its current step is done.

    Args:
        loops: one loop for each replica, on separate devices, with equal settings.
        transport: connection to the other processes of the engine.
        owners: for each replica, the sorted indices of the processes whose devices hold it; () =
            this process holds all replicas.
    """

    def __init__(
        self,
        loops: Sequence[EngineLoop],
        transport: Transport,
        owners: Sequence[Sequence[int]] = (),
    ) -> None:
        self.loops = tuple(loops)
        local_process = transport.process
        self._transport, self._shared = transport, bool(owners)
        self._local = [
            not owners or local_process in owners[index] for index in range(len(self.loops))
        ]
        # If several processes hold parts of a replica, the first of them sends its outcome.
        self._sends = [
            bool(owners) and local_process == owners[i][0] for i in range(len(self.loops))
        ]
        proposers = [loop.scheduler.proposer for loop in self.loops]
        self._proposers = [
            one for one in proposers if owners and one is not None and not one.repeatable
        ]
        self._router = ReplicaRouter(len(self.loops))
        self._arrivals = 0
        self.backlog: list[RequestOutput] = []
        """Outputs that the next `step` returns."""

    def __contains__(self, request_id: str) -> bool:
        return self._router.find(request_id) is not None

    # ---- properties that all replicas share

    @property
    def runner(self) -> Runner:
        """The runner of a local replica, for properties that all replicas share."""
        return self.loops[self._local.index(True)].runner

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the first replica, for properties that all replicas share."""
        return self.loops[0].scheduler

    @property
    def adapters(self) -> AdapterTable:
        """The loaded adapters, which are equal in all replicas."""
        return self.loops[0].adapters

    @property
    def paused(self) -> bool:
        return self.loops[0].paused

    @property
    def asleep(self) -> bool:
        return self.loops[0].asleep

    def memory_bytes(self) -> int:
        """Return the bytes of weights, adapter slots, pages and states of this process."""
        return sum(loop.memory_bytes() for loop in self.loops)

    # ---- requests

    @property
    def open_requests(self) -> list[str]:
        """Ids of the waiting and running requests."""
        return [name for loop in self.loops for name in loop.open_requests]

    def _collect(self) -> None:
        for loop in self.loops:
            self._keep(loop.backlog)
            loop.backlog = []

    def _keep(self, outputs: list[RequestOutput]) -> None:
        self.backlog += outputs
        for output in outputs:
            if output.finished:
                self._router.finish_request(output.request_id, output.metrics.num_generated_tokens)

    # ---- commands

    def execute(self, command: Command) -> None:
        """Execute a command before the next step.

        Raises:
            ConfigError: see `EngineLoop.execute`.
        """
        try:
            match command:
                case Add():
                    self._add(command)
                case Abort(request_id):
                    replica_index = self._router.find(request_id)
                    if replica_index is not None:
                        self.loops[replica_index].execute(command)
                case _:
                    self._execute_in_all(command)
        finally:
            self._collect()

    def _add(self, add: Add) -> None:
        replica_index = self._router.find(add.request_id)
        if replica_index is not None:
            self.loops[replica_index].execute(add)  # raises the error for an id in use
        cached_tokens = self._count_cached_tokens(add)
        replica_index = self._router.choose(len(add.token_ids), cached_tokens)
        loop = self.loops[replica_index]
        # Arrival numbers, and the seeds derived from them, do not depend on the replicas.
        loop.ledger.arrivals = self._arrivals
        loop.execute(add)
        self._arrivals = loop.ledger.arrivals
        completions = add.params.n if isinstance(add.params, SamplingParams) else 0
        new = len(add.token_ids) - cached_tokens[replica_index]
        self._router.place(add.request_id, replica_index, new, completions, add.max_tokens)

    def _count_cached_tokens(self, add: Add) -> list[int]:
        """Return the number of prompt tokens in the prefix cache of each replica."""
        caches = [loop.scheduler.pages.prefixes for loop in self.loops]
        if caches[0] is None or not reads_prefixes(add.params):
            return [0] * len(caches)
        size = caches[0].page_size
        keys = prompt_keys(add.token_ids, add.salt, size, add.encoder_inputs)
        return [0 if cache is None else cache.count_prefix_pages(keys) * size for cache in caches]

    def _execute_in_all(self, command: Command) -> None:
        """Execute a command in every replica. If one replica rejects an adapter, unload the adapter
        from all replicas."""
        self._exchange()  # the command may require the results of a running step
        errors: list[EasyDeLError] = []
        done: list[EngineLoop] = []
        for loop in self.loops:
            try:
                loop.execute(command)
            except EasyDeLError as error:
                errors.append(error)
            else:
                done.append(loop)
        if errors and isinstance(command, LoadAdapter):
            for loop in done:
                loop.execute(UnloadAdapter(command.name))
        if errors:
            raise errors[0]

    # ---- steps

    def step(self) -> list[RequestOutput]:
        """Return the outputs of every replica with a finished step. Wait for one if none has
        finished.

        Raises:
            EasyDeLError: see `EngineLoop.step`.
        """
        for loop in self.loops:
            loop.launch()
        self._collect()
        for loop in self._done():
            try:
                self._keep(loop.step())
            except EasyDeLError:  # the weights, which all replicas share, are not finite
                for replica_loop in self.loops:
                    replica_loop.spoilt = True
                raise
        self._exchange_proposals()
        outputs, self.backlog = self.backlog, []
        return outputs

    def wait(self) -> None:
        """Wait until the devices have finished all started steps."""
        for loop in self.loops:
            loop.wait()

    def _done(self) -> list[EngineLoop]:
        """Return the loops whose step is done. Wait for at least one if any step runs and the
        backlog is empty."""
        if self._shared:  # every process must wait for the same steps
            self._exchange()
            self._collect()
            return [loop for loop in self.loops if loop.in_flight]
        working = [loop for loop in self.loops if loop.in_flight]
        while working and not self.backlog and not any(loop.ready for loop in working):
            time.sleep(POLLING_INTERVAL)
        return [loop for loop in working if loop.ready]

    def _exchange(self) -> None:
        """Send the outcomes of local replicas, and apply those of remote replicas."""
        if not self._shared:
            return
        outcomes = {
            index: (loop.take_refusals(), loop.parts())
            for index, loop in enumerate(self.loops)
            if self._sends[index]
        }
        for received in self._transport.gather(outcomes):
            for index, outcome in received.items():
                if not self._local[index]:
                    self.loops[index].repeat(*outcome)
                elif not self._sends[index]:
                    self.loops[index].take_refusals()

    def _exchange_proposals(self) -> None:
        """Send the proposals of local replicas, which the next plans contain."""
        if not self._proposers:
            return
        local_proposals = {
            i: one.proposals() for i, one in enumerate(self._proposers) if self._sends[i]
        }
        for received in self._transport.gather(local_proposals):
            for index, proposals in received.items():
                if not self._local[index]:
                    self._proposers[index].receive(proposals)

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile all programs of the steps, one replica after another."""
        for loop in self.loops:
            loop.compile_all(progress)

    # ---- numbers

    def stats(self) -> dict[str, float]:
        """Return the metrics of all replicas: sums, and the mean of `kv_cache_usage`."""
        replica_stats = self.replica_stats()
        total = {name: sum(stats[name] for stats in replica_stats) for name in replica_stats[0]}
        return {**total, "kv_cache_usage": total["kv_cache_usage"] / len(replica_stats)}

    def replica_stats(self) -> list[dict[str, float]]:
        """Return the metrics of each replica."""
        return [loop.stats() for loop in self.loops]
