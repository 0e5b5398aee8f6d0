"""Tools of MCP servers, which a model calls during training.

The client is that of the engine's server, with its limits of sizes and times. A process of the run
has one session with each server, which all samples of the process share.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Coroutine, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from ed_infra.errors import ConfigError
from ed_trainers.environments.tools import RemoteTool, build_tool_schema

from ed_elarge.config.checks.machine import find_wrong_mcp_options

if TYPE_CHECKING:
    from ed_esurge.server.mcp_servers import McpServerOptions, McpServers

ResultT = TypeVar("ResultT")
#: Seconds in which sessions end.
_CLOSE_SECONDS = 10.0


def connect_tools(options: Mapping[str, Any]) -> list[RemoteTool]:
    """Return the tools of an MCP server; the connection ends with the last of them.

    Args:
        options: see `find_wrong_mcp_options`.

    Raises:
        ConfigError: an option is wrong, the package mcp is not installed, the server does not
            answer, or it has no tool.
    """
    for place, message in find_wrong_mcp_options(options):
        raise ConfigError(f"mcp.{'.'.join(place)}: {message}" if place else f"mcp: {message}")
    if find_spec("mcp") is None:
        raise ConfigError('tools of MCP servers need the package mcp: pip install "ed-esurge[mcp]"')
    from ed_esurge.server.mcp_servers import McpServerOptions

    connection = McpConnection(McpServerOptions.model_validate(options))
    tools = connection.list_tools()
    if not tools:
        raise ConfigError(
            f"the MCP server {connection.label} has no tool that the run may use: correct "
            "allowed_tools, or omit it"
        )
    return tools


class McpConnection:
    """A connection to an MCP server in a separate thread.

    Args:
        options: the server.
    """

    def __init__(self, options: McpServerOptions) -> None:
        from ed_esurge.server.mcp_servers import McpServers

        self.label = options.url or " ".join([str(options.command), *options.args])
        self._servers = McpServers({self.label: options})
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mcp tools", daemon=True).start()
        weakref.finalize(self, _close, self._servers, self._loop)

    def list_tools(self) -> list[RemoteTool]:
        """Return the tools of the server.

        Raises:
            ConfigError: the server does not answer.
        """
        from ed_esurge.server.mcp_servers import McpError

        try:
            listed = self._wait(self._servers.tools(self.label, ""))
        except McpError as error:
            raise ConfigError(
                f"{error}. Start the server, or correct command or url of trainer.tools"
            ) from error
        return [
            RemoteTool(
                build_tool_schema(one["name"], one["description"], one["input_schema"]),
                partial(self._call, one["name"]),
            )
            for one in listed
        ]

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._wait(self._servers.call(self.label, name, json.dumps(dict(arguments)), ""))

    def _wait(self, request: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(request, self._loop).result()


def _close(servers: McpServers, loop: asyncio.AbstractEventLoop) -> None:
    """End the sessions and the thread of a connection."""
    asyncio.run_coroutine_threadsafe(servers.close(), loop).result(_CLOSE_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
