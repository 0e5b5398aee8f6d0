"""`POST /api/generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ed_esurge.frontends.library.definitions import add_only_messages
from ed_esurge.frontends.ollama.replies import (
    LINES,
    ReplyLine,
    Stopwatch,
    TimedAnswer,
    head,
    json_line,
    reply_lines,
    whole_reply,
)
from ed_esurge.frontends.ollama.requests import (
    OLLAMA_NAMES,
    Images,
    OllamaRequest,
    keep_model,
    with_images,
)
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import ChatGeneration
from ed_esurge.server.generation.prompts import EncodedPrompt
from ed_esurge.server.http.errors import APIError, rename_fields
from ed_esurge.server.http.fields import TokenIds, few, reject_field
from ed_esurge.server.routing import post

MAX_CONTEXT = 2**20
_DRAWS = "generation of images"


class GenerateRequest(OllamaRequest):
    """Body of `POST /api/generate`. Without a prompt, the model is only loaded."""

    prompt: str = ""
    suffix: str = ""
    """Text after the answer: the model fills the gap between `prompt` and `suffix`."""
    system: str | None = None
    raw: bool = False
    """Whether the prompt is passed to the model without the chat template."""
    images: Images = Field(default_factory=list)
    context: Annotated[TokenIds, few(MAX_CONTEXT)] = Field(default_factory=list)
    """Token ids of an earlier answer, before the prompt."""
    template: Annotated[
        None, reject_field("templates of Go; start the server with chat_template", "")
    ] = None
    width: Annotated[None, reject_field(_DRAWS, 0)] = None
    height: Annotated[None, reject_field(_DRAWS, 0)] = None
    steps: Annotated[None, reject_field(_DRAWS, 0)] = None


class GenerateAnswer(TimedAnswer):
    """Answer of `POST /api/generate`, or a line of its stream."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None
    """Token ids of prompt and answer, for `context` of the next request."""


async def _generate(model: ServedModel, body: GenerateRequest, request: Request) -> Response:
    """Answer a prompt.

    Raises:
        APIError: see `ChatGeneration.begin`.
    """
    watch = Stopwatch(model)
    keep_model(model, body.keep_alive, request)
    if not body.prompt and not body.suffix:
        reason = "unload" if body.keep_alive == 0 else "load"
        empty = {"response": "", "done": True, "done_reason": reason}
        return JSONResponse({**head(model), **empty, **watch.durations()})
    with rename_fields({**OLLAMA_NAMES, "messages": "prompt"}):
        turn = await _begin(model, body, request)
    tokens = list(turn.tokens)

    def fields(line: ReplyLine) -> dict[str, Any]:
        reply_fields: dict[str, Any] = {"response": line.content}
        if line.thinking:
            reply_fields["thinking"] = line.thinking
        if line.logprobs:
            reply_fields["logprobs"] = line.logprobs
        return reply_fields

    async def build_response() -> dict[str, Any]:
        reply = await whole_reply(turn)
        last = {**watch.last(turn, reply.finish), "context": [*tokens, *turn.answer_tokens]}
        return {**head(model), **fields(reply), **last}

    async def events() -> AsyncGenerator[str]:
        async with aclosing(reply_lines(turn)) as lines:
            async for line in lines:
                if line.content or line.thinking or line.logprobs:
                    yield json_line({**head(model), **fields(line), "done": False})
                if line.finish is not None:
                    last = watch.last(turn, line.finish)
                    last["context"] = [*tokens, *turn.answer_tokens]
                    yield json_line({**head(model), "response": "", **last})

    return await turn.generation.answer(body.stream, events, build_response, LINES)


async def _begin(model: ServedModel, body: GenerateRequest, request: Request) -> ChatGeneration:
    """Return the running request: a filled gap, a continued text, or an answered message."""
    prompts = model.prompts
    messages = [{"role": "user", "content": with_images(body.prompt, body.images)}]
    raw_prompt: EncodedPrompt | None = None
    if body.suffix:
        raw_prompt = EncodedPrompt(await prompts.infill(body.prompt, body.suffix, param="suffix"))
    elif body.raw or not prompts.has_template:
        if body.images:
            raise APIError(
                "images require the chat template of the model: omit raw", param="images"
            )
        if body.system is not None and not body.raw:
            raise APIError(
                "this model has no chat template, which a system prompt requires: put the text "
                "into prompt, or start the server with chat_template=",
                param="system",
            )
        special = not body.context
        (tokens,) = await prompts.encode([body.prompt], add_special_tokens=special)
        raw_prompt = EncodedPrompt(tokens)
    if body.system is not None:
        messages.insert(0, {"role": "system", "content": body.system})
    prompts.check_ids(body.context, "context")
    return await ChatGeneration.begin(
        add_only_messages(model),
        body.chat(model, messages),
        request,
        "ollama",
        tokens=body.context,
        raw_prompt=raw_prompt,
        context=body.sampling(model).get("num_ctx"),
        stores=True,
    )


ENDPOINTS = (
    post(
        "/api/generate",
        "Answer a prompt in the format of Ollama's API.",
        _generate,
        GenerateRequest,
        GenerateAnswer,
        streams=True,
        ability=GENERATES,
    ),
)
