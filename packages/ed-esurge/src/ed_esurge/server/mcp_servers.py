"""MCP servers of the operator, whose tools `/v1/responses` executes.

The extra `ed-esurge[mcp]` is the official client. Each connection lives in one task, because its
resources must be released by the task that acquired them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from ed_infra.errors import ConfigError
from ed_infra.options import Options
from pydantic import Field, ValidationError, model_validator

logger = logging.getLogger(__name__)

#: Limits of a configuration, and of the result of a call in characters.
MAX_SERVERS, MAX_TOOLS_OF_SERVER, MAX_OUTPUT = 64, 128, 2**16
#: Limits of the calls of one response, and of its rounds of generation.
MAX_TOOL_CALLS, MAX_ROUNDS = 64, 16
MAX_CONFIG_BYTES = 2**20


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
        known = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the MCP configuration {path} cannot be read: {error}") from error
    servers = known.get("mcpServers") if isinstance(known, dict) else None
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


class McpError(Exception):
    """A call or a connection failed. The message is for the model and the client."""


class _Connection:
    """A connection to one server, which is opened again after it ended."""

    def __init__(self, label: str, options: McpServerOptions) -> None:
        self.label, self.options = label, options
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None
        self._stop = asyncio.Event()
        self.tools: list[dict[str, Any]] | None = None

    async def client(self) -> Any:
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
            from mcp import StdioServerParameters

            return StdioServerParameters(
                command=options.command, args=list(options.args), env=options.env
            )
        if not options.headers:
            return options.url
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        http = await stack.enter_async_context(create_mcp_http_client(headers=options.headers))
        assert options.url is not None, "a server has a command or a url"
        return streamable_http_client(options.url, http_client=http)

    def drop(self) -> None:
        """End the connection. The next use opens a new one."""
        self._stop.set()
        self._task = None

    async def close(self) -> None:
        """End the connection and wait for its end."""
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=5)
            self._task.cancel()


class McpServers:
    """The MCP servers of the operator.

    Args:
        servers: label -> options of the server.
    """

    def __init__(self, servers: Mapping[str, McpServerOptions]) -> None:
        self.servers = dict(servers)
        self._connections: dict[str, _Connection] = {}

    def _connection(self, label: str) -> _Connection:
        if label not in self._connections:
            self._connections[label] = _Connection(label, self.servers[label])
        return self._connections[label]

    async def tools(self, label: str) -> list[dict[str, Any]]:
        """Return the tools of a server: name, description, input_schema, annotations.

        Raises:
            McpError: the server does not answer.
        """
        connection = self._connection(label)
        if connection.tools is None:
            client = await connection.client()
            try:
                listed = await asyncio.wait_for(client.list_tools(), connection.options.timeout)
            except Exception as error:
                connection.drop()
                raise McpError(f"the MCP server {label!r} lists no tools: {error}") from error
            allowed = connection.options.allowed_tools
            connection.tools = [
                {
                    "name": tool.name,
                    "description": tool.description or "",
                    "input_schema": tool.input_schema,
                    "annotations": tool.annotations and tool.annotations.model_dump(mode="json"),
                }
                for tool in listed.tools[:MAX_TOOLS_OF_SERVER]
                if allowed is None or tool.name in allowed
            ]
        return connection.tools

    async def call(self, label: str, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's result, at most `MAX_OUTPUT` characters.

        Raises:
            McpError: the tool failed, or did not answer in time.
        """
        connection = self._connection(label)
        client = await connection.client()
        seconds = connection.options.timeout
        try:
            result = await asyncio.wait_for(client.call_tool(name, dict(arguments)), seconds)
        except TimeoutError:
            raise McpError(f"the tool did not answer within {seconds:g} s") from None
        except Exception as error:
            connection.drop()
            raise McpError(f"the call failed: {error}") from error
        texts = [getattr(part, "text", None) or f"[{part.type}]" for part in result.content]
        text = "\n".join(texts)
        if len(text) > MAX_OUTPUT:
            text = f"{text[:MAX_OUTPUT]}\n[{len(text) - MAX_OUTPUT} more characters]"
        if result.is_error:
            raise McpError(text or "the tool failed")
        return text

    async def close(self) -> None:
        """End all connections."""
        for connection in self._connections.values():
            await connection.close()
