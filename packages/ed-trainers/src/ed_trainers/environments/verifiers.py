"""Environments of verifiers 0.4 (`verifiers.v1`): tasksets with rewards, users, games and tools.

An environment of verifiers calls a model by an endpoint with OpenAI's interface. Here, the endpoint
is a server on loopback whose replies are the messages of the trained model: each sample runs an
episode of verifiers, a request of the episode becomes the messages that the model reads, and the
reward of the episode is the reward of the sample. Episodes run in one thread of the process.

verifiers pins versions of other packages, so it is no extra: `pip install verifiers==0.4.0`.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import json
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from ed_infra.errors import ConfigError, EasyDeLError

from ed_trainers.environments import EnvironmentReply

_Message = Mapping[str, Any]
#: Name under which verifiers imports the harness, and name of the model.
_HARNESS, _MODEL = "easydel_policy", "policy"
_SESSION = "X-Session-ID"
_OPEN_SECONDS, _CLOSE_SECONDS = 600.0, 10.0


class _Event(NamedTuple):
    """The next request of an episode, or its end.

    Attributes:
        messages: the conversation of a request; None: the episode ended.
        reward: the reward of the episode.
        error: why the episode failed, or an empty text.
    """

    messages: list[dict[str, Any]] | None
    reward: float = 0.0
    error: str = ""


class _Trace(Protocol):
    """The record of an episode; its id is that of the requests."""

    id: str


class VerifiersEnvironment:
    """An environment of verifiers.

    Args:
        taskset: name of an installed taskset, such as `textarena` or the module of your own.
        config: further keys of the taskset's configuration.
        environment: name of an installed environment of the taskset; None: the taskset's own.
        task_field: field of the rows with the number of the task, see `list_tasks`.
        timeout: seconds in which an episode must ask the model or end.

    Raises:
        ConfigError: verifiers is not installed, or it rejects the configuration.
    """

    def __init__(
        self,
        taskset: str,
        config: dict[str, Any] | None = None,
        environment: str | None = None,
        task_field: str = "task",
        timeout: float = 600.0,
    ) -> None:
        self._service = _open_service(taskset, json.dumps(config or {}), environment or "")
        self._task_field, self._timeout = task_field, timeout
        self._episode: _Episode | None = None
        self._known = 0

    def observe(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Begin the episode of a row, and return the first messages that the model reads."""
        if self._task_field not in row:
            raise ConfigError(
                f"the row has no field {self._task_field!r} (it has {', '.join(row) or 'none'}): "
                f"write additional_fields: [{self._task_field}] in the entries of mixture.informs"
            )
        self.close()
        self._episode = _Episode(self._service, int(row[self._task_field]))
        event = self._episode.wait(self._timeout)
        if event.messages is None:
            raise EasyDeLError(
                f"the episode ended before the first message of the model: {event.error or 'done'}"
            )
        self._known = len(event.messages)
        return event.messages

    def reset(self, messages: Sequence[_Message], row: Mapping[str, Any]) -> None:
        """See `Environment`.

        Raises:
            ConfigError: the prompt is not that of the task.
        """
        prompt = [(one["role"], one["content"]) for one in messages]
        task = [(one["role"], one["content"]) for one in self.observe(row)]
        if prompt != task:
            self.close()
            raise ConfigError(
                f"the prompt of the row with task {row[self._task_field]} is {prompt}, and the "
                f"task of verifiers begins with {task}: write the rows with "
                "ed_trainers.environments.list_first_prompts"
            )

    def step(self, messages: Sequence[_Message]) -> EnvironmentReply:
        """See `Environment`."""
        assert self._episode is not None, "reset begins an episode"
        self._episode.reply(str(messages[-1]["content"]))
        event = self._episode.wait(self._timeout)
        if event.messages is None:
            if event.error:
                raise EasyDeLError(f"the episode of verifiers failed: {event.error}")
            return EnvironmentReply(reward=event.reward, done=True)
        new = event.messages[self._known + 1 :]  # the first one is the message of the model
        self._known = len(event.messages)
        return EnvironmentReply([{"role": m["role"], "content": m["content"]} for m in new])

    def close(self) -> None:
        """Stop an episode that did not end."""
        if self._episode is not None:
            self._episode.close()
            self._episode = None


class _Episode:
    """One episode: the events of verifiers, and the replies of the model."""

    def __init__(self, service: _Service, number: int) -> None:
        self.events: queue.Queue[_Event] = queue.Queue()
        self.replies: queue.Queue[str | None] = queue.Queue()
        self._service = service
        self._future: Future[None] = service.begin(self, number)

    def wait(self, seconds: float) -> _Event:
        """Return the next event."""
        try:
            return self.events.get(timeout=seconds)
        except queue.Empty:
            self.close()
            return _Event(None, error=f"no request and no end within {seconds:g} s")

    def reply(self, text: str) -> None:
        """Pass the message of the model to the request that waits."""
        self.replies.put(text)

    def close(self) -> None:
        """Stop the episode."""
        self.replies.put(None)
        self._future.cancel()


