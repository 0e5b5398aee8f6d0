"""`ReplicaHub`: starts and restarts the replicas of this host, and accepts those of others."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger

from ed_esurge.children.process import wait_or_kill
from ed_esurge.engine.channel import SECRET
from ed_esurge.engine.connection import GREETING_SECONDS, Connection
from ed_esurge.engine.listener import Listener
from ed_esurge.processes.answer_check import is_text, require
from ed_esurge.processes.connected_replica import HEAD_BYTES
from ed_esurge.processes.messages import MAX_MESSAGE_BYTES, TOKEN
from ed_esurge.processes.replicated_engine import ReplicatedEngine

logger = get_logger(__name__)

#: Consecutive ends of a replica before it was ready, after which it is not started again.
MAX_FAILURES = 10
#: Seconds in which the processes must end, for example to store their prefix pages.
END_SECONDS = 60.0
#: Seconds between two checks of the processes.
_INTERVAL = 0.1
#: Exit code of a process with invalid input.
_BAD_INPUT = 2
#: Connections of other hosts in addition to two for each replica, for example during restarts.
_SPARE_CONNECTIONS = 16
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass
class _LocalReplica:
    """A process on this host.

    Attributes:
        token: random text that identifies the connection of the process.
    """

    engine: ReplicatedEngine
    environment: Mapping[str, str]
    token: str
    process: subprocess.Popen[bytes]
    failures: int = 0


class ReplicaHub:
    """Connects the replicas of all models of a server.

    Args:
        address: `HOST:PORT` at which replicas connect; port 0 selects a free port.
        secret: the secret that authenticates the replicas.
        command: the command that starts a replica, without the address.
        module: the Python module of the program of the command.

    Raises:
        ConfigError: the address is not available.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        command: Sequence[str] = ("esurge", "join"),
        module: str = "ed_esurge",
    ) -> None:
        self._secret = secret
        self._command, self._module = tuple(command), module
        self._engines: dict[str, ReplicatedEngine] = {}
        self._local: list[_LocalReplica] = []
        self._failed: EasyDeLError | None = None
        self._closed, self._starting = threading.Event(), threading.Lock()
        self._connections: set[Connection] = set()
        self._tokens: set[str] = set()
        try:
            self._listener = Listener(address, secret, self._connect, limit=MAX_MESSAGE_BYTES)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"replicas cannot connect to {address} ({error}): choose another address or port"
            ) from error
        self.address = self._listener.address
        threading.Thread(target=self._supervise, name="replica-hub", daemon=True).start()

    @property
    def pids(self) -> dict[str, list[int]]:
        """Name of a model -> ids of its processes on this host."""
        process_ids: dict[str, list[int]] = {name: [] for name in self._engines}
        for one in self._local:
            process_ids[one.engine.model_name].append(one.process.pid)
        return process_ids

    def command(self) -> str:
        """Return the command that starts a replica on another host."""
        return f"{SECRET}=... {shlex.join([*self._command, self.address])}"

    def start(self, engine: ReplicatedEngine, local: int) -> None:
        """Start the replicas of a model, and wait until all are ready.

        The first replica starts alone, so that the others read its compiled programs.

        Args:
            engine: the engine with the number of all replicas.
            local: number of replicas on this host.

        Raises:
            EasyDeLError: a replica cannot start.
        """
        engine.replicas.reserved = local
        self._engines[engine.model_name] = engine
        shares = device_shares(local)

        def check() -> None:
            if self._failed is not None:
                raise self._failed

        for number in range(local):
            environment = {**_environment(), **shares[number], SECRET: self._secret.decode()}
            token = secrets.token_hex(16)
            self._tokens.add(token)
            process = self._spawn(engine, environment, token)
            self._local.append(_LocalReplica(engine, environment, token, process))
            if number == 0:
                engine.replicas.wait_ready(1, check)
        remote = engine.replicas.size - local
        if remote > 0:
            print(
                f"waiting for {remote} replicas of {engine.model_name}; on "
                f"another host: {self.command()}",
                flush=True,
            )
        engine.replicas.wait_ready(engine.replicas.size, check)

    def close(self) -> None:
        """End all replicas, and wait for the processes of this host."""
        with self._starting:
            self._closed.set()
        self._listener.close()
        for engine in self._engines.values():
            engine.replicas.close()
        for connection in list(self._connections):
            connection.close()
        wait_or_kill([one.process for one in self._local], END_SECONDS)

    def _spawn(
        self, engine: ReplicatedEngine, environment: Mapping[str, str], token: str
    ) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", self._module, *self._command[1:], self.address]
        return subprocess.Popen(
            [*words, "--model-name", engine.model_name],
            env={**environment, TOKEN: token},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,  # Ctrl-C reaches the server only, which drains
        )

    def _supervise(self) -> None:
        while not self._closed.wait(_INTERVAL):
            engines = list(self._engines.values())
            silent = {token for engine in engines for token in engine.replicas.look()}
            for one in list(self._local):
                if one.token in silent:
                    one.process.kill()
                if one.process.poll() is not None:
                    self._restart(one)

    def _restart(self, one: _LocalReplica) -> None:
        """Start a process again after its end, later after each failure."""
        engine, process = one.engine, one.process
        self._tokens.discard(one.token)
        if one.token in engine.replicas.seen:
            engine.replicas.seen.discard(one.token)
            one.failures = 0
            logger.warning(
                "a process of %s ended (%s): restarting", engine.model_name, process.returncode
            )
        elif one.failures > MAX_FAILURES:
            return
        else:
            one.failures += 1
            never = engine.replicas.num_ready == 0 and process.returncode == _BAD_INPUT
            if never or one.failures > MAX_FAILURES:
                one.failures = MAX_FAILURES + 1
                reason = (
                    f"a replica of {engine.model_name} cannot start (exit code "
                    f"{process.returncode}); see its message above"
                )
                self._failed = EasyDeLError(reason)
                engine.replicas.fail(reason)
                return
        self._closed.wait(min(one.failures, 5))
        with self._starting:
            if not self._closed.is_set():
                one.token = secrets.token_hex(16)
                self._tokens.add(one.token)
                one.process = self._spawn(engine, one.environment, one.token)

    def _connect(self, connection: Connection) -> None:
        """Follow one connection to its end."""
        connection.head_limit = HEAD_BYTES
        hello = connection.receive(GREETING_SECONDS)
        require(isinstance(hello, dict), "a first message that is no dict")
        model, token = hello.get("model"), hello.get("token")
        require(model is None or is_text(model, 1024), "a wrong name of a model")
        if not isinstance(token, str) or token not in self._tokens:
            token = None
        most = _SPARE_CONNECTIONS + 2 * sum(
            engine.replicas.size for engine in self._engines.values()
        )
        if token is None and len(self._connections) >= most:
            raise EasyDeLError(f"{most} replicas are connected: end one before another joins")
        self._connections.add(connection)
        try:
            self._engine_for(model).attend(connection, token)
        except Exception:
            if not self._closed.is_set():
                raise
        finally:
            self._connections.discard(connection)

    def _engine_for(self, model_name: str | None) -> ReplicatedEngine:
        """Return the model with a name, or the model that lacks the most replicas."""
        if model_name is not None:
            if model_name not in self._engines:
                raise ConfigError(f"the server has no model {model_name!r}")
            return self._engines[model_name]
        if not self._engines:
            raise ConfigError("the server has no models yet: try again later")
        return max(self._engines.values(), key=lambda engine: engine.replicas.num_missing)


def device_shares(count: int) -> list[dict[str, str]]:
    """Return the variables that give each replica of this host its own GPUs.

    Raises:
        ConfigError: the GPUs cannot be divided by the number of replicas.
    """
    listed = os.environ.get(_VISIBLE)
    if listed is None:
        listed = ",".join(map(str, range(len([*_GPUS.iterdir()])))) if _GPUS.is_dir() else ""
    devices = [device for device in listed.split(",") if device]
    if not devices or not count:
        return [{} for _ in range(count)]
    device, remainder = divmod(len(devices), count)
    if remainder:
        raise ConfigError(
            f"{len(devices)} GPUs cannot be divided among {count} replicas: set {_VISIBLE} to a "
            "multiple, or change data_parallel_size"
        )
    return [{_VISIBLE: ",".join(devices[i * device : (i + 1) * device])} for i in range(count)]


def _environment() -> dict[str, str]:
    """Return the environment without the variables that would connect a process to a cluster."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    }
