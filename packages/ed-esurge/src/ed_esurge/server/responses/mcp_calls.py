"""The MCP tools of one response: their listing, approvals, and calls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from ed_esurge.server.http.errors import APIError, hide_paths
from ed_esurge.server.mcp_servers import MAX_TOOL_CALLS, McpError, McpServers
from ed_esurge.server.responses.items import (
    ApprovalItem,
    ApprovalRequestItem,
    McpListItem,
    build_denial,
)
from ed_esurge.server.responses.request import PromptFields
from ed_esurge.server.responses.tools import McpTool


class McpCalls:
    """The MCP tools that a response may use.

    Args:
        servers: the servers of the operator.
        owner: owner of the request, see `http.auth.get_owner`.
        most: limit of the calls; None = `MAX_TOOL_CALLS`.

    Attributes:
        lists: the items `mcp_list_tools` of servers that the conversation has not listed.
        chat_tools: the tools for the chat request.
        messages: messages about calls that the user denied.
        approved: items of the calls that the user approved, after `approve`.
        count: number of calls so far.
    """

    def __init__(self, servers: McpServers, owner: str, most: int | None = None) -> None:
        self._servers, self._owner = servers, owner
        self._most = min(most or MAX_TOOL_CALLS, MAX_TOOL_CALLS)
        self._tools: dict[str, McpTool] = {}
        self.lists: list[dict[str, Any]] = []
        self.chat_tools: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.approved: list[dict[str, Any]] = []
        self.count = 0

    async def prepare(self, body: PromptFields, previous: dict[str, Any] | None) -> None:
        """Read the tools of the servers that the request names.

        Args:
            previous: `facts` of the previous response, see `StoredResponse`.

        Raises:
            APIError: 400, the server is unknown, or two tools have one name; 502, the server does
                not answer.
        """
        listed = {item.server_label for item in _of(body, McpListItem)}
        if previous is not None:
            listed.update(previous["labels"])
        names = set(body.offered.functions)
        for tool in body.usable_tools:
            if not isinstance(tool, McpTool):
                continue
            label = tool.server_label
            if label not in self._servers.servers:
                labels = ", ".join(sorted(self._servers.servers)) or "none"
                raise APIError(
                    f"this server has no MCP server {label!r:.80}: the operator configured "
                    f"{labels} "
                    "(--mcp-config)",
                    param="tools",
                    code="unknown_mcp_server",
                )
            try:
                tools = await self._servers.tools(label, self._owner)
            except McpError as error:
                raise APIError(
                    hide_paths(error), status=502, param="tools", code="mcp_error"
                ) from None
            tools = [one for one in tools if tool.allows(one["name"])]
            for one in tools:
                if one["name"] in names:
                    raise APIError(
                        f"two tools have the name {one['name']!r:.80}: select tools with "
                        "allowed_tools",
                        param="tools",
                    )
                names.add(one["name"])
                self._tools[one["name"]] = tool
                function = {
                    "name": one["name"],
                    "description": one["description"],
                    "parameters": one["input_schema"],
                }
                self.chat_tools.append({"type": "function", "function": function})
            if label not in listed:
                item = {"id": f"mcpl_{uuid.uuid4().hex}", "type": "mcp_list_tools"}
                self.lists.append({**item, "server_label": label, "tools": tools, "error": None})

    async def approve(self, body: PromptFields, previous: dict[str, Any] | None) -> None:
        """Send the calls that the user approved in this request.

        Raises:
            APIError: 400, an approval names an unknown request, or a tool that is not offered.
        """
        requests = {item.id: item for item in _of(body, ApprovalRequestItem)}
        for item in previous["requests"] if previous is not None else ():
            requests[item["id"]] = ApprovalRequestItem.model_validate(item)
        jobs = []
        for answer in _of(body, ApprovalItem):
            request = requests.get(answer.approval_request_id)
            if request is None:
                raise APIError(
                    f"the approval request {answer.approval_request_id!r:.80} does not exist in "
                    "the previous response or the input",
                    param="input",
                )
            if not answer.approve:
                self.messages += build_denial(request, answer.reason)
                continue
            tool = self._tools.get(request.name)
            if tool is None or tool.server_label != request.server_label:
                raise APIError(
                    f"the approved tool {request.name!r:.80} is not among the tools of the request",
                    param="tools",
                )
            jobs.append(self.call(request.name, request.arguments, approval=request.id))
        self.approved = list(await asyncio.gather(*jobs))

    def owns(self, name: str) -> bool:
        """Return whether a tool belongs to an MCP server."""
        return name in self._tools

    def item(self, name: str, arguments: str, block_id: str, **more: object) -> dict[str, Any]:
        """Return the item of a call."""
        return {
            "id": f"mcp_{block_id}",
            "type": "mcp_call",
            "server_label": self._tools[name].server_label,
            "name": name,
            "arguments": arguments,
            "approval_request_id": None,
            "output": None,
            "error": None,
            "status": "in_progress",
            **more,
        }

    def request(self, name: str, arguments: str, block_id: str) -> dict[str, Any]:
        """Return the item that requests the approval of a call."""
        label = self._tools[name].server_label
        fields = {"server_label": label, "name": name, "arguments": arguments}
        return {"id": f"mcpr_{block_id}", "type": "mcp_approval_request", **fields}

    def requires_approval(self, name: str) -> bool:
        """Return whether a call requires an approval, by the operator or by the request."""
        tool = self._tools[name]
        operator = self._servers.servers[tool.server_label].require_approval
        return operator == "always" or tool.requires_approval(name)

    @property
    def exhausted(self) -> bool:
        """Whether no further call is allowed."""
        return self.count >= self._most

    async def call(
        self, name: str, arguments: str, *, block_id: str = "", approval: str | None = None
    ) -> dict[str, Any]:
        """Send a call to its server and return its item."""
        item = self.item(name, arguments, block_id or uuid.uuid4().hex)
        item["approval_request_id"] = approval
        if self.exhausted:
            error: str | None = f"the response has {self._most} calls, its limit (max_tool_calls)"
        else:
            self.count += 1
            error = None
            try:
                label = self._tools[name].server_label
                item["output"] = await self._servers.call(label, name, arguments, self._owner)
            except McpError as problem:
                error = str(problem)
        return {**item, "error": error, "status": "completed" if error is None else "failed"}


def _of(body: PromptFields, kind: type[Any]) -> Sequence[Any]:
    """Return the input items of a kind."""
    items = () if isinstance(body.input, str) else body.input
    return [item for item in items if isinstance(item, kind)]
