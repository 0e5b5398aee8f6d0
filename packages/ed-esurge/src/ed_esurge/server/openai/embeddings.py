"""`POST /v1/embeddings`: pooled hidden states of texts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from ed_infra.errors import ConfigError
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.sampling import PoolingParams
from ed_esurge.server.generation.abilities import EMBEDS, require_ability
from ed_esurge.server.generation.answer_size import NUMBER_BYTES, AnswerSize
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.pipeline import answer_headers, truncation
from ed_esurge.server.generation.pooled_requests import EncodingFields, PoolingName, TextRequest
from ed_esurge.server.generation.rendering import ConversationOptions
from ed_esurge.server.generation.text_pairs import PairSide
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.json_parts import JsonItems, answer_json
from ed_esurge.server.routing import post


class VectorRequest(TextRequest, EncodingFields):
    """Fields of a request for vectors."""

    ALIASES: ClassVar[Mapping[str, str]] = {"use_activation": "normalize"}

    dimensions: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    """Number of elements of each vector. Shorter vectors are normalized again."""

    # Extensions.
    pooling: PoolingName = "last"
    prompt_name: str | None = None
    """Name of the checkpoint's prompt that precedes each text. "" = no prompt; null = the default
    prompt of the checkpoint. Token ids and messages have no prompt."""


class EmbeddingRequest(VectorRequest):
    """Body of `POST /v1/embeddings`."""

    normalize: bool = True
    """Whether vectors have length 1; vLLM's name is `use_activation`."""


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

    id: str
    object: Literal["list"]
    created: int
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


async def _embed(model: ServedModel, body: EmbeddingRequest, request: Request) -> Response:
    """Answer an embedding request.

    Raises:
        APIError: 400, the model returns no embeddings, a text is too long, the prompt is unknown,
            or the vectors have fewer dimensions than requested.
    """
    request_id = new_id("embd", body.request_id)
    texts = await EncodedTexts.of(model, body)
    params = await texts.embedding_params(body, normalize=body.normalize)
    options = model.queue_options(body)
    size = model.pooled_size(request, texts.prompts)

    vectors = await model.vectors(texts.prompts, params, request_id, **options)
    size.raise_to(vectors.size * NUMBER_BYTES)
    if body.dimensions is not None:
        vectors = truncate_vectors(vectors, body.dimensions, normalize=body.normalize)
    data = JsonItems(
        lambda: (
            {
                "object": "embedding",
                "index": index,
                "embedding": body.encode_vectors(vector),
            }
            for index, vector in enumerate(vectors)
        ),
        group=0,
    )
    return await answer_list(request_id, model, data, texts.prompts, texts.truncated, size)


@dataclass(frozen=True)
class EncodedTexts:
    """The encoded texts of a request.

    Attributes:
        model: the model that reads the texts.
        prompts: one prompt for each text, or the prompt of the conversation.
        truncated: number of tokens that were removed.
        prefix: prompt of the checkpoint before each text; "" without a prompt.
        prefixed: whether each text starts with the prefix.
    """

    model: ServedModel
    prompts: list[CheckedPrompt]
    truncated: int
    prefix: str
    prefixed: list[bool]

    @classmethod
    async def of(
        cls, model: ServedModel, body: TextRequest, *, embeds: bool = True
    ) -> EncodedTexts:
        """Encode the texts or the conversation of a request.

        Args:
            embeds: whether the texts are embedded, so that prompts of the checkpoint precede them.

        Raises:
            APIError: 400, the model returns no embeddings, a text is too long, or the prompt is
                unknown.
        """
        if embeds:
            require_ability(model, EMBEDS)
        limits = {"most": body.truncate_prompt_tokens, "side": body.truncation_side}
        if body.messages is not None:
            options = ConversationOptions(
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                variables=body.chat_template_kwargs or {},
            )
            encoded = await model.prompts.conversation(body.messages, options)
            if encoded.encoder_inputs:
                raise APIError(
                    "images have no pooled vectors: send messages of text",
                    param="messages",
                    code="unsupported_value",
                )
            encoded_prompts = await model.prompts.encode_prompts(
                [encoded.tokens], param="messages", **limits
            )
            return cls(model, *encoded_prompts, "", [False])
        prefix, texts = "", body.input or []
        if embeds and isinstance(body, VectorRequest):
            try:
                prefix = model.embedding_settings.prompt(body.prompt_name)
            except ConfigError as error:
                raise APIError(str(error), param="prompt_name", code="invalid_value") from None
        encoded_prompts = await model.prompts.encode_prompts(
            [prefix + text if isinstance(text, str) else text for text in texts],
            add_special_tokens=body.add_special_tokens is not False,
            param="input",
            **limits,
        )
        return cls(model, *encoded_prompts, prefix, [isinstance(text, str) for text in texts])

    async def embedding_params(
        self, body: VectorRequest, *, normalize: bool
    ) -> list[PoolingParams]:
        """Return the options of each text."""
        base = PoolingParams(pooling=body.pooling, normalize=normalize)
        lengths = await prompt_lengths(
            self.model, self.prefix, self.prompts, self.prefixed, body.truncation_side
        )
        return [base.replace(prompt_length=length) if length else base for length in lengths]


async def prompt_lengths(
    model: ServedModel,
    prompt: str,
    prompts: Sequence[CheckedPrompt],
    with_prompt: Sequence[bool],
    side: PairSide | None = None,
) -> list[int]:
    """Return how many tokens at the start of each encoded text are not pooled.

    Args:
        prompt: text of the prompt of the checkpoint.
        prompts: the encoded texts.
        with_prompt: whether each text starts with the prompt.
        side: the side that lost tokens; see `PromptEncoder.encode_prompts`.
    """
    if model.embedding_settings.include_prompt or not prompt:
        return [0] * len(prompts)
    count = await model.prompts.prefix_length(prompt)
    truncates_left = model.prompts.truncation_side(side) == "left"
    pairs = zip(prompts, with_prompt, strict=True)
    return [
        max(0, count - encoded.removed * truncates_left) if starts else 0
        for encoded, starts in pairs
    ]


async def answer_list(
    request_id: str,
    model: ServedModel,
    items: JsonItems,
    prompts: list[CheckedPrompt],
    truncated: int,
    size: AnswerSize,
) -> Response:
    """Return the answer with one item for each text: vectors, classes or scores.

    Args:
        request_id: the id of the request.
        model: the model that read the texts.
        items: the items of the answer.
        prompts: the texts.
        truncated: number of tokens that were removed.
        size: the memory of the answer.
    """
    response = {
        "id": request_id,
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": items,
        "usage": token_counts(prompts, truncated),
    }
    return await answer_json(response, size.bytes, answer_headers(request_id, truncated))


def token_counts(prompts: list[CheckedPrompt], truncated: int) -> dict[str, int]:
    """Return the `usage` of an answer: the prompt tokens, and the truncated tokens unless 0."""
    count = sum(len(prompt) for prompt in prompts)
    return {"prompt_tokens": count, "total_tokens": count, **truncation(truncated)}


def truncate_vectors(vectors: np.ndarray, count: int, *, normalize: bool) -> np.ndarray:
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


ENDPOINTS = (
    post("/v1/embeddings", "Embed texts.", _embed, EmbeddingRequest, Embeddings, batched=True),
)
