"""`POST /v1/embeddings`, `/v1/score` and `/v1/rerank`: pooled hidden states of texts."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from ed_infra.enums import TaskType
from fastapi import Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field, PlainValidator

from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.sampling import PoolingParams
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.pipeline import answer_headers, truncation
from ed_esurge.server.generation.requests import MAX_PROMPTS, as_prompts
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.fields import RequestBody, few
from ed_esurge.server.routing import post

_PoolingName = Literal["last", "mean"]


class EmbeddingRequest(RequestBody):
    """Body of `POST /v1/embeddings`. `input` is converted to a list."""

    input: Annotated[list[str | list[int]], PlainValidator(as_prompts)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    """Number of elements of each vector. Shorter vectors are normalized again."""
    user: str | None = None

    # Extensions.
    pooling: _PoolingName = "last"
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None


class EmbeddingUsage(AnswerBody):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    truncated_tokens: int | None = None
    """Number of tokens removed from the texts; absent if 0."""


class Embedding(AnswerBody):
    """A vector as numbers, or as base64 of its little-endian float32 bytes."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(AnswerBody):
    """Answer of `POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def embed(model: ServedModel, body: EmbeddingRequest, request: Request) -> Response:
    """Answer an embedding request.

    Raises:
        APIError: 400, the model is a classifier, a text is too long, or the vectors have fewer
            dimensions than requested.
    """
    _check_embeds(model)
    prompts, truncated = await model.prompts.tokens_of(
        body.input,
        add_special_tokens=body.add_special_tokens,
        last=body.truncate_prompt_tokens,
        param="input",
    )
    params = PoolingParams(pooling=body.pooling, normalize=body.normalize)

    async def whole() -> dict[str, Any]:
        vectors = await model.vectors(prompts, params)
        if body.dimensions is not None:
            vectors = shortened(vectors, body.dimensions, normalize=body.normalize)
        values = [_encoded(vector, body.encoding_format) for vector in vectors]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": value}
                for index, value in enumerate(values)
            ],
            "model": model.name,
            "usage": token_counts(prompts, truncated),
        }

    headers = answer_headers(new_id("embd", None), truncated)
    return await model.lifetime(request).answer(whole(), headers)


def _check_embeds(model: ServedModel) -> None:
    """Raise APIError if the model is a classifier: its logits are no embedding."""
    if model.task == TaskType.SEQUENCE_CLASSIFICATION:
        raise model.unsupported_task("it returns no embeddings, send the texts to /classify")


def token_counts(prompts: list[CheckedPrompt], truncated: int) -> dict[str, int]:
    """Return the `usage` of an answer: the prompt tokens, and the truncated tokens unless 0."""
    count = sum(len(prompt) for prompt in prompts)
    return {"prompt_tokens": count, "total_tokens": count, **truncation(truncated)}


def shortened(vectors: np.ndarray, count: int, *, normalize: bool) -> np.ndarray:
    """Return the first `count` elements of each vector.

    Raises:
        APIError: the vectors have fewer elements.
    """
    if count > vectors.shape[1]:
        raise APIError(
            f"{count} exceeds the {vectors.shape[1]} dimensions of the vectors",
            param="dimensions",
            code="invalid_value",
        )
    vectors = vectors[:, :count]
    if not normalize:
        return vectors
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _encoded(vector: np.ndarray, encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], Field(min_length=1), BeforeValidator(_listed), few(MAX_PROMPTS)]


class ScoreRequest(RequestBody):
    """Body of `POST /v1/score` in vLLM's format: pairs of texts, or one text and several texts."""

    ALIASES: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("queries", "data_1"), "text_1"),
        **dict.fromkeys(("documents", "items", "data_2"), "text_2"),
    }

    text_1: Texts
    text_2: Texts
    model: str | None = None
    user: str | None = None
    pooling: _PoolingName = "last"
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None


