"""`POST /classify` in vLLM's format: the probabilities of a classifier's labels."""

from __future__ import annotations

import time
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field, PlainValidator

from ed_esurge.sampling import PoolingParams
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.pipeline import answer_headers
from ed_esurge.server.generation.requests import as_prompts
from ed_esurge.server.http.fields import RequestBody
from ed_esurge.server.openai.embeddings import EmbeddingUsage, token_counts
from ed_esurge.server.routing import post


class ClassificationRequest(RequestBody):
    """Body of `POST /classify`. `input` is converted to a list."""

    ALIASES: ClassVar[dict[str, str]] = {"activation": "use_activation"}

    input: Annotated[list[str | list[int]], PlainValidator(as_prompts)]
    model: str | None = None
    user: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    use_activation: bool = True
    """Whether `probs` contains probabilities; false = logits."""


class Classification(AnswerBody):
    """The probabilities of one text, and the name of its most probable label.

    `label` is null if the checkpoint has no name for the label.
    """

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationList(AnswerBody):
    """Answer of `POST /classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


async def classify(model: ServedModel, body: ClassificationRequest, request: Request) -> Response:
    """Answer a classification request.

    Raises:
        APIError: 400, the model is not a classifier, or a text is too long.
    """
    labels = model.labels
    if labels is None:
        raise model.unsupported_task("/classify requires the task 'sequence-classification'")
    prompts, truncated = await model.prompts.tokens_of(
        body.input,
        add_special_tokens=body.add_special_tokens,
        last=body.truncate_prompt_tokens,
        param="input",
    )
    request_id = new_id("classify", None)

    async def whole() -> dict[str, Any]:
        logits = await model.vectors(prompts, PoolingParams(normalize=False))
        scores = labels.probabilities(logits) if body.use_activation else logits
        data = [
            {
                "index": index,
                "label": labels.names[row.argmax()],
                "probs": row.tolist(),
                "num_classes": len(row),
            }
            for index, row in enumerate(scores)
        ]
        return {
            "id": request_id,
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": data,
            "usage": token_counts(prompts, truncated),
        }

    headers = answer_headers(request_id, truncated)
    return await model.lifetime(request).answer(whole(), headers)


ENDPOINTS = (
    post(
        "/classify",
        "Classify texts.",
        classify,
        ClassificationRequest,
        ClassificationList,
    ),
)
