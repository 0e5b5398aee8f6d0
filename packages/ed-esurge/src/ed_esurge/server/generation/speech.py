"""Transcriptions of a served model: errors, metrics and traces as for other requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ed_infra.errors import ConfigError, EasyDeLError

from ed_esurge.outputs import CompletionOutput, RequestMetrics, RequestOutput
from ed_esurge.sampling import PoolingParams
from ed_esurge.server.generation.abilities import TRANSCRIBES, require_ability
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.http.errors import APIError, engine_unavailable, hide_paths
from ed_esurge.speech.options import TranscriptionOptions
from ed_esurge.speech.samples import AudioError, AudioTooLongError, QueueFullError


def speech_engine(model: ServedModel) -> Any:
    """Return the engine of a model that transcribes. Raises APIError: 400, it is another model."""
    require_ability(
        model, TRANSCRIBES, "it reads no audio, send the file to a model such as Whisper"
    )
    return model.engine


async def heard(
    model: ServedModel,
    engine: Any,
    audio: bytes,
    options: TranscriptionOptions,
    label: str,
    client: str,
) -> AsyncGenerator[Any]:
    """Yield the segments of a recording, and then the transcript; see `SpeechEngine.transcribe`.

    Args:
        label: name of the request in traces.
        client: name of the client.

    Raises:
        APIError: 400, the file is no audio file, or the model does not support an option; 413, the
            recording is too long; 429, too many transcriptions run or wait; 503, the engine does
            not run.
    """
    model.check_running()
    limits, tracing = model.state.limits, model.state.tracing
    span = None
    if tracing is not None:
        span = tracing.request(label, model.name, 0, PoolingParams())
    timer = model.metrics.request(0, span=span)
    times = RequestMetrics(time.monotonic())
    language = _language(engine, options)
    pieces = engine.transcribe(
        audio,
        language,
        client=client,
        max_seconds=limits.max_audio_seconds,
        most=limits.max_concurrent_transcriptions,
        on_start=lambda: setattr(times, "first_scheduled_time", time.monotonic()),
    )
    try:
        async with aclosing(pieces) as items:
            async for item in items:
                now = times.last_token_time = time.monotonic()
                times.first_token_time = times.first_token_time or now
                ends = not hasattr(item, "tokens")
                part = CompletionOutput(0, token_ids=[] if ends else list(item.tokens))
                part.finish_reason = "stop" if ends else None
                timer.observe(RequestOutput(label, [], [part], ends, times, delta=True))
                if ends:
                    model.metrics.audio_seconds.inc(item.duration)
                yield item
    except AudioTooLongError:
        raise APIError(
            f"the recording is longer than {limits.max_audio_seconds:g} seconds, the limit of this "
            "server (max_audio_seconds): send the recording in parts",
            status=413,
            param="file",
            code="audio_too_long",
        ) from None
    except AudioError as error:
        raise APIError(hide_paths(error), param="file", code="invalid_audio") from None
    except QueueFullError as error:
        raise APIError(str(error), status=429, code="rate_limit_exceeded") from None
    except ConfigError as error:
        fields = {name: name for name in ("language", "prompt", "temperature")}
        fields |= {"task": "model", "word_timestamps": "timestamp_granularities"}
        param = next((fields[name] for name in fields if str(error).startswith(name)), None)
        raise APIError(str(error), param=param, code="invalid_value") from None
    except EasyDeLError as error:
        raise engine_unavailable(hide_paths(error)) from error
    finally:
        timer.over()


def _language(engine: Any, options: TranscriptionOptions) -> TranscriptionOptions:
    """Return the options without a language that the model has no choice of.

    Clients name English for English-only Whisper models.
    """
    english = (options.language or "").lower() in ("en", "english")
    if english and not engine.languages and "language" in engine.transcriber.options:
        return replace(options, language=None)
    return options
