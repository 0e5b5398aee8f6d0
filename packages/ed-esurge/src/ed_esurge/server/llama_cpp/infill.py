"""`POST /infill`: fill the gap between two texts of code."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.outputs import CompletionOutput
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import ChatGeneration
from ed_esurge.server.generation.prompts import EncodedPrompt
from ed_esurge.server.generation.requests import ChatRequest
from ed_esurge.server.http.errors import APIError, renamed
from ed_esurge.server.http.fields import RequestBody, few, validated
from ed_esurge.server.http.streaming import StreamFormat, encode
from ed_esurge.server.library.parameters import SamplingOptions, chat_fields
from ed_esurge.server.routing import post

MAX_EXTRA = 1024
#: llama.cpp's defaults, which differ from those of OpenAI.
DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}


class ExtraFile(RequestBody):
    """Another file of the repository."""

    filename: Annotated[str, Field(max_length=4096)] = "tmp"
    text: str


class InfillRequest(SamplingOptions):
    """Body of `POST /infill`."""

    ALIASES: ClassVar[dict[str, str]] = {"n_predict": "num_predict"}

    model: str | None = None
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], few(MAX_EXTRA)] = Field(default_factory=list)
    prompt: str = ""
    """Text of the gap so far."""
    stream: bool = False


class Timings(AnswerBody):
    """Measured times of a request."""

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None


class InfillAnswer(AnswerBody):
    """Answer of `POST /infill`. The fields after `stop` belong to the last event of a stream."""

    content: str
    tokens: list[int]
    stop: bool
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None
    stop_type: Literal["eos", "word", "limit"] | None = None
    stopping_word: str | None = None
    timings: Timings | None = None


async def infill(model: ServedModel, body: InfillRequest, request: Request) -> Response:
    """Fill a gap.

    Raises:
        APIError: 400, the model has no tokens for gaps, or the texts are too long.
    """
    options = {**DEFAULTS, **body.values()}
    files = [(file.filename, file.text) for file in body.input_extra]
    with renamed(NAMES):
        tokens = await model.prompts.infill(
            body.input_prefix, body.input_suffix, files=files, param="input_suffix"
        )
        if body.prompt:
            (begun,) = await model.prompts.encode([body.prompt], add_special_tokens=False)
            tokens += begun
        messages = [{"role": "user", "content": ""}]
        fields = {"messages": messages, "stream": body.stream, **chat_fields(options)}
        chat = validated(ChatRequest, fields)
        turn = await ChatGeneration.begin(
            model,
            chat,
            request,
            "infill",
            plain=EncodedPrompt(tokens),
            context=options.get("num_ctx"),
            own_options=True,
        )

    async def whole() -> dict[str, Any]:
        (choice,) = await turn.choices()
        known = {"content": choice.reply.content, "tokens": choice.out.token_ids}
        return {**known, **_last(turn, choice.out)}

    async def events() -> AsyncGenerator[str]:
        async with aclosing(turn.pieces()) as items:
            async for pieces in items:
                for piece in pieces:
                    text = "".join(getattr(event, "text", "") for event in piece.events)
                    known = {"content": text, "tokens": piece.out.token_ids, "stop": False}
                    yield _event(known)
                    if piece.finish is not None:
                        yield _event({"content": "", "tokens": [], **_last(turn, piece.out)})

    return await turn.generation.answer(body.stream, events, whole, StreamFormat(_error_event))


def _event(fields: dict[str, Any]) -> str:
    return f"data: {encode(fields)}\n\n"


def _error_event(error: APIError) -> str:
    return _event(error.envelope())


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
            "prompt_n": counts.prompt_tokens - counts.cached_tokens,
            "prompt_ms": (first - begun) * 1000,
            "predicted_n": counts.completion_tokens,
            "predicted_ms": predicted,
            "predicted_per_second": (counts.completion_tokens - 1) / predicted * 1000
            if predicted > 0
            else None,
        },
    }


ENDPOINTS = (
    post(
        "/infill",
        "Fill the gap between two texts in the format of llama.cpp's server.",
        infill,
        InfillRequest,
        InfillAnswer,
        streams=True,
        ability=GENERATES,
    ),
)
