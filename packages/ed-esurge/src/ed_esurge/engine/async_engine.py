"""`AsyncEngine`: runs an `eSurge` in a background thread and serves its outputs to coroutines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger
from ed_models.adapters.values import Adapter
from ed_models.protocol import LanguageModel
from flax import nnx
from jaxtyping import Float

from ed_esurge.config import EngineConfig
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.core.commands import (
    Abort,
    Add,
    Command,
    EncoderInput,
    ResetPrefixCache,
    Sleep,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from ed_esurge.engine.control import check_level, loading
from ed_esurge.engine.facts import EngineFacts, EngineWithFacts
from ed_esurge.engine.intake import CheckedPrompt, PromptInput, RequestOptions, RequestParams
from ed_esurge.engine.surge import eSurge
from ed_esurge.grammars.store import Grammar
from ed_esurge.outputs import Follower, OutputItem, RequestOutput, hand_over, refuse
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs
from ed_esurge.tokenizer import Tokenizer

logger = get_logger(__name__)

#: Bytes of new prefix pages that a running engine writes at once, between two steps.
MOST_STORED_BYTES = 2**26


class AsyncEngine(EngineWithFacts):
    """Runs an engine in a background thread. Every method may be called from any event loop.

    Args:
        engine: the engine; no other code may call its `step` between `start` and `shutdown`.
        stuck_after: seconds without progress after which a step counts as stuck.
    """

    def __init__(self, engine: eSurge, *, stuck_after: float = 300.0) -> None:
        self.engine = engine
        self.stuck_after = stuck_after
        # Commands, each with the future or follower that receives its completion or its error.
        self._inbox: deque[tuple[Command, Follower | Future[None] | None]] = deque()
        self._wake = threading.Event()
        self._followers: dict[str, Follower] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._over: EasyDeLError | None = None  # error for commands posted after the thread ended
        self._beat = self._stored_at = time.monotonic()
        self._dozing = 0  # number of unfinished calls of `sleep`

    # ---- properties of the engine

    @property
    def facts(self) -> EngineFacts:
        return self.engine.facts

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    def embedded_prompt(
        self, embeds: Float[np.ndarray, "n d"]
    ) -> tuple[list[int], tuple[EncoderInput, ...]]:
        """See `eSurge.embedded_prompt`."""
        return self.engine.embedded_prompt(embeds)

    @property
    def directory(self) -> Path | None:
        """The directory of the checkpoint, if the engine was loaded from one."""
        return self.engine.directory

    @property
    def processor(self) -> Any:
        return self.engine.processor

    def check_prompt(self, prompt: PromptInput, max_tokens: int | None) -> CheckedPrompt:
        """See `eSurge.check_prompt`."""
        return self.engine.check_prompt(prompt, max_tokens)

    def compile_structured(self, structured_outputs: StructuredOutputs) -> Future[Grammar]:
        """See `eSurge.compile_structured`."""
        return self.engine.compile_structured(structured_outputs)

    def stats(self) -> Mapping[str, float]:
        """See `eSurge.stats`."""
        return self.engine.stats()

    def replica_stats(self) -> Sequence[Mapping[str, float]]:
        """See `eSurge.replica_stats`."""
        return self.engine.replica_stats()

    @property
    def is_healthy(self) -> bool:
        """Whether the thread runs, no step has failed, and no step exceeds `stuck_after`."""
        alive = self._thread is not None and self._thread.is_alive()
        return alive and self._failure is None and self._since_beat() < self.stuck_after

    def _since_beat(self) -> float:
        return time.monotonic() - self._beat

    # ---- start and shutdown

    def start(self) -> None:
        """Start or restart the thread.

        Raises:
            EasyDeLError: the engine has failed, or another `AsyncEngine` drives the same engine.
                Two drivers would receive each other's outputs.
        """
        if self._failure is not None:
            raise EasyDeLError(f"the engine failed and cannot be restarted: {self._failure}")
        if self._thread is not None and self._thread.is_alive():
            return
        if not self.engine.claim(self):
            raise EasyDeLError(
                "another AsyncEngine drives this engine: use it, or call its shutdown() first"
            )
        self._stopping, self._over = False, None
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ed-esurge", daemon=True)
        self._thread.start()

    def shutdown(self, timeout: float = 30.0) -> None:
        """Abort all requests and stop the thread. The engine remains usable."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self.engine.store_pages()

    # ---- requests

    def generate(
        self,
        prompt_token_ids: PromptInput,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the deltas of one request. Closing the generator early aborts the request.

        Args:
            prompt_token_ids: token ids, or text, which is tokenized in the calling thread.
            sampling_params: sampling options.
            request_id: id, unique among the unfinished requests.
            options: see `RequestOptions`.

        Raises:
            ConfigError: the request can never run, its id is in use, or its adapter is not loaded.
            EasyDeLError: the engine has stopped or failed.
        """
        return self._outputs(prompt_token_ids, sampling_params, request_id, **options)

    async def embed(
        self,
        prompt_token_ids: PromptInput,
        pooling_params: PoolingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Return the pooled vector of one prompt. Cancellation aborts the request. See
        `generate`."""
        outputs = self._outputs(prompt_token_ids, pooling_params, request_id, **options)
        async with aclosing(outputs):
            return await anext(outputs)

    async def _outputs(
        self,
        prompt: PromptInput,
        params: RequestParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput]:
        self._check_alive()
        structured = params.structured_outputs if isinstance(params, SamplingParams) else None
        if structured is not None:
            # `prepare` would block the event loop until the grammar is compiled.
            compiled = await asyncio.to_thread(self.compile_structured, structured)
            await asyncio.wrap_future(compiled)
        prepare = partial(self.engine.prepare, request_id, prompt, params, **options)
        if isinstance(params, SamplingParams) and params.bad_words:  # tokenization is slow
            add = await asyncio.to_thread(prepare)
        else:
            add = prepare()
        follower = Follower()
        try:
            self._post(add, follower)
            while not follower.over:
                yield await follower.get()
        finally:
            if not follower.over:
                self._post(Abort(request_id), follower)

    async def abort(self, request_id: str) -> None:
        """Abort a request. Its generator yields a last output. Unknown ids are ignored."""
        self._post(Abort(request_id))

    async def update_model_weights(self, model_or_state: LanguageModel | nnx.State) -> None:
        """Replace the weights before the next step; see `eSurge.update_model_weights`."""
        await self._done(UpdateWeights(model_or_state))

    async def load_weights(self, source: str | Path) -> None:
        """Replace the weights by those of a directory; see `update_model_weights`.

        Raises:
            ConfigError: the weights are those of another model, or the engine was created from a
                model in memory without `read_model`.
            CheckpointError: the directory cannot be read.
        """
        read = self.engine.read_model
        if read is None:
            raise ConfigError(
                "this engine was created from a model in memory: call update_model_weights"
            )
        path = Path(source)
        await self.update_model_weights(await asyncio.to_thread(read, path))
        self.engine.set_source(path)

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache; see `eSurge.reset_prefix_cache`."""
        await self._done(ResetPrefixCache())

    async def sleep(self, level: int = 1) -> None:
        """Free device memory; see `eSurge.sleep`."""
        command = Sleep(keep_weights=check_level(level) == 1)
        self._dozing += 1
        try:
            await self._done(command)
        finally:
            self._dozing -= 1

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps: from the call of `sleep` to the end of `wake_up`."""
        return self._dozing > 0 or self.engine.is_sleeping

    async def wake_up(self) -> None:
        """Resume after `sleep`; see `eSurge.wake_up`."""
        await self._done(WakeUp())

    async def load_lora_adapter(self, name: str, source: str | Path | nnx.Module | Adapter) -> None:
        """Load a LoRA adapter under a name; see `eSurge.load_lora_adapter`. Files are read in a
        worker thread."""
        await self._done(await asyncio.to_thread(loading, self.engine.loop, name, source))

    async def unload_lora_adapter(self, name: str) -> None:
        """Reject new requests for an adapter; see `eSurge.unload_lora_adapter`."""
        await self._done(UnloadAdapter(name))

    def list_lora_adapters(self) -> list[LoadedAdapter]:
        """Return the loaded adapters, in loading order."""
        return self.engine.list_lora_adapters()

    async def _done(self, command: Command) -> None:
        """Post a command and wait until the engine has executed the command."""
        self._check_alive()
        done: Future[None] = Future()
        self._post(command, done)
        await asyncio.wrap_future(done)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EasyDeLError(f"the engine failed: {self._failure}") from self._failure
        if self._stopping or self._thread is None or not self._thread.is_alive():
            raise EasyDeLError("the engine is not running: call start() first")

    # ---- the thread

    def _post(self, command: Command, waiting: Follower | Future[None] | None = None) -> None:
        self._inbox.append((command, waiting))
        self._wake.set()
        if self._over is not None:  # the thread has read its inbox for the last time
            self._refuse_inbox(self._over)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._beat = time.monotonic()
                self._read_inbox()
                self._store_new_pages()
                if self.engine.has_unfinished_requests:
                    self._give(self.engine.step())
                if not self.engine.has_unfinished_requests or self.engine.paused:
                    # Wake up regularly while idle, so that the beat stays recent.
                    self._wake.wait(min(0.2, self.stuck_after / 4))
                    self._wake.clear()
                    self.engine.beat()
            self._end(EasyDeLError("the engine was shut down"))
        except BaseException as error:
            logger.exception("the engine failed")
            self._failure = error
            self.engine.release(self)  # before the error reaches callers, which may start anew
            self._end(EasyDeLError(f"the engine failed: {error}"))
        finally:
            self.engine.release(self)

    def _store_new_pages(self) -> None:
        interval = self.config.prefix_cache_interval
        if self.config.prefix_cache_directory is None or interval is None:
            return
        if self._beat - self._stored_at >= interval:
            self.engine.store_pages(MOST_STORED_BYTES)
            self._stored_at = time.monotonic()

    def _read_inbox(self) -> None:
        while self._inbox:
            command, waiting = self._inbox.popleft()
            if isinstance(command, Abort) and not self._owns(waiting, command.request_id):
                continue
            try:
                self.engine.execute(command)
            except Exception as error:
                if waiting is None:
                    raise
                refuse(waiting, error)
                continue
            if isinstance(waiting, Future):
                waiting.set_result(None)
            elif waiting is not None and isinstance(command, Add):
                self._followers[command.request_id] = waiting

    def _owns(self, waiting: Follower | Future[None] | None, request_id: str) -> bool:
        """Return whether a follower owns a request. Another caller may use the same id."""
        return waiting is None or self._followers.get(request_id) is waiting

    def _give(self, outputs: list[RequestOutput]) -> None:
        batch: list[tuple[Follower, OutputItem]] = []
        for output in outputs:
            follower = self._followers.get(output.request_id)
            if follower is not None:
                batch.append((follower, output))
            if output.finished:
                self._followers.pop(output.request_id, None)
        hand_over(batch)

    def _end(self, error: EasyDeLError) -> None:
        """Fail all pending commands and followers, and reject new ones."""
        self._over = error
        self._refuse_inbox(error)
        for follower in self._followers.values():
            refuse(follower, error)
        self._followers.clear()
        if self._failure is None:
            for name in self.engine.unfinished_requests():
                self.engine.abort_request(name)
            self.engine.step()  # discards the last outputs

    def _refuse_inbox(self, error: BaseException) -> None:
        """Fail the commands in the inbox. Several threads may call this method concurrently."""
        while True:
            try:
                _, waiting = self._inbox.popleft()
            except IndexError:
                return
            if waiting is not None:
                refuse(waiting, error)
