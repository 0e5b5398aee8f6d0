"""Rows with recordings: decoding, limits, features and labels equal to those of transformers."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_data import build_loader
from ed_data.config import Inform, Mixture
from ed_data.errors import DataError
from ed_data.rows import recordings
from ed_data.rows.documents import Documents
from ed_data.rows.example import RowAudio
from ed_data.rows.recordings import read_samples
from ed_data.schema import CTC, SPEECH_SEQ2SEQ, TEXT, Schema
from ed_data.tokens.audio import TimeSteps
from ed_data.tokens.speech_tokenizers import train_ctc, train_whisper

soundfile = pytest.importorskip("soundfile")
soxr = pytest.importorskip("soxr")

RATE = 16000
TEXTS = ["one two", "three", "two two three", "one"]
STEPS = TimeSteps((10, 8), (5, 8))


def tone(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * 300 * t) + 0.02 * rng.normal(size=len(t))).astype(np.float32)


def encoded(samples: np.ndarray, rate: int = RATE, form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form)
    return file.getvalue()


@pytest.fixture(scope="module")
def whisper() -> Any:
    return train_whisper(TEXTS, 280, mel_bins=20, positions=50)


@pytest.fixture(scope="module")
def letters() -> Any:
    return train_ctc(TEXTS, 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with four recordings and the file of their rows."""
    rows = []
    for number, text in enumerate(TEXTS):
        name = f"{number}.flac"
        (tmp_path / name).write_bytes(encoded(tone(0.3 + 0.1 * number, seed=number), form="FLAC"))
        rows.append({"audio": name, "text": text})
    write(tmp_path, rows)
    return tmp_path


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def mixture(folder: Path, inform: dict[str, Any] | None = None, **options: Any) -> Mixture:
    options.setdefault("tokenization", {"max_length": 24})
    own = {"data_files": str(folder / "rows.jsonl"), **(inform or {})}
    return Mixture(informs=[Inform(**own)], **options)


def of_whisper(mixture: Mixture, processor: Any, **options: Any) -> Any:
    start = processor.tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    own = {"schema": SPEECH_SEQ2SEQ, "processor": processor, "decoder_start_token_id": start}
    return build_loader(mixture, batch_size=2, shuffle=False, **{**own, **options})


def of_ctc(mixture: Mixture, processor: Any, **options: Any) -> Any:
    own = {"schema": CTC, "processor": processor, "time_steps": STEPS}
    return build_loader(mixture, batch_size=2, shuffle=False, **{**own, **options})


def batches(loader: Any, count: int = 2) -> Iterator[dict[str, np.ndarray]]:
    return (loader.batch_at(step) for step in range(count))


@pytest.mark.proves("mixture.tokenization.language", "mixture.tokenization.task")
def test_features_and_labels_of_whisper_equal_transformers(folder: Path, whisper: Any) -> None:
    tokenization = {"max_length": 24, "language": "German", "task": "translate"}
    loader = of_whisper(mixture(folder, tokenization=tokenization), whisper)
    found = {key: np.concatenate(parts) for key, parts in _joined(batches(loader)).items()}
    whisper.tokenizer.set_prefix_tokens(language="de", task="translate")
    for row, text in enumerate(TEXTS):
        samples, _ = soundfile.read(folder / f"{row}.flac", dtype="float32")
        want = whisper.feature_extractor(samples, sampling_rate=RATE, return_tensors="np")
        np.testing.assert_array_equal(found["input_features"][row], want["input_features"][0])
        # Hugging Face's collator removes the start token, which the model adds again.
        ids = whisper.tokenizer(text).input_ids
        labels = found["labels"][row]
        assert labels[labels >= 0].tolist() == ids[1:]
        assert found["decoder_input_ids"][row, : len(ids) - 1].tolist() == ids[:-1]
    assert whisper.tokenizer.convert_ids_to_tokens(ids[:3]) == [
        "<|startoftranscript|>",
        "<|de|>",
        "<|translate|>",
    ]


