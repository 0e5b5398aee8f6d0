"""MCP servers of the operator, whose tools `/v1/responses` executes.

The extra `ed-esurge[mcp]` is the official client. Each connection lives in one task, because its
resources must be released by the task that acquired them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from ed_infra.errors import ConfigError
from ed_infra.options import Options
from pydantic import Field, ValidationError, model_validator
from pydantic_core import from_json

from ed_esurge.server.mcp_transports import bounded_http_client, stdio_transport

logger = logging.getLogger(__name__)

#: Limits of a configuration, and of the result of a call in characters.
MAX_SERVERS, MAX_TOOLS_OF_SERVER, MAX_OUTPUT = 64, 128, 2**16
#: Limits of the calls of one response, and of its rounds of generation.
MAX_TOOL_CALLS, MAX_ROUNDS = 64, 16
MAX_CONFIG_BYTES = 2**20
#: Limit of the sessions of all owners, and seconds after which an unused session is closed.
MAX_SESSIONS, IDLE_SECONDS = 64, 600.0
#: Limit of the message of an error in characters.
MAX_ERROR = 2048


class McpServerOptions(Options):
    """One MCP server: either a command (stdio) or a URL (streamable HTTP)."""

    command: str | None = None
    """Program of a stdio server."""
    args: tuple[str, ...] = ()
    """Arguments of the program."""
    env: dict[str, str] | None = None
    """Environment variables of the program, in addition to the defaults of the client."""
    url: str | None = None
    """Address of a server with streamable HTTP."""
    headers: dict[str, str] | None = None
    """Headers of the requests to the address, such as credentials."""
    require_approval: Literal["always", "never"] = "always"
    """`always`: every call needs the approval of the user. `never`: the request decides."""
    allowed_tools: tuple[str, ...] | None = None
    """Tools that requests may use. None: all."""
    timeout: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Time limit of the connection and of each call, in seconds."""

    @model_validator(mode="after")
    def _one_transport(self) -> McpServerOptions:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server has either a command (stdio) or a url (HTTP)")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} must begin with http:// or https://")
        return self


def read_mcp_config(path: str | Path) -> dict[str, McpServerOptions]:
    """Return label -> server of a JSON file `{"mcpServers": {label: {...}}}`.

    Raises:
        ConfigError: the file cannot be read, is invalid, or the package mcp is not installed.
    """
    try:
        if Path(path).stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes")
        config = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the MCP configuration {path} cannot be read: {error}") from error
    servers = config.get("mcpServers") if isinstance(config, dict) else None
    if not isinstance(servers, dict) or not 0 < len(servers) <= MAX_SERVERS:
        raise ConfigError(
            f'{path} must contain {{"mcpServers": {{LABEL: SERVER}}}} with 1 to {MAX_SERVERS} '
            "servers"
        )
    result = {}
    for label, fields in servers.items():
        try:
            result[label] = McpServerOptions.model_validate(fields)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(map(str, (label, *problem["loc"])))
            raise ConfigError(f"{path}: {place}: {problem['msg']}") from None
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise ConfigError(
            'MCP servers need the package mcp: pip install "ed-esurge[mcp]"'
        ) from None
    return result


# Codes of errors of the protocol; see `mcp_types`.
CONNECTION_CLOSED, REQUEST_TIMEOUT = -32000, -32001


class McpError(Exception):
    """A call or a connection failed. The message is for the model and the client."""


class _Session:
    """A connection of one owner to one server, which is opened again after it ended."""

    def __init__(self, label: str, options: McpServerOptions) -> None:
        self.label, self.options = label, options
        self.calls = 0
        self.used = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._stop = asyncio.Event()
        self.tools: list[dict[str, Any]] | None = None

    async def request(self, send: Callable[[Any], Awaitable[Any]], failure: str) -> Any:
        """Send a request of the connected client, and return its result.

        Args:
            send: sends the request with a client.
            failure: beginning of the message of an error.

        Raises:
            McpError: the server failed, or did not answer in time.
        """
        self.calls += 1
        client = None
        try:
            client = await self._client()
            return await asyncio.wait_for(send(client), self.options.timeout)
        except McpError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) or _get_error_code(error) == REQUEST_TIMEOUT:
                seconds = self.options.timeout
                raise McpError(f"{failure}: it did not answer within {seconds:g} s") from None
            # The server reports other errors, such as invalid arguments, over a working connection.
            if _get_error_code(error) in (None, CONNECTION_CLOSED):
                self._drop(client)
            raise McpError(f"{failure}: {error}"[:MAX_ERROR]) from error
        finally:
            self.calls -= 1
            self.used = time.monotonic()

    async def _client(self) -> Any:
        """Return the connected client. Raises McpError: the server does not answer."""
        if self._task is None or self._task.done():
            self._ready, self._stop = asyncio.get_running_loop().create_future(), asyncio.Event()
            self.tools = None
            self._task = asyncio.create_task(self._run(self._ready, self._stop))
        assert self._ready is not None, "a running task has a future"
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), self.options.timeout)
        except TimeoutError:
            self._task.cancel()
            raise McpError(
                f"the MCP server {self.label!r} did not answer within {self.options.timeout:g} s"
            ) from None

    async def _run(self, ready: asyncio.Future[Any], stop: asyncio.Event) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                transport = await self._transport(stack)
                client = Client(transport, read_timeout_seconds=self.options.timeout)
                await stack.enter_async_context(client)
                ready.set_result(client)
                await stop.wait()
        except Exception as error:
            logger.warning("the MCP server %s failed: %s", self.label, error)
        finally:
            if not ready.done():
                ready.set_exception(McpError(f"the MCP server {self.label!r} cannot be reached"))
                ready.exception()  # marks the error as read if no request waits any more

    async def _transport(self, stack: AsyncExitStack) -> Any:
        options = self.options
        if options.command is not None:
            return stdio_transport(options.command, options.args, options.env)
        from mcp.client.streamable_http import streamable_http_client

        http = await stack.enter_async_context(bounded_http_client(options.headers))
        assert options.url is not None, "a server has a command or a url"
        return streamable_http_client(options.url, http_client=http)

    def _drop(self, client: object) -> None:
        """End the connection of a client. The next request opens a new one."""
        ready = self._ready
        if ready is None or not ready.done() or ready.cancelled() or ready.exception() is not None:
            return
        if ready.result() is client:  # a later connection has another client
            self._stop.set()
            self._task = None

    async def close(self) -> None:
        """End the connection and wait for its end."""
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)
            self._task.cancel()


