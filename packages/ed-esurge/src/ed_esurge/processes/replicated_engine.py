"""`ReplicatedEngine`: the replicas of a model as one engine for a server."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger

from ed_esurge.certificates import certificate_summary
from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.core.commands import EncoderInput
from ed_esurge.core.router import ReplicaRouter
from ed_esurge.engine.connection import Connection
from ed_esurge.engine.control import check_level
from ed_esurge.engine.followers import Follower, OutputItem, hand_over
from ed_esurge.engine.intake import CheckedPrompt, RequestOptions, seed_of, seeds_of
from ed_esurge.grammars.store import Grammar, Grammars
from ed_esurge.outputs import RequestOutput
from ed_esurge.processes.connected_replica import ConnectedReplica, SentRequest
from ed_esurge.processes.messages import EngineFacts, error_of
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs

logger = get_logger(__name__)

#: Replicas that a request may lose before its first output; then it fails.
MAX_TRIES = 3
#: Seconds that a request waits for a replica.
WAIT_SECONDS = 300.0
#: Seconds without a message after which a replica counts as lost.
SILENCE_SECONDS = 60.0
#: Seconds in which the requests of a replica may end before its weights are replaced.
DRAIN_SECONDS = 600.0


class ReplicaLostError(EasyDeLError):
    """The process of a replica ended during a request."""


class ReplicatedEngine:
    """Distributes requests to replicas in other processes. Implements `ServedEngine`.

    A request goes to the replica that can finish it first, see `ReplicaRouter`. Its prefix counts
    as cached in the replicas that received it. If a replica is lost, its requests without an output
    go to other replicas, and its other requests end with an error.

    The methods may be called from any event loop, and the methods for connections from threads.

    Args:
        name: name of the model.
        config: the options of each replica.
        tokenizer: the tokenizer of the model.
        run: the message that tells a replica how to create its engine.
        replicas: maximum number of replicas.
        load_processor: returns the processor of the model, if the model has one.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        tokenizer: Any,
        run: Mapping[str, Any],
        replicas: int,
        load_processor: Callable[[EngineFacts], Any],
    ) -> None:
        self.model_name, self.config, self.tokenizer = name, config, tokenizer
        self.size = replicas
        self.processor: Any = None
        self.closed = False
        self.seen: set[int] = set()
        """Ids of the processes that have been ready."""
        self._run, self._load_processor = dict(run), load_processor
        self._facts: EngineFacts | None = None
        self._grammars: Grammars | None = None
        self._changed = threading.Condition(threading.RLock())
        self._router = ReplicaRouter(replicas)
        self._replicas: dict[int, ConnectedReplica] = {}
        self._requests: dict[str, SentRequest] = {}
        self._waiting: dict[str, SentRequest] = {}
        self._numbers = itertools.count(1)
        self._arrivals = 0
        self._failure: str | None = None
        # What a replica that starts again must repeat.
        self._weights: str | None = None
        self._version = 0  # number of updates of the weights
        self._adapters: dict[str, str] = {}
        self._level: int | None = None
        self._dozing = self._rolling = False

    # ---- properties of the model

    @property
    def facts(self) -> EngineFacts:
        """The facts about the engine, which the first replica reported."""
        if self._facts is None:
            raise EasyDeLError("no replica has been ready: call wait_ready() first")
        return self._facts

    def __getattr__(self, name: str) -> Any:
        # `input_names`, `task`, `labels`, ... of `ServedEngine`
        if name in EngineFacts.__dataclass_fields__:
            return getattr(self.facts, name)
        raise AttributeError(name)

    @property
    def max_model_len(self) -> int:
        return self.facts.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.facts.vocab_size

    @property
    def is_healthy(self) -> bool:
        """Whether a replica is ready, or will be."""
        return not self.closed and (bool(self._replicas) or self._failure is None)

    @property
    def is_sleeping(self) -> bool:
        return self._dozing or any(one.sleeping for one in self._ready())

    def replica_stats(self) -> list[Mapping[str, float]]:
        """Return the last reported statistics of each replica."""
        return [stats for one in self._ready() for stats in one.stats]

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """Return the loaded adapters of a replica; all replicas have the same."""
        ready = self._ready()
        return ready[0].adapters if ready else []

    def compile_structured(self, wanted: StructuredOutputs) -> Future[Grammar]:
        """Compile a grammar, to reject an invalid grammar before a replica receives it."""
        if self._grammars is None:
            raise ConfigError("structured outputs require a tokenizer")
        return self._grammars.submit(wanted)

    def embedded_prompt(self, embeds: np.ndarray) -> tuple[list[int], tuple[EncoderInput, ...]]:
        """Raise ConfigError: replicas accept no prompts of embeddings."""
        raise ConfigError(
            "prompts of embeddings require one process: start the server without data_parallel_size"
        )

    # ---- requests

    def generate(
        self,
        prompt_token_ids: CheckedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the deltas of one request. Closing the generator early aborts the request.

        Raises:
            ConfigError: the request can never run.
            EasyDeLError: a replica was lost in the middle of the request, or no replica is ready.
        """
        return self._outputs("generate", prompt_token_ids, sampling_params, request_id, options)

    async def embed(
        self,
        prompt_token_ids: CheckedPrompt,
        pooling_params: PoolingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Return the pooled vector of one prompt. See `generate`."""
        outputs = self._outputs("embed", prompt_token_ids, pooling_params, request_id, options)
        async with aclosing(outputs):
            return await anext(outputs)

    async def _outputs(
        self,
        kind: str,
        prompt: CheckedPrompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        options: RequestOptions,
    ) -> AsyncGenerator[RequestOutput]:
        structured = params.structured_outputs if isinstance(params, SamplingParams) else None
        if structured is not None:
            compiled = await asyncio.to_thread(self.compile_structured, structured)
            await asyncio.wrap_future(compiled)
        follower = Follower()
        self._submit(self._request(kind, prompt, params, request_id, options, follower))
        try:
            while not follower.over:
                yield await follower.get()
        finally:
            if not follower.over:
                self._abort(request_id)

    def _request(
        self,
        kind: str,
        prompt: CheckedPrompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        options: RequestOptions,
        follower: Follower,
    ) -> SentRequest:
        with self._changed:
            if request_id in self._requests:
                raise ConfigError(f"the request id {request_id!r} is in use: choose another")
            # As in one process: equal requests without a seed have different answers.
            seed = seed_of(params, self.config.seed, self._arrivals)
            self._arrivals += len(seeds_of(params, seed))
        if isinstance(params, SamplingParams):
            params = params.replace(seed=seed)
        return SentRequest.of(kind, prompt, params, request_id, options, follower, self.config)

    def _submit(self, request: SentRequest) -> None:
        """Send a request to a replica, or let it wait for one."""
        with self._changed:
            if not self.is_healthy:
                raise EasyDeLError(self._failure or "the server has ended its replicas")
            name = request.name
            self._requests[name] = request
            prepared = [one for one in self._replicas.values() if one.prepared]
            among = [one.index for one in prepared if not one.draining or len(prepared) == 1]
            if not among:
                self._waiting[name] = request
                return
            known = [0] * self.size
            for index, one in self._replicas.items():
                known[index] = one.prefixes.known(request.keys) * self.config.page_size
            size = len(request.token_ids)
            where = self._router.choose(size, known, among)
            new = size - known[where]
            self._router.place(name, where, new, request.completions, request.max_tokens)
            replica = request.replica = self._replicas[where]
            replica.requests.add(name)
            replica.prefixes.add(request.keys)
            replica.send(request.message)

    def _abort(self, name: str) -> None:
        with self._changed:
            request = self._requests.get(name)
            if request is None:
                return
            if request.replica is not None:
                request.replica.send({"do": "abort", "id": name})
            self._forget(request)

    def _forget(self, request: SentRequest, output: RequestOutput | None = None) -> None:
        """Remove a request; `output` is its last output."""
        name = request.name
        self._requests.pop(name, None)
        self._waiting.pop(name, None)
        if request.replica is not None:
            request.replica.requests.discard(name)
            if output is None:
                self._router.remove(name)
            else:
                self._router.ended(name, output.metrics.num_generated_tokens)

    # ---- weights, memory and adapters

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache of each replica."""
        await self._call_all("reset_prefix_cache")
        for one in self._ready():
            one.prefixes.clear()

    async def sleep(self, level: int = 1) -> None:
        """Release the device memory of each replica."""
        check_level(level)
        self._dozing, self._level = True, level
        try:
            await self._call_all("sleep", level)
        except EasyDeLError:
            self._level = None
            raise
        finally:
            self._dozing = False

    async def wake_up(self) -> None:
        """Resume after `sleep`."""
        await self._call_all("wake_up")
        self._level = None

    async def load_lora_adapter(self, name: str, source: str | Path) -> None:
        """Load a LoRA adapter in each replica. If one replica fails, no replica keeps it."""
        try:
            await self._call_all("load_lora_adapter", name, str(source))
        except EasyDeLError:
            if name not in self._adapters:
                await asyncio.gather(
                    *(self._call(one, "unload_lora_adapter", name) for one in self._ready()),
                    return_exceptions=True,
                )
            raise
        self._adapters[name] = str(source)

    async def unload_lora_adapter(self, name: str) -> None:
        """Reject new requests for an adapter."""
        self._adapters.pop(name, None)
        await self._call_all("unload_lora_adapter", name)

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
            while left := [one for one in self._ready() if one.version < version]:
                await self._replace_weights(left[0], path, version)
            if self._version < version:
                raise EasyDeLError("no replica is ready: try again later")
        finally:
            self._rolling = False
        self._facts = EngineFacts(**{**vars(self.facts), "certificate": _certificate(path)})

    async def _replace_weights(self, replica: ConnectedReplica, path: str, version: int) -> None:
        others = any(one is not replica and one.prepared for one in self._ready())
        replica.draining = others
        try:
            until = time.monotonic() + DRAIN_SECONDS
            while others and replica.requests and time.monotonic() < until:
                await asyncio.sleep(0.02)
            try:
                await self._call(replica, "load_weights", path)
            except ReplicaLostError:
                return  # its successor repeats the update
            with self._changed:
                replica.version = self._version = version
                self._weights = path
                replica.prefixes.clear()
        finally:
            with self._changed:
                replica.draining = False
                self._flush()

    async def _call_all(self, method: str, *arguments: Any) -> None:
        """Call a method of every replica. A lost replica is no error, if others remain."""
        replicas = self._ready()
        if not replicas:
            raise EasyDeLError("no replica is ready: try again later")
        calls = (self._call(one, method, *arguments) for one in replicas)
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [each for each in results if isinstance(each, BaseException)]
        lost = [each for each in errors if isinstance(each, ReplicaLostError)]
        for error in errors:
            if error not in lost or len(lost) == len(replicas):
                raise error

    async def _call(self, replica: ConnectedReplica, method: str, *arguments: Any) -> None:
        await asyncio.wrap_future(self._post_call(replica, method, *arguments))

    def _post_call(self, replica: ConnectedReplica, method: str, *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        with self._changed:
            name = f"call-{next(self._numbers)}"
            if self._replicas.get(replica.index) is not replica:
                done.set_exception(ReplicaLostError(f"replica {replica.index} was lost"))
                return done
            replica.calls[name] = done
            replica.send({"do": "call", "id": name, "method": method, "arguments": list(arguments)})
        return done

    # ---- connections of the replicas

    def _ready(self) -> list[ConnectedReplica]:
        with self._changed:
            return [one for _, one in sorted(self._replicas.items())]

    @property
    def num_ready(self) -> int:
        """Number of replicas that are ready."""
        return sum(one.prepared for one in self._ready())

    def attend(self, connection: Connection) -> None:
        """Follow the connection of a replica to its end."""
        connection.send(self._run)
        messages = connection.receive()
        replica = self._enter(connection, messages[0])
        if replica is None:
            logger.warning(
                "a replica of %s was rejected: all %d are ready", self.model_name, self.size
            )
            connection.close()
            return
        try:
            while True:
                self._take(replica, messages)
                messages = connection.receive()
        except EasyDeLError:
            pass  # the replica is gone
        finally:
            self._leave(replica)

    def _enter(self, connection: Connection, ready: Mapping[str, Any]) -> ConnectedReplica | None:
        """Accept a replica: repeat the changes since the start, and send the waiting requests."""
        if self._facts is None:
            self._facts = EngineFacts.read(ready["facts"])
            self.processor = self._load_processor(self._facts)
            self._grammars = Grammars.of(
                self.tokenizer, self._facts.vocab_size, self._facts.eos_token_ids
            )
        with self._changed:
            index = next((i for i in range(self.size) if i not in self._replicas), None)
            if index is None or self.closed:
                return None
            replica = self._replicas[index] = ConnectedReplica(connection, index, ready)
            self.seen.add(replica.pid)
            calls = []
            if self._weights is not None:
                calls.append(self._post_call(replica, "load_weights", self._weights))
                replica.version = self._version
            for name, source in self._adapters.items():
                calls.append(self._post_call(replica, "load_lora_adapter", name, source))
            if self._level is not None:
                calls.append(self._post_call(replica, "sleep", self._level))
            if not calls:
                self._open(replica)
            for call in calls:
                call.add_done_callback(partial(self._repeated, replica, calls))
        return replica

    def _repeated(
        self, replica: ConnectedReplica, calls: Sequence[Future[None]], call: Future[None]
    ) -> None:
        """Follow a call that repeats a change in a new replica."""
        error = call.exception()
        if error is not None and not isinstance(error, ReplicaLostError):
            logger.error("replica %d cannot repeat a change: %s", replica.index, error)
            replica.drop()
        if all(each.done() and each.exception() is None for each in calls):
            self._open(replica)

    def _open(self, replica: ConnectedReplica) -> None:
        """Send requests to a replica, first those that wait."""
        with self._changed:
            replica.prepared = True
            self._flush()
            self._changed.notify_all()
        logger.info("replica %d of %s is ready", replica.index, self.model_name)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self._submit(request)

    def _leave(self, replica: ConnectedReplica) -> None:
        """Retry or end the requests of a lost replica."""
        replica.close()
        ended: list[tuple[Follower, OutputItem]] = []
        with self._changed:
            del self._replicas[replica.index]
            replica.prepared = False
            for call in replica.calls.values():
                if call.set_running_or_notify_cancel():
                    call.set_exception(ReplicaLostError(f"replica {replica.index} was lost"))
            for name in sorted(replica.requests, key=lambda one: self._requests[one].arrival):
                request = self._requests[name]
                self._forget(request)
                request.replica = None
                request.tries += 1
                try:
                    if request.begun:
                        raise ReplicaLostError(
                            f"replica {replica.index} was lost in the middle of the answer: send "
                            "the request again"
                        )
                    if request.tries == MAX_TRIES:
                        raise ReplicaLostError(
                            f"{MAX_TRIES} replicas were lost during this request, which may be "
                            "the cause: change the request"
                        )
                    self._submit(request)
                except EasyDeLError as error:
                    ended.append((request.follower, error))
            self._changed.notify_all()
        hand_over(ended)
        if not self.closed:
            logger.warning("replica %d of %s was lost", replica.index, self.model_name)

    def _take(self, replica: ConnectedReplica, messages: Sequence[Mapping[str, Any]]) -> None:
        """Apply the messages of a replica."""
        items: list[tuple[Follower, OutputItem]] = []
        with self._changed:
            replica.heard = time.monotonic()
            for message in messages:
                match message["do"]:
                    case "state":
                        replica.update(message)
                    case "called":
                        call = replica.calls.pop(message["id"])
                        problem = message["error"]
                        if call.set_running_or_notify_cancel():
                            if problem is None:
                                call.set_result(None)
                            else:
                                call.set_exception(error_of(problem))
                    case "output" | "failed":
                        request = self._requests.get(message["id"])
                        if request is None or request.replica is not replica:
                            continue  # aborted
                        items.append((request.follower, self._item(request, message)))
        hand_over(items)

    def _item(self, request: SentRequest, message: Mapping[str, Any]) -> OutputItem:
        """Return the output or the error of a message."""
        if message["do"] == "failed":
            self._forget(request)
            return error_of(message["error"])
        output: RequestOutput = message["output"]
        assert request.replica is not None, "the replica has sent the output"
        request.replica.to_local_times(output, request.arrival)
        if request.begun:
            output.prompt_token_ids, output.prompt = request.token_ids, None
        request.begun = True
        if output.finished:
            self._forget(request, output)
        return output

    # ---- supervision

    def wait_ready(self, count: int, check: Callable[[], None], interval: float = 0.1) -> None:
        """Wait until `count` replicas are ready.

        Args:
            check: is called regularly, and raises an error if a replica can never be ready.
        """
        while True:
            with self._changed:
                if self.num_ready >= count:
                    return
                self._changed.wait(interval)
            check()

    def look(self) -> list[int]:
        """End the requests that waited too long, and the connections of silent replicas.

        Returns:
            the ids of the processes of silent replicas.
        """
        now = time.monotonic()
        with self._changed:
            late = [each for each in self._waiting.values() if now - each.arrival > WAIT_SECONDS]
            for request in late:
                self._forget(request)
            silent = [one for one in self._replicas.values() if now - one.heard > SILENCE_SECONDS]
        error = EasyDeLError(f"no replica was ready within {WAIT_SECONDS:g} seconds")
        hand_over([(request.follower, error) for request in late])
        for one in silent:
            logger.error("replica %d of %s does not respond", one.index, self.model_name)
            one.drop()
        return [one.pid for one in silent]

    def fail(self, reason: str) -> None:
        """Refuse requests as soon as no replica is ready, because none will start again."""
        with self._changed:
            self._failure = reason
            waiting = list(self._waiting.values())
            for request in waiting:
                self._forget(request)
        hand_over([(request.follower, EasyDeLError(reason)) for request in waiting])

    def close(self) -> None:
        """End all replicas."""
        with self._changed:
            self.closed = True
            replicas = list(self._replicas.values())
        for one in replicas:
            one.close()


def _certificate(path: str) -> Mapping[str, Any] | None:
    return certificate_summary(Path(path))
