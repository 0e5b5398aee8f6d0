"""`POST /v1/score` and `/v1/rerank`: the similarity of texts.

A classifier with one label scores pairs of texts as a cross-encoder. For other models, a score is
the similarity of two vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import numpy as np
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    model_validator,
)
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.outputs import LabelSet
from ed_esurge.sampling import PoolingParams
from ed_esurge.server.generation.abilities import RANKS, require_ability
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.pipeline import answer_headers
from ed_esurge.server.generation.pooled_requests import PooledRequest, PoolingName
from ed_esurge.server.generation.requests import MAX_PROMPTS
from ed_esurge.server.http.errors import APIError, InvalidField
from ed_esurge.server.http.fields import few, reject_field
from ed_esurge.server.http.json_parts import JsonItems, answer_json
from ed_esurge.server.openai.embeddings import (
    EmbeddingUsage,
    answer_list,
    prompt_lengths,
    token_counts,
)
from ed_esurge.server.routing import post


def _wrap_in_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _document(value: object) -> str | dict[str, Any]:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return dict(value)
    raise InvalidField("must be a string, or an object with a string `text`")


Texts = Annotated[list[str], Field(min_length=1), BeforeValidator(_wrap_in_list), few(MAX_PROMPTS)]
RankedInput = Annotated[
    str | dict[str, Any],
    PlainValidator(_document, json_schema_input_type=str | dict[str, Any]),
]
RankedInputs = Annotated[
    list[RankedInput], Field(min_length=1), BeforeValidator(_wrap_in_list), few(MAX_PROMPTS)
]


_NO_TEMPLATE = "scores use no chat template, put the instruction into the first text"
_Count = Annotated[int | None, Field(ge=0, lt=2**31)]


class ScoringRequest(PooledRequest):
    """Fields of both kinds of requests."""

    ALIASES: ClassVar[Mapping[str, str]] = {"activation": "use_activation"}

    max_tokens_per_query: _Count = None
    """Number of tokens of each first text that are read; 0 or null = all."""
    max_tokens_per_doc: _Count = None
    """Number of tokens of each document that are read; 0 or null = all."""
    use_activation: bool = True
    """Whether a cross-encoder applies its activation; false = the logit."""
    instruction: Annotated[None, reject_field(_NO_TEMPLATE, "")] = None
    chat_template_kwargs: Annotated[None, reject_field(_NO_TEMPLATE, {})] = None

    # Extension.
    pooling: PoolingName = "last"


class ScoreRequest(ScoringRequest):
    """Body of `POST /v1/score` in vLLM's format: pairs of texts, or one text and several texts."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **ScoringRequest.ALIASES,
        **dict.fromkeys(("queries", "data_1"), "text_1"),
        **dict.fromkeys(("documents", "items", "data_2"), "text_2"),
    }

    text_1: Texts
    text_2: Texts

    _names: tuple[str, str] = PrivateAttr(("text_1", "text_2"))

    @model_validator(mode="wrap")
    @classmethod
    def _note_names(cls, data: Any, handler: ModelWrapValidatorHandler[ScoreRequest]) -> Any:
        body = handler(data)
        spelled = {cls.ALIASES.get(key, key): key for key in data}
        body._names = spelled["text_1"], spelled["text_2"]
        return body

    @property
    def names(self) -> tuple[str, str]:
        """The names of both fields in the spelling of the client."""
        return self._names


class RerankRequest(ScoringRequest):
    """Body of `POST /v1/rerank` in the formats of Jina and Cohere (v1 and v2)."""

    query: str
    documents: RankedInputs
    top_n: Annotated[int | None, Field(ge=0, lt=2**31)] = None
    """Number of documents to return, best first; 0 or null = all."""
    return_documents: bool = True
    rank_fields: Annotated[Any, reject_field("only the field `text` is read", ["text"])] = None
    max_chunks_per_doc: Annotated[
        Any, reject_field("a document is one chunk, use max_tokens_per_doc", 1)
    ] = None


class Score(AnswerBody):
    """The score of a pair of texts."""

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
    """A document of the request, with all of its fields."""

    model_config = ConfigDict(extra="allow")

    text: str


class Ranked(AnswerBody):
    """A document with its index in the request and its score."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class APIVersion(AnswerBody):
    """The version of Cohere's format."""

    version: str


