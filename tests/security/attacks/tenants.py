"""Attacks of tenants: hostile MCP calls, and batches beyond a quota.

`options` contains the options of the server that these attacks need.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

#: Limit of the stored bytes of a key, which the attack exceeds.
STORED_BYTES = 2**20
#: Seconds in which a batch must end.
_BATCH_SECONDS = 120.0
#: A server of MCP over stdio with the standard library. The tool `die` ends the process, and
#: `flood` writes a message without an end.
_MCP_SERVER = """
import json, os, sys
def tool(name):
    return {"name": name, "inputSchema": {"type": "object"}}
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    method, params = request["method"], request.get("params") or {}
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "tools", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": [tool(name) for name in ("echo", "die", "flood")]}
    elif method == "tools/call" and params["name"] == "die":
        os._exit(1)
    elif method == "tools/call" and params["name"] == "flood":
        while True:
            sys.stdout.write("x" * 2**20)
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": json.dumps(params.get("arguments"))}]}
    else:
        result = {}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
"""


def options(folder: Path) -> dict[str, Any]:
    """Return options of a server.

    Args:
        folder: an empty folder for the data of the server.
    """
    known: dict[str, Any] = {
        "batch_directory": folder / "batches",
        "limits": {"max_stored_bytes": STORED_BYTES},
    }
    if importlib.util.find_spec("mcp") is not None:
        server = {"command": sys.executable, "args": ["-c", _MCP_SERVER], "timeout": 30}
        servers = {"mcpServers": {"tools": {**server, "require_approval": "never"}}}
        known["mcp_config"] = folder / "mcp.json"
        known["mcp_config"].write_text(json.dumps(servers))
    return known


def _send(
    port: int, method: str, path: str, body: object = None, kind: str = "application/json"
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": kind})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def call_hostile_tools(port: int) -> None:
    """Call MCP tools with invalid arguments, and tools that end or flood their connection. Each
    call fails alone, and the next call is answered."""
    if importlib.util.find_spec("mcp") is None:
        return
    deep = '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"
    calls = [("echo", text) for text in ("[1]", '"a"', "{", "9" * 5000, deep)]
    for name, arguments in (*calls, ("die", "{}"), ("flood", "{}"), ("none", "{}")):
        assert _call_tool(port, name, arguments)["status"] == "failed", (name, arguments[:80])
        call = _call_tool(port, "echo", '{"text": "a"}')
        assert (call["status"], call["output"]) == ("completed", '{"text": "a"}'), call


def _call_tool(port: int, name: str, arguments: str) -> dict[str, Any]:
    """Return the item of a call that the user has approved."""
    approval = {"type": "mcp_approval_request", "id": "mcpr_1", "server_label": "tools"}
    answer = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
    body = {
        "input": [
            {"role": "user", "content": "a"},
            {**approval, "name": name, "arguments": arguments},
            answer,
        ],
        "tools": [{"type": "mcp", "server_label": "tools", "require_approval": "never"}],
        "max_output_tokens": 1,
        "store": False,
    }
    status, response = _send(port, "POST", "/v1/responses", body)
    if status == 400:  # a server with a short context refuses long arguments
        return {"status": "failed", "output": response["error"]["message"]}
    assert status == 200, response
    (call,) = [item for item in response["output"] if item["type"] == "mcp_call"]
    return call


def exceed_batch_quota(port: int) -> None:
    """Order a batch whose results exceed the storage of the key. The batch ends, and the storage is
    free after its files are deleted."""
    body = {"prompt": "a", "max_tokens": 8, "logprobs": 5}
    lines = [
        json.dumps({"custom_id": str(number), "url": "/v1/completions", "body": body})
        for number in range(2000)
    ]
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    head += b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    form = head + "\n".join(lines).encode() + b"\r\n--b--\r\n"
    status, file = _send(port, "POST", "/v1/files", form, "multipart/form-data; boundary=b")
    assert status in (200, 413, 429), file
    if status == 200:
        order = {"endpoint": "/v1/completions", "completion_window": "24h"}
        status, batch = _send(port, "POST", "/v1/batches", {**order, "input_file_id": file["id"]})
        assert status in (200, 429), batch
        until = time.monotonic() + _BATCH_SECONDS
        while status == 200 and batch["status"] in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < until, batch
            time.sleep(0.05)
            _, batch = _send(port, "GET", f"/v1/batches/{batch['id']}")
        if status == 200:
            assert batch["status"] == "failed", batch
            assert batch["errors"]["data"][0]["code"] == "storage_quota_exceeded", batch
    _, known = _send(port, "GET", "/v1/files?limit=10000")
    assert sum(one["bytes"] for one in known["data"]) <= STORED_BYTES
    for one in known["data"]:
        _send(port, "DELETE", f"/v1/files/{one['id']}")