def test_samples_and_labels_of_ctc_equal_transformers(folder: Path, letters: Any) -> None:
    limit = {"max_duration_in_seconds": 0.75}
    found = _joined(batches(of_ctc(mixture(folder, limit), letters)))
    values, mask, labels = (
        np.concatenate(found[n]) for n in ("input_values", "attention_mask", "labels")
    )
    assert {*found} == {"input_values", "attention_mask", "labels"}
    assert values.shape == (4, 0.75 * RATE)
    for row, text in enumerate(TEXTS):
        samples, _ = soundfile.read(folder / f"{row}.flac", dtype="float32")
        want = letters(audio=samples, sampling_rate=RATE, return_tensors="np")["input_values"][0]
        np.testing.assert_array_equal(values[row, : len(samples)], want)
        assert not values[row, len(samples) :].any()
        assert mask[row].sum() == len(samples)
        assert labels[row][labels[row] >= 0].tolist() == letters.tokenizer(text).input_ids
    longest = mixture(folder, limit, tokenization={"max_length": 24, "padding": "longest"})
    padded = of_ctc(longest, letters).batch_at(0)
    assert padded["input_values"].shape == (2, 0.75 * RATE)
    assert padded["labels"].shape == (2, 8)


def _joined(found: Iterator[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
    result: dict[str, list[np.ndarray]] = {}
    for batch in found:
        for name, array in batch.items():
            result.setdefault(name, []).append(array)
    return result


def test_every_form_of_a_recording_has_the_same_samples(folder: Path, letters: Any) -> None:
    samples = tone(0.4)
    raw = encoded(samples)
    (folder / "a.wav").write_bytes(raw)
    samples, _ = soundfile.read(io.BytesIO(raw), dtype="float32")
    forms: list[Any] = [
        str(folder / "a.wav"),
        raw,
        {"bytes": raw, "path": "elsewhere.wav"},
        {"bytes": None, "path": "a.wav"},
        {"array": samples, "sampling_rate": RATE},
    ]
    inform = Inform(data_files=str(folder / "rows.jsonl"))
    for form in forms:

        def row(_: Any, form: Any = form) -> dict[str, Any]:
            return {"audio": form, "text": "one"}

        documents = Documents(inform.replace(format_callback=row), schema=CTC)
        (audio,) = next(iter(documents)).recordings
        np.testing.assert_array_equal(read_samples(audio, RATE), samples)


def test_other_rates_and_channels_are_converted_as_by_librosa() -> None:
    stereo = np.stack([tone(0.5, 22050), tone(0.5, 22050, seed=1)], axis=1)
    raw = encoded(stereo, 22050)
    decoded, _ = soundfile.read(io.BytesIO(raw), dtype="float32")
    want = soxr.resample(decoded.mean(axis=1), 22050, RATE)
    found = read_samples(RowAudio(raw, "a row"), RATE)
    assert len(found) == -(-len(decoded) * RATE // 22050)
    np.testing.assert_array_equal(found[: len(want)], want[: len(found)])
    assert abs(len(found) - len(want)) <= 1


@pytest.mark.parametrize("name", ["sentence", "transcription"])
def test_transcript_is_found_under_names_of_known_datasets(
    folder: Path, letters: Any, name: str
) -> None:
    write(folder, [{"audio": "0.flac", name: "two"}])
    labels = of_ctc(mixture(folder), letters, seq_length=24).batch_at(0)["labels"][0]
    assert labels[labels >= 0].tolist() == letters.tokenizer("two").input_ids
    with pytest.raises(DataError, match="no field 'txt'"):
        of_ctc(mixture(folder, {"content_field": "txt"}), letters)


@pytest.mark.proves("mixture.informs.audio_field")
def test_recording_is_read_from_the_named_field(folder: Path, letters: Any) -> None:
    write(folder, [{"sound": "2.flac", "audio": "0.flac", "text": "two"}])
    found = of_ctc(mixture(folder, {"audio_field": "sound"}), letters).batch_at(0)
    assert found["attention_mask"][0].sum() == 0.5 * RATE


def test_dataset_with_an_audio_feature_is_read_without_its_decoder(
    folder: Path, letters: Any
) -> None:
    import datasets

    rows = {"audio": [str(folder / f"{i}.flac") for i in range(4)], "text": TEXTS}
    data = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio())
    data.save_to_disk(folder / "saved")
    inform = Inform(type="huggingface", data_files=str(folder / "saved"))
    found = of_ctc(Mixture(informs=[inform], tokenization={"max_length": 24}), letters).batch_at(0)
    want = of_ctc(mixture(folder), letters).batch_at(0)
    for name, array in want.items():
        np.testing.assert_array_equal(found[name], array)


def test_streamed_and_divided_batches_equal_indexed_batches(folder: Path, letters: Any) -> None:
    indexed = of_ctc(mixture(folder), letters)
    stream = of_ctc(mixture(folder, streaming=True), letters)
    part = indexed.for_rows([1])
    for step, streamed in zip(range(2), stream, strict=False):
        whole = indexed.batch_at(step)
        for name, array in whole.items():
            np.testing.assert_array_equal(array, streamed[name])
            np.testing.assert_array_equal(array[1:], part.batch_at(step)[name])


@pytest.mark.proves(
    "mixture.informs.min_duration_in_seconds", "mixture.informs.max_duration_in_seconds"
)
def test_durations_outside_the_limits_are_dropped_and_counted(folder: Path, letters: Any) -> None:
    limits = {"min_duration_in_seconds": 0.35, "max_duration_in_seconds": 0.55}
    loader = of_ctc(mixture(folder, limits), letters)
    dropped = loader.stats["sources"]["rows"]["dropped"]
    assert dropped == {
        "shorter than min_duration_in_seconds (0.35)": 1,
        "longer than max_duration_in_seconds (0.55)": 1,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "one " * 30}, r"rows.jsonl:2: the transcript has .* the limit is 24"),
        ({"audio": "9.flac"}, r"rows.jsonl:2: there is no recording '9.flac'"),
        ({"audio": "broken.flac"}, r"rows.jsonl:2, .*broken.flac.*cannot be decoded"),
        ({"audio": "cut.wav"}, r"rows.jsonl:2, .*cut.wav.*its header states"),
        ({"audio": "long.wav"}, r"long.wav.* has 1.50 seconds, and the model reads 1"),
        ({"audio": 7}, r"rows.jsonl:2: 'audio' must be a recording"),
        ({"audio": {"array": [1, 2], "sampling_rate": 8000}}, r"floating-point samples"),
        ({"audio": {"array": [0.1], "sampling_rate": None}}, r"sampling_rate None"),
    ],
)
def test_bad_recording_names_its_row_and_file_and_can_be_skipped(
    folder: Path, whisper: Any, change: dict[str, Any], message: str
) -> None:
    (folder / "broken.flac").write_bytes(encoded(tone(0.3), form="FLAC")[:30])
    (folder / "cut.wav").write_bytes(encoded(tone(0.3))[:4000])
    (folder / "long.wav").write_bytes(encoded(tone(1.5)))
    rows = [{"audio": f"{i}.flac", "text": text} for i, text in enumerate(TEXTS)]
    rows[1] |= change
    write(folder, rows)
    with pytest.raises(DataError, match=message):
        list(batches(of_whisper(mixture(folder), whisper)))
    loader = of_whisper(mixture(folder, {"on_error": "skip"}), whisper)
    labels = np.concatenate([batch["labels"] for batch in batches(loader, 1)])
    assert (labels >= 0).any(axis=1).all()


