"""Training and serving compute equal features of a recording."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ed_data import build_loader
from ed_data.config import Inform, Mixture, Tokenization
from ed_data.rows.example import RowAudio
from ed_data.rows.recordings import BLOCK, read_samples
from ed_data.schema import SPEECH_SEQ2SEQ
from ed_data.tokens.speech_tokenizers import train_whisper
from ed_esurge.speech import library_files
from ed_esurge.speech.audio import decode_audio
from ed_esurge.speech.decoder_process import DecoderProcess
from ed_models.speech import Transcriber

soundfile = pytest.importorskip("soundfile")

RATE, RATES, FORMATS = 16000, (8000, 22050, 44100, 48000), ("WAV", "FLAC", "MP3", "OGG")
CASES = [(form, rate, channels) for form in FORMATS for rate in RATES for channels in (1, 2)]


@pytest.fixture(scope="module")
def decoder() -> DecoderProcess:
    return DecoderProcess()


def recording(form: str, rate: int, channels: int, seconds: float = 0.7) -> bytes:
    """Return a file of some seconds and some samples, which is louder than 1 at some samples."""
    rng = np.random.default_rng(rate)
    samples = 0.5 * rng.normal(size=(int(seconds * rate) + 3, channels))
    file = io.BytesIO()
    soundfile.write(file, np.clip(samples, -1, 1), rate, format=form)
    return file.getvalue()


def test_samples_of_every_format_and_rate_are_equal(decoder: DecoderProcess) -> None:
    loudest = 0.0
    for case in CASES:
        file = recording(*case)
        trained = read_samples(RowAudio(file, "a row"), RATE)
        served = decode_audio(file, RATE, 30, decoder)
        np.testing.assert_array_equal(trained, served, err_msg=str(case))
        loudest = max(loudest, float(np.abs(served).max()))
    assert loudest > 1, "the files contain samples that a limit of 1 would change"


@pytest.mark.nightly
def test_features_of_every_format_and_rate_are_equal(
    tmp_path: Path, decoder: DecoderProcess
) -> None:
    processor = train_whisper(["one two"], 280, mel_bins=20, positions=50)
    rows = []
    for form, rate, channels in CASES:
        name = f"{rate}-{channels}.{form.lower()}"
        (tmp_path / name).write_bytes(recording(form, rate, channels))
        rows.append({"audio": name, "text": "one"})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    inform = Inform(data_files=str(tmp_path / "rows.jsonl"))
    loader: Any = build_loader(
        Mixture(informs=(inform,), tokenization=Tokenization(max_length=24)),
        processor.tokenizer,
        batch_size=len(CASES),
        shuffle=False,
        schema=SPEECH_SEQ2SEQ,
        processor=processor,
        decoder_start_token_id=processor.tokenizer.convert_tokens_to_ids("<|startoftranscript|>"),
    )
    trained = loader.batch_at(0)["input_features"]
    extract = processor.feature_extractor
    # `Transcriber.features` reads the extractor and the rate, and no model.
    transcriber: Any = SimpleNamespace(extract=extract, sampling_rate=RATE)
    for row, expected in zip(rows, trained, strict=True):
        samples = decode_audio((tmp_path / row["audio"]).read_bytes(), RATE, 30, decoder)
        found = Transcriber.features(transcriber, samples)
        np.testing.assert_array_equal(found, expected, err_msg=row["audio"])


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["MP3", "FLAC"])
def test_samples_of_recordings_of_several_blocks_are_equal(
    form: str, decoder: DecoderProcess
) -> None:
    assert BLOCK == library_files.LIBRARY_BLOCK
    file = recording(form, 44100, 2, seconds=60)
    trained = read_samples(RowAudio(file, "a row"), RATE)
    np.testing.assert_array_equal(trained, decode_audio(file, RATE, 120, decoder))
