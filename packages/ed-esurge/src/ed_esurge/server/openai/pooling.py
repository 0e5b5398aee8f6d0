"""`POST /pooling` in vLLM's format: the vectors, labels or token vectors of texts."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import BeforeValidator
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.server.generation.abilities import EMBEDS, EMBEDS_TOKENS, POOLS, require_ability
from ed_esurge.server.generation.answer_size import NUMBER_BYTES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.http.errors import APIError, InvalidField
from ed_esurge.server.http.fields import reject_field
from ed_esurge.server.http.json_parts import JsonItems
from ed_esurge.server.openai.classification import apply_activation, require_labels
from ed_esurge.server.openai.embeddings import (
    EmbeddingUsage,
    EncodedTexts,
    VectorRequest,
    answer_list,
    truncate_vectors,
)
from ed_esurge.server.routing import post

PoolingTask = Literal["embed", "classify", "token_embed"]
#: Tasks of vLLM that this server refuses, with the way out.
_REFUSED = {
    "score": "send pairs of texts to /score, or use classify",
    "encode": "use token_embed",
    "token_classify": "no model of this server has labels of tokens, use classify or token_embed",
    "plugin": "this server has no plugins, use embed, classify or token_embed",
    "embed&token_classify": "use embed",
}


def _task(value: object) -> object:
    if isinstance(value, str) and value in _REFUSED:
        raise InvalidField(f"{value!r} is not supported: {_REFUSED[value]}")
    return value


class PoolingRequest(VectorRequest):
    """Body of `POST /pooling`."""

    task: Annotated[PoolingTask | None, BeforeValidator(_task)] = None
    """null = "classify" for a classifier, and "embed" for other models."""
    normalize: bool = True
    """Whether vectors have length 1, or labels have probabilities instead of logits; vLLM's name is
    `use_activation`."""
    data: Annotated[None, reject_field("plugins; send input or messages")] = None


class Pooled(AnswerBody):
    """The vector of a text, or one vector of each token, as numbers or as base64."""

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class PooledList(AnswerBody):
    """Answer of `POST /pooling`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


async def _pool(model: ServedModel, body: PoolingRequest, request: Request) -> Response:
    """Answer a pooling request.

    Raises:
        APIError: 400, the model does not support the task, a text is too long, or an option has no
            effect on the task.
    """
    require_ability(model, POOLS)
    task = body.task or ("embed" if model.labels is None else "classify")
    _check_options(body, task)
    request_id = new_id("pooling", body.request_id)
    labels = None
    if task == "classify":
        labels = require_labels(model, "the pooling task 'classify' requires a classifier")
    else:
        require_ability(model, EMBEDS if task == "embed" else EMBEDS_TOKENS)
    texts = await EncodedTexts.of(model, body, embeds=labels is None)
    params = await texts.embedding_params(body, normalize=body.normalize and labels is None)
    if task == "token_embed":
        params = [prompt_params.replace(task="token_embed") for prompt_params in params]
    options = model.queue_options(body)
    size = model.pooled_size(request, texts.prompts, each_token=task == "token_embed")

    rows = await model.pool_prompts(texts.prompts, params, request_id, **options)
    size.raise_to(sum(row.size for row in rows) * NUMBER_BYTES)
    vectors: list[np.ndarray] | np.ndarray = rows
    if labels is not None:
        vectors = apply_activation(labels, np.stack(rows), body.normalize)
    elif body.dimensions is not None:
        vectors = truncate_vectors(np.stack(rows), body.dimensions, normalize=body.normalize)
    data = JsonItems(
        lambda: (
            {"index": index, "object": "pooling", "data": body.encode_vectors(vector)}
            for index, vector in enumerate(vectors)
        ),
        group=0,
    )
    return await answer_list(request_id, model, data, texts.prompts, texts.truncated, size)


def _check_options(body: PoolingRequest, task: PoolingTask) -> None:
    """Check that the options have an effect on the task. Raises APIError: 400."""
    names = {"classify": ("dimensions", "prompt_name", "pooling"), "token_embed": ("dimensions",)}
    for name in names.get(task, ()):
        if name in body.model_fields_set:
            raise APIError(
                f"has no effect on the task {task!r}: omit the field, or use the task 'embed'",
                param=name,
                code="invalid_value",
            )


ENDPOINTS = (post("/pooling", "Pool texts.", _pool, PoolingRequest, PooledList),)
