"""One response from its request to its end: rounds of generation, MCP calls, and events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json
from starlette.requests import Request

from ed_esurge.replies.blocks import Block, Change
from ed_esurge.server.detached import DetachedAnswer
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import ChatGeneration, truncation
from ed_esurge.server.generation.requests import ChatMessage, ChatRequest
from ed_esurge.server.http.body import aside, get_body_size, parsed_json
from ed_esurge.server.http.errors import APIError, rename_fields
from ed_esurge.server.http.json_parts import encode_json, to_bytes, write_json
from ed_esurge.server.mcp_servers import MAX_ROUNDS
from ed_esurge.server.responses.items import InputItem, Items, build_messages, omit_images
from ed_esurge.server.responses.mcp_calls import McpCalls
from ed_esurge.server.responses.output import (
    EventFields,
    OutputItems,
    TokenPlaces,
    event,
    get_status,
)
from ed_esurge.server.responses.request import RESPONSE_NAMES, PromptFields, ResponseRequest
from ed_esurge.server.responses.tools import AllowedTools, FunctionTool, NamedFunction
from ed_esurge.server.stores import StoredResponse

_ITEMS: TypeAdapter[Any] = TypeAdapter(Items)

_INSTRUCTIONS = ("system", "developer")


class ResponsePrompt:
    """The prompt of a response: the previous messages, the tools, and the chat request.

    Attributes:
        previous_messages: messages of the previous responses, as JSON texts of lists.
        mcp: the MCP tools of the response.
        size: bytes of the request and the previous messages.
    """

    def __init__(self, model: ServedModel, body: PromptFields, request: Request) -> None:
        self._model, self._body = model, body
        self.size = get_body_size(request)
        self.previous_messages: tuple[bytes, ...] = ()
        self._facts: bytes | None = None
        if body.previous_response_id is not None:
            previous_response: StoredResponse = model.state.responses.get(
                body.previous_response_id, model.owner, param="previous_response_id"
            )
            if previous_response.status in ("queued", "in_progress"):
                raise APIError(
                    "the previous response is not finished: wait for its end, or cancel it",
                    param="previous_response_id",
                    code="response_not_finished",
                )
            self.previous_messages, self._facts = (
                previous_response.messages,
                previous_response.facts,
            )
            self.size += previous_response.conversation_bytes
            self._check_size(request)
        most = body.max_tool_calls if isinstance(body, ResponseRequest) else None
        self.mcp = McpCalls(model.state.mcp, model.owner, most)

    def _check_size(self, request: Request) -> None:
        """Check the bytes of the conversation, and count them as bytes in flight.

        Raises:
            APIError: 400, the conversation is too long; 503, too many bytes are in flight.
        """
        state = self._model.state
        if self.size > state.limits.max_conversation_bytes:
            raise APIError(
                f"the conversation has {self.size} bytes with this request, and the limit of this "
                f"server is {state.limits.max_conversation_bytes} (max_conversation_bytes): begin "
                "a new conversation, and send the messages that the model needs",
                param="previous_response_id",
                code="conversation_too_long",
            )
        state.reservation(request).add(request.scope, self.size - get_body_size(request))

    def _read_before(self) -> list[dict[str, Any]]:
        """Return the messages of the previous responses.

        Raises:
            APIError: 400, the conversation has too many values.
        """
        try:
            lists = parsed_json(b"[" + b",".join(self.previous_messages) + b"]")
        except ValueError as error:
            raise APIError(
                f"the conversation has {error}: begin a new conversation",
                param="previous_response_id",
                code="conversation_too_long",
            ) from None
        return [message for messages in lists for message in messages]

    async def chat(self, *, execute: bool = True) -> ChatRequest:
        """Return the chat request, without the oldest turns if the request truncates.

        Args:
            execute: whether calls that the user approved are sent.

        Raises:
            APIError: see `PromptFields.chat` and `McpCalls`.
        """
        body, mcp = self._body, self.mcp
        facts = None if self._facts is None else from_json(self._facts)
        await mcp.prepare(body, facts)
        if execute:
            await mcp.approve(body, facts)
        earlier = await aside(self._read_before, self.size) if self.previous_messages else []
        previous_messages = [*earlier, *mcp.messages]
        chat = await aside(partial(body.chat, previous_messages, mcp.chat_tools), self.size)
        if mcp.approved:
            chat = append_messages(chat, build_messages(_ITEMS.validate_python(mcp.approved)))
        return chat if body.truncation == "disabled" else await self._truncate_chat(chat)

    async def _truncate_chat(self, chat: ChatRequest) -> ChatRequest:
        """Return a chat request without its oldest turns, if they do not fit the context.

        A turn begins with a message of the user. Instructions and the last turn remain.
        """
        messages = chat.messages
        system = next((at for at, one in enumerate(messages) if one.role not in _INSTRUCTIONS), 0)
        starts = [at for at, one in enumerate(messages) if one.role == "user" and at >= system]
        prompts = self._model.prompts

        async def without(start: int) -> ChatRequest | None:
            remaining_messages = (
                [*messages[:system], *messages[start:]] if start > system else messages
            )
            shorter = chat.model_copy(update={"messages": remaining_messages})
            try:
                prompt = await prompts.chat(shorter, self.size)
                prompts.check(prompt.tokens, shorter.max_completion_tokens, param="messages")
            except APIError as error:
                if error.code != "context_length_exceeded":
                    raise
                return None
            return shorter

        full_chat = await without(system)
        if full_chat is not None or not starts:
            return chat
        low, high = 0, len(starts) - 1  # the first start whose turns fit
        while low < high:
            middle = (low + high) // 2
            if await without(starts[middle]) is None:
                low = middle + 1
            else:
                high = middle
        return await without(starts[low]) or chat


def append_messages(chat: ChatRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """Return a chat request with more messages."""
    more = [ChatMessage.model_validate(message) for message in messages]
    return chat.model_copy(update={"messages": [*chat.messages, *more]})


class ResponseRun:
    """A response in progress.

    Attributes:
        fields: the fields of the response so far.
        turn: the current round of generation.
    """

    def __init__(
        self,
        model: ServedModel,
        body: ResponseRequest,
        request: Request,
        conversation: ResponsePrompt,
        chat: ChatRequest,
        turn: ChatGeneration,
    ) -> None:
        self._model, self._body, self._request = model, body, request
        self._conversation, self._chat, self.turn = conversation, chat, turn
        self._mcp = conversation.mcp
        self._answer: DetachedAnswer | None = None
        self._thoughts = ""
        self._turns = [turn]
        self._stop = ""
        self.fields = initial_fields(turn, body)

    @classmethod
    async def begin(
        cls, model: ServedModel, body: ResponseRequest, request: Request
    ) -> ResponseRun:
        """Check a request and create its prompt. Raises APIError: see `ChatGeneration.begin`."""
        with rename_fields(RESPONSE_NAMES):
            conversation = ResponsePrompt(model, body, request)
            chat = await conversation.chat()
            turn = await ChatGeneration.begin(model, chat, request, "resp", stores=True)
        return cls(model, body, request, conversation, chat, turn)

    async def events(self) -> AsyncGenerator[list[EventFields]]:
        """Yield the events after each step of the engine, from the first to the last."""
        begun = False
        rounds = self._rounds()
        async with aclosing(rounds):
            async for new in rounds:
                if not begun:
                    begun = True
                    # A copy: the fields change before the events of a background response are read.
                    first = dict(self.fields)
                    new = [
                        event("response.created", response=first),
                        event("response.in_progress", response=first),
                        *self._build_first_events(),
                        *new,
                    ]
                if new:
                    yield new
        await self._end()
        yield [event(f"response.{self.fields['status']}", response=self.fields)]

    async def build_response(self) -> dict[str, Any]:
        """Return the complete response."""
        async with aclosing(self.events()) as items:
            async for _ in items:
                pass
        return self.fields

    def _build_first_events(self) -> list[EventFields]:
        """Return the events of the items that exist before the first token."""
        events = []
        for index, item in enumerate(self._first_items()):
            place = {"item_id": item["id"], "output_index": index}
            kind = "mcp_list_tools" if item["type"] == "mcp_list_tools" else "mcp_call"
            opened = {**item, "tools": []} if kind == "mcp_list_tools" else item
            ended = "failed" if item["error"] is not None else "completed"
            events += [
                event("response.output_item.added", output_index=index, item=opened),
                event(f"response.{kind}.in_progress", **place),
                event(f"response.{kind}.{ended}", **place),
                event("response.output_item.done", output_index=index, item=item),
            ]
        return events

    def _first_items(self) -> list[dict[str, Any]]:
        return [*self._mcp.lists, *self._mcp.approved]

    async def _rounds(self) -> AsyncGenerator[list[EventFields]]:
        output: list[dict[str, Any]] = self.fields["output"]
        output += self._first_items()
        first = len(output)
        for number in range(1, MAX_ROUNDS + 1):
            output_items = OutputItems(
                self._body.offered, raw=self._body.required_custom_tool is not None, first=first
            )
            async with aclosing(self._changes(output_items)) as items:
                async for new in items:
                    yield new
            start = len(output)
            blocks, finish = self.turn.blocks.whole, self._finish
            last = blocks[-1] if blocks else None
            self._thoughts += "".join(one.text for one in blocks if one.kind == "thoughts")
            calls: list[Block] = []
            waits = finish == "length"
            for block in blocks:
                status = get_status(block, finish if block is last else None)
                if block.kind != "call" or not self._mcp.owns(block.name):
                    waits = waits or block.kind == "call"
                    output.append(output_items.item(block, status))
                elif self._mcp.requires_approval(block.name):
                    waits = True
                    output.append(self._mcp.request(block.name, block.text, block.id))
                else:
                    output.append(self._mcp.item(block.name, block.text, block.id))
                    if status == "completed":
                        calls.append(block)
                    else:
                        output[-1]["status"] = "incomplete"
            if not calls:
                return
            places = {f"mcp_{one.id}": first + one.index for one in calls}
            done = await asyncio.gather(
                *(self._mcp.call(one.name, one.text, block_id=one.id) for one in calls)
            )
            events = []
            for item in done:
                next(one for one in output if one["id"] == item["id"]).update(item)
                index = places[item["id"]]
                place = {"item_id": item["id"], "output_index": index}
                events.append(event(f"response.mcp_call.{item['status']}", **place))
                events.append(event("response.output_item.done", output_index=index, item=item))
            yield events
            if waits:
                return
            if number == MAX_ROUNDS:
                self._stop = "max_tool_calls"
                return
            if not await self._next_round(output[start:]):
                return
            first += blocks[-1].index + 1

    async def _next_round(self, items: list[dict[str, Any]]) -> bool:
        """Begin the generation after the results of calls. Return False without room for tokens."""
        chat = append_messages(self._chat, self._convert(_ITEMS.validate_python(items)))
        changes: dict[str, Any] = {"tool_choice": "none" if self._mcp.exhausted else None}
        if self._body.max_output_tokens is not None:
            used = sum(turn.generation.completion_tokens for turn in self._turns)
            changes["max_completion_tokens"] = self._body.max_output_tokens - used
            if changes["max_completion_tokens"] < 1:
                self._stop = "max_output_tokens"
                return False
        self._chat = chat.model_copy(update=changes)
        with rename_fields(RESPONSE_NAMES):
            self.turn = await ChatGeneration.begin(
                self._model, self._chat, self._request, "resp", stores=True
            )
        self._turns.append(self.turn)
        return True

    @property
    def _finish(self) -> str | None:
        return self.turn.last.finish if self.turn.last is not None else None

    async def _changes(self, output_items: OutputItems) -> AsyncGenerator[list[EventFields]]:
        """Yield the events of one round of generation."""
        turn, body = self.turn, self._body
        places = None
        if body.logprobs:
            hides = not turn.model.formats.shows_special(turn.body)
            places = TokenPlaces(turn.model.texts, hides_special=hides, top=body.top_logprobs or 0)
        read = 0
        async with aclosing(turn.changes()) as items:
            async for changes in items:
                if places is not None:
                    places.add(turn.answer_tokens[read:], turn.answer_logprobs[read:])
                    read = len(turn.answer_tokens)
                events: list[EventFields] = []
                for change, finish in changes:
                    new: list[dict[str, Any]] = []
                    grows = change.kind == "grows" and change.block.kind == "text"
                    if places is not None and grows:
                        new = places.take(change.end - len(change.text), change.end)
                        output_items.logprobs.setdefault(change.block.index, []).extend(new)
                    block = change.block
                    if block.kind == "call" and self._mcp.owns(block.name):
                        events += self._mcp_events(change, output_items)
                    else:
                        events += output_items.events(change, finish, new)
                yield events

    def _mcp_events(self, change: Change, output_items: OutputItems) -> list[EventFields]:
        """Return the events of a call to an MCP server, up to its arguments."""
        block, index = change.block, output_items.first + change.block.index
        if self._mcp.requires_approval(block.name):
            if change.kind != "closes" or block.broken:
                return []
            item = self._mcp.request(block.name, block.text, block.id)
            return [
                event("response.output_item.added", output_index=index, item=item),
                event("response.output_item.done", output_index=index, item=item),
            ]
        item = self._mcp.item(block.name, block.text, block.id)
        place = {"item_id": item["id"], "output_index": index}
        if change.kind == "opens":
            return [
                event("response.output_item.added", output_index=index, item=item),
                event("response.mcp_call.in_progress", **place),
            ]
        if change.kind == "grows":
            return [event("response.mcp_call_arguments.delta", **place, delta=change.text)]
        return [event("response.mcp_call_arguments.done", **place, arguments=block.text)]

    async def _end(self) -> None:
        """Complete the fields. Store the response if requested."""
        reason = self._stop or ("max_output_tokens" if self._finish == "length" else None)
        encoded = [[]]
        if self._thoughts:
            prompts = self._model.prompts
            encoded = await prompts.encode([self._thoughts], add_special_tokens=False)
        self.fields |= {
            "status": "incomplete" if reason else "completed",
            "completed_at": None if reason else int(time.time()),
            "incomplete_details": {"reason": reason} if reason else None,
            "usage": _usage(self._turns, len(encoded[0])),
        }
        if self._body.store:
            await self.store()

    def _new_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the request and the response, without instructions."""
        completed_items = [
            one
            for one in self.fields["output"]
            if one.get("status", "completed") == "completed"
            or one["type"] not in ("function_call", "custom_tool_call")
        ]
        items = _ITEMS.validate_python(completed_items) if completed_items else []
        new = [*self._convert(self._body.input), *self._convert(items)]
        if not self._model.prompts.media.accepts_images:
            new = [omit_images(message) for message in new]
        return [*self._mcp.messages, *new]

    def _convert(self, items: str | Sequence[InputItem]) -> list[dict[str, Any]]:
        """Return the chat messages of items."""
        return build_messages(items, offered=self._body.offered)

    @property
    def size(self) -> int:
        """Bytes of the request and the response."""
        return self._conversation.size + sum(turn.generation.size.bytes for turn in self._turns)

    async def store(self) -> None:
        """Store the ended response."""
        size, model, fields = self.size, self._model, self.fields
        messages = await write_json(await aside(self._new_messages, size), size)
        items = await write_json(await aside(self._body.input_items, size), size)
        requests = [one for one in fields["output"] if one["type"] == "mcp_approval_request"]
        labels = [tool.get("server_label") for tool in fields["tools"]]
        stored = StoredResponse(
            fields["status"],
            await write_json(fields, size),
            (*self._conversation.previous_messages, b"".join(messages)),
            to_bytes(encode_json({"labels": labels, "requests": requests})),
            b"".join(items),
            self._answer,
        )
        model.state.responses.put(fields["id"], stored, model.owner)

    def open(self, answer: DetachedAnswer) -> None:
        """Make a background response in progress known to other requests."""
        self._answer = answer
        stored = StoredResponse(answer=answer, live=self.fields)
        self._model.state.responses.put(self.fields["id"], stored, self._model.owner)