class _Service:
    """The environment of verifiers in a thread, and the server of the model's messages.

    Args:
        taskset, config, environment: see `VerifiersEnvironment`.
    """

    def __init__(self, taskset: str, config: Mapping[str, Any], environment: str) -> None:
        try:
            import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
            from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"the environment verifiers needs verifiers 0.4 ({error}): pip install "
                "verifiers==0.4.0. Its pins exclude some versions of other packages, so a "
                "separate environment may be necessary"
            ) from error
        _register_harness()
        seat = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}}
        try:
            options = loaders.env_config_type(taskset, environment)
            seats = [
                name
                for name, field in options.model_fields.items()
                if isinstance(field.default, vf.AgentConfig)
            ]
            values: dict[str, Any] = {"taskset": {**config, "id": taskset}}
            if environment:
                values["id"] = environment
            self._environment = loaders.load_environment(
                options.model_validate({**values, **dict.fromkeys(seats, seat)})
            )
        except Exception as error:  # of verifiers, pydantic, and the code of a taskset
            raise ConfigError(
                f"the taskset {taskset!r} of verifiers cannot be loaded: {error}"
            ) from error
        if len(seats) != 1:
            raise ConfigError(
                f"the environment of {taskset!r} has {len(seats)} agents ({', '.join(seats)}), "
                "and a run trains one: use an environment with one agent"
            )
        self._tasks: list[Any] = []
        self._stream = iter(self._environment.taskset)
        self._sessions: dict[str, _Episode] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _build_handler(self._sessions))
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self._context = vf.ModelContext(
            model=_MODEL,
            client=vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var=_MODEL),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True).start()
        self._stop = asyncio.Event()
        ready: Future[None] = Future()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(ready), self._loop)
        self._serving.add_done_callback(lambda _: ready.done() or ready.cancel())
        try:
            ready.result(_OPEN_SECONDS)
        except Exception as error:
            raise ConfigError(
                f"the servers of the taskset {taskset!r} did not start: "
                f"{self._serving.exception() if self._serving.done() else error}"
            ) from error
        atexit.register(self.close)

    async def _serve(self, ready: Future[None]) -> None:
        """Hold the servers of the environment: contexts end in the task that entered them."""
        async with self._environment.serving():
            ready.set_result(None)
            await self._stop.wait()

    def task(self, number: int) -> object:
        """Return a task of the taskset.

        Raises:
            ConfigError: the taskset has fewer tasks.
        """
        while len(self._tasks) <= number:
            task = next(self._stream, None)
            if task is None:
                raise ConfigError(f"there is no task {number}: the taskset has {len(self._tasks)}")
            self._tasks.append(task)
        return self._tasks[number]

    def begin(self, episode: _Episode, number: int) -> Future[None]:
        """Begin an episode."""
        return asyncio.run_coroutine_threadsafe(self._run(episode, self.task(number)), self._loop)

    async def _run(self, episode: _Episode, task: object) -> None:
        sessions: list[str] = []

        def watch(trace: _Trace) -> None:
            sessions.append(trace.id)
            self._sessions[trace.id] = episode

        try:
            result = await self._environment.run_episode(task, self._context, on_trace=watch)
            errors = [*result.errors, *itertools.chain(*(t.errors for t in result.traces))]
            error = "" if result.ok else str(errors[-1].message if errors else "no reason")
            reward = sum(trace.reward for trace in result.traces)
            episode.events.put(_Event(None, reward, error))
        except Exception as error:  # of the code of a taskset
            episode.events.put(_Event(None, error=f"{type(error).__name__}: {error}"))
        finally:
            for name in sessions:
                self._sessions.pop(name, None)

    def close(self) -> None:
        """End the servers of the environment."""
        self._server.shutdown()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._serving.result(_CLOSE_SECONDS)


@functools.cache
def _open_service(taskset: str, config: str, environment: str) -> _Service:
    return _Service(taskset, json.loads(config), environment)


def _build_handler(sessions: Mapping[str, _Episode]) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests of episodes, which are answered with the replies."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            episode = sessions.get(self.headers.get(_SESSION, ""))
            text = None
            if episode is not None:
                episode.events.put(_Event(body["messages"]))
                text = episode.replies.get()
            if text is None:
                with suppress(OSError):  # the episode does not wait any more
                    self.send_error(410, "the sample ended")
                return
            message = {"role": "assistant", "content": text}
            content = json.dumps(
                {
                    "id": "reply",
                    "object": "chat.completion",
                    "created": 0,
                    "model": _MODEL,
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                    "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
                }
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Omit the lines of the log for each request."""

    return Handler


def _register_harness() -> None:
    """Make the harness importable for verifiers under the name `_HARNESS`."""
    if _HARNESS in sys.modules:
        return
    import httpx
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    from verifiers.v1.dialects.chat import (  # pyright: ignore[reportMissingImports]
        message_to_wire,
    )

    class PolicyHarness(vf.Harness[vf.HarnessConfig]):
        """Requests one message for each segment, in the process of the trainer."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: vf.ModelContext,
            trace: vf.Trace,
            runtime: vf.Runtime,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: vf.TaskData,
        ) -> vf.ProgramResult:
            """See `Harness`."""
            system, prompt = self.resolve_prompt(data)
            messages: list[dict[str, Any]] = []
            if system:
                messages.append({"role": "system", "content": system})
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
                response = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
            code = 0 if response.is_success else 1
            return vf.ProgramResult(exit_code=code, stdout="", stderr=response.text)

    module = ModuleType(_HARNESS)
    vars(module).update(PolicyHarness=PolicyHarness, __all__=["PolicyHarness"])
    sys.modules[_HARNESS] = module
