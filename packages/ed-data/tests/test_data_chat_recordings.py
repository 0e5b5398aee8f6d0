"""Chats with recordings: placeholder tokens, spectrograms, packing, truncation and errors."""

from __future__ import annotations

import base64
import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from ed_data import DataError, build_loader

soundfile = pytest.importorskip("soundfile")

RATE, FEATURES, SOUND = 16000, 5, "feature_attention_mask"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}[AUDIO]{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)


class Form(NamedTuple):
    """Recordings of a model with parts of half a second."""

    token: int
    shape: tuple[int, int] = (16, 50)
    length: int = FEATURES
    includes_padding: bool = True

    def features(self, frames: int) -> int:
        return (frames + 1) // 2 // 2


@pytest.fixture(scope="module")
def processor(tokenizer: Any) -> Any:
    from transformers import WhisperFeatureExtractor

    own = pickle.loads(pickle.dumps(tokenizer))
    own.add_special_tokens({"additional_special_tokens": ["[AUDIO]"]})
    own.chat_template = TEMPLATE
    extract = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return SimpleNamespace(feature_extractor=extract, tokenizer=own)


def wav(seconds: float, seed: int = 0) -> bytes:
    samples = np.random.default_rng(seed).normal(size=int(seconds * RATE)) * 0.2
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV")
    return file.getvalue()


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    """Four files, `0.wav` to `3.wav`, with one to four parts."""
    for number in range(4):
        (tmp_path / f"{number}.wav").write_bytes(wav(0.3 + 0.5 * number, seed=number))
    return tmp_path


def chat(*numbers: int) -> dict[str, Any]:
    parts = [*[{"type": "audio"}] * len(numbers), {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a dog"}]
    return {"messages": messages, "audios": [f"{number}.wav" for number in numbers]}


def loader_of(
    mixture: Any, jsonl: Any, processor: Any, rows: Any, form: Form | None = None, **options: Any
) -> Any:
    inform = {"data_files": jsonl(rows), "content_field": "messages", **options.pop("inform", {})}
    made = mixture(informs=[inform], **{"pack_tokens": False, "seed": 0, **options})
    token = processor.tokenizer.convert_tokens_to_ids("[AUDIO]")
    return build_loader(
        made,
        batch_size=2,
        seq_length=None if made.pack_tokens else 96,
        shuffle=False,
        processor=processor,
        recordings=form or Form(token),
    )


def of_transformers(processor: Any, *files: Path) -> np.ndarray:
    """Return the parts of recordings, computed by the processor of Voxtral."""
    pytest.importorskip("torch")
    from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

    self = SimpleNamespace(feature_extractor=processor.feature_extractor)
    arrays = [soundfile.read(file, dtype="float32")[0] for file in files]
    options: dict[str, Any] = {**VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": RATE // 2}
    del options["max_source_positions"]
    return VoxtralProcessor._retrieve_input_features(self, arrays, 50, **options).numpy()


@pytest.mark.torch
def test_recordings_of_a_batch_equal_transformers(mixture, jsonl, processor, sounds) -> None:
    batch = loader_of(mixture, jsonl, processor, [chat(0, 2), chat(1)]).batch_at(0)
    assert batch["input_features"].shape == (2, 4, 16, 50)
    token = processor.tokenizer.convert_tokens_to_ids("[AUDIO]")
    for row, numbers in enumerate([(0, 2), (1,)]):
        want = of_transformers(processor, *(sounds / f"{number}.wav" for number in numbers))
        found = batch["input_features"][row]
        np.testing.assert_array_equal(found[: len(want)], want)
        assert not found[len(want) :].any()
        placeholders = batch["input_ids"][row] == token
        assert placeholders.sum() == FEATURES * len(want)
        assert (batch["labels"][row][placeholders] == -100).all()


def _part(kind: str) -> dict[str, Any]:
    text = base64.b64encode(wav(0.3)).decode()
    return {
        "audio": {"type": "audio", "audio": "0.wav"},
        "path": {"type": "audio", "path": "0.wav"},
        "base64": {"type": "audio", "base64": text},
        "data": {"type": "audio", "url": f"data:audio/wav;base64,{text}"},
        "audio_url": {"type": "audio_url", "audio_url": {"url": "0.wav"}},
        "input_audio": {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
    }[kind]


@pytest.mark.parametrize("kind", ["audio", "path", "base64", "data", "audio_url", "input_audio"])
def test_parts_contain_their_recordings(mixture, jsonl, processor, sounds, kind: str) -> None:
    listed = loader_of(mixture, jsonl, processor, [chat(0)]).batch_at(0)
    row = chat()
    row["messages"][0]["content"].insert(0, _part(kind))
    own = loader_of(mixture, jsonl, processor, [row]).batch_at(0)
    assert all(np.array_equal(own[name], listed[name]) for name in listed)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**chat(0), "audios": []}, r":1: recording part 1 of the messages has no recording"),
        ({**chat(0), "audios": ["0.wav", "1.wav"]}, r":1: the row has 2 recordings in 'audios'"),
        ({**chat(0), "audios": ["none.wav"]}, r":1: there is no recording 'none\.wav'"),
        ({**chat(0), "audios": ["data.jsonl"]}, r":1, recording 1 of 1: the recording cannot be"),
        ({**chat(0), "audios": [5]}, r":1: 'audios' must be a recording: .*got int 5"),
        (
            {"messages": [{"role": "user", "content": "[AUDIO]"}]},
            r":1: the row has 0 recordings, but its tokens contain the audio token '\[AUDIO\]' 1",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio", "base64": "?"}]}]},
            r":1: an audio part has an invalid base64 text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "0.wav"}]}]},
            r":1: the messages contain images: pass the processor of a model that reads images",
        ),
        (chat(3, 3, 3, 3, 3), r":1: the row has \d+ tokens, and truncation at 96"),
    ],
)
def test_errors_of_recordings_name_file_and_row(
    mixture, jsonl, processor, sounds, row: Any, says: str
) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl{says}"):
        loader_of(mixture, jsonl, processor, [row]).batch_at(0)
    rows, skip = [row, chat(1)], {"on_error": "skip"}
    kept = loader_of(mixture, jsonl, processor, rows, inform=skip).batch_at(0)
    assert (kept["segment_ids"][:, 0] > 0).tolist() == [True, True], "the valid row is repeated"


