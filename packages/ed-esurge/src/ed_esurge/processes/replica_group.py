"""The connected replicas of a model, and the distribution of requests to them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from ed_infra.errors import EasyDeLError
from ed_infra.logging import get_logger

from ed_esurge.core.router import ReplicaRouter
from ed_esurge.engine.connection import Connection
from ed_esurge.outputs import Follower, OutputItem, RequestMetrics, RequestOutput, hand_over
from ed_esurge.processes.answer_check import is_text, require
from ed_esurge.processes.connected_replica import ConnectedReplica, SentRequest
from ed_esurge.processes.messages import MAX_MESSAGES, decode_error

logger = get_logger(__name__)

#: Replicas that a request may lose before its first output; then it fails.
MAX_TRIES = 3
#: Seconds that a request waits for a replica.
WAIT_SECONDS = 300.0
#: Seconds without a message after which a replica counts as lost.
SILENCE_SECONDS = 60.0


class ReplicaLostError(EasyDeLError):
    """The process of a replica ended during a request."""


class ReplicaGroup:
    """The replicas of a model in other processes, and their requests. Thread-safe.

    A request goes to the replica that can finish it first, see `ReplicaRouter`. Its prefix counts
    as cached in the replicas that received it. If a replica is lost, its requests without an output
    go to other replicas, and its other requests end with an error.

    Args:
        model_name: name of the model, for messages.
        size: maximum number of replicas.
        page_size: number of tokens in a page of a replica.
        max_num_seqs: maximum number of running sequences of an engine of a replica.

    Attributes:
        changed: the lock of the replicas and requests; notified when a replica is ready or lost.
        reserved: number of replicas that only processes with a token may be.
        seen: tokens of the processes that have been ready.
        closed: whether the replicas were ended.
    """

    def __init__(
        self, model_name: str, size: int, page_size: int, max_num_seqs: int = 2**16
    ) -> None:
        self.size, self.closed, self.reserved = size, False, 0
        self.seen: set[str] = set()
        self._model_name, self._page_size = model_name, page_size
        self._max_num_seqs = max_num_seqs
        self.changed = threading.Condition(threading.RLock())
        self._router = ReplicaRouter(size)
        self._replicas: dict[int, ConnectedReplica] = {}
        self._requests: dict[str, SentRequest] = {}
        self._waiting: dict[str, SentRequest] = {}
        self._numbers = itertools.count(1)
        self._failure: str | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether a replica is ready, or will be."""
        return not self.closed and (bool(self._replicas) or self._failure is None)

    def list_replicas(self) -> list[ConnectedReplica]:
        """Return the connected replicas, in the order of their indices."""
        with self.changed:
            return [one for _, one in sorted(self._replicas.items())]

    @property
    def num_ready(self) -> int:
        """Number of replicas that are ready."""
        return sum(one.prepared for one in self.list_replicas())

    @property
    def num_missing(self) -> int:
        """Number of replicas that are not ready."""
        return self.size - self.num_ready

    # ---- requests

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is unfinished."""
        return request_id in self._requests

    def submit(self, request: SentRequest) -> None:
        """Send a request to a replica, or let the request wait for one.

        Raises:
            EasyDeLError: no replica will be ready.
        """
        with self.changed:
            if not self.is_healthy:
                raise EasyDeLError(self._failure or "the server has ended its replicas")
            name = request.name
            self._requests[name] = request
            prepared = [one for one in self._replicas.values() if one.prepared]
            among = [one.index for one in prepared if not one.draining or len(prepared) == 1]
            if not among:
                self._waiting[name] = request
                return
            cached_tokens = [0] * self.size
            for index, one in self._replicas.items():
                cached_tokens[index] = (
                    one.prefixes.count_prefix_pages(request.keys) * self._page_size
                )
            size = len(request.token_ids)
            replica_index = self._router.choose(size, cached_tokens, among)
            new = size - cached_tokens[replica_index]
            self._router.place(name, replica_index, new, request.completions, request.max_tokens)
            replica = request.replica = self._replicas[replica_index]
            replica.add(request)

    def abort(self, name: str) -> None:
        """Abort a request. No effect after its end."""
        with self.changed:
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
            request.replica.remove(request)
            if output is None:
                self._router.remove(name)
            else:
                most = request.completions * request.max_tokens
                self._router.finish_request(name, min(output.metrics.num_generated_tokens, most))

    # ---- calls of methods

    async def call_all(self, method: str, *arguments: object) -> None:
        """Call a method of every replica. A lost replica is no error, if others remain.

        Raises:
            EasyDeLError: no replica is ready, or the error of a replica.
        """
        replicas = self.list_replicas()
        if not replicas:
            raise EasyDeLError("no replica is ready: try again later")
        calls = (self.call(one, method, *arguments) for one in replicas)
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [outcome for outcome in results if isinstance(outcome, BaseException)]
        lost = [outcome for outcome in errors if isinstance(outcome, ReplicaLostError)]
        for error in errors:
            if error not in lost or len(lost) == len(replicas):
                raise error

    async def call(self, replica: ConnectedReplica, method: str, *arguments: object) -> None:
        """Call a method of a replica, and wait for its end.

        Raises:
            ReplicaLostError: the replica is gone.
            EasyDeLError: the error of the replica.
        """
        await asyncio.wrap_future(self.post_call(replica, method, *arguments))

    def post_call(self, replica: ConnectedReplica, method: str, *arguments: object) -> Future[None]:
        """Call a method of a replica without waiting for its end."""
        done: Future[None] = Future()
        with self.changed:
            name = f"call-{next(self._numbers)}"
            if self._replicas.get(replica.index) is not replica:
                done.set_exception(ReplicaLostError(f"replica {replica.index} was lost"))
                return done
            replica.calls[name] = done
            replica.send({"do": "call", "id": name, "method": method, "arguments": list(arguments)})
        return done

    @contextmanager
    def draining(self, replica: ConnectedReplica) -> Iterator[bool]:
        """Send no new requests to a replica during the block, if others are ready. Yield whether
        others are."""
        others_ready = any(one is not replica and one.prepared for one in self.list_replicas())
        replica.draining = others_ready
        try:
            yield others_ready
        finally:
            with self.changed:
                replica.draining = False
                self._flush()

    # ---- connections of the replicas

    def enter(
        self,
        connection: Connection,
        ready: Mapping[str, Any],
        repeat: Callable[[ConnectedReplica], Sequence[Future[None]]],
        token: str | None = None,
    ) -> ConnectedReplica | None:
        """Accept a replica. Send requests to the replica when it has repeated all changes.

        Args:
            connection: the connection to its process.
            ready: its first message.
            repeat: calls the methods that repeat the changes since the start of the server.
            token: the token of a process that the server started; None for other processes.

        Returns:
            None if all replicas are connected.

        Raises:
            ReplicaMessageError: the message is invalid.
        """
        with self.changed:
            if self.closed or not self._has_place(token):
                logger.warning(
                    "a replica of %s was rejected: all %d are ready", self._model_name, self.size
                )
                return None
            index = next(i for i in range(self.size) if i not in self._replicas)
            replica = ConnectedReplica(connection, index, ready, token)
            self._replicas[index] = replica
            if token is not None:
                self.seen.add(token)
            calls = repeat(replica)
            if not calls:
                self._open(replica)
            for call in calls:
                call.add_done_callback(partial(self._check_repeated_call, replica, calls))
        return replica

    def _has_place(self, token: str | None) -> bool:
        """Return whether a replica may connect. A token belongs to one connection."""
        tokens = [one.token for one in self._replicas.values()]
        if token is not None:
            return token not in tokens and len(tokens) < self.size
        return tokens.count(None) < self.size - self.reserved and len(tokens) < self.size

    def _check_repeated_call(
        self, replica: ConnectedReplica, calls: Sequence[Future[None]], call: Future[None]
    ) -> None:
        """Follow a call that repeats a change in a new replica."""
        error = call.exception()
        if error is not None and not isinstance(error, ReplicaLostError):
            logger.error("replica %d cannot repeat a change: %s", replica.index, error)
            replica.drop()
        if all(
            repeated_call.done() and repeated_call.exception() is None for repeated_call in calls
        ):
            self._open(replica)

    def _open(self, replica: ConnectedReplica) -> None:
        """Send requests to a replica, first those that wait."""
        with self.changed:
            replica.prepared = True
            self._flush()
            self.changed.notify_all()
        logger.info("replica %d of %s is ready", replica.index, self._model_name)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self.submit(request)

    def leave(self, replica: ConnectedReplica) -> None:
        """Retry or end the requests of a lost replica."""
        replica.close()
        ended: list[tuple[Follower, OutputItem]] = []
        with self.changed:
            del self._replicas[replica.index]
            replica.prepared = False
            for call in replica.calls.values():
                if call.set_running_or_notify_cancel():
                    call.set_exception(ReplicaLostError(f"replica {replica.index} was lost"))
            for name in sorted(replica.requests, key=lambda one: self._requests[one].arrival):
                request = self._requests[name]
                self._forget(request)
                try:
                    self._retry(request, replica)
                except EasyDeLError as error:
                    ended.append((request.follower, error))
            self.changed.notify_all()
        hand_over(ended)
        if not self.closed:
            logger.warning("replica %d of %s was lost", replica.index, self._model_name)

    def _retry(self, request: SentRequest, lost: ConnectedReplica) -> None:
        """Send a request to another replica.

        Raises:
            EasyDeLError: the caller has an output already, or the request lost too many replicas.
        """
        request.replica = None
        request.answer.restart()
        request.tries += 1
        if request.begun:
            raise ReplicaLostError(
                f"replica {lost.index} was lost in the middle of the answer: send the request again"
            )
        if request.tries == MAX_TRIES:
            raise ReplicaLostError(
                f"{MAX_TRIES} replicas were lost during this request, which may be the cause: "
                "change the request"
            )
        self.submit(request)

    def take(self, replica: ConnectedReplica, messages: Sequence[Mapping[str, Any]]) -> None:
        """Apply the messages of a replica.

        Raises:
            ReplicaMessageError: a message is invalid. The messages before are applied.
        """
        require(isinstance(messages, list) and len(messages) <= MAX_MESSAGES, "no list of messages")
        items: list[tuple[Follower, OutputItem]] = []
        try:
            with self.changed:
                replica.heard = time.monotonic()
                for message in messages:
                    self._apply(replica, message, items)
        finally:
            hand_over(items)

    def _apply(
        self,
        replica: ConnectedReplica,
        message: Mapping[str, Any],
        items: list[tuple[Follower, OutputItem]],
    ) -> None:
        """Apply one message, and append the output or error of its request to `items`."""
        require(isinstance(message, dict), "a message that is no dict")
        kind, name = message.get("do"), message.get("id")
        if kind in ("state", "ready"):
            if kind == "state":
                replica.update(message, self._max_num_seqs)
            return
        require(kind in ("called", "output", "failed"), "an unknown kind")
        require(is_text(name, 2**12), "an id that is no text")
        assert isinstance(name, str), "checked"
        if kind == "called":
            problem = message.get("error")
            error = None if problem is None else decode_error(problem)
            require(name in replica.calls, "the result of a call that is not open")
            call = replica.calls.pop(name)
            if call.set_running_or_notify_cancel():
                if error is None:
                    call.set_result(None)
                else:
                    call.set_exception(error)
            return
        request = self._requests.get(name)
        if request is not None and request.replica is replica:  # else aborted
            items.append((request.follower, self._item(request, replica, message)))

    def _item(
        self, request: SentRequest, replica: ConnectedReplica, message: Mapping[str, Any]
    ) -> OutputItem:
        """Return the output or the error of a message."""
        if message["do"] == "failed":
            error = decode_error(message.get("error"))
            self._forget(request)
            return error
        output = message.get("output")
        if isinstance(output, RequestOutput) and isinstance(output.metrics, RequestMetrics):
            replica.to_local_times(output)
        output = request.answer.check(output, request.arrival)
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
            with self.changed:
                if self.num_ready >= count:
                    return
                self.changed.wait(interval)
            check()

    def look(self) -> list[str]:
        """End the requests that waited too long, and the connections of silent replicas.

        Returns:
            the tokens of the silent replicas that the server started.
        """
        now = time.monotonic()
        with self.changed:
            late_requests = [
                waiting_request
                for waiting_request in self._waiting.values()
                if now - waiting_request.arrival > WAIT_SECONDS
            ]
            for request in late_requests:
                self._forget(request)
            silent = [one for one in self._replicas.values() if now - one.heard > SILENCE_SECONDS]
        error = EasyDeLError(f"no replica was ready within {WAIT_SECONDS:g} seconds")
        hand_over([(request.follower, error) for request in late_requests])
        for one in silent:
            logger.error("replica %d of %s does not respond", one.index, self._model_name)
            one.drop()
        return [one.token for one in silent if one.token is not None]

    def fail(self, reason: str) -> None:
        """Refuse requests as soon as no replica is ready, because none will start again."""
        with self.changed:
            self._failure = reason
            waiting = list(self._waiting.values())
            for request in waiting:
                self._forget(request)
        hand_over([(request.follower, EasyDeLError(reason)) for request in waiting])

    def close(self) -> None:
        """End all replicas."""
        with self.changed:
            self.closed = True
            replicas = list(self._replicas.values())
        for one in replicas:
            one.close()
