"""One turn of a conversation: from a chat request through the engine to parsed replies.

Every endpoint that speaks in messages takes this path, and spells what comes back in its own way.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from ed_esurge.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from ed_esurge.replies.events import CallEnds, Content, Event, Reply
from ed_esurge.sampling import SamplingParams, StructuredOutputs
from ed_esurge.server.generation.choices import Tally, finish_reason
from ed_esurge.server.generation.models import Served, new_id
from ed_esurge.server.generation.reply_formats import Parser
from ed_esurge.server.generation.requests import ChatRequest
from ed_esurge.server.generation.structured import of_tools, one_of
from ed_esurge.server.generation.tools import NamedTool
from ed_esurge.server.http.streaming import headers_of
from ed_esurge.server.http.threads import size_of
from ed_esurge.server.http.watch import Watch


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice.

    Attributes:
        events: what the new text says.
        out: the new tokens.
        finish: OpenAI's reason, with the last piece of the choice.
    """

    index: int
    events: list[Event]
    out: CompletionOutput
    finish: str | None


@dataclass(slots=True)
class Choice:
    """A whole choice."""

    index: int
    reply: Reply
    out: CompletionOutput
    finish: str


@dataclass
class Turn:
    """A chat request on its way.

    Attributes:
        tokens: the prompt.
        tally: counts tokens as they come.
        prompt_logprobs: of the prompt, where they were asked for, once something has come.
    """

    served: Served
    body: ChatRequest
    request_id: str
    tokens: list[int]
    params: SamplingParams
    watch: Watch
    tally: Tally
    queue: dict[str, Any]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    _parsers: dict[int, Parser] = field(default_factory=dict)
    _called: set[int] = field(default_factory=set)

    @classmethod
    async def begin(cls, served: Served, body: ChatRequest, request: Request, kind: str) -> Turn:
        """Check a request and make its prompt.

        Args:
            kind: what the request's id begins with.

        Raises:
            APIError: the conversation does not fit or the template refuses it, the model is not
                this one, or the engine is down.
        """
        served.check_generations(body.n)
        served.formats.check(body)
        queue = served.queue_options(body)
        whole = await served.prompts.chat(body, size_of(request))
        tokens, limit = served.prompts.fit(
            whole,
            body.max_completion_tokens or body.max_tokens,
            param="messages",
            default=None,
            last=body.truncate_prompt_tokens,
        )
        more: dict[str, Any] = {}
        if served.formats.shows_special(body):
            more["skip_special_tokens"] = False
        ends = served.formats.ends_of_thoughts(tokens)
        structured = await one_of(served.engine, _wanted(body), ends)
        if structured is not None:
            more["structured_outputs"] = structured
        params = await served.sampling_params(
            body,
            limit,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            **more,
        )
        request_id = new_id(kind, body.request_id)
        watch = served.watch(request)
        tally = Tally([tokens], truncated_tokens=len(whole) - len(tokens))
        return cls(served, body, request_id, tokens, params, watch, tally, queue)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer."""
        return headers_of(self.request_id, self.tally.truncated_tokens)

    async def pieces(self) -> AsyncGenerator[list[Piece]]:
        """What is new after each step of the engine. Closing it ends the request."""
        make = self.served.formats.parsers(self.body, self.tokens)
        deltas = self.served.generate(self.tokens, self.params, self.request_id, **self.queue)
        async with aclosing(deltas) as items:
            async for delta in items:
                yield self._read(delta, make)

    def _read(self, delta: RequestOutput, make: Any) -> list[Piece]:
        self.tally.observe(0, delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        result = []
        for out in delta.outputs:
            reason = out.finish_reason and finish_reason(out.finish_reason)
            if make is None:
                events: list[Event] = [Content(out.text)] if out.text else []
            else:
                if out.index not in self._parsers:
                    self._parsers[out.index] = make()
                parser = self._parsers[out.index]
                events = parser.feed(out.text) if out.text else []
                if reason is not None:
                    events += parser.close(cut=reason == "length")
                if any(isinstance(event, CallEnds) for event in events):
                    self._called.add(out.index)
                # As OpenAI has it, a call that was asked for by name is no reason to stop.
                asked = isinstance(self.body.tool_choice, NamedTool)
                if reason == "stop" and out.index in self._called and not asked:
                    reason = "tool_calls"
            result.append(Piece(out.index, events, out, reason))
        return result

    async def choices(self) -> list[Choice] | None:
        """All choices, whole; None if the client went away."""

        async def gather() -> list[Choice]:
            known: dict[int, Choice] = {}
            async with aclosing(self.pieces()) as items:
                async for pieces in items:
                    for piece in pieces:
                        choice = known.get(piece.index)
                        if choice is None:
                            choice = Choice(piece.index, Reply(), piece.out, "")
                            known[piece.index] = choice
                        else:
                            choice.out.add(piece.out)
                        choice.reply.add(piece.events)
                        choice.finish = piece.finish or choice.finish
            return [known[index] for index in sorted(known)]

        return await self.watch.over(gather())


def _wanted(body: ChatRequest) -> dict[str, StructuredOutputs]:
    """The structured outputs that a request asks for, by the field that asks."""
    wanted = body.outputs()
    calls = of_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    text = body.response_format.schema_text if body.response_format is not None else None
    if calls is not None:  # such a reply has no content that a response_format would concern
        wanted["tool_choice"] = calls
    elif text is not None:
        wanted["response_format"] = StructuredOutputs(json_schema=text)
    return wanted
