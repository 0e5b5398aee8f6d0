"""A replica, and a request to a replica, as the server sees them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.core.prefix_cache import prompt_keys
from ed_esurge.engine.connection import Connection
from ed_esurge.engine.followers import Follower
from ed_esurge.engine.intake import CheckedPrompt, RequestOptions
from ed_esurge.outputs import RequestOutput
from ed_esurge.processes.message_writer import MessageWriter
from ed_esurge.processes.sent_prefixes import SentPrefixes
from ed_esurge.sampling import PoolingParams, SamplingParams

#: Difference in seconds up to which the clocks of two processes are those of one machine.
_SAME_CLOCK = 1.0


@dataclass
class SentRequest:
    """An unfinished request.

    Attributes:
        message: the message for a replica.
        follower: receives the outputs.
        token_ids: the prompt.
        keys: keys of the prompt's pages.
        completions: number of completions; 0 for a pooled request.
        max_tokens: maximum number of tokens of a completion.
        replica: the replica that executes the request; None while the request waits for one.
        begun: whether the caller has received an output.
        tries: number of replicas that were lost with the request.
        arrival: time of the request, monotonic.
    """

    message: dict[str, Any]
    follower: Follower
    token_ids: list[int]
    keys: Sequence[bytes]
    completions: int
    max_tokens: int
    replica: ConnectedReplica | None = None
    begun: bool = False
    tries: int = 0
    arrival: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls,
        kind: str,
        prompt: CheckedPrompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        options: RequestOptions,
        follower: Follower,
        config: EngineConfig,
    ) -> SentRequest:
        """Return a request of the kind `generate` or `embed`."""
        keys: Sequence[bytes] = ()
        completions = params.n if isinstance(params, SamplingParams) else 0
        if completions and config.enable_prefix_caching:
            salt = repr((options.get("lora_name"), options.get("cache_salt"))).encode()
            items = options.get("encoder_inputs", ())
            keys = prompt_keys(prompt.token_ids, salt, config.page_size, items)
        message = {
            "do": kind,
            "id": request_id,
            "prompt": prompt,
            "params": params,
            "options": dict(options),
        }
        return cls(message, follower, prompt.token_ids, keys, completions, prompt.max_tokens)

    @property
    def name(self) -> str:
        """The id of the request."""
        return str(self.message["id"])


class ConnectedReplica:
    """A connected replica that is ready.

    Args:
        connection: the connection to the process of the replica.
        index: number of the replica.
        ready: the first message of the replica.

    Attributes:
        pid: id of the process on its host.
        requests: ids of its unfinished requests.
        calls: id -> future of each unfinished call of a method.
        prefixes: the prefixes that were sent to the replica.
        prepared: whether the replica has repeated the changes since the start of the server.
        draining: whether the replica receives no new requests.
        version: number of the update of the weights that it has; 0 = those of its start.
        heard: time of the last message, monotonic.
    """

    def __init__(self, connection: Connection, index: int, ready: Mapping[str, Any]) -> None:
        self.index, self.pid = index, int(ready["pid"])
        self._connection, self._writer = connection, MessageWriter(connection)
        self.requests: set[str] = set()
        self.calls: dict[str, Future[None]] = {}
        self.prefixes = SentPrefixes()
        self.prepared, self.draining = False, False
        self.version = 0
        self.heard = time.monotonic()
        ahead = float(ready["now"]) - self.heard
        self._ahead = 0.0 if abs(ahead) < _SAME_CLOCK else ahead
        self.stats: Sequence[Mapping[str, float]] = ()
        self.adapters: list[LoadedAdapter] = []
        self.sleeping = False

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message to the replica."""
        self._writer.put(message)

    def close(self) -> None:
        """End the connection, which ends the process of the replica."""
        self._writer.close()

    def drop(self) -> None:
        """End the connection without sending the queued messages."""
        self._connection.close()

    def update(self, state: Mapping[str, Any]) -> None:
        """Store the state that the replica has reported."""
        self.stats, self.adapters = state["stats"], list(state["adapters"])
        self.sleeping = bool(state["sleeping"])

    def to_local_times(self, output: RequestOutput, arrival: float) -> None:
        """Convert the times of an output to the clock of this process.

        Args:
            arrival: time of the request in this process.
        """
        metrics = output.metrics
        if self._ahead:
            for name in (
                "first_scheduled_time",
                "first_token_time",
                "last_token_time",
                "finished_time",
            ):
                value = getattr(metrics, name)
                if value is not None:
                    setattr(metrics, name, value - self._ahead)
        metrics.arrival_time = arrival
