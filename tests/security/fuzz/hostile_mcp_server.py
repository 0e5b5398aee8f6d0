"""An MCP server over stdio that replies with the values of a file: `hostile_mcp_server.py FILE`.

The file has the replies to `tools/list` and `tools/call`. A text is written as it is; another value
becomes the result of the request. The server ends after a call, so that the next use reads the file
again.
"""

import json
import sys


def main() -> None:
    """Reply to the requests of one client."""
    for line in sys.stdin:
        try:
            request = json.loads(line)
        except ValueError:
            continue
        if not isinstance(request, dict) or "id" not in request:
            continue
        with open(sys.argv[1], encoding="utf-8") as file:
            replies = json.load(file)
        method, params = request.get("method"), request.get("params") or {}
        if method == "initialize":
            reply = {
                "protocolVersion": params.get("protocolVersion", "2025-06-18"),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "hostile", "version": "1"},
            }
        elif method == "tools/list":
            reply = replies["list"]
        elif method == "tools/call":
            reply = replies["call"]
        else:
            reply = {}
        if not isinstance(reply, str):
            reply = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": reply})
        sys.stdout.write(reply.encode("utf-8", "replace").decode() + "\n")
        sys.stdout.flush()
        if method == "tools/call":
            return


if __name__ == "__main__":
    main()
