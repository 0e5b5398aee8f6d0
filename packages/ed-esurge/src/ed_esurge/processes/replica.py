"""The process of a replica: an engine that executes the requests of a server.

The server sends lists of messages. `generate` and `embed` start a request, `abort` ends it, and
`call` runs a method of `_METHODS`. Messages are executed in order; a request starts after the calls
before it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.logging import get_logger

from ed_esurge.engine.async_engine import AsyncEngine
from ed_esurge.engine.connection import Connection, shared_secret
from ed_esurge.engine.surge import eSurge
from ed_esurge.processes.message_writer import MessageWriter
from ed_esurge.processes.messages import MAX_MESSAGE_BYTES, TOKEN, encode_error, encode_facts

logger = get_logger(__name__)

#: Seconds between two reports of the state of a replica.
BEAT = 0.5
#: Methods of the engine that a server may call.
_METHODS = (
    "load_lora_adapter",
    "unload_lora_adapter",
    "reset_prefix_cache",
    "sleep",
    "wake_up",
    "load_weights",
)


def serve_replica(
    address: str, model_name: str | None, create: Callable[[Mapping[str, Any]], Any]
) -> None:
    """Connect to a server, create its engine, and execute its requests until it ends.

    Args:
        address: `HOST:PORT` of the server.
        model_name: a model of the server; None = the model that lacks the most replicas.
        create: creates the engine from the arguments that the server sends.

    Raises:
        EasyDeLError: there is no server at the address, it has another secret, the engine cannot be
            created, or it has failed.
    """
    connection = Connection.open(address, shared_secret())
    connection.send({"model": model_name, "token": os.environ.get(TOKEN)})
    run = connection.receive()
    ready = threading.Event()

    def watch() -> None:
        """End this process if the server ends before the engine is ready."""
        if not connection.wait() and not ready.is_set():
            os._exit(0)

    # Until then, the server sends nothing.
    threading.Thread(target=watch, name="replica-watch", daemon=True).start()
    if Path(run["directory"]).is_dir():
        os.chdir(run["directory"])
    engine = create(run["arguments"])
    if not isinstance(engine, eSurge):
        raise ConfigError(
            f"{engine.model_name} transcribes audio, and has no replicas: omit data_parallel_size"
        )
    running = AsyncEngine(engine)
    running.start()
    ready.set()
    try:
        Replica(connection, running).serve()
    finally:
        running.shutdown()


class Replica:
    """Executes the requests of a server until the connection ends.

    Args:
        connection: the connection to the server.
        engine: a running engine.
    """

    def __init__(self, connection: Connection, engine: AsyncEngine) -> None:
        self._connection, self._engine = connection, engine
        self._writer = MessageWriter(connection, MAX_MESSAGE_BYTES)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def serve(self) -> None:
        """Execute messages until the server ends.

        Raises:
            EasyDeLError: the engine has failed.
        """
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[list[dict[str, Any]] | None] = asyncio.Queue()

        def read() -> None:
            with suppress(RuntimeError):  # the loop is closed
                try:
                    while True:
                        loop.call_soon_threadsafe(inbox.put_nowait, self._connection.receive())
                except EasyDeLError:  # the connection is lost
                    loop.call_soon_threadsafe(inbox.put_nowait, None)

        threading.Thread(target=read, name="replica-reader", daemon=True).start()
        ready = {"do": "ready", "facts": encode_facts(self._engine.facts), "now": time.monotonic()}
        self._writer.put(ready)
        beating = asyncio.create_task(self._beat(inbox))
        try:
            while (messages := await inbox.get()) is not None:
                for message in messages:
                    await self._execute(message)
        finally:
            beating.cancel()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if not self._engine.is_healthy:
            raise EasyDeLError("the engine of this replica failed; see the log above")

    async def _beat(self, inbox: asyncio.Queue[list[dict[str, Any]] | None]) -> None:
        """Report the state regularly. End the process if the engine has failed."""
        while self._engine.is_healthy:
            self._report()
            await asyncio.sleep(BEAT)
        inbox.put_nowait(None)

    def _report(self) -> None:
        stats = [
            {name: float(number) for name, number in engine_stats.items()}
            for engine_stats in self._engine.replica_stats()
        ]
        adapters = self._engine.list_lora_adapters()
        self._writer.put(
            {
                "do": "state",
                "stats": stats,
                "adapters": adapters,
                "sleeping": self._engine.is_sleeping,
            }
        )

    async def _execute(self, message: dict[str, Any]) -> None:
        name = message["id"]
        match message["do"]:
            case "call":
                await self._call(message)
            case "abort":
                if name in self._tasks:
                    self._tasks[name].cancel()
            case _:
                self._tasks[name] = asyncio.create_task(self._answer(message))
                self._tasks[name].add_done_callback(lambda _: self._tasks.pop(name, None))

    async def _call(self, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"do": "called", "id": message["id"], "error": None}
        try:
            if message["method"] not in _METHODS:
                raise EasyDeLError(f"{message['method']!r} is no method of a replica")
            await getattr(self._engine, message["method"])(*message["arguments"])
        except Exception as error:
            answer["error"] = encode_error(error)
        self._report()  # before the answer, so that the server knows the new state
        self._writer.put(answer)

    async def _answer(self, message: dict[str, Any]) -> None:
        """Send the outputs of one request."""
        name, engine = message["id"], self._engine
        arguments = message["prompt"], message["params"], name
        try:
            if message["do"] == "embed":
                output = await engine.embed(*arguments, **message["options"])
                self._writer.put({"do": "output", "id": name, "output": output})
                return
            first = True
            async with aclosing(engine.generate(*arguments, **message["options"])) as outputs:
                async for output in outputs:
                    if not first:  # the server knows the prompt
                        output = replace(output, prompt_token_ids=[], prompt=None)
                    first = False
                    self._writer.put({"do": "output", "id": name, "output": output})
        except Exception as error:
            # If the engine has failed, this process ends, and the server tries another replica.
            if engine.is_healthy:
                self._writer.put({"do": "failed", "id": name, "error": encode_error(error)})