def _get_error_code(error: Exception) -> int | None:
    """Return the code of an error of the protocol; None for other errors."""
    from mcp.shared.exceptions import MCPError

    return error.code if isinstance(error, MCPError) else None


class McpServers:
    """The MCP servers of the operator.

    Each owner (API key) has its own session with a server, so that the end of a session interrupts
    no calls of other owners.

    Args:
        servers: label -> options of the server.
    """

    def __init__(self, servers: Mapping[str, McpServerOptions]) -> None:
        self.servers = dict(servers)
        self._sessions: dict[tuple[str, str], _Session] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def _session(self, label: str, owner: str) -> _Session:
        """Return the session of an owner.

        Raises:
            McpError: other owners use too many sessions.
        """
        self._close_idle()
        key = label, owner
        if key not in self._sessions:
            if len(self._sessions) >= MAX_SESSIONS:
                raise McpError(
                    f"{MAX_SESSIONS} sessions with MCP servers are in use, the limit of this "
                    "server: try again later"
                )
            self._sessions[key] = _Session(label, self.servers[label])
        return self._sessions[key]

    def _close_idle(self) -> None:
        """Close unused sessions: after `IDLE_SECONDS`, or the oldest if there is no room."""
        now = time.monotonic()
        idle = sorted(
            (session.used, key) for key, session in self._sessions.items() if not session.calls
        )
        for used, key in idle:
            if now - used < IDLE_SECONDS and len(self._sessions) < MAX_SESSIONS:
                return
            task = asyncio.create_task(self._sessions.pop(key).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def tools(self, label: str, owner: str) -> list[dict[str, Any]]:
        """Return the tools of a server: name, description, input_schema, annotations.

        Args:
            owner: see `http.auth.get_owner`.

        Raises:
            McpError: the server does not answer.
        """
        session = self._session(label, owner)
        if session.tools is None:
            listed = await session.request(
                lambda client: client.list_tools(), f"the MCP server {label!r} lists no tools"
            )
            allowed = session.options.allowed_tools
            session.tools = [
                {
                    "name": tool.name,
                    "description": tool.description or "",
                    "input_schema": tool.input_schema,
                    "annotations": tool.annotations and tool.annotations.model_dump(mode="json"),
                }
                for tool in listed.tools[:MAX_TOOLS_OF_SERVER]
                if allowed is None or tool.name in allowed
            ]
        return session.tools

    async def call(self, label: str, name: str, arguments: str, owner: str) -> str:
        """Return the text of a tool's result, at most `MAX_OUTPUT` characters.

        Args:
            arguments: JSON text of an object.
            owner: see `http.auth.get_owner`.

        Raises:
            McpError: the arguments are no object, the tool failed, or did not answer in time.
        """
        try:
            values = from_json(arguments or "{}")
        except ValueError as error:
            raise McpError(f"the arguments are not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise McpError(f"the arguments {arguments!r:.80} are not a JSON object")
        result = await self._session(label, owner).request(
            lambda client: client.call_tool(name, values), "the call failed"
        )
        texts = (getattr(part, "text", None) or f"[{part.type}]" for part in result.content)
        text = "\n".join(texts)
        if len(text) > MAX_OUTPUT:
            text = f"{text[:MAX_OUTPUT]}\n[{len(text) - MAX_OUTPUT} more characters]"
        if result.is_error:
            raise McpError(text or "the tool failed")
        return text

    async def close(self) -> None:
        """End all sessions."""
        for session in self._sessions.values():
            await session.close()
        await asyncio.gather(*self._closing)
