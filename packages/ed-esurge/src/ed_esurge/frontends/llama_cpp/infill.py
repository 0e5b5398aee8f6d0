"""`POST /infill`: fill the gap between two texts of code."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.frontends.llama_cpp.generated import GeneratedAnswer, LlamaRequest, generate_response
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.http.fields import RequestBody, few
from ed_esurge.server.routing import post

MAX_EXTRA = 1024


class ExtraFile(RequestBody):
    """Another file of the repository."""

    filename: Annotated[str, Field(max_length=4096)] = "tmp"
    text: str


class InfillRequest(LlamaRequest):
    """Body of `POST /infill`."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], few(MAX_EXTRA)] = Field(default_factory=list)
    prompt: str = ""
    """Text of the gap so far."""


async def infill(model: ServedModel, body: InfillRequest, request: Request) -> Response:
    """Fill a gap.

    Raises:
        APIError: 400, the model has no tokens for gaps, or the texts are too long.
    """
    files = [(file.filename, file.text) for file in body.input_extra]
    tokens = await model.prompts.infill(
        body.input_prefix, body.input_suffix, files=files, param="input_suffix"
    )
    if body.prompt:
        (begun,) = await model.prompts.encode([body.prompt], add_special_tokens=False)
        tokens += begun
    return await generate_response(model, body, request, tokens, "infill", message="input_prefix")


ENDPOINTS = (
    post(
        "/infill",
        "Fill the gap between two texts in the format of llama.cpp's server.",
        infill,
        InfillRequest,
        GeneratedAnswer,
        streams=True,
        ability=GENERATES,
    ),
)
