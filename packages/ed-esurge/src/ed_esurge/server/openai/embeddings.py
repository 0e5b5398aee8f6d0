"""`POST /v1/embeddings`: texts to vectors, the model's hidden states pooled."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import Field, PlainValidator

from ed_esurge.sampling import PoolingParams
from ed_esurge.server.generation.answers import Answer
from ed_esurge.server.generation.models import Served, new_id
from ed_esurge.server.generation.requests import as_prompts
from ed_esurge.server.http.errors import APIError, client_gone
from ed_esurge.server.http.fields import Body
from ed_esurge.server.http.streaming import answer, headers_of, truncation

Pooling = Literal["last", "mean"]


class EmbeddingRequest(Body):
    """Body of `POST /v1/embeddings`. `input` is normalised to a list."""

    input: Annotated[list[str | list[int]], PlainValidator(as_prompts)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    """Keep so many numbers of each vector, its first, and make its length 1 again."""
    user: str | None = None

    # Extensions.
    pooling: Pooling = "last"
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None


class EmbeddingUsage(Answer):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    truncated_tokens: int | None = None
    """Tokens that were cut off the texts, where some were."""


class Embedding(Answer):
    """A vector: numbers, or base64 of its float32 bytes, lowest byte first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    """Answer of `POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def embed(served: Served, body: EmbeddingRequest, request: Request) -> Response:
    """Answer one request.

    Raises:
        APIError: a text does not fit, or the vectors have fewer dimensions than were asked for.
    """
    prompts, truncated = await served.prompts.tokens_of(
        body.input,
        add_special_tokens=body.add_special_tokens,
        last=body.truncate_prompt_tokens,
        param="input",
    )
    params = PoolingParams(pooling=body.pooling, normalize=body.normalize)
    vectors = await served.watch(request).over(served.vectors(prompts, params))
    if vectors is None:
        return client_gone()
    if body.dimensions is not None:
        vectors = shortened(vectors, body.dimensions, normalize=body.normalize)
    data = [
        {"object": "embedding", "index": index, "embedding": _spelt(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    count = sum(map(len, prompts))
    return answer(
        {
            "object": "list",
            "data": data,
            "model": served.name,
            "usage": {"prompt_tokens": count, "total_tokens": count, **truncation(truncated)},
        },
        headers_of(new_id("embd", None), truncated),
    )


def shortened(vectors: np.ndarray, count: int, *, normalize: bool) -> np.ndarray:
    """The first `count` numbers of each vector.

    Raises:
        APIError: there are not so many.
    """
    if count > vectors.shape[1]:
        raise APIError(
            f"{count} is more than the {vectors.shape[1]} dimensions that the vectors have",
            param="dimensions",
            code="invalid_value",
        )
    vectors = vectors[:, :count]
    if not normalize:
        return vectors
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _spelt(vector: np.ndarray, encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