def test_more_labels_than_time_steps_are_an_error(folder: Path, letters: Any) -> None:
    write(folder, [{"audio": "0.flac", "text": "two two"}])
    coarse = TimeSteps((10, 600), (5, 400))
    assert coarse.of(4800) == 1 + (959 - 600) // 400
    with pytest.raises(DataError, match=r"needs 7 time steps .* 0.30 seconds has 1"):
        of_ctc(mixture(folder), letters, time_steps=coarse).batch_at(0)


def header_of_caf(chunks: bytes) -> bytes:
    form = struct.pack(">d4sIIIII", 16000.0, b"lpcm", 0, 2, 1, 1, 16)
    return b"caff\0\1\0\0desc" + struct.pack(">q", 32) + form + chunks


W64 = "726966662E91CF11A5D628DB04C10000", "77617665F3ACD3118CD100C04F8EDB8A"
WAV = encoded(np.zeros(9, np.float32))
#: Files with extreme headers, and the reason of the error; None = any reason.
BOMBS = {
    "rate of 1 Hz": (WAV[:24] + b"\1\0\0\0" + WAV[28:], "has 1 samples of a second"),
    "rate of 2 GHz": (WAV[:24] + b"\xff\xff\xff\x7f" + WAV[28:], "must be from 1000 to 384000"),
    "samples at 1 Hz": ({"array": tone(0.1), "sampling_rate": 1}, "must be from 1000 to 384000"),
    "long at a higher rate": ({"array": tone(9, 1000), "sampling_rate": 1000}, "144000 samples"),
    "chunks of WAV": (WAV[:12] + b"junk\0\0\0\0" * 2**17, None),
    "chunks of CAF": (header_of_caf((b"free" + bytes(8)) * 2**17), None),
    "negative chunk": (header_of_caf(b"free" + b"\xff" * 7 + b"\xf4data" + b"\xff" * 8), None),
    "chunks of AIFF": (b"FORM\x7f\xff\xff\xffAIFF" + b"NAME\0\0\0\0" * 2**17, None),
    "length of W64": (bytes.fromhex(W64[0]) + bytes(7) + b"\x40" + bytes.fromhex(W64[1]), None),
    "tags of MP3": (b"ID3\4\0\0\0\0\0\0" * 2**17, None),
    "pages of Ogg": (b"OggS\0\2" + (bytes(21) + b"OggS\0\0") * 2**15, None),
    "blocks of FLAC": (b"fLaC" + b"\4\0\0\0" * 2**17, None),
    "boxes of MP4": (
        b"".join(struct.pack(">I4s", 8 * n, b"moov") for n in range(9999, 0, -1)),
        None,
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_extreme_headers_are_errors_of_their_row(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(recordings, "MAX_SAMPLES", 2**17)
    source, reason = BOMBS[name]
    with pytest.raises(DataError, match=rf"a row: .*{reason or ''}"):
        read_samples(
            RowAudio({"bytes": source} if isinstance(source, bytes) else source, "a row"), RATE
        )


def test_large_files_and_infinite_samples_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.array([0.1, np.nan], np.float32), RATE, format="WAV", subtype="FLOAT")
    with pytest.raises(DataError, match=r"a row: .* samples that are not finite"):
        read_samples(RowAudio(file.getvalue(), "a row"), RATE)
    monkeypatch.setattr(recordings, "MAX_BYTES", 100)
    with pytest.raises(
        DataError, match="a row: the recording has 3244 bytes, and the limit is 100"
    ):
        read_samples(RowAudio(encoded(tone(0.1)), "a row"), RATE)


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (TEXT, {"inform": {"audio_field": "sound"}}, "audio_field requires a model of speech"),
        (TEXT, {"tokenization": {"language": "de"}}, "language requires recordings"),
        (CTC, {"tokenization": {"language": "de"}}, "language='de' has no effect"),
        (CTC, {"pack_tokens": True, "pack_seq_length": 24}, "rows are not packed"),
        (CTC, {"inform": {"audio_field": "sound"}}, "no field 'sound' with a recording"),
    ],
)
def test_options_that_do_not_fit_the_data_are_errors(
    folder: Path,
    letters: Any,
    whisper: Any,
    schema: Schema,
    options: dict[str, Any],
    message: str,
) -> None:
    if "tokenization" in options:
        options = {**options, "tokenization": {"max_length": 24, **options["tokenization"]}}
    inform = options.get("inform")
    rest = {name: value for name, value in options.items() if name != "inform"}
    made = mixture(folder, inform, **rest)
    build = {
        TEXT: lambda: build_loader(made, letters.tokenizer),
        CTC: lambda: of_ctc(made, letters, time_steps=None),
        SPEECH_SEQ2SEQ: lambda: of_whisper(made, whisper),
    }
    with pytest.raises(DataError, match=message):
        build[schema]()


def test_recordings_require_a_processor(folder: Path, letters: Any) -> None:
    with pytest.raises(DataError, match="requires a processor"):
        build_loader(mixture(folder), letters.tokenizer, schema=CTC)
