"""A replica, and a request to a replica, as the server sees them."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.core.prefix_cache import prompt_keys
from ed_esurge.engine.connection import Connection
from ed_esurge.engine.intake import CheckedPrompt, RequestOptions
from ed_esurge.outputs import STEP_SIZES, Follower, RequestOutput
from ed_esurge.processes.answer_check import AnswerCheck, is_count, is_text, require
from ed_esurge.processes.message_writer import MessageWriter
from ed_esurge.sampling import PoolingParams, SamplingParams

#: Difference in seconds up to which the clocks of two processes are those of one machine.
_SAME_CLOCK = 1.0
#: Seconds without progress after which a write to a replica ends its connection.
_WRITE_SECONDS = 60.0
#: Maximum bytes of a message of a replica without arrays, in addition to the requested answers.
HEAD_BYTES = 2**22
#: Maximum number of engines, adapters and statistics that a replica reports.
_MAX_ENGINES, _MAX_ADAPTERS, _MAX_STATS = 1024, 4096, 128
#: Statistics that the routes of the server read.
_STATS = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "iteration_tokens_sum"),
        *(f"iteration_tokens_{bound}" for bound in (*STEP_SIZES, "inf")),
    )
)


@dataclass
class SentRequest:
    """An unfinished request.

    Attributes:
        message: the message for a replica.
        follower: receives the outputs.
        answer: checks the outputs.
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
    answer: AnswerCheck
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
        vocab_size: int,
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
        answer = AnswerCheck(request_id, prompt, params, vocab_size)
        return cls(
            message, follower, answer, prompt.token_ids, keys, completions, prompt.max_tokens
        )

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
        token: the token of a process that the server started; None for other processes.

    Attributes:
        requests: ids of its unfinished requests.
        calls: id -> future of each unfinished call of a method.
        prefixes: the prefixes that were sent to the replica.
        prepared: whether the replica has repeated the changes since the start of the server.
        draining: whether the replica receives no new requests.
        version: number of the update of the weights that it has; 0 = those of its start.
        heard: time of the last message, monotonic.

    Raises:
        ReplicaMessageError: the message is invalid.
    """

    def __init__(
        self,
        connection: Connection,
        index: int,
        ready: Mapping[str, Any],
        token: str | None = None,
    ) -> None:
        self.index, self.token = index, token
        now = ready.get("now")
        require(isinstance(now, float) and math.isfinite(now), "a time that is no number")
        self._connection, self._writer = connection, MessageWriter(connection)
        connection.limit_writes(_WRITE_SECONDS)
        connection.head_limit = HEAD_BYTES
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

    def add(self, request: SentRequest) -> None:
        """Send a request, whose answer the replica may return."""
        self.requests.add(request.name)
        self.prefixes.add(request.keys)
        assert self._connection.head_limit is not None, "set at the start"
        self._connection.head_limit += request.answer.head_bytes
        self.send(request.message)

    def remove(self, request: SentRequest) -> None:
        """Forget a request."""
        if request.name in self.requests:
            self.requests.remove(request.name)
            assert self._connection.head_limit is not None, "set at the start"
            self._connection.head_limit -= request.answer.head_bytes

    def close(self) -> None:
        """End the connection, which ends the process of the replica."""
        self._writer.close()

    def drop(self) -> None:
        """End the connection without sending the queued messages."""
        self._connection.close()

    def update(self, state: Mapping[str, Any], max_num_seqs: int) -> None:
        """Store the state that the replica has reported.

        Args:
            state: the message.
            max_num_seqs: maximum number of running sequences of an engine.

        Raises:
            ReplicaMessageError: the state is invalid.
        """
        names = ("stats", "adapters", "sleeping")
        require(all(name in state for name in names), "a state with missing values")
        stats, adapters, sleeping = (state[name] for name in names)
        require(isinstance(stats, list) and 0 < len(stats) <= _MAX_ENGINES, "wrong statistics")
        for engine_stats in stats:
            require(
                isinstance(engine_stats, dict) and engine_stats.keys() >= _STATS,
                "missing statistics",
            )
            require(len(engine_stats) <= _MAX_STATS, "too many statistics")
            for name, value in engine_stats.items():
                require(is_text(name, 64) and isinstance(value, float), "a wrong statistic")
                require(0 <= value <= 2**63, "a statistic outside its range")
            require(
                engine_stats["num_requests_running"] <= max_num_seqs, "too many running requests"
            )
        require(isinstance(adapters, list) and len(adapters) <= _MAX_ADAPTERS, "wrong adapters")
        for one in adapters:
            require(isinstance(one, LoadedAdapter) and is_text(one.name, 1024), "a wrong adapter")
            numbers = (one.number, one.place, one.rank)
            require(
                all(is_count(engine_stats, 2**31) for engine_stats in numbers), "a wrong adapter"
            )
            source = one.source is None or is_text(one.source)
            require(source and isinstance(one.dora, bool), "a wrong adapter")
        require(isinstance(sleeping, bool), "a wrong state")
        self.stats, self.adapters, self.sleeping = stats, adapters, sleeping

    def to_local_times(self, output: RequestOutput) -> None:
        """Convert the times of an output to the clock of this process."""
        if self._ahead:
            for name in (
                "first_scheduled_time",
                "first_token_time",
                "last_token_time",
                "finished_time",
            ):
                value = getattr(output.metrics, name)
                if isinstance(value, float):
                    setattr(output.metrics, name, value - self._ahead)


#: Maximum number of remembered pages of a replica; the least recently used are forgotten.
MAX_PAGES = 2**16


class SentPrefixes:
    """Remembers the keys of the prompt pages of a replica, to estimate its cached prefixes."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def count_prefix_pages(self, keys: Sequence[bytes]) -> int:
        """Return the number of pages at the beginning of a prompt that the replica has received.

        Args:
            keys: keys of the full pages, see `ed_esurge.core.prefix_cache.prompt_keys`.
        """
        return next((count for count, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[bytes]) -> None:
        """Remember the pages of a prompt."""
        for key in reversed(keys):  # the later pages of a prompt are forgotten first
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_PAGES:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all pages, after a change of the weights or a reset of the cache."""
        self._keys.clear()