class InputTokens(AnswerBody):
    """Token counts in Cohere's format."""

    input_tokens: int
    output_tokens: int


class RerankMeta(AnswerBody):
    """Details of an answer in Cohere's format."""

    api_version: APIVersion
    tokens: InputTokens


class Reranked(AnswerBody):
    """Answer of `POST /v1/rerank`, best first. `usage` is Jina's, and `meta` is Cohere's."""

    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage
    meta: RerankMeta


async def _score(model: ServedModel, body: ScoreRequest, request: Request) -> Response:
    """Answer a score request.

    Raises:
        APIError: 400, the model is a classifier with several labels, the numbers of texts do not
            match, or a text is too long.
    """
    first, second = body.text_1, body.text_2
    if len(first) not in (1, len(second)):
        raise APIError(
            f"has {len(first)} texts, and text_2 has {len(second)}: send one text, or as many as "
            "text_2 has",
            param="text_1",
        )
    default = model.embedding_settings.prompt()
    request_id = new_id("score", body.request_id)
    texts = _Texts(body.names, first, second, (default, default), body, request_id)
    scorer = await _scorer(model, texts)
    size = model.pooled_size(request, scorer.prompts)

    scores = await scorer.scores()
    data = JsonItems(
        lambda: (
            {"index": index, "object": "score", "score": float(value)}
            for index, value in enumerate(scores)
        )
    )
    return await answer_list(request_id, model, data, scorer.prompts, scorer.truncated, size)


async def rerank(model: ServedModel, body: RerankRequest, request: Request) -> Response:
    """Answer a rerank request.

    Raises:
        APIError: 400, the model is a classifier with several labels, or a text is too long.
    """
    documents = [
        document if isinstance(document, str) else document["text"] for document in body.documents
    ]
    settings = model.embedding_settings
    prompts = (
        settings.first_prompt("query"),
        settings.first_prompt("document", "passage", "corpus"),
    )
    request_id = new_id("rerank", body.request_id)
    names = ("query", "documents")
    texts = _Texts(names, [body.query], documents, prompts, body, request_id)
    scorer = await _scorer(model, texts)
    size = model.pooled_size(request, scorer.prompts)

    scores = await scorer.scores()
    order = np.argsort(-scores, kind="stable").tolist()

    def results() -> Iterator[dict[str, Any]]:
        for index in order[: body.top_n or len(order)]:
            result: dict[str, Any] = {"index": index, "relevance_score": float(scores[index])}
            if body.return_documents:
                document = body.documents[index]
                result["document"] = {"text": document} if isinstance(document, str) else document
            yield result

    usage = token_counts(scorer.prompts, scorer.truncated)
    response = {
        "id": request_id,
        "model": model.name,
        "results": JsonItems(results, group=1),
        "usage": usage,
        "meta": {
            "api_version": {"version": "2"},
            "tokens": {"input_tokens": usage["prompt_tokens"], "output_tokens": 0},
        },
    }
    headers = answer_headers(request_id, scorer.truncated)
    return await answer_json(response, size.bytes, headers)


@dataclass(frozen=True)
class _Texts:
    """The texts of a request.

    Attributes:
        names: fields of the first and the second texts, for errors.
        first, second: texts to compare: one by one, or the only first text with each second text.
        prefixes: prompts of an embedding model for the first and the second texts.
        body: the request.
        request_id: name of the request in the log and in traces.
    """

    names: tuple[str, str]
    first: list[str]
    second: list[str]
    prefixes: tuple[str, str]
    body: ScoringRequest
    request_id: str

    async def truncate_texts(self, model: ServedModel) -> tuple[list[str], list[str]]:
        """Return the first and the second texts, up to the limits of their tokens."""
        limits = self.body.max_tokens_per_query, self.body.max_tokens_per_doc
        pairs = zip((self.first, self.second), limits, strict=True)
        first, second = [
            await model.prompts.first_tokens(texts, most) if most else texts
            for texts, most in pairs
        ]
        return first, second

    async def vectors(
        self, model: ServedModel, prompts: list[CheckedPrompt], params: list[PoolingParams]
    ) -> np.ndarray:
        """Return the vectors of prompts of the request."""
        options = model.queue_options(self.body)
        return await model.vectors(prompts, params, self.request_id, **options)


