"""`AsyncEngine`: an `eSurge` driven by a thread of its own, for coroutines that each follow a
request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from typing import Any

from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger

from ed_esurge.completion import Group
from ed_esurge.engine.surge import eSurge
from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import SamplingParams

logger = get_logger(__name__)


class _Follower:
    """Where the outputs of one request go: a queue on the loop of the coroutine that waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

    def put(self, item: RequestOutput | BaseException) -> None:
        """Hand over an output; called by the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:
            logger.debug("the loop of a request has closed: its output is dropped")

    async def get(self) -> RequestOutput:
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item


class AsyncEngine:
    """Drives an engine from a background thread; every method may be called from any loop.

    Args:
        engine: nobody else may step it meanwhile.
        stuck_after: seconds without progress after which a step counts as stuck.
    """

    def __init__(self, engine: eSurge, *, stuck_after: float = 300.0) -> None:
        self.engine = engine
        self.stuck_after = stuck_after
        self._inbox: deque[tuple[Callable[[], Any], Future[Any] | None]] = deque()
        self._wake = threading.Event()
        self._followers: dict[str, _Follower] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._beat = time.monotonic()

    # ---- what a server shows

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def model_name(self) -> str:
        return self.engine.model_name

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    def stats(self) -> Mapping[str, float]:
        """See `eSurge.stats`."""
        return self.engine.stats()

    @property
    def is_healthy(self) -> bool:
        """The thread runs, no step has failed, and none takes longer than `stuck_after`."""
        alive = self._thread is not None and self._thread.is_alive()
        return alive and self._failure is None and self._since_beat() < self.stuck_after

    def _since_beat(self) -> float:
        return time.monotonic() - self._beat

    # ---- life

    def start(self) -> None:
        """Start the thread (again)."""
        if self._failure is not None:
            raise EasyDeLError(f"the engine failed and cannot go on: {self._failure}")
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopping = False
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ed-esurge", daemon=True)
        self._thread.start()

    def shutdown(self, timeout: float = 30.0) -> None:
        """Abort what runs and stop the thread; the engine itself stays usable."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    # ---- requests

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Deltas of one request, as they come. Closing the generator early aborts the request.

        Args:
            prompt_token_ids: token ids (text is encoded too, in the calling thread).

        Raises:
            ConfigError: the request can never run, or its id is in use.
            EasyDeLError: the engine has stopped or failed.
        """
        self._check_alive()
        if request_id in self._followers:
            raise ConfigError(f"request id {request_id!r} is in use: choose another")
        group = self.engine.prepare(
            request_id, prompt_token_ids, sampling_params, priority=priority
        )
        follower = self._followers[request_id] = _Follower()
        finished = False
        try:
            self._post(lambda: self._submit(group))
            while not finished:
                output = await follower.get()
                finished = output.finished
                yield output
        finally:
            self._followers.pop(request_id, None)
            if not finished:
                self._post(lambda: self.engine.abort_request(request_id))

    async def abort(self, request_id: str) -> None:
        """End a request: its generator gives a last output. Unknown ids are ignored."""
        self._post(lambda: self.engine.abort_request(request_id))

    async def update_model_weights(self, model_or_state: Any) -> None:
        """Serve other weights from the next step on; see `eSurge.update_model_weights`."""
        self._check_alive()
        done: Future[Any] = Future()
        self._post(lambda: self.engine.update_model_weights(model_or_state), done)
        await asyncio.wrap_future(done)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EasyDeLError(f"the engine failed: {self._failure}") from self._failure
        if self._stopping or self._thread is None or not self._thread.is_alive():
            raise EasyDeLError("the engine is not running: call start() first")

    # ---- the thread

    def _post(self, action: Callable[[], Any], done: Future[Any] | None = None) -> None:
        self._inbox.append((action, done))
        self._wake.set()

    def _submit(self, group: Group) -> None:
        try:
            self.engine.submit(group)
        except ConfigError as error:
            self._give(group.request_id, error)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._beat = time.monotonic()
                self._read_inbox()
                if self.engine.has_unfinished_requests:
                    for output in self.engine.step():
                        self._give(output.request_id, output)
                if not self.engine.has_unfinished_requests or self.engine.paused:
                    # The beat goes on while there is nothing to do.
                    self._wake.wait(min(0.2, self.stuck_after / 4))
                    self._wake.clear()
            self._end(EasyDeLError("the engine was shut down"))
        except BaseException as error:
            logger.exception("the engine failed")
            self._failure = error
            self._end(EasyDeLError(f"the engine failed: {error}"))

    def _read_inbox(self) -> None:
        while self._inbox:
            action, done = self._inbox.popleft()
            try:
                result = action()
            except Exception as error:
                if done is None:
                    raise
                done.set_exception(error)
            else:
                if done is not None:
                    done.set_result(result)

    def _give(self, request_id: str, item: RequestOutput | BaseException) -> None:
        follower = self._followers.get(request_id)
        if follower is not None:
            follower.put(item)

    def _end(self, error: BaseException) -> None:
        """Nobody is left waiting."""
        for follower in list(self._followers.values()):
            follower.put(error)
        while self._inbox:
            _, done = self._inbox.popleft()
            if done is not None:
                done.set_exception(error)
        if self._failure is None:
            for name in self.engine.unfinished_requests():
                self.engine.abort_request(name)
            self.engine.step()  # takes the last outputs, which nobody waits for
