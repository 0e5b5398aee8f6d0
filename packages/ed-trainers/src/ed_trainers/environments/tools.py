"""Python functions as tools of a model: `ToolSet`, and the environment that calls them.

The model reads the functions as JSON schemas in its prompt, and their results as messages with the
role `tool`. An error never ends a run: the model reads its text instead of a result, in TRL's form
`{'error': '…'}`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ed_trainers.environments import Environment, EnvironmentReply, close_environment

_Message = Mapping[str, Any]
#: Returns the message of a reply (with `tool_calls` if it has calls), and the fault of its calls;
#: empty for a valid reply. Its argument is the tokens of the reply.
ReadReply = Callable[[Sequence[int]], tuple[dict[str, Any], str]]
#: Beginning of the content of a message with an error.
_ERROR = "{'error': "


@dataclass(frozen=True)
class ToolSet:
    """The tools of a run.

    Attributes:
        functions: the functions by name; coroutine functions are awaited. Tools of an environment
            are methods of the object of a sample, and are not among them.
        schemas: the descriptions that the model reads, in the format of OpenAI.
        read: reads replies of the model.
        seconds: maximum duration of a call.
    """

    functions: Mapping[str, Callable[..., object]]
    schemas: Sequence[Mapping[str, Any]]
    read: ReadReply
    seconds: float

    def answer(self, message: _Message) -> list[dict[str, Any]]:
        """Return the results of the calls of a message, in their order."""
        results = []
        for call in message["tool_calls"]:
            function = call["function"]
            content = self._call(function["name"], function["arguments"])
            ids = {"tool_call_id": call["id"]} if "id" in call else {}
            results.append({"role": "tool", **ids, "name": function["name"], "content": content})
        return results

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a call as text, or the text of its error."""
        if name not in self.functions:
            return write_error(f"Tool {name} not found.")
        function, results = self.functions[name], list[str]()

        def run() -> None:
            try:
                result = function(**arguments)
                if inspect.isawaitable(result):
                    result = asyncio.run(_wait(result))
                results.append(str(result))
            except BaseException as error:  # of the user's code; SystemExit must not end the run
                results.append(write_error(str(error) or type(error).__name__))

        thread = threading.Thread(target=run, name=f"tool {name}", daemon=True)
        thread.start()
        thread.join(self.seconds)
        # A function cannot be stopped: after the limit it runs on, and its result is not used.
        return results[0] if results else write_error(f"{name} took more than {self.seconds:g} s")


async def _wait(result: Awaitable[object]) -> object:
    return await result


def write_error(text: str) -> str:
    """Return the content of the message with an error."""
    return str({"error": text})


class ToolEnvironment:
    """Calls the tools that a message of the model calls.

    A message without calls ends the sample, or goes to another environment.

    Args:
        tools: the tools.
        environment: replies to messages without calls, and computes the rewards. Its methods with
            the names of `tools` are tools, too.
    """

    def __init__(self, tools: ToolSet, environment: Environment | None = None) -> None:
        methods = {name: getattr(environment, name) for name in list_tool_methods(environment)}
        self._tools = replace(tools, functions={**tools.functions, **methods})
        self._environment = environment

    def reset(self, messages: Sequence[_Message], row: Mapping[str, Any]) -> None:
        """See `Environment`."""
        if self._environment is not None:
            self._environment.reset(messages, row)

    def step(self, messages: Sequence[_Message]) -> EnvironmentReply:
        """See `Environment`."""
        message = messages[-1]
        if message.get("tool_calls"):
            results = self._tools.answer(message)
            take_outcome = getattr(self._environment, "take_outcome", None)
            reward, done = (0.0, False) if take_outcome is None else take_outcome()
            return EnvironmentReply(results, reward, done)
        if self._environment is None:
            return EnvironmentReply(done=True)
        return EnvironmentReply(*self._environment.step(messages))

    def close(self) -> None:
        """See `Environment`."""
        close_environment(self._environment)


class RemoteTool:
    """A tool of a server, which describes itself.

    Args:
        schema: the description that the model reads, in the format of OpenAI.
        call: calls the tool with the arguments of a call.
    """

    def __init__(self, schema: dict[str, Any], call: Callable[[Mapping[str, Any]], object]) -> None:
        self.schema, self._call = schema, call
        self.__name__ = str(schema["function"]["name"])

    def __call__(self, **arguments: object) -> object:
        """Return the result of a call."""
        return self._call(arguments)


def build_tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function in the format of OpenAI.

    Args:
        name: name of the function.
        description: description of the function.
        parameters: JSON schema of the arguments; titles are omitted.
    """
    properties = {
        key: {name: value for name, value in one.items() if name != "title"}
        for key, one in parameters.get("properties", {}).items()
    }
    other_keys = {k: value for k, value in parameters.items() if k not in ("title", "$schema")}
    body = {"type": "object", **other_keys, "properties": properties}
    function = {"name": name, "description": description, "parameters": body}
    return {"type": "function", "function": function}


def list_tool_methods(environment: object) -> tuple[str, ...]:
    """Return the names of the methods of an environment that are tools: its attribute `tools`."""
    return tuple(getattr(environment, "tools", ()))


def count_calls(completions: Sequence[object]) -> dict[str, float]:
    """Return how often tools are called, and how often calls fail, with TRL's names.

    Args:
        completions: messages of each completion.
    """
    messages: list[_Message] = [
        message
        for completion in completions
        if isinstance(completion, list)
        for message in cast("list[_Message]", completion)
        if isinstance(message, Mapping)
    ]
    calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    errors = sum(
        message.get("role") == "tool" and str(message.get("content")).startswith(_ERROR)
        for message in messages
    )
    return {
        "tools/call_frequency": calls / max(len(completions), 1),
        "tools/failure_frequency": errors / calls if calls else 0.0,
    }
