"""`POST /classify` in vLLM's format: the probabilities of a classifier's labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.outputs import LabelSet
from ed_esurge.sampling import PoolingParams
from ed_esurge.server.generation.abilities import CLASSIFIES, unsupported_task
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.pooled_requests import TextRequest
from ed_esurge.server.http.json_parts import JsonItems
from ed_esurge.server.openai.embeddings import EmbeddingUsage, EncodedTexts, answer_list
from ed_esurge.server.routing import post


class ClassificationRequest(TextRequest):
    """Body of `POST /classify`."""

    ALIASES: ClassVar[Mapping[str, str]] = {"activation": "use_activation"}

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
    labels = require_labels(model, "/classify requires the task 'sequence-classification'")
    request_id = new_id("classify", body.request_id)
    texts = await EncodedTexts.of(model, body, embeds=False)
    options = model.queue_options(body)
    size = model.pooled_size(request, texts.prompts)

    params = PoolingParams(normalize=False)
    logits = await model.vectors(texts.prompts, params, request_id, **options)
    scores = apply_activation(labels, logits, body.use_activation)

    def data() -> Iterator[dict[str, Any]]:
        for index, row in enumerate(scores):
            yield {
                "index": index,
                "label": labels.names[row.argmax()],
                "probs": row.tolist(),
                "num_classes": len(row),
            }

    items = JsonItems(data, group=4)
    return await answer_list(request_id, model, items, texts.prompts, texts.truncated, size)


def require_labels(model: ServedModel, reason: str) -> LabelSet:
    """Return the labels of a classifier.

    Raises:
        APIError: 400, the model is not a classifier; `reason` names the constraint.
    """
    if model.labels is None:
        raise unsupported_task(model, CLASSIFIES, reason)
    return model.labels


def apply_activation(labels: LabelSet, logits: np.ndarray, use_activation: bool) -> np.ndarray:
    """Return the probabilities of logits, or the logits."""
    return labels.probabilities(logits) if use_activation else logits


ENDPOINTS = (
    post(
        "/classify",
        "Classify texts.",
        classify,
        ClassificationRequest,
        ClassificationList,
    ),
)
