"""Audio files become the right samples, and damaged or hostile files raise a short error."""

from __future__ import annotations

import io
import os
import signal
import struct
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soxr
from ed_esurge.speech import audio
from ed_esurge.speech.decoder_process import DecoderProcess
from ed_esurge.speech.samples import AudioError, AudioTooLongError, resample_blocks

RATE = 16000
decoded = partial(audio.decode_audio, decoder=DecoderProcess())


def wav(
    values: np.ndarray,
    rate: int = RATE,
    *,
    encoding: int = 1,
    bits: int = 16,
    size: int | None = None,
) -> bytes:
    """Return a WAV file of encoded values [n] or [n, c]; `size` replaces the size of the data."""
    channels = 1 if values.ndim == 1 else values.shape[1]
    data = values.tobytes()
    frame = channels * bits // 8
    form = struct.pack("<HHIIHH", encoding, channels, rate, rate * frame % 2**32, frame, bits)
    size = len(data) if size is None else size
    body = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size) + data
    return b"RIFF" + struct.pack("<I", (len(body) + 4) % 2**32) + b"WAVE" + body


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(
        np.float32
    )


def int16(values: np.ndarray) -> np.ndarray:
    return np.round(values * 2**15).astype("<i2")


def int24(values: np.ndarray) -> np.ndarray:
    wide = np.round(values.astype(np.float64) * 2**23).astype("<i4")
    return np.ascontiguousarray(wide.view(np.uint8).reshape(-1, 4)[:, :3])


@pytest.mark.parametrize(
    ("encode", "options", "step"),
    [
        (lambda x: np.round(x * 127 + 128).astype(np.uint8), {"bits": 8}, 1 / 64),
        (int16, {}, 2**-15),
        (lambda x: (x.astype(np.float64) * 2**31).astype("<i4"), {"bits": 32}, 1e-7),
        (lambda x: x, {"encoding": 3, "bits": 32}, 0),
        (lambda x: x.astype(np.float64), {"encoding": 3, "bits": 64}, 1e-7),
    ],
    ids=["u8", "s16", "s32", "f32", "f64"],
)
def test_encodings_of_wav_give_the_same_samples(encode, options, step):
    expected = tone(0.5, RATE)
    found = decoded(wav(encode(expected), **options), RATE, 10)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=step)


def test_24_bits_and_stereo_give_the_mean_of_the_channels():
    expected = tone(0.5, RATE)
    data = int24(expected).tobytes()
    form = struct.pack("<HHIIHH", 1, 1, RATE, RATE * 3, 3, 24)
    body = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(data)) + data
    file = b"RIFF" + struct.pack("<I", len(body) + 4) + b"WAVE" + body
    np.testing.assert_allclose(decoded(file, RATE, 10), expected, atol=2**-23)
    both = np.stack([int16(expected), int16(expected / 2)], axis=1)
    np.testing.assert_allclose(decoded(wav(both), RATE, 10), 0.75 * expected, atol=2**-14)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates_keep_a_tone(rate):
    found = decoded(wav(int16(tone(2, rate)), rate), RATE, 10)
    expected = tone(2, RATE)
    assert abs(len(found) - len(expected)) <= 1
    np.testing.assert_allclose(found[500:30000], expected[500:30000], atol=1e-4)


def test_frequencies_above_the_new_rate_are_removed():
    found = decoded(wav(int16(tone(1, 48000, 11000)), 48000), RATE, 10)
    assert np.abs(found[500:-500]).max() < 1e-3


@pytest.mark.parametrize("rate", [8000, 44100, 44099, 48000])
def test_resampling_in_blocks_equals_resampling_at_once(rate):
    values = np.random.default_rng(0).normal(size=rate * 14 + 7).astype(np.float32)
    whole = soxr.resample(values, rate, RATE)
    count = -(-len(values) * RATE // rate)
    expected = np.pad(whole[:count], (0, count - len(whole[:count])))
    for parts in (1, 37):
        found = np.concatenate([*resample_blocks(np.array_split(values, parts), rate, RATE)])
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [2**32 - 1, 2**31 - 1, 0x7FFFF000])
def test_unknown_size_of_a_stream_reads_the_rest_of_the_file(size):
    expected = tone(0.5, RATE)
    assert len(decoded(wav(int16(expected), size=size), RATE, 10)) == len(expected)


