"""An MCP server with tools for tests: `python mcp_tools.py [stdio | PORT]`."""

import sys
import time

from mcp.server import MCPServer

server = MCPServer("tests")


@server.tool()
def weather(city: str, days: int = 1) -> str:
    """Return the weather of a city."""
    return f"{city}: {days} sunny days"


@server.tool()
def now() -> str:
    """Return a long text."""
    return "x" * 100_000


@server.tool()
def sleepy() -> str:
    """Return after a minute."""
    time.sleep(60)
    return "late"


@server.tool()
def broken() -> str:
    """Fail."""
    raise ValueError("no weather")


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
