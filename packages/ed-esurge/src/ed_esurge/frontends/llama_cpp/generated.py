"""Requests and answers that `/completion` and `/infill` share: text, counts and times."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.frontends.library.parameters import SamplingOptions, chat_fields, get_server_defaults
from ed_esurge.outputs import CompletionOutput
from ed_esurge.sampling import SamplingParams
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.logprobs import token_probabilities
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import ChatGeneration
from ed_esurge.server.generation.prompts import EncodedPrompt
from ed_esurge.server.generation.requests import MAX_BIASES, MAX_LOGPROBS, ChatRequest
from ed_esurge.server.http.errors import APIError, InvalidField, rename_fields
from ed_esurge.server.http.fields import (
    LLAMA_SAMPLERS,
    JsonSchema,
    few,
    reject_field,
    validate_body,
)
from ed_esurge.server.http.json_parts import JsonItems
from ed_esurge.server.http.streaming import StreamFormat, encode_json

#: llama.cpp's defaults, which differ from those of OpenAI.
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
#: Field of a chat request -> field of this API.
_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "structured_outputs.grammar": "grammar",
    "response_format": "json_schema",
    "top_logprobs": "n_probs",
}


_MISSING = object()
_OPTIONS = frozenset(SamplingOptions.model_fields)
_SHOWN = ("presence_penalty", "frequency_penalty", "temperature", *LLAMA_SAMPLERS)


def default_settings(model: ServedModel) -> dict[str, Any]:
    """Return the sampling options of a request without options."""
    engine = SamplingParams()
    values = {name: getattr(engine, name) for name in _SHOWN}
    return {
        **{name: [*one] if isinstance(one, tuple) else one for name, one in values.items()},
        "repeat_penalty": engine.repetition_penalty,
        "repeat_last_n": -1,
        **_DEFAULTS,
        **get_server_defaults(model),
    }


def _biases(value: object) -> object:
    """Convert llama.cpp's list of pairs to an object; false forbids a token."""
    pairs = [*value.items()] if isinstance(value, Mapping) else value
    if not isinstance(pairs, list):
        return value
    biases = {}
    for place, pair in enumerate(pairs):
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            raise InvalidField(f"item {place} is not a pair of a token id and a number")
        token, bias = pair
        biases[str(token)] = -100 if bias is False else bias
    return biases


FieldName = Annotated[str, Field(min_length=1, max_length=256)]


