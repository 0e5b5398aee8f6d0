"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: audio files to text."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.pipeline import answer_headers
from ed_esurge.server.generation.speech import heard, speech_engine
from ed_esurge.server.http.admission import get_client
from ed_esurge.server.http.errors import APIError, client_gone
from ed_esurge.server.http.fields import RequestBody, few, reject_field
from ed_esurge.server.http.streaming import encode_json
from ed_esurge.server.openai.transcripts import TextDeltas, subtitles, verbose
from ed_esurge.server.routing import post
from ed_esurge.speech.options import TranscriptionOptions

TranscriptFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]
_SPEAKERS = "the model does not distinguish speakers, omit the field"
#: Formats with times of segments.
TIMED = ("verbose_json", "srt", "vtt")


def _wrap_in_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class AudioRequest(RequestBody):
    """The fields of both endpoints."""

    file: Annotated[bytes, Field(json_schema_extra={"format": "binary"})]
    """The audio file."""
    model: str | None = None
    prompt: Annotated[str, Field(max_length=2**14)] | None = None
    """Earlier text, or names as the recording spells them. The model reads the last tokens."""
    response_format: TranscriptFormat = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Temperature of the draws. 0: greedy, and higher temperatures after failed attempts."""

    # Extensions.
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the draws."""


class TranscriptionRequest(AudioRequest):
    """Body of `POST /v1/audio/transcriptions`, as multipart/form-data."""

    language: Annotated[str, Field(max_length=64)] | None = None
    """Code of the language, such as `en`. null: the model detects the language."""
    stream: bool = False
    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]], few(2), BeforeValidator(_wrap_in_list)
    ] = Field(default_factory=list)
    """What has times in the format verbose_json. Words require Whisper with `alignment_heads`."""
    chunking_strategy: Annotated[
        None, reject_field("the model cuts the recording itself, omit the field", "auto")
    ] = None
    include: Annotated[
        None, reject_field("transcripts have no log-probabilities of tokens, omit the field")
    ] = None
    known_speaker_names: Annotated[None, reject_field(_SPEAKERS)] = None
    known_speaker_references: Annotated[None, reject_field(_SPEAKERS)] = None


class TranslationRequest(AudioRequest):
    """Body of `POST /v1/audio/translations`, as multipart/form-data."""


class AudioUsage(AnswerBody):
    """The length of the recording in seconds, rounded up."""

    type: Literal["duration"]
    seconds: int


class TranscriptSegment(AnswerBody):
    """A piece of the text; the times are in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(AnswerBody):
    """A word; the times are in seconds."""

    word: str
    start: float
    end: float


class TranscriptBody(AnswerBody):
    """Answer of both endpoints; the format verbose_json has all fields."""

    text: str
    usage: AudioUsage
    task: str | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[TranscriptSegment] | None = None
    words: list[TranscriptWord] | None = None


async def _transcribe(model: ServedModel, body: TranscriptionRequest, request: Request) -> Response:
    """Answer with the text of a recording.

    Raises:
        APIError: 400, the model or an option is not suitable, or the file is no audio file; 413,
            the recording is too long; 429, too many transcriptions run or wait.
    """
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise APIError(
            f"timestamp_granularities has no effect with response_format {body.response_format}: "
            "use verbose_json",
            param="timestamp_granularities",
            code="invalid_value",
        )
    if body.stream and body.response_format not in ("json", "text"):
        raise APIError(
            f"a stream has no format {body.response_format}: use json, or stream=false",
            param="response_format",
            code="invalid_value",
        )
    return await _answer(model, body, request, "transcribe", body.language, body.stream)


async def translate(model: ServedModel, body: TranslationRequest, request: Request) -> Response:
    """Answer with an English translation of a recording. Raises APIError: see `_transcribe`."""
    return await _answer(model, body, request, "translate", None, False)


async def _answer(
    model: ServedModel,
    body: AudioRequest,
    request: Request,
    task: str,
    language: str | None,
    stream: bool,
) -> Response:
    engine = speech_engine(model)
    granularities = getattr(body, "timestamp_granularities", ())
    options = TranscriptionOptions(
        task=task,
        language=language,
        prompt=body.prompt,
        temperature=body.temperature,
        timestamps=body.response_format in TIMED,
        word_timestamps="word" in granularities,
        seed=body.seed,
    )
    label = new_id("transcription", None)
    headers = answer_headers(label, 0)
    lifetime = model.lifetime(request)
    pieces = heard(model, engine, body.file, options, label, get_client(request.scope))
    if stream:
        events = _events(pieces, TextDeltas(engine.transcriber))
        return await lifetime.respond(events, lambda: headers)

    async def last() -> Any:
        async with aclosing(pieces) as items:
            return [item async for item in items][-1]

    transcript = await lifetime.run(last())
    if transcript is None:
        return client_gone()
    form = body.response_format
    if form == "text":
        return PlainTextResponse(transcript.text + "\n", headers=headers)
    if form == "srt" or form == "vtt":
        return PlainTextResponse(subtitles(transcript.segments, form), headers=headers)
    content: dict[str, Any] = {"text": transcript.text, "usage": _usage(transcript.duration)}
    if form == "verbose_json":
        content = verbose(transcript, task, granularities) | content
    return JSONResponse(content, headers=headers)


def _usage(duration: float) -> dict[str, Any]:
    """Return the `usage` of an answer."""
    return {"type": "duration", "seconds": math.ceil(duration)}


async def _events(pieces: AsyncGenerator[Any], deltas: TextDeltas) -> AsyncGenerator[str]:
    """Yield an event for each new piece of text, and one with the whole text."""
    async with aclosing(pieces) as items:
        async for item in items:
            ends = not hasattr(item, "tokens")
            delta = deltas.rest(item.text) if ends else deltas.push(item)
            if delta:
                yield _event({"type": "transcript.text.delta", "delta": delta})
            if ends:
                done = {"type": "transcript.text.done", "text": item.text}
                yield _event(done | {"usage": _usage(item.duration)})


def _event(fields: dict[str, Any]) -> str:
    return f"data: {encode_json(fields)}\n\n"


ENDPOINTS = (
    post(
        "/v1/audio/transcriptions",
        "Return the text of an audio file.",
        _transcribe,
        TranscriptionRequest,
        TranscriptBody,
        streams=True,
        form=True,
    ),
    post(
        "/v1/audio/translations",
        "Return an English translation of an audio file.",
        translate,
        TranslationRequest,
        TranscriptBody,
        form=True,
    ),
)
