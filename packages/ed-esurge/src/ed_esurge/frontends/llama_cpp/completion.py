"""`POST /completion`: continue a prompt of text and token ids."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.frontends.llama_cpp.generated import GeneratedAnswer, LlamaRequest, generate_response
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.routing import post

MAX_PIECES = 2**20


def _pieces(value: object) -> list[str | list[int]]:
    """Convert a prompt to its texts and lists of token ids."""
    items = value if isinstance(value, list) else [value]
    if not items or len(items) > MAX_PIECES:
        raise InvalidField(f"is empty, or has more than {MAX_PIECES} items")
    if len(items) > 1 and all(isinstance(item, str | list) for item in items):
        raise InvalidField("has several prompts: send one, or use /v1/completions")
    pieces: list[str | list[int]] = []
    for place, item in enumerate(items):
        if isinstance(item, str):
            pieces.append(item)
        elif type(item) is not int or not 0 <= item < 2**31:
            raise InvalidField(f"item {place} is neither text nor a token id")
        elif pieces and isinstance(pieces[-1], list):
            pieces[-1].append(item)
        else:
            pieces.append([item])
    return pieces


class LlamaCompletionRequest(LlamaRequest):
    """Body of `POST /completion`."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_pieces)]
    """Text, token ids, or a list of both; only text at the beginning gets special tokens."""


async def _complete(model: ServedModel, body: LlamaCompletionRequest, request: Request) -> Response:
    """Continue a prompt.

    Raises:
        APIError: 400, the prompt is too long, or an option does not fit the model.
    """
    tokens: list[int] = []
    for place, piece in enumerate(body.prompt):
        if isinstance(piece, str):
            (ids,) = await model.prompts.encode([piece], add_special_tokens=place == 0)
            tokens += ids
        else:
            model.prompts.check_ids(piece, "prompt")
            tokens += piece
    return await generate_response(model, body, request, tokens, "completion", message="prompt")


ENDPOINTS = (
    post(
        "/completion",
        "Continue a prompt in the format of llama.cpp's server.",
        _complete,
        LlamaCompletionRequest,
        GeneratedAnswer,
        streams=True,
        ability=GENERATES,
    ),
)
