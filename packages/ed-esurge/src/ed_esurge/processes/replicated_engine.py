"""`ReplicatedEngine`: the replicas of a model as one engine for a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.certificates import certificate_summary
from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.core.commands import EncoderInput
from ed_esurge.engine.connection import Connection, ConnectionLost
from ed_esurge.engine.facts import EngineFacts, EngineWithFacts
from ed_esurge.engine.intake import (
    CheckedPrompt,
    RequestOptions,
    check_request_keywords,
    derive_seed,
    get_seeds,
)
from ed_esurge.grammars.store import Grammar, Grammars
from ed_esurge.outputs import Follower, RequestOutput
from ed_esurge.processes.answer_check import require
from ed_esurge.processes.connected_replica import SentRequest
from ed_esurge.processes.messages import decode_facts
from ed_esurge.processes.repeated_changes import RepeatedChanges
from ed_esurge.processes.replica_group import ReplicaGroup
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs
from ed_esurge.tokenizer import Tokenizer


class ReplicatedEngine(EngineWithFacts):
    """Serves a model by replicas in other processes. Implements `ServedEngine`.

    The methods may be called from any event loop, and `attend` from threads.

    Args:
        name: name of the model.
        config: the options of each replica.
        tokenizer: the tokenizer of the model.
        run: the message that instructs a replica how to create its engine.
        replicas: maximum number of replicas.
        load_processor: returns the processor of the model, if the model has one.

    Attributes:
        replicas: the connected replicas, and the requests that they received.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        run: Mapping[str, Any],
        replicas: int,
        load_processor: Callable[[EngineFacts], Any],
    ) -> None:
        self._name, self.config, self.tokenizer = name, config, tokenizer
        self.processor: Any = None
        self.replicas = ReplicaGroup(name, replicas, config.page_size, config.max_num_seqs)
        self._changes = RepeatedChanges(self.replicas)
        self.sleep, self.wake_up = self._changes.sleep, self._changes.wake_up
        self.load_lora_adapter = self._changes.load_lora_adapter
        self.unload_lora_adapter = self._changes.unload_lora_adapter
        self._run, self._load_processor = dict(run), load_processor
        self._facts: EngineFacts | None = None
        self._grammars: Grammars | None = None
        self._lock, self._facts_lock, self._arrivals = threading.Lock(), threading.Lock(), 0

    # ---- properties of the model

    @property
    def facts(self) -> EngineFacts:
        """The facts about the engine, which the first replica reported."""
        if self._facts is None:
            raise EasyDeLError("no replica has been ready: call replicas.wait_ready() first")
        return self._facts

    @property
    def model_name(self) -> str:
        return self._name

    @property
    def is_healthy(self) -> bool:
        """Whether a replica is ready, or will be."""
        return self.replicas.is_healthy

    @property
    def is_sleeping(self) -> bool:
        return self._changes.is_sleeping

    def replica_stats(self) -> list[Mapping[str, float]]:
        """Return the last reported statistics of each replica."""
        return [stats for one in self.replicas.list_replicas() for stats in one.stats]

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """Return the loaded adapters of a replica; all replicas have the same."""
        replicas = self.replicas.list_replicas()
        return replicas[0].adapters if replicas else []

    def compile_structured(self, structured_outputs: StructuredOutputs) -> Future[Grammar]:
        """Compile a grammar, to reject an invalid grammar before a replica receives it."""
        if self._grammars is None:
            raise ConfigError("structured outputs require a tokenizer")
        return self._grammars.submit(structured_outputs)

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
        check_request_keywords(options)
        structured = params.structured_outputs if isinstance(params, SamplingParams) else None
        if structured is not None:
            compiled = await asyncio.to_thread(self.compile_structured, structured)
            await asyncio.wrap_future(compiled)
        follower = Follower()
        self.replicas.submit(self._request(kind, prompt, params, request_id, options, follower))
        try:
            while not follower.over:
                yield await follower.get()
        finally:
            if not follower.over:
                self.replicas.abort(request_id)

    def _request(
        self,
        kind: str,
        prompt: CheckedPrompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        options: RequestOptions,
        follower: Follower,
    ) -> SentRequest:
        if request_id in self.replicas:
            raise ConfigError(f"the request id {request_id!r} is in use: choose another")
        with self._lock:
            # As in one process: equal requests without a seed have different answers.
            seed = derive_seed(params, self.config.seed, self._arrivals)
            self._arrivals += len(get_seeds(params, seed))
        if isinstance(params, SamplingParams):
            params = params.replace(seed=seed)
        return SentRequest.of(
            kind, prompt, params, request_id, options, follower, self.config, self.vocab_size
        )

    # ---- weights, memory and adapters

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache of each replica."""
        await self.replicas.call_all("reset_prefix_cache")
        for one in self.replicas.list_replicas():
            one.prefixes.clear()

    async def load_weights(self, source: str | Path) -> None:
        """See `RepeatedChanges.load_weights`."""
        await self._changes.load_weights(source)
        self._facts = replace(self.facts, certificate=certificate_summary(Path(source)))

    # ---- connections of the replicas

    def attend(self, connection: Connection, token: str | None = None) -> None:
        """Follow the connection of a replica to its end.

        Args:
            connection: the connection.
            token: the token of a process that the server started; None for other processes.

        Raises:
            EasyDeLError: the replica sent an invalid message, or has another model.
        """
        connection.send(self._run)
        messages = connection.receive()
        require(isinstance(messages, list) and messages, "no list of messages")
        ready = messages[0]
        require(isinstance(ready, dict) and ready.get("do") == "ready", "a missing first message")
        self._read_facts(ready)
        replica = self.replicas.enter(connection, ready, self._changes.repeat, token)
        if replica is None:
            return
        try:
            while True:
                self.replicas.take(replica, messages)
                messages = connection.receive()
        except ConnectionLost:
            pass  # the replica is gone
        finally:
            self.replicas.leave(replica)

    def _read_facts(self, ready: Mapping[str, Any]) -> None:
        """Store the facts of the first replica, and compare those of the others."""
        facts = decode_facts(ready.get("facts"))
        with self._facts_lock:
            if self._facts is not None:
                names = self._facts.differing_names(facts)
                if names:
                    raise ConfigError(
                        f"a replica of {self.model_name} has other values of {', '.join(names)} "
                        "than the first replica: give all replicas the same model and options"
                    )
                return
            self.processor = self._load_processor(facts)
            self._grammars = Grammars.of(self.tokenizer, facts.vocab_size, facts.eos_token_ids)
            self._facts = facts
