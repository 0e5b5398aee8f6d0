"""Changes of all replicas of a model, which a replica that starts again must repeat."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path

from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.engine.control import check_level
from ed_esurge.processes.connected_replica import ConnectedReplica
from ed_esurge.processes.replica_group import ReplicaGroup, ReplicaLostError

#: Seconds in which the requests of a replica may end before its weights are replaced.
DRAIN_SECONDS = 600.0


class RepeatedChanges:
    """The weights, the adapters and the sleep of the replicas.

    Args:
        replicas: the replicas of a model.
    """

    def __init__(self, replicas: ReplicaGroup) -> None:
        self._replicas = replicas
        self._weights: str | None = None
        self._version = 0  # number of updates of the weights
        self._adapters: dict[str, str] = {}
        self._adapter_lock = asyncio.Lock()  # replicas may read two adapters in any order
        self._level: int | None = None
        self._dozing = self._rolling = False
        self._may_sleep = False  # whether `sleep` was called since the last `wake_up`

    def repeat(self, replica: ConnectedReplica) -> list[Future[None]]:
        """Apply all changes since the start of the server to a new replica."""
        call = self._replicas.post_call
        calls = []
        if self._weights is not None:
            calls.append(call(replica, "load_weights", self._weights))
            replica.version = self._version
        for name, source in self._adapters.items():
            calls.append(call(replica, "load_lora_adapter", name, source))
        if self._level is not None:
            calls.append(call(replica, "sleep", self._level))
        return calls

    @property
    def is_sleeping(self) -> bool:
        """Whether a replica sleeps as requested, or is about to."""
        sleeping = self._may_sleep and any(o.sleeping for o in self._replicas.list_replicas())
        return self._dozing or sleeping

    async def sleep(self, level: int = 1) -> None:
        """Release the device memory of each replica."""
        check_level(level)
        self._dozing, self._may_sleep, self._level = True, True, level
        try:
            await self._replicas.call_all("sleep", level)
        except EasyDeLError:
            self._level = None
            raise
        finally:
            self._dozing = False

    async def wake_up(self) -> None:
        """Resume after `sleep`."""
        await self._replicas.call_all("wake_up")
        self._level, self._may_sleep = None, False

    async def load_lora_adapter(self, name: str, source: str | Path) -> None:
        """Load a LoRA adapter in each replica. If one replica fails, no replica keeps it."""
        replicas = self._replicas
        async with self._adapter_lock:
            try:
                await replicas.call_all("load_lora_adapter", name, str(source))
            except EasyDeLError:
                if name not in self._adapters:
                    calls = (
                        replicas.call(o, "unload_lora_adapter", name)
                        for o in replicas.list_replicas()
                    )
                    await asyncio.gather(*calls, return_exceptions=True)
                raise
            self._adapters[name] = str(source)

    async def unload_lora_adapter(self, name: str) -> None:
        """Reject new requests for an adapter."""
        async with self._adapter_lock:
            self._adapters.pop(name, None)
            await self._replicas.call_all("unload_lora_adapter", name)

    async def load_weights(self, source: str | Path) -> None:
        """Replace the weights of the replicas by those of a directory, one replica after another.

        A replica receives no requests while it finishes its requests and reads the weights; the
        other replicas continue. A single replica replaces its weights between two steps, and its
        unfinished requests continue.

        Raises:
            ConfigError: the weights are those of another model, or another update is running.
            CheckpointError: the directory cannot be read.
            EasyDeLError: no replica is ready.
        """
        if self._rolling:
            raise ConfigError("another update of the weights is running: wait until it ends")
        path, version = str(source), self._version + 1
        self._rolling = True
        try:
            # A replica that starts in the meantime has the weights of `_version`.
            while outdated_replicas := [
                one for one in self._replicas.list_replicas() if one.version < version
            ]:
                await self._replace_weights(outdated_replicas[0], path, version)
            if self._version < version:
                raise EasyDeLError("no replica is ready: try again later")
        finally:
            self._rolling = False

    async def _replace_weights(self, replica: ConnectedReplica, path: str, version: int) -> None:
        with self._replicas.draining(replica) as others_ready:
            deadline = time.monotonic() + DRAIN_SECONDS
            while others_ready and replica.requests and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            try:
                await self._replicas.call(replica, "load_weights", path)
            except ReplicaLostError:
                return  # its successor repeats the update
            with self._replicas.changed:
                replica.version = self._version = version
                self._weights = path
                replica.prefixes.clear()
