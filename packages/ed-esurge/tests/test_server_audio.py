"""Transcriptions over HTTP equal those of transformers, and requests have the limits of others."""

from __future__ import annotations

import io
import json
import re
import threading
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from ed_esurge.command.load import parse_model_arguments, served_engine
from ed_esurge.server.launch import background
from ed_esurge.speech.engine import SpeechEngine
from ed_esurge.testing import ScriptedEngine, ScriptedTranscriber
from ed_infra.errors import ConfigError
from ed_infra.testing import require_torch

from tests.speech_cases import RATE, recording, write_whisper


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """Return a WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.round(samples * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2").tobytes())
    return file.getvalue()


def read(file: bytes) -> np.ndarray:
    """Return the samples of a WAV file of this module."""
    return np.frombuffer(file[44:], "<i2").astype(np.float32) / 2**15


SHORT, LONG = wav(recording(0.7, seed=1)), wav(recording(2.7))
SILENCE = wav(np.zeros(RATE * 3, np.float32))


@pytest.fixture(scope="module")
def whisper(tmp_path_factory) -> tuple[SpeechEngine, Any]:
    """A tiny Whisper that never repeats an attempt, and the model of transformers."""
    require_torch()
    from ed_models.speech import Transcriber, load_transcriber
    from ed_models.speech.whisper import Thresholds

    folder = tmp_path_factory.mktemp("whisper")
    theirs = write_whisper(folder)
    loaded = load_transcriber(folder, dtype="float32", param_dtype="float32")
    # Random weights are never confident, so every attempt would fail the usual thresholds.
    never = Thresholds(None, -100.0, 0.999)
    made = Transcriber(
        loaded.model, loaded.processor, thresholds=never, condition_on_prev_tokens=False
    )
    return SpeechEngine(made, "tiny"), theirs


@pytest.fixture(scope="module")
def url(whisper):
    with background(whisper[0]) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def expected(whisper, file: bytes, **options: Any) -> list[list[int]]:
    """Return the tokens of the segments of transformers."""
    import torch

    samples = read(file)
    form = {} if len(samples) <= RATE else {"truncation": False, "padding": "longest"}
    processor = whisper[0].transcriber.processor
    features = processor(samples, sampling_rate=RATE, return_tensors="pt", **form).input_features
    with torch.no_grad():
        found = whisper[1].generate(
            features,
            return_segments=True,
            return_timestamps=True,
            temperature=(0.0, 0.2),
            logprob_threshold=-100.0,
            no_speech_threshold=0.999,
            condition_on_prev_tokens=False,
            **options,
        )
    return [segment["tokens"].tolist() for segment in found["segments"][0]]


@pytest.mark.torch
@pytest.mark.daily("short")
@pytest.mark.parametrize(
    ("file", "options"),
    [(SHORT, {}), (LONG, {}), (LONG, {"language": "de"}), (LONG, {"prompt": "ab cd"})],
    ids=["short", "long", "language", "prompt"],
)
def test_tokens_over_http_equal_transformers(whisper, client, file, options):
    answer = client.audio.transcriptions.create(
        model="tiny", file=("a.wav", file), response_format="verbose_json", **options
    )
    theirs = dict(options, task="transcribe")
    if "prompt" in theirs:
        import torch

        ids = whisper[0].transcriber.processor.get_prompt_ids(theirs.pop("prompt"))
        theirs["prompt_ids"] = torch.tensor(ids)
    assert [segment.tokens for segment in answer.segments] == expected(whisper, file, **theirs)
    assert answer.language in ("english", "german")
    assert answer.duration == pytest.approx(len(read(file)) / RATE, abs=1e-4)


@pytest.mark.torch
@pytest.mark.nightly
def test_translations_equal_transformers(whisper, client):
    answer = client.audio.translations.create(
        model="tiny", file=("a.wav", LONG), response_format="verbose_json"
    )
    tokens = [segment.tokens for segment in answer.segments]
    assert tokens == expected(whisper, LONG, task="translate")
    assert (answer.task, answer.language) == ("translate", "english")


@pytest.mark.torch
@pytest.mark.nightly
def test_formats_contain_the_same_text(client):
    ask = client.audio.transcriptions.create
    answers = {
        form: ask(model="tiny", file=("a.wav", LONG), response_format=form)
        for form in ("json", "text", "verbose_json", "srt", "vtt")
    }
    text = answers["json"].text
    assert text
    assert answers["text"] == text + "\n"
    assert answers["json"].usage.to_dict() == {"type": "duration", "seconds": 3}
    segments = answers["verbose_json"].segments
    for form, mark in (("srt", ","), ("vtt", ".")):
        times = re.findall(r"(\S+) --> (\S+)", answers[form])
        assert len(times) == len(segments)
        for (start, end), segment in zip(times, segments, strict=True):
            for shown, seconds in ((start, segment.start), (end, segment.end)):
                hours, minutes, rest = shown.replace(mark, ".").split(":")
                assert int(hours) * 3600 + int(minutes) * 60 + float(rest) == pytest.approx(seconds)
    assert answers["vtt"].startswith("WEBVTT\n\n00:")
    assert answers["srt"].startswith("1\n00:")


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.parametrize("file", [SHORT, LONG, SILENCE], ids=["short", "long", "silence"])
def test_deltas_of_a_stream_are_the_text(client, file):
    whole = client.audio.transcriptions.create(model="tiny", file=("a.wav", file)).text
    stream = client.audio.transcriptions.create(model="tiny", file=("a.wav", file), stream=True)
    events = list(stream)
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == whole == "".join(event.delta for event in events[:-1])


@pytest.mark.torch
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"language": "xx"}, "language", "known: de, en"),
        ({"temperature": "2"}, "temperature", "less than or equal to 1"),
        ({"prompt": "<|en|>"}, "prompt", "special token"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "use verbose_json"),
        (
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            "timestamp_granularities",
            "alignment_heads",
        ),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "use verbose_json"),
        ({"response_format": "diarized_json"}, "response_format", "'verbose_json'"),
        ({"response_format": "srt", "stream": "true"}, "response_format", "no format srt"),
        ({"include[]": "logprobs"}, "include", "no log-probabilities"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "cuts the recording"),
        ({"model": "tini"}, "model", "does not exist"),
    ],
)
def test_invalid_fields_are_refused_by_name(url, fields, param, message):
    answer = httpx.post(f"{url}/audio/transcriptions", files={"file": SHORT}, data=fields)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert param in error["param"]
    assert message in error["message"]


@pytest.fixture(scope="module")
def scripted():
    """A server with a model for speech and a model of texts, and small limits."""
    engines = {"text": ScriptedEngine(), "speech": SpeechEngine(ScriptedTranscriber(0.02))}
    limits = {"max_audio_seconds": 30, "max_audio_bytes": 2**20, "max_concurrent_transcriptions": 2}
    with background(engines, limits=limits, api_key=["k", "other"]) as url:
        yield url


def post(url: str, file: bytes, key: str = "k", **fields: str) -> httpx.Response:
    form = {"model": "speech", **fields}
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{url}/audio/transcriptions", files={"file": file}, data=form, headers=headers
    )


def test_several_kinds_of_models_share_a_server(scripted):
    assert post(scripted, SILENCE).json() == {
        "text": "word0 word1 word2",
        "usage": {"type": "duration", "seconds": 3},
    }
    refused = post(scripted, SILENCE, model="text").json()["error"]
    assert "'causal-language-model': it reads no audio" in refused["message"]
    headers = {"Authorization": "Bearer k"}
    for path, body in (("completions", {"prompt": "a"}), ("embeddings", {"input": "a"})):
        answer = httpx.post(f"{scripted}/{path}", json={"model": "speech", **body}, headers=headers)
        assert answer.status_code == 400
        assert "send files to /v1/audio/transcriptions" in answer.json()["error"]["message"]
    assert httpx.get(f"{scripted}/../health/decode").status_code == 200
    names = {one["id"] for one in httpx.get(f"{scripted}/models", headers=headers).json()["data"]}
    assert names == {"text", "speech"}


@pytest.mark.parametrize(
    ("file", "status", "code"),
    [
        (b"", 400, "invalid_audio"),
        (b"hello", 400, "invalid_audio"),
        (SILENCE[:100], 400, "invalid_audio"),
        (wav(np.zeros(31 * 8000, np.float32), 8000), 413, "audio_too_long"),
        (bytes(2**20 + 1), 413, "request_too_large"),
        (bytes(2**21), 413, "request_too_large"),
    ],
)
def test_bad_audio_is_an_error_of_its_sender(scripted, file, status, code):
    for fields in ({}, {"stream": "true"}):
        answer = post(scripted, file, **fields)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == code


def test_requests_without_a_form_a_file_or_a_key_are_refused(scripted):
    url, headers = f"{scripted}/audio/transcriptions", {"Authorization": "Bearer k"}
    assert httpx.post(url, files={"file": SILENCE}).status_code == 401
    answer = httpx.post(url, json={"model": "speech"}, headers=headers)
    assert answer.json()["error"]["code"] == "invalid_form"
    answer = httpx.post(url, files={"model": (None, "speech")}, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "file"
    both = [("file", SILENCE), ("file", SILENCE)]
    assert httpx.post(url, files=both, headers=headers).status_code == 400
    assert httpx.post(url, files={"file": SILENCE}, headers=headers).status_code == 400  # text


def test_concurrent_transcriptions_have_a_limit_for_each_client(scripted):
    long = wav(np.zeros(RATE * 25, np.float32))
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(post, scripted, long, key) for key in ("k", "k", "other", "k")]
        codes = sorted(one.result().status_code for one in running)
    assert codes == [200, 200, 429, 429]
    refused = next(one.result() for one in running if one.result().status_code == 429)
    assert refused.headers["Retry-After"]
    assert "max_concurrent_transcriptions" in refused.json()["error"]["message"]


def test_transcription_of_a_client_that_left_is_aborted_and_counted(scripted):
    def numbers() -> dict[str, float]:
        text = httpx.get(f"{scripted}/../metrics").text
        found = re.findall(r"^(\S+?)({.*model_name=.speech.*}) (\S+)$", text, re.MULTILINE)
        return {name + labels: float(value) for name, labels, value in found}

    def running() -> float:
        return sum(v for k, v in numbers().items() if k.startswith("vllm:num_requests_running"))

    aborted = 'vllm:request_success_total{finished_reason="abort",model_name="speech"}'
    before = numbers()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{scripted}/audio/transcriptions",
            files={
                "file": wav(np.zeros(RATE * 30, np.float32))[: 2**20 - 2] if False else SILENCE * 1
            },
            data={"model": "speech"},
            headers={"Authorization": "Bearer k"},
            timeout=httpx.Timeout(10, read=0.02),
        )
    deadline = time.monotonic() + 60
    while numbers()[aborted] == before.get(aborted, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert numbers()[aborted] == before.get(aborted, 0) + 1
    while running() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running() == 0


def test_transcription_does_not_delay_other_requests(scripted):
    done = threading.Event()

    def long() -> None:
        post(scripted, SILENCE, key="other")
        done.set()

    thread = threading.Thread(target=long)
    thread.start()
    headers = {"Authorization": "Bearer k"}
    body = {"model": "text", "prompt": "a", "max_tokens": 2}
    assert httpx.post(f"{scripted}/completions", json=body, headers=headers).status_code == 200
    assert not done.is_set()
    thread.join()


@pytest.mark.torch
@pytest.mark.nightly
def test_serve_reads_the_task_from_the_checkpoint(tmp_path):
    require_torch()
    write_whisper(tmp_path)
    with pytest.raises(ConfigError, match="--max-num-seqs has no effect"):
        served_engine(parse_model_arguments([str(tmp_path), "--max-num-seqs", "2"]))
    engine = served_engine(parse_model_arguments([str(tmp_path), "--dtype", "float32"]))
    assert isinstance(engine, SpeechEngine)
    with background(engine) as url:
        answer = httpx.post(f"{url}/audio/transcriptions", files={"file": SHORT}, timeout=60)
        assert answer.status_code == 200
        assert json.loads(answer.text)["usage"]["seconds"] == 1


@pytest.mark.nightly
@pytest.mark.parametrize("granularities", [["word"], ["word", "segment"]])
def test_words_have_the_times_of_the_transcriber(whisper, granularities):
    from ed_models.speech.alignment import TokenAligner
    from ed_models.speech.transcriber import Transcriber

    given = whisper[0].transcriber
    made = Transcriber(given.model, given.processor, thresholds=given.thresholds)
    decoder: Any = made.decoder
    decoder.aligner = TokenAligner(given.model, [[0, 1], [1, 3]])
    expected = made.transcribe(read(LONG), word_timestamps=True)
    with background(SpeechEngine(made, "tiny")) as url:
        answer = openai.OpenAI(base_url=url, api_key="none").audio.transcriptions.create(
            model="tiny",
            file=("a.wav", LONG),
            response_format="verbose_json",
            timestamp_granularities=granularities,
        )
    words = [word for segment in expected.segments for word in segment.words or ()]
    assert [(w.word, w.start, w.end) for w in answer.words or ()] == [
        (word.text.strip(), word.start, word.end) for word in words
    ]
    assert len(words) > 1
    assert (answer.segments is not None) == ("segment" in granularities)
