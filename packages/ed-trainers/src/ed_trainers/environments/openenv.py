"""Environments of OpenEnv: servers with `reset` and `step` over WebSocket.

Each sample has a connection, and so a separate session on the server. The messages are those of
openenv-core 0.3 (`openenv/core/env_server/types.py`): `{"type": "reset", "data": {…}}` and
`{"type": "step", "data": ACTION}`; the reply is `{"type": "observation", "data": {"observation":
{…}, "reward": …, "done": …}}`. The action `{"type": "list_tools"}` returns the tools of an
environment with tools, and `{"type": "call_tool", "tool_name": …, "arguments": {…}}` calls one.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from ed_infra.errors import ConfigError, EasyDeLError

from ed_trainers.environments import EnvironmentReply
from ed_trainers.environments.tools import RemoteTool, build_tool_schema

_Message = Mapping[str, Any]
#: Largest message of a server in bytes; as the client of openenv-core.
_MAX_BYTES = 100 * 2**20
#: Schemes of addresses, and those of their WebSockets.
_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class OpenEnvEnvironment:
    """An environment on a server of OpenEnv (`ed-trainers[openenv]`).

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        action: field of the action that contains the text of a message of the model. None: the
            environment receives only calls of its tools, and a message without a call ends the
            sample.
        observation: field of the observation with the text that the model reads. None: the only
            text of the observation, or its JSON.
        tools: whether the model may call the tools of the environment.
        reset_fields: fields of the rows that are arguments of `reset`, such as a seed.
        timeout: maximum duration of the connection and of each request in seconds.
        role: role of the messages with observations.

    Raises:
        ConfigError: the package websockets is not installed, the address is invalid, or the model
            can neither write actions nor call tools.
    """

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        tools: bool = False,
        reset_fields: list[str] | None = None,
        timeout: float = 60.0,
        role: str = "user",
    ) -> None:
        try:
            from websockets.sync.client import connect  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                'the environment openenv needs a package: pip install "ed-trainers[openenv]"'
            ) from error
        scheme, sign, address = url.partition("://")
        if not sign or scheme not in _SCHEMES or not address.strip("/"):
            raise ConfigError(
                f"url {url!r} of the environment openenv is no address: write "
                "http://HOST:PORT of a running server"
            )
        if action is None and not tools:
            raise ConfigError(
                "the model can do nothing in this environment of openenv: set action to the field "
                "of the action that contains the message, such as `message`, or tools: true"
            )
        self._connect = functools.partial(
            connect,
            f"{_SCHEMES[scheme]}://{address.rstrip('/')}/ws",
            open_timeout=timeout,
            max_size=_MAX_BYTES,
            proxy=None,
        )
        self.url, self._timeout, self._role = url, timeout, role
        self._action, self._observation = action, observation
        self._has_tools, self._reset_fields = tools, tuple(reset_fields or ())
        self._session, self._lock, self._has_begun = ExitStack(), threading.Lock(), False
        self._connection = None
        self._tools: dict[str, RemoteTool] | None = None
        self._reward, self._done = 0.0, False

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that the model may call; each is an attribute of this object."""
        return tuple(self._list_tools()) if self._has_tools else ()

    def __getattr__(self, name: str) -> RemoteTool:
        tools = self.__dict__.get("_tools") or {}
        if name not in tools:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return tools[name]

    def observe(self, row: Mapping[str, Any]) -> str:
        """Begin an episode with the fields of a row, and return the first observation."""
        missing = [name for name in self._reset_fields if name not in row]
        if missing:
            raise ConfigError(
                f"the row has no field {missing[0]!r} of reset_fields (it has "
                f"{', '.join(row) or 'none'}): write additional_fields: [{missing[0]}] in the "
                "entries of mixture.informs"
            )
        self._reward, self._done, self._has_begun = 0.0, False, False
        reply = self._request("reset", {name: row[name] for name in self._reset_fields})
        self._has_begun = True
        return self._write(reply["observation"])

    def reset(self, messages: Sequence[_Message], row: Mapping[str, Any]) -> None:
        """See `Environment`."""
        self.observe(row)

    def step(self, messages: Sequence[_Message]) -> EnvironmentReply:
        """See `Environment`."""
        if self._action is None:
            return EnvironmentReply(done=True)
        reply = self._request("step", {self._action: str(messages[-1]["content"])})
        message = {"role": self._role, "content": self._write(reply["observation"])}
        return EnvironmentReply([message], *_read_outcome(reply))

    def take_outcome(self) -> tuple[float, bool]:
        """Return the reward of the calls since the last message, and whether the episode ended."""
        reward, self._reward = self._reward, 0.0
        return reward, self._done

    def close(self) -> None:
        """End the session on the server."""
        if self._connection is not None:
            with suppress(Exception):  # of a connection that ended
                self._connection.send(json.dumps({"type": "close"}))
        self._session.close()
        self._connection = None

    def _list_tools(self) -> dict[str, RemoteTool]:
        if self._tools is None:
            listed = self._request("step", {"type": "list_tools"})["observation"]
            if "tools" not in listed:
                raise ConfigError(f"the environment of {self.url} has no tools: omit tools: true")
            schemas = [
                build_tool_schema(
                    one["name"],
                    one.get("description") or "",
                    one.get("input_schema") or one.get("inputSchema") or {},
                )
                for one in listed["tools"]
            ]
            self._tools = {
                schema["function"]["name"]: RemoteTool(
                    schema, functools.partial(self._call_tool, schema["function"]["name"])
                )
                for schema in schemas
            }
        return self._tools

    def _call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of the result of a tool. Raises EasyDeLError: the tool failed."""
        action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        reply = self._request("step", action)
        reward, done = _read_outcome(reply)
        self._reward, self._done = self._reward + reward, self._done or done
        observation = reply["observation"]
        if error := observation.get("error"):
            raise EasyDeLError(str(error.get("message", error)))
        return _write_result(observation.get("result"))

    def _request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the reply of the server.

        Raises:
            EasyDeLError: the server cannot be reached, does not answer, or reports an error.
        """
        if self._connection is None and self._has_begun:
            raise EasyDeLError(f"the session with the OpenEnv server {self.url} ended in a sample")
        try:
            with self._lock:  # a call that took too long still reads its reply
                connection = self._connection or self._session.enter_context(self._connect())
                self._connection = connection
                connection.send(json.dumps({"type": kind, "data": data}))
                reply = json.loads(connection.recv(timeout=self._timeout))
        except Exception as error:  # of the network, and of the package websockets
            self.close()
            raise EasyDeLError(
                f"the OpenEnv server {self.url} did not answer the request {kind}: "
                f"{error or type(error).__name__}. Start the server, or correct url"
            ) from error
        if reply.get("type") == "error":
            details = reply.get("data") or {}
            hint = ""
            if details.get("code") == "CAPACITY_REACHED":
                self.close()
                hint = (
                    ". Each sample of a generation has a session: start the server with "
                    "max_concurrent_envs of at least their number"
                )
            raise EasyDeLError(
                f"the OpenEnv server {self.url} refused the request {kind}: "
                f"{details.get('message', details)}{hint}"
            )
        return dict(reply["data"])

    def _write(self, observation: Mapping[str, Any]) -> str:
        """Return the text of an observation."""
        if self._observation is not None:
            if self._observation not in observation:
                raise ConfigError(
                    f"the observation of {self.url} has no field {self._observation!r} (it has "
                    f"{', '.join(observation) or 'none'}): correct `observation`, or omit it"
                )
            return str(observation[self._observation])
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)


def _read_outcome(reply: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the reward and the end of a reply; no reward is 0."""
    return float(reply.get("reward") or 0.0), bool(reply.get("done", False))


def _write_result(result: object) -> str:
    """Return the text of the result of a tool: a value, or a result of FastMCP."""
    if isinstance(result, Mapping):
        for key in ("data", "structured_content"):
            if result.get(key) is not None:
                return _write_result(result[key])
        if list(result) == ["result"]:
            return _write_result(result["result"])
        content = result.get("content")
        if isinstance(content, list):
            return "\n".join(str(part.get("text", part)) for part in content)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
