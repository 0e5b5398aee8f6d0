"""The prompt of a conversation: its text after the chat template, and the number of its tokens.

The paths are `POST /apply-template` and `POST /v1/chat/completions/input_tokens`.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import check_template
from ed_esurge.server.generation.requests import ChatRequest
from ed_esurge.server.http.body import get_body_size
from ed_esurge.server.responses.endpoint import ResponseTokenCount
from ed_esurge.server.routing import post


class AppliedTemplate(AnswerBody):
    """Answer of `POST /apply-template`."""

    prompt: str


async def apply_template(model: ServedModel, body: ChatRequest, request: Request) -> Response:
    """Return the text of a chat request. Nothing is generated.

    Raises:
        APIError: 400, there is no template, or the template rejects the conversation.
    """
    model.formats.check(body)
    check_template(model, body)
    return JSONResponse({"prompt": await model.prompts.get_text(body)})


async def _count_tokens(model: ServedModel, body: ChatRequest, request: Request) -> Response:
    """Return the number of prompt tokens of a chat request. Nothing is generated.

    Raises:
        APIError: 400, there is no template, or the template rejects the conversation.
    """
    model.formats.check(body)
    check_template(model, body)
    prompt = await model.prompts.chat(body, get_body_size(request))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


ENDPOINTS = (
    post(
        "/apply-template",
        "Return a conversation as text in the format of llama.cpp's server.",
        apply_template,
        ChatRequest,
        AppliedTemplate,
        ability=GENERATES,
    ),
    post(
        "/v1/chat/completions/input_tokens",
        "Count the prompt tokens of a conversation.",
        _count_tokens,
        ChatRequest,
        ResponseTokenCount,
        ability=GENERATES,
    ),
)
