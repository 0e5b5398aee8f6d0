"""`POST /v1/embeddings`: pooled hidden states of texts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from fastapi import Request
from fastapi.responses import Response
from pydantic import Field, PlainValidator

from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.sampling import PoolingParams
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.pipeline import answer_headers, truncation
from ed_esurge.server.generation.requests import as_prompts
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.fields import RequestBody
from ed_esurge.server.routing import post

PoolingName = Literal["last", "mean"]


class EmbeddingRequest(RequestBody):
    """Body of `POST /v1/embeddings`. `input` is converted to a list."""

    input: Annotated[list[str | list[int]], PlainValidator(as_prompts)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    """Number of elements of each vector. Shorter vectors are normalized again."""
    user: str | None = None

    # Extensions.
    pooling: PoolingName = "last"
    normalize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    prompt_name: str | None = None
    """Name of the checkpoint's prompt that precedes each text. "" = no prompt; null = the default
    prompt of the checkpoint. Token ids have no prompt."""


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
        APIError: 400, the model is a classifier, a text is too long, the prompt is unknown, or the
            vectors have fewer dimensions than requested.
    """
    check_embeds(model)
    try:
        prompt = model.embedding_settings.prompt(body.prompt_name)
    except ConfigError as error:
        raise APIError(str(error), param="prompt_name", code="invalid_value") from None
    prompts, truncated = await model.prompts.tokens_of(
        [prompt + text if isinstance(text, str) else text for text in body.input],
        add_special_tokens=body.add_special_tokens,
        last=body.truncate_prompt_tokens,
        param="input",
    )
    base = PoolingParams(pooling=body.pooling, normalize=body.normalize)
    lengths = await prompt_lengths(model, prompt, prompts, [type(x) is str for x in body.input])
    params = [base.replace(prompt_length=length) if length else base for length in lengths]

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


def check_embeds(model: ServedModel) -> None:
    """Raise APIError if the model is a classifier: its logits are no embedding."""
    if model.task == TaskType.SEQUENCE_CLASSIFICATION:
        raise model.unsupported_task("it returns no embeddings, send the texts to /classify")


async def prompt_lengths(
    model: ServedModel, prompt: str, prompts: Sequence[CheckedPrompt], with_prompt: Sequence[bool]
) -> list[int]:
    """Return how many tokens at the start of each encoded text are not pooled.

    Args:
        prompt: text of the prompt of the checkpoint.
        prompts: the encoded texts.
        with_prompt: whether each text starts with the prompt.
    """
    if model.embedding_settings.include_prompt or not prompt:
        return [0] * len(prompts)
    count = await model.prompts.prefix_length(prompt)
    pairs = zip(prompts, with_prompt, strict=True)
    return [max(0, count - encoded.removed) if starts else 0 for encoded, starts in pairs]


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


ENDPOINTS = (
    post("/v1/embeddings", "Embed texts.", embed, EmbeddingRequest, Embeddings, batched=True),
)