GOOD = wav(int16(tone(0.5, RATE)))
NAN = tone(0.5, RATE)
NAN[7] = np.nan


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"RIFF", "not an audio file"),
        (b"{}" * 100, "not an audio file"),
        (b"\xff\xfb\x90\x00" * 3, "not an audio file|is damaged|minimum is 0.1"),
        (GOOD[:30], "no data chunk|no complete fmt"),
        (GOOD[:-100], "truncated: its header promises 16000 bytes"),
        (GOOD[:44], "truncated: its header promises"),
        (wav(int16(tone(0.5, RATE)), size=2**30), "truncated: its header promises 1073741824"),
        (wav(np.zeros(0, "<i2")), "0.000 seconds; the minimum is 0.1"),
        (wav(np.zeros(10, "<i2")), "the minimum is 0.1"),
        (wav(np.zeros(9000, "<i2"), rate=0), "a rate of 0 Hz"),
        (wav(np.zeros(9000, "<i2"), rate=2**32 - 1), "a rate of 4294967295 Hz"),
        (wav(np.zeros((9000, 64), "<i2")), "64 channels"),
        (wav(NAN, encoding=3, bits=32), "not finite"),
        (wav(np.full(9000, 1e300), encoding=3, bits=64), "not finite"),
    ],
    ids=range(15),
)
def test_bad_files_raise_an_audio_error(data, message):
    with pytest.raises(AudioError, match=message):
        decoded(data, RATE, 10)


def test_loud_samples_are_not_changed_and_samples_of_another_scale_are_an_error():
    loud = np.tile(np.array([1.5, -1.25], "<f4"), 4500)
    np.testing.assert_array_equal(decoded(wav(loud, encoding=3, bits=32), RATE, 10), loud)
    with pytest.raises(AudioError, match=r"a sample of 1e\+30, but .* from -1 to 1: scale"):
        decoded(wav(np.full(9000, 1e30, "<f4"), encoding=3, bits=32), RATE, 10)


def test_recording_beyond_the_limit_is_not_decoded_completely():
    file = wav(np.zeros(2**24, np.uint8), rate=1000, bits=8)
    tracemalloc.start()
    with pytest.raises(AudioTooLongError):
        decoded(file, RATE, 5)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_other_formats_equal_wav(request):
    soundfile = pytest.importorskip("soundfile")
    values = tone(0.5, RATE)
    for form, subtype, limit in (
        ("FLAC", None, 2**-15),
        ("OGG", "VORBIS", 0.05),
        ("MP3", None, 0.2),
    ):
        file = io.BytesIO()
        soundfile.write(file, values, RATE, format=form, subtype=subtype)
        found = decoded(file.getvalue(), RATE, 10)
        assert abs(len(found) - len(values)) < 2400
        if form != "MP3":  # which shifts the samples
            np.testing.assert_allclose(found[: len(values)], values[: len(found)], atol=limit)
        cut = file.getvalue()[: len(file.getvalue()) // 2]
        if form == "FLAC":
            with pytest.raises(AudioError, match=r"truncated|damaged"):
                decoded(cut, RATE, 10)


def test_small_flac_file_of_a_long_silence_needs_little_memory():
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.zeros(16_000_000, np.int16), RATE, format="FLAC")
    assert file.tell() < 2**20
    tracemalloc.start()
    with pytest.raises(AudioTooLongError):
        decoded(file.getvalue(), RATE, 30)
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def test_file_without_the_extra_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(AudioError, match=r"WAV files .* install ed-esurge\[audio\]"):
        decoded(b"fLaC" + bytes(100), RATE, 10)


FAULTS = {
    "crash": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "hang": "while True: pass",
    "exit": "import os\nos._exit(0)",
    "memory": "import numpy\nnumpy.ones(2**40)",
}


@pytest.mark.daily("crash", "exit", "memory")
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_the_decoding_library_ends_one_request(fault, monkeypatch, tmp_path: Path):
    """A fake library has the fault for files that contain a word, and reads other files."""
    pytest.importorskip("soundfile")
    body = FAULTS[fault].replace("\n", "\n        ")
    (tmp_path / "soundfile.py").write_text(
        "class SoundFileError(Exception): pass\n"
        "def SoundFile(file):\n"
        "    if b'fault' in file.getvalue():\n"
        f"        {body}\n"
        "    raise SoundFileError('read')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    decoder = DecoderProcess(cpu_seconds=0.5)
    for _ in range(2):
        message = "needs more than 512 MiB" if fault == "memory" else "made the decoding library"
        with pytest.raises(AudioError, match=message):
            audio.decode_audio(b"fault" * 100, RATE, 1, decoder)
        with pytest.raises(AudioError, match=r"that this server reads .*: read"):
            audio.decode_audio(b"other" * 100, RATE, 1, decoder)


def test_ended_worker_process_is_replaced():
    pytest.importorskip("soundfile")
    decoder = DecoderProcess()
    with pytest.raises(AudioError, match="not an audio file"):
        audio.decode_audio(b"other" * 100, RATE, 1, decoder)
    first = decoder.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    decoder._connection.process.wait()
    with pytest.raises(AudioError, match="not an audio file"):
        audio.decode_audio(b"other" * 100, RATE, 1, decoder)
    assert decoder.pid != first
