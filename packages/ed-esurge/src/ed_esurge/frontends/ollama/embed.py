"""`POST /api/embed`, and the older `POST /api/embeddings`."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.frontends.ollama.replies import Stopwatch
from ed_esurge.frontends.ollama.requests import KeepAlive, ModelReference, keep_model
from ed_esurge.server.generation.abilities import EMBEDS, require_ability
from ed_esurge.server.generation.answer_size import NUMBER_BYTES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.requests import MAX_PROMPTS
from ed_esurge.server.http.fields import RequestBody, few, validate_body
from ed_esurge.server.http.json_parts import JsonItems, answer_json
from ed_esurge.server.openai.embeddings import EmbeddingRequest, EncodedTexts, truncate_vectors
from ed_esurge.server.routing import post


def _wrap_in_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class EmbedRequest(RequestBody):
    """Body of `POST /api/embed`."""

    model: ModelReference
    input: Annotated[list[str], BeforeValidator(_wrap_in_list), few(MAX_PROMPTS)]
    truncate: bool = True
    """Whether a text that is too long loses its end; false = such a text is an error."""
    dimensions: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    keep_alive: KeepAlive = None


class EmbedAnswer(AnswerBody):
    """Answer of `POST /api/embed`. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsRequest(RequestBody):
    """Body of `POST /api/embeddings`."""

    model: ModelReference
    prompt: str
    keep_alive: KeepAlive = None


class EmbeddingsAnswer(AnswerBody):
    """Answer of `POST /api/embeddings`."""

    embedding: list[float]


async def _embed(model: ServedModel, body: EmbedRequest, request: Request) -> Response:
    """Return the vector of each text.

    Raises:
        APIError: 400, the model returns no embeddings, a text is too long, or the vectors have
            fewer dimensions than requested.
    """
    require_ability(model, EMBEDS)
    watch = Stopwatch(model)
    keep_model(model, body.keep_alive, request)
    vectors: np.ndarray = np.zeros((0, 0), np.float32)
    count = 0
    if body.input:
        vectors, count = await _vectors(model, request, body.input, body.truncate, body.dimensions)
    response = {
        "model": model.name,
        "embeddings": JsonItems(lambda: (row.tolist() for row in vectors), 1),
        **watch.durations(),
        "prompt_eval_count": count,
    }
    return await answer_json(response, vectors.size * NUMBER_BYTES)


async def embeddings(model: ServedModel, body: EmbeddingsRequest, request: Request) -> Response:
    """Return the vector of one text.

    Raises:
        APIError: see `_embed`.
    """
    require_ability(model, EMBEDS)
    keep_model(model, body.keep_alive, request)

    if not body.prompt:
        return await answer_json({"embedding": []})
    vectors, _ = await _vectors(model, request, [body.prompt], True, None)
    return await answer_json({"embedding": vectors[0].tolist()})


async def _vectors(
    model: ServedModel,
    request: Request,
    texts: list[str],
    truncate: bool,
    dimensions: int | None,
) -> tuple[np.ndarray, int]:
    """Return normalized vectors, [n, d], and the number of prompt tokens."""
    fields = {"input": texts, "truncate_prompt_tokens": -1 if truncate else None}
    embedding_request = validate_body(EmbeddingRequest, fields)
    encoded = await EncodedTexts.of(model, embedding_request)
    params = await encoded.embedding_params(embedding_request, normalize=True)
    model.pooled_size(request, encoded.prompts)
    vectors = await model.vectors(encoded.prompts, params, **model.queue_options(embedding_request))
    if dimensions is not None:
        vectors = truncate_vectors(vectors, dimensions, normalize=True)
    return vectors, sum(len(prompt) for prompt in encoded.prompts)


ENDPOINTS = (
    post(
        "/api/embed",
        "Embed texts in the format of Ollama's API.",
        _embed,
        EmbedRequest,
        EmbedAnswer,
    ),
    post(
        "/api/embeddings",
        "Embed one text in the older format of Ollama's API.",
        embeddings,
        EmbeddingsRequest,
        EmbeddingsAnswer,
    ),
)
