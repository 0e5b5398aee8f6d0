"""`POST /v1/score` and `/v1/rerank`: how alike texts are, by the cosine of their vectors.

The paths without a version, and `/v2/rerank`, are vLLM's names of the same endpoints.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from ed_esurge.sampling import PoolingParams
from ed_esurge.server.generation.answers import Answer
from ed_esurge.server.generation.models import Served, new_id
from ed_esurge.server.generation.requests import MAX_PROMPTS
from ed_esurge.server.http.errors import APIError, client_gone
from ed_esurge.server.http.fields import Body, few
from ed_esurge.server.http.streaming import answer, headers_of, truncation
from ed_esurge.server.openai.embeddings import EmbeddingUsage, Pooling


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], Field(min_length=1), BeforeValidator(_listed), few(MAX_PROMPTS)]


class ScoreRequest(Body):
    """Body of `POST /v1/score`: one text against many, or as many pairs. The names are vLLM's."""

    ALIASES: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("queries", "data_1"), "text_1"),
        **dict.fromkeys(("documents", "items", "data_2"), "text_2"),
    }

    text_1: Texts
    text_2: Texts
    model: str | None = None
    user: str | None = None
    pooling: Pooling = "last"
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None


class RerankRequest(Body):
    """Body of `POST /v1/rerank`, as Jina and Cohere have it."""

    query: str
    documents: Texts
    model: str | None = None
    user: str | None = None
    top_n: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    """How many documents to return, the best first; 0 or null: all."""
    return_documents: bool = True
    pooling: Pooling = "last"
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None


class Score(Answer):
    """The cosine of two texts' vectors."""

    index: int
    object: str
    score: float


class Scores(Answer):
    """Answer of `POST /v1/score`."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Document(Answer):
    """A document that was sent."""

    text: str


class Ranked(Answer):
    """A document's place among those that were sent, and its score."""

    index: int
    relevance_score: float
    document: Document | None = None


class Reranked(Answer):
    """Answer of `POST /v1/rerank`, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


async def score(served: Served, body: ScoreRequest, request: Request) -> Response:
    """Answer one request.

    Raises:
        APIError: 400, where the numbers of texts do not fit together, or a text is too long.
    """
    first, second = body.text_1, body.text_2
    if len(first) not in (1, len(second)):
        raise APIError(
            f"has {len(first)} texts, and text_2 has {len(second)}: send one, or as many",
            param="text_1",
        )
    scored = await _cosines(served, body, request, first, second)
    if scored is None:
        return client_gone()
    cosines, usage = scored
    data = [
        {"index": index, "object": "score", "score": cosine} for index, cosine in enumerate(cosines)
    ]
    scores = {
        "id": new_id("score", None),
        "object": "list",
        "created": int(time.time()),
        "model": served.name,
        "data": data,
        "usage": usage,
    }
    return answer(scores, headers_of(scores["id"], usage.get("truncated_tokens", 0)))


async def rerank(served: Served, body: RerankRequest, request: Request) -> Response:
    """Answer one request. Raises APIError: a text is too long."""
    scored = await _cosines(served, body, request, [body.query], body.documents)
    if scored is None:
        return client_gone()
    cosines, usage = scored
    order = sorted(range(len(cosines)), key=lambda index: -cosines[index])
    results: list[dict[str, Any]] = []
    for index in order[: body.top_n or len(order)]:
        result: dict[str, Any] = {"index": index, "relevance_score": cosines[index]}
        if body.return_documents:
            result["document"] = {"text": body.documents[index]}
        results.append(result)
    name = new_id("rerank", None)
    ranked = {"id": name, "model": served.name, "results": results, "usage": usage}
    return answer(ranked, headers_of(name, usage.get("truncated_tokens", 0)))


async def _cosines(
    served: Served,
    body: ScoreRequest | RerankRequest,
    request: Request,
    first: list[str],
    second: list[str],
) -> tuple[list[float], dict[str, int]] | None:
    """The cosine of each pair, and the token counts; None if the client went away."""
    prompts, truncated = await served.prompts.tokens_of(
        [*first, *second], last=body.truncate_prompt_tokens, param="the texts"
    )
    params = PoolingParams(pooling=body.pooling, normalize=True)
    vectors = await served.watch(request).over(served.vectors(prompts, params))
    if vectors is None:
        return None
    left, right = vectors[: len(first)], vectors[len(first) :]
    products = np.atleast_2d(left.astype(np.float64) * right)
    cosines = [float(row.sum()) for row in products]
    count = sum(map(len, prompts))
    usage = {"prompt_tokens": count, "total_tokens": count, **truncation(truncated)}
    return cosines, usage
