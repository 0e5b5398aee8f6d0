"""`POST /v1/chat/completions`: a conversation through the model's chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ed_esurge.outputs import CompletionOutput, RequestOutput
from ed_esurge.server.choices import Tally, collect, finish_reason
from ed_esurge.server.logprobs import chat_logprobs
from ed_esurge.server.protocol import ChatRequest
from ed_esurge.server.served import Served, new_id
from ed_esurge.server.stream import (
    Chunks,
    answer,
    client_gone,
    encode,
    merge,
    respond,
    until_disconnect,
    usage,
)

ROLE = '"delta":{"role":"assistant","content":""}'


async def chat(served: Served, body: ChatRequest, request: Request) -> Response:
    """Answer one request.

    Raises:
        APIError: the conversation does not fit or the template refuses it, the model is not this
            one, or the engine is down.
    """
    served.check_model(body.model)
    tokens = await served.prompts.chat(body)
    wanted = body.max_completion_tokens or body.max_tokens
    limit = served.prompts.room(len(tokens), wanted, param="messages", default=None)
    params = served.sampling_params(
        body, limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None
    )
    request_id = new_id("chatcmpl")
    deltas = merge([served.generate(tokens, params, request_id)])
    tally = Tally([tokens])
    if body.stream:
        return await respond(request, _events(served, body, deltas, tally, request_id), request_id)
    outputs = await until_disconnect(request.receive, collect(deltas, 1, tally))
    if outputs is None:
        return client_gone()
    return answer(
        {
            "id": request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": served.name,
            "choices": [_choice(served, body, out) for out in outputs[0].outputs],
            "usage": usage(tally.prompt_tokens, tally.completion_tokens, tally.cached_tokens),
        },
        request_id,
    )


def _choice(served: Served, body: ChatRequest, out: CompletionOutput) -> dict[str, Any]:
    """One entry of `choices`, whole."""
    return {
        "index": out.index,
        "message": {"role": "assistant", "content": out.text, "refusal": None},
        "logprobs": _logprobs(served, body, out),
        "finish_reason": finish_reason(out.finish_reason),
    }


def _logprobs(served: Served, body: ChatRequest, out: CompletionOutput) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return chat_logprobs(served.texts, out.token_ids, out.logprobs or [], body.top_logprobs or 0)


async def _events(
    served: Served,
    body: ChatRequest,
    deltas: AsyncGenerator[tuple[int, RequestOutput]],
    tally: Tally,
    request_id: str,
) -> AsyncGenerator[str]:
    """The chunks of a stream: the role, the text as it comes, an empty delta with the reason."""
    chunks = Chunks(
        "chat.completion.chunk", request_id, served.name, int(time.time()), body.include_usage
    )
    begun: set[int] = set()
    async with aclosing(deltas) as items:
        async for place, delta in items:
            tally.observe(place, delta)
            events = []
            for out in delta.outputs:
                if out.index not in begun:
                    begun.add(out.index)
                    events.append(chunks.choice(out.index, ROLE, None, None))
                shown = _logprobs(served, body, out) if out.token_ids else None
                if out.text or shown is not None:
                    payload = f'"delta":{{"content":{encode(out.text)}}}'
                    events.append(chunks.choice(out.index, payload, shown, None))
                if out.finish_reason is not None:
                    reason = finish_reason(out.finish_reason)
                    events.append(chunks.choice(out.index, '"delta":{}', None, reason))
            if events:
                yield "".join(events)
    if body.include_usage:
        yield chunks.usage(usage(tally.prompt_tokens, tally.completion_tokens, tally.cached_tokens))