class _Scorer(Protocol):
    """Encoded texts.

    Attributes:
        prompts: the prompts.
        truncated: number of tokens that were removed.
    """

    prompts: list[CheckedPrompt]
    truncated: int

    async def scores(self) -> np.ndarray:
        """Return the score of each pair, float64."""
        ...


async def _scorer(model: ServedModel, texts: _Texts) -> _Scorer:
    """Encode texts for the task of the model.

    Raises:
        APIError: 400, the model is a classifier with several labels, or a text is too long.
    """
    labels = model.labels
    if labels is not None and len(labels.names) == 1:
        return await _CrossEncoder.of(model, labels, texts)
    require_ability(model, RANKS)
    if not texts.body.use_activation:
        raise APIError(
            "false requires a cross-encoder, and this model compares vectors: omit the field",
            param="use_activation",
            code="unsupported_value",
        )
    return await _BiEncoder.of(model, texts)


@dataclass
class _CrossEncoder:
    """A classifier with one label, which reads both texts of a pair at once."""

    model: ServedModel
    labels: LabelSet
    texts: _Texts
    prompts: list[CheckedPrompt]
    truncated: int
    params: list[PoolingParams]

    @classmethod
    async def of(cls, model: ServedModel, labels: LabelSet, texts: _Texts) -> _CrossEncoder:
        body = texts.body
        if body.truncation_side == "left":
            raise APIError(
                "pairs of texts lose tokens at the end of the longer text: omit the field",
                param="truncation_side",
                code="unsupported_value",
            )
        queries = texts.first
        if body.max_tokens_per_query:
            queries = await model.prompts.first_tokens(queries, body.max_tokens_per_query)
        first = queries * len(texts.second) if len(queries) == 1 else queries
        encoded = await model.prompts.encode_pairs(
            list(zip(first, texts.second, strict=True)),
            longest=body.truncate_prompt_tokens,
            most=body.max_tokens_per_doc or None,
            param=texts.names[1],
        )
        params = [
            PoolingParams(normalize=False, second_text_start=pair.second_start) for pair in encoded
        ]
        prompts = [pair.prompt for pair in encoded]
        truncated = sum(prompt.removed for prompt in prompts)
        return cls(model, labels, texts, prompts, truncated, params)

    async def scores(self) -> np.ndarray:
        logits = await self.texts.vectors(self.model, self.prompts, self.params)
        if not self.texts.body.use_activation:
            return logits[:, 0].astype(np.float64)
        return self.labels.scores(logits)


@dataclass
class _BiEncoder:
    """A model whose vectors of texts are compared. The first prompts are the first texts."""

    model: ServedModel
    texts: _Texts
    prompts: list[CheckedPrompt]
    truncated: int
    params: list[PoolingParams]
    count: int

    @classmethod
    async def of(cls, model: ServedModel, texts: _Texts) -> _BiEncoder:
        body = texts.body
        normalize = model.embedding_settings.similarity_fn_name == "cosine"
        base = PoolingParams(pooling=body.pooling, normalize=normalize)
        prompts: list[CheckedPrompt] = []
        params: list[PoolingParams] = []
        truncated = 0
        cut = await texts.truncate_texts(model)
        for name, prefix, side_texts in zip(texts.names, texts.prefixes, cut, strict=True):
            encoded, removed = await model.prompts.encode_prompts(
                [prefix + text for text in side_texts],
                most=body.truncate_prompt_tokens,
                side=body.truncation_side,
                param=name,
            )
            lengths = await prompt_lengths(
                model, prefix, encoded, [True] * len(encoded), body.truncation_side
            )
            prompts += encoded
            params += [base.replace(prompt_length=length) if length else base for length in lengths]
            truncated += removed
        return cls(model, texts, prompts, truncated, params, len(texts.first))

    async def scores(self) -> np.ndarray:
        vectors = await self.texts.vectors(self.model, self.prompts, self.params)
        vectors = vectors.astype(np.float64)
        left, right = vectors[: self.count], vectors[self.count :]
        match self.model.embedding_settings.similarity_fn_name:
            case "euclidean":
                return -np.linalg.norm(left - right, axis=1)
            case "manhattan":
                return -np.abs(left - right).sum(axis=1)
            case _:  # cosine or dot
                return (left * right).sum(axis=1)


ENDPOINTS = (
    *(
        post(
            path,
            "Score the similarity of texts.",
            _score,
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