class RerankRequest(RequestBody):
    """Body of `POST /v1/rerank` in the format of Jina and Cohere."""

    query: str
    documents: Texts
    model: str | None = None
    user: str | None = None
    top_n: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    """Number of documents to return, best first; 0 or null = all."""
    return_documents: bool = True
    pooling: _PoolingName = "last"
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None


class Score(AnswerBody):
    """The cosine of the vectors of two texts."""

    index: int
    object: str
    score: float


class ScoreList(AnswerBody):
    """Answer of `POST /v1/score`."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedDocument(AnswerBody):
    """A document of the request."""

    text: str


class Ranked(AnswerBody):
    """A document with its index in the request and its score."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Reranked(AnswerBody):
    """Answer of `POST /v1/rerank`, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage


async def score(model: ServedModel, body: ScoreRequest, request: Request) -> Response:
    """Answer a score request.

    Raises:
        APIError: 400, the model is a classifier, the numbers of texts do not match, or a text is
            too long.
    """
    first, second = body.text_1, body.text_2
    if len(first) not in (1, len(second)):
        raise APIError(
            f"has {len(first)} texts, and text_2 has {len(second)}: send one text, or as many as "
            "text_2 has",
            param="text_1",
        )
    pairs = await _Pairs.of(model, body, first, second)
    request_id = new_id("score", None)

    async def whole() -> dict[str, Any]:
        scores = await pairs.cosines(len(first))
        return {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": [
                {"index": index, "object": "score", "score": value}
                for index, value in enumerate(scores)
            ],
            "usage": pairs.usage,
        }

    return await model.lifetime(request).answer(whole(), pairs.headers(request_id))


async def rerank(model: ServedModel, body: RerankRequest, request: Request) -> Response:
    """Answer a rerank request.

    Raises:
        APIError: 400, the model is a classifier, or a text is too long.
    """
    pairs = await _Pairs.of(model, body, [body.query], body.documents)
    request_id = new_id("rerank", None)

    async def whole() -> dict[str, Any]:
        scores = await pairs.cosines(1)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results: list[dict[str, Any]] = []
        for index in order[: body.top_n or len(order)]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents:
                result["document"] = {"text": body.documents[index]}
            results.append(result)
        return {"id": request_id, "model": model.name, "results": results, "usage": pairs.usage}

    return await model.lifetime(request).answer(whole(), pairs.headers(request_id))


@dataclass(frozen=True)
class _Pairs:
    """Encoded texts whose vectors are compared."""

    model: ServedModel
    prompts: list[CheckedPrompt]
    truncated: int
    pooling: _PoolingName

    @classmethod
    async def of(
        cls,
        model: ServedModel,
        body: ScoreRequest | RerankRequest,
        first: list[str],
        second: list[str],
    ) -> _Pairs:
        _check_embeds(model)
        prompts, truncated = await model.prompts.tokens_of(
            [*first, *second], last=body.truncate_prompt_tokens, param="the texts"
        )
        return cls(model, prompts, truncated, body.pooling)

    @property
    def usage(self) -> dict[str, int]:
        return token_counts(self.prompts, self.truncated)

    def headers(self, request_id: str) -> dict[str, str]:
        return answer_headers(request_id, self.truncated)

    async def cosines(self, count: int) -> list[float]:
        """Return the cosines of the first `count` prompts with the other prompts."""
        params = PoolingParams(pooling=self.pooling, normalize=True)
        vectors = await self.model.vectors(self.prompts, params)
        left, right = vectors[:count], vectors[count:]
        products = np.atleast_2d(left.astype(np.float64) * right)
        return [float(row.sum()) for row in products]


ENDPOINTS = (
    post("/v1/embeddings", "Embed texts.", embed, EmbeddingRequest, Embeddings, batched=True),
    *(
        post(
            path,
            "Score the similarity of texts.",
            score,
            ScoreRequest,
            ScoreList,
            batched=path == "/v1/score",
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        post(
            path,
            "Rank documents by their similarity to a query.",
            rerank,
            RerankRequest,
            Reranked,
            batched=path == "/v1/rerank",
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
)
