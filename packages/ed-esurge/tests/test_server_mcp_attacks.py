"""Hostile arguments and tools of MCP servers interrupt no calls of other keys."""

from __future__ import annotations

import asyncio
import json
import sys

import httpx
import pytest
from ed_esurge.server import mcp_servers, mcp_transports
from ed_esurge.server.launch import background
from ed_esurge.server.mcp_servers import McpError, McpServerOptions, McpServers
from ed_esurge.testing import ScriptedEngine

pytest.importorskip("mcp")
SERVER = """
import os, time
import anyio
from mcp.server import MCPServer
server = MCPServer("hostile")
@server.tool()
def echo(text: str = "") -> str:
    return text
@server.tool()
def die() -> str:
    os._exit(1)
@server.tool()
async def slow() -> str:
    await anyio.sleep(1)
    return "late"
@server.tool()
def large(size: int) -> str:
    return "x" * size
server.run("stdio")
"""
DEEP = '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"


def options():
    arguments = ("-c", SERVER)
    return McpServerOptions(
        command=sys.executable, args=arguments, require_approval="never", timeout=30
    )


def run(work):
    async def everything():
        servers = McpServers({"s": options()})
        try:
            return await work(servers)
        finally:
            await servers.close()

    return asyncio.run(everything())


@pytest.mark.nightly
def test_invalid_arguments_fail_only_their_call():
    async def work(servers):
        await servers.tools("s", "a")
        others = asyncio.create_task(servers.call("s", "slow", "{}", "a"))
        await asyncio.sleep(0.1)
        session = servers._sessions["s", "a"]
        for arguments in ("[1]", '"a"', "1", "null", "{", DEEP, '{"size": "x"}'):
            with pytest.raises(McpError):
                await servers.call("s", "large", arguments, "a")
        assert await others == "late"
        assert await servers.call("s", "echo", '{"text": "b"}', "a") == "b"
        assert servers._sessions["s", "a"] is session

    run(work)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("die", "{}"),
        pytest.param("large", '{"size": 3000000}', marks=pytest.mark.nightly),
    ],
)
def test_dying_tool_interrupts_no_call_of_another_key(tool, arguments, monkeypatch):
    monkeypatch.setattr(mcp_transports, "MAX_MESSAGE_BYTES", 2**20)

    async def work(servers):
        await servers.tools("s", "a")
        await servers.tools("s", "b")
        others = asyncio.create_task(servers.call("s", "slow", "{}", "b"))
        await asyncio.sleep(0.1)
        with pytest.raises(McpError):
            await servers.call("s", tool, arguments, "a")
        assert await others == "late"
        assert await servers.call("s", "echo", '{"text": "again"}', "a") == "again"

    run(work)


@pytest.mark.nightly
def test_unused_sessions_are_closed_when_the_limit_is_reached(monkeypatch):
    monkeypatch.setattr(mcp_servers, "MAX_SESSIONS", 2)

    async def work(servers):
        for owner in "abc":
            assert await servers.call("s", "echo", '{"text": "x"}', owner) == "x"
        assert {owner for _, owner in servers._sessions} == {"b", "c"}
        busy = [asyncio.create_task(servers.call("s", "slow", "{}", owner)) for owner in "bc"]
        await asyncio.sleep(0.1)
        with pytest.raises(McpError, match="2 sessions with MCP servers are in use"):
            await servers.call("s", "echo", "{}", "d")
        assert await asyncio.gather(*busy) == ["late", "late"]

    run(work)


@pytest.mark.nightly
def test_approved_calls_with_invalid_arguments_return_items_with_errors(tmp_path):
    path = tmp_path / "mcp.json"
    entry = options().model_dump(exclude_none=True)
    path.write_text(json.dumps({"mcpServers": {"s": entry}}))
    tool = {"type": "mcp", "server_label": "s", "require_approval": "never"}
    with background(ScriptedEngine(max_model_len=2**20), mcp_config=path) as url:
        for arguments in ("[1]", DEEP):
            asked = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "s"}
            asked |= {"name": "echo", "arguments": arguments}
            answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1"}
            message = {"role": "user", "content": "a"}
            items = [message, asked, {**answer, "approve": True}]
            body = {"input": items, "tools": [tool]}
            response = httpx.post(f"{url}/responses", json=body, timeout=60)
            assert response.status_code == 200, response.text[:300]
            (made,) = [one for one in response.json()["output"] if one["type"] == "mcp_call"]
            assert made["status"] == "failed" and "JSON" in made["error"]