@pytest.mark.torch
def test_recordings_without_padding_have_the_features_of_transformers(
    mixture, jsonl, processor, sounds
) -> None:
    """Qwen2-Audio: the features of a recording follow from its length."""
    pytest.importorskip("torch")
    from transformers import Qwen2AudioProcessor

    token = processor.tokenizer.convert_tokens_to_ids("[AUDIO]")
    form = Form(token, (16, 100), 25, includes_padding=False)
    rows = [chat(0), chat(1)]
    batch = loader_of(mixture, jsonl, processor, rows, form=form).batch_at(0)
    self = SimpleNamespace(
        feature_extractor=processor.feature_extractor,
        replace_audio_token=lambda inputs, audio_idx: "",
    )
    for row in range(2):
        samples = [soundfile.read(sounds / f"{row}.wav", dtype="float32")[0]]
        options = {"sampling_rate": RATE, "return_tensors": "np"}
        want, _ = Qwen2AudioProcessor._process_audio(self, samples, **options)  # type: ignore
        found = {name: batch[name][row, :1] for name in ("input_features", SOUND)}
        assert all(np.array_equal(found[name], want[name]) for name in found)
        assert (batch["input_ids"][row] == token).sum() == want["num_audio_tokens"][0]
    with pytest.raises(DataError, match=r"data\.jsonl:1, recording 1 of 1: .*at most 1 seconds"):
        loader_of(mixture, jsonl, processor, [chat(3)], form=form).batch_at(0)


def test_damaged_recording_is_an_error_of_its_row(mixture, jsonl, processor, sounds) -> None:
    file = sounds / "2.wav"
    file.write_bytes(file.read_bytes()[:9000])
    with pytest.raises(DataError, match=r"data\.jsonl:2, recording 1 of 1: .*its header states"):
        loader_of(mixture, jsonl, processor, [chat(0), chat(2)]).batch_at(0)


def test_durations_drop_rows_of_chats(mixture, jsonl, processor, sounds) -> None:
    limit = {"inform": {"max_duration_in_seconds": 1.0, "audio_field": "sounds"}}
    rows = [{"messages": row["messages"], "sounds": row["audios"]} for row in (chat(0), chat(3))]
    loader = loader_of(mixture, jsonl, processor, rows, **limit)
    (stats,) = loader.stats["sources"].values()
    assert "longer than max_duration_in_seconds (1)" in str(stats)


def test_recordings_require_a_model_that_reads_them(mixture, jsonl, processor, sounds) -> None:
    inform = {"data_files": jsonl([chat(0)]), "content_field": "messages"}
    made = mixture(informs=[inform], pack_tokens=False)
    with pytest.raises(DataError, match=r"data\.jsonl:1: the messages contain recordings"):
        build_loader(made, processor.tokenizer, seq_length=64).batch_at(0)


def test_packed_rows_have_the_recordings_of_their_documents(
    mixture, jsonl, processor, sounds
) -> None:
    rows = [chat(0), chat(1), chat(), chat(0, 1)]
    options = {"pack_tokens": True, "pack_seq_length": 128, "pack_strategy": "greedy"}
    packed = loader_of(mixture, jsonl, processor, rows, **options).batch_at(0)
    alone = loader_of(mixture, jsonl, processor, rows)
    token = processor.tokenizer.convert_tokens_to_ids("[AUDIO]")
    found = []
    for row in range(2):
        used = int((packed["input_ids"][row] == token).sum()) // FEATURES
        found += list(packed["input_features"][row, :used])
        assert not packed["input_features"][row, used:].any()
    wanted = []
    for step, row in ((0, 0), (0, 1), (1, 1)):
        batch = alone.batch_at(step)
        used = int((batch["input_ids"][row] == token).sum()) // FEATURES
        wanted += list(batch["input_features"][row, :used])
    assert packed["segment_ids"].max() > 1, "no row contains several documents"
    np.testing.assert_array_equal(np.stack(found[: len(wanted)]), np.stack(wanted))