def initial_fields(turn: ChatGeneration, body: ResponseRequest) -> dict[str, Any]:
    """Return the fields of a response before the first token."""
    choice = body.tool_choice
    named_tool = isinstance(choice, NamedFunction | AllowedTools)
    form: dict[str, Any] = {"type": body.text.format.type}
    if form["type"] == "json_schema":
        form |= {"name": body.text.format.name, "schema": body.text.format.json_schema}
        form["strict"] = True
    return {
        "id": turn.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": turn.model.name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "background": body.background,
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": form},
        "tool_choice": choice.model_dump(exclude_none=True) if named_tool else choice or "auto",
        "tools": [_tool(tool) for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
        **turn.model.get_omitted_defaults(body, "temperature", "top_p"),
    }


def _tool(tool: BaseModel) -> dict[str, Any]:
    if not isinstance(tool, FunctionTool):
        return tool.model_dump(exclude_none=True)
    return {"strict": None, **tool.model_dump()}


def _usage(turns: list[ChatGeneration], reasoning: int) -> dict[str, Any]:
    """Return the token counts of all rounds.

    Args:
        reasoning: number of tokens of the thoughts.
    """
    counts = [turn.generation for turn in turns]
    prompt = sum(one.prompt_tokens for one in counts)
    generated = sum(one.completion_tokens for one in counts)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": sum(one.cached_tokens for one in counts),
            "cache_write_tokens": 0,
            **truncation(sum(one.truncated_tokens for one in counts)),
        },
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + generated,
    }
