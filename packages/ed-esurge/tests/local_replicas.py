"""Replicas in threads of the test process, with real connections to a hub."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

from ed_esurge import eSurge
from ed_esurge.engine import AsyncEngine
from ed_esurge.engine.connection import Connection
from ed_esurge.engine.facts import EngineFacts
from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.processes.hub import ReplicaHub
from ed_esurge.processes.messages import encode_facts
from ed_esurge.processes.replica import Replica
from ed_esurge.processes.replicated_engine import ReplicatedEngine
from ed_infra.errors import EasyDeLError

SECRET = b"a secret of this test"
OPTIONS = {
    "max_num_seqs": 4,
    "page_size": 8,
    "max_num_batched_tokens": 16,
    "max_model_len": 128,
    "max_num_seq_buckets": (4,),
    "compile_runner": False,
    "silent_mode": True,
}


class LocalReplica:
    """A replica in a thread of this process, with its own connection."""

    def __init__(self, hub: ReplicaHub, engine: eSurge) -> None:
        self.connection = Connection.open(hub.address, SECRET)
        self.connection.send({"model": None})
        self.run = self.connection.receive()
        self.engine = AsyncEngine(engine)
        self.engine.start()
        replica = Replica(self.connection, self.engine)
        self.thread = threading.Thread(target=replica.serve)
        self.thread.start()

    def end(self) -> None:
        """End the replica as a lost connection does."""
        self.connection.close()
        self.thread.join(60)
        self.engine.shutdown()


#: Sends the answers of a lying replica to a request.
Lie = Callable[[Connection, dict[str, Any]], None]


class LyingReplica:
    """A replica that holds the secret, and answers each request by a lie.

    Args:
        hub: the hub of the server.
        facts: the facts about the engine in its first message.
        lie: sends messages after each request.
        ready: values that replace those of its first message.
    """

    def __init__(
        self, hub: ReplicaHub, facts: EngineFacts, lie: Lie, ready: dict[str, Any] | None = None
    ) -> None:
        self.requests: list[str] = []
        self.connection = Connection.open(hub.address, SECRET)
        self.connection.send({"model": None})
        self.connection.receive()
        first = {"do": "ready", "facts": encode_facts(facts), "now": time.monotonic()}
        self.connection.send([{**first, **(ready or {})}])
        self._lie = lie
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        with suppress(EasyDeLError):
            while True:
                for message in self.connection.receive():
                    if message["do"] == "generate":
                        self.requests.append(message["id"])
                        self._lie(self.connection, message)
        self.connection.close()


@contextmanager
def serving_replicas(config: Any, tokenizer: Any, size: int) -> Iterator[Any]:
    """Yield an engine without replicas, its hub, and the thread that waits for all replicas."""
    hub = ReplicaHub("127.0.0.1:0", SECRET)
    front = ReplicatedEngine("tiny", config, tokenizer, {"a": 1}, size, lambda facts: None)
    starting = threading.Thread(target=hub.start, args=(front, 0))
    starting.start()
    while "tiny" not in hub._engines:
        time.sleep(0.01)
    try:
        yield front, hub, starting
    finally:
        hub.close()
        front.replicas.fail("the test has ended")


async def collect_tokens(front, prompt, params, name):
    """Return the tokens of a request."""
    tokens = []
    checked = CheckedPrompt(prompt, params.max_tokens)
    async with aclosing(front.generate(checked, params, name)) as outputs:
        async for output in outputs:
            tokens += output.outputs[0].token_ids
            assert output.prompt_token_ids == prompt
    return tokens
