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
from ed_esurge.server.errors import client_gone
from ed_esurge.server.logprobs import chat_logprobs, prompt_logprobs
from ed_esurge.server.protocol import ChatRequest
from ed_esurge.server.served import Served, new_id
from ed_esurge.server.stream import (
    Chunks,
    answer,
    encode,
    merge,
    respond,
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
    served.check_generations(body.n)
    queue = served.queue_options(body)
    whole = await served.prompts.chat(body)
    tokens, limit = served.prompts.fit(
        whole,
        body.max_completion_tokens or body.max_tokens,
        param="messages",
        default=None,
        last=body.truncate_prompt_tokens,
    )
    params = served.sampling_params(
        body,
        limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    request_id = new_id("chatcmpl", body.request_id)
    watch = served.watch(request)
    deltas = merge([served.generate(tokens, params, request_id, **queue)])
    tally = Tally([tokens])
    if body.stream:
        events = _events(served, body, deltas, tokens, tally, request_id)
        return await respond(watch, events, request_id)
    outputs = await watch.over(collect(deltas, 1, tally))
    if outputs is None:
        return client_gone()
    completion = {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": served.name,
        "choices": [_choice(served, body, out) for out in outputs[0].outputs],
        "usage": usage(tally.prompt_tokens, tally.completion_tokens, tally.cached_tokens),
    }
    if body.prompt_logprobs is not None:
        completion["prompt_logprobs"] = prompt_logprobs(
            served.texts, outputs[0].prompt_logprobs, body.prompt_logprobs
        )
    if body.return_token_ids:
        completion["prompt_token_ids"] = tokens
    return answer(completion, request_id)


def _choice(served: Served, body: ChatRequest, out: CompletionOutput) -> dict[str, Any]:
    """One entry of `choices`, whole."""
    choice = {
        "index": out.index,
        "message": {"role": "assistant", "content": out.text, "refusal": None},
        "logprobs": _logprobs(served, body, out),
        "finish_reason": finish_reason(out.finish_reason),
    }
    if body.return_token_ids:
        choice["token_ids"] = out.token_ids
    return choice


def _logprobs(served: Served, body: ChatRequest, out: CompletionOutput) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return chat_logprobs(served.texts, out.token_ids, out.logprobs or [], body.top_logprobs or 0)


async def _events(
    served: Served,
    body: ChatRequest,
    deltas: AsyncGenerator[tuple[int, RequestOutput]],
    tokens: list[int],
    tally: Tally,
    request_id: str,
) -> AsyncGenerator[str]:
    """The chunks of a stream: the role, the text as it comes, an empty delta with the reason."""
    chunks = Chunks(
        "chat.completion.chunk", request_id, served.name, int(time.time()), body.include_usage
    )
    begun: set[int] = set()
    prompt = f',"prompt_token_ids":{encode(tokens)}' if body.return_token_ids else ""
    async with aclosing(deltas) as items:
        async for place, delta in items:
            tally.observe(place, delta)
            events = []
            for out in delta.outputs:
                if out.index not in begun:
                    begun.add(out.index)
                    events.append(chunks.choice(out.index, ROLE, None, None, prompt))
                    prompt = ""
                shown = _logprobs(served, body, out) if out.token_ids else None
                ids = f',"token_ids":{encode(out.token_ids)}' if body.return_token_ids else ""
                if out.text or shown is not None or (ids and out.token_ids):
                    payload = f'"delta":{{"content":{encode(out.text)}}}{ids}'
                    events.append(chunks.choice(out.index, payload, shown, None))
                if out.finish_reason is not None:
                    reason = finish_reason(out.finish_reason)
                    events.append(chunks.choice(out.index, '"delta":{}', None, reason))
            if events:
                yield "".join(events)
    if body.include_usage:
        yield chunks.usage(usage(tally.prompt_tokens, tally.completion_tokens, tally.cached_tokens))