class LlamaRequest(SamplingOptions):
    """Fields that the bodies share."""

    ALIASES: ClassVar[Mapping[str, str]] = {"n_predict": "num_predict"}

    model: str | None = None
    stream: bool = False
    grammar: Annotated[str | None, Field(max_length=2**16)] = None
    """A grammar in GBNF or Lark, which the text follows."""
    json_schema: JsonSchema | None = None
    logit_bias: Annotated[dict[str, Any] | None, few(MAX_BIASES), BeforeValidator(_biases)] = None
    """Token ids and numbers that are added to their logits; false forbids a token."""
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    """Number of the most probable tokens in `completion_probabilities`; 0 = omitted."""
    ignore_eos: bool = False
    # These fields select a place or a cache of llama.cpp, and do not change the answer.
    id_slot: int | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    samplers: Annotated[
        None, reject_field("the order of the samplers is fixed; omit unused samplers", [])
    ] = None
    lora: Annotated[None, reject_field("adapters of one request; select one by `model`", [])] = None
    t_max_predict_ms: Annotated[None, reject_field("a limit of time; send n_predict", 0, -1)] = None
    post_sampling_probs: Annotated[
        None, reject_field("probabilities after the samplers; n_probs has those before", False)
    ] = None
    response_fields: Annotated[list[FieldName] | None, few(64)] = None
    """Names of the fields of the answer; `a/b` is the field b of a. None = all."""
    n_cmpl: Annotated[None, reject_field("several answers; use /v1/completions with n", 1)] = None

    def settings(self, model: ServedModel) -> dict[str, Any]:
        """Return all options, with the defaults of those that the request omits."""
        request_options = {
            "n_predict": -1,
            "seed": -1,
            "stop": [],
            **{name: getattr(self, name) for name in ("stream", "ignore_eos", "n_probs")},
            "grammar": self.grammar or "",
            "logit_bias": [[int(key), bias] for key, bias in (self.logit_bias or {}).items()],
        }
        values = {name: value for name, value in self.values().items() if name in _OPTIONS}
        if "num_predict" in values:
            values["n_predict"] = values.pop("num_predict")
        return {**default_settings(model), **request_options, **values}

    def chat(self, model: ServedModel) -> dict[str, Any]:
        """Return the fields of a chat request for these fields."""
        values = {**_DEFAULTS, **get_server_defaults(model), **self.values()}
        fields = {"stream": self.stream, **chat_fields(values)}
        if self.grammar:
            fields["structured_outputs"] = {"grammar": self.grammar}
        if self.json_schema is not None:
            schema = {"name": "answer", "schema": self.json_schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.n_probs:
            fields |= {"logprobs": True, "top_logprobs": self.n_probs}
        return {**fields, "ignore_eos": self.ignore_eos, "logit_bias": self.logit_bias}


class Timings(AnswerBody):
    """Measured times of a request."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None


class TokenProbability(AnswerBody):
    """The log-probability of one token."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class CompletionProbability(TokenProbability):
    """The log-probabilities of a token of the answer, and of the most probable tokens."""

    top_logprobs: list[TokenProbability]


class GeneratedAnswer(AnswerBody):
    """Answer of an endpoint. The fields after `stop` belong to the last event of a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    completion_probabilities: list[CompletionProbability] | None = None
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    generation_settings: dict[str, Any] | None = None
    prompt: str | None = None
    has_new_line: bool | None = None
    id_slot: int | None = None
    stop_type: Literal["eos", "word", "limit"] | None = None
    stopping_word: str | None = None
    timings: Timings | None = None


async def generate_response(
    model: ServedModel,
    body: LlamaRequest,
    request: Request,
    tokens: Sequence[int],
    kind: str,
    *,
    message: str,
) -> Response:
    """Continue token ids, and answer in the format of llama.cpp.

    Args:
        kind: prefix of the request id.
        message: the field of the body with the text, for errors.

    Raises:
        APIError: 400, the prompt is too long, or an option does not fit the model.
    """
    with rename_fields({**_NAMES, "messages": message}):
        fields = {"messages": [{"role": "user", "content": ""}], **body.chat(model)}
        turn = await ChatGeneration.begin(
            model,
            validate_body(ChatRequest, fields),
            request,
            kind,
            raw_prompt=EncodedPrompt([*tokens]),
            context=body.num_ctx,
        )

    prompt = await model.prompts.decode([*tokens])
    settings = {**body.settings(model), "n_ctx": body.num_ctx or model.prompts.max_model_len}

    def request_facts(text: str) -> dict[str, Any]:
        return {
            "generation_settings": settings,
            "prompt": prompt,
            "has_new_line": "\n" in text,
            "id_slot": body.id_slot if body.id_slot is not None and body.id_slot >= 0 else 0,
        }

    async def build_response() -> dict[str, Any]:
        (choice,) = await turn.choices()
        head_fields = _head(turn, choice.out, choice.reply.content)
        if turn.body.logprobs:
            head_fields["completion_probabilities"] = JsonItems(
                lambda: _probabilities(turn, choice.out)
            )
        facts = request_facts(choice.reply.content)
        return _select({**head_fields, **facts, **_last(turn, choice.out)}, body.response_fields)

    async def events() -> AsyncGenerator[str]:
        has_new_line = False
        async with aclosing(turn.pieces()) as items:
            async for pieces in items:
                for piece in pieces:
                    text = "".join(getattr(event, "text", "") for event in piece.events)
                    head_fields = _head(turn, piece.out, text)
                    has_new_line = has_new_line or "\n" in text
                    if turn.body.logprobs:
                        head_fields["completion_probabilities"] = [*_probabilities(turn, piece.out)]
                    yield _event({**head_fields, "stop": False})
                    if piece.finish is not None:
                        end = {"index": 0, "content": "", "tokens": []}
                        facts = request_facts("\n" if has_new_line else "")
                        last = {**end, **facts, **_last(turn, piece.out)}
                        yield _event(_select(last, body.response_fields))

    return await turn.generation.answer(
        body.stream, events, build_response, StreamFormat(_error_event)
    )


def _select(answer: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields of an answer that a request names; None = all."""
    if names is None:
        return answer
    selected: dict[str, Any] = {}
    for name in names:
        value = answer
        *_, last = keys = name.split("/")
        for key in keys:
            value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is not _MISSING:
            selected[last] = value
    return selected


def _event(fields: Mapping[str, Any]) -> str:
    return f"data: {encode_json(fields)}\n\n"


def _error_event(error: APIError) -> str:
    return _event(error.envelope())


def _head(turn: ChatGeneration, out: CompletionOutput, text: str) -> dict[str, Any]:
    return {"index": 0, "content": text, "tokens": out.token_ids}


def _probabilities(turn: ChatGeneration, out: CompletionOutput) -> Iterator[dict[str, Any]]:
    texts, top = turn.model.texts_for(turn.body), turn.body.top_logprobs or 0
    return token_probabilities(texts, out.token_ids, out.logprobs or [], top)


def _last(turn: ChatGeneration, out: CompletionOutput) -> dict[str, Any]:
    counts, times = turn.generation, turn.generation.times
    word = out.stop_reason if isinstance(out.stop_reason, str) else ""
    kind = "word" if word else "limit" if out.finish_reason == "length" else "eos"
    assert times is not None, "the last event follows an output"
    ended = times.last_token_time or times.arrival_time
    first = times.first_token_time or ended
    begun = times.first_scheduled_time or first
    predicted = (ended - first) * 1000
    return {
        "stop": True,
        "model": turn.model.name,
        "tokens_predicted": counts.completion_tokens,
        "tokens_evaluated": counts.prompt_tokens,
        "tokens_cached": counts.cached_tokens,
        "truncated": counts.truncated_tokens > 0,
        "stop_type": kind,
        "stopping_word": word,
        "timings": {
            "cache_n": counts.cached_tokens,
            "prompt_n": counts.prompt_tokens - counts.cached_tokens,
            "prompt_ms": (first - begun) * 1000,
            "predicted_n": counts.completion_tokens,
            "predicted_ms": predicted,
            "predicted_per_second": (counts.completion_tokens - 1) / predicted * 1000
            if predicted > 0
            else None,
        },
    }
