"""Transcripts equal those of `transformers` on torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_models.body.spec_augment import Spans
from ed_models.speech import Segment, SpokenWord, Transcriber, load_transcriber, pieces
from ed_models.speech.alignment import TokenAligner, find_warping_path
from ed_models.speech.pieces import pause
from ed_models.speech.whisper import Thresholds
from ed_models.speech.words import split_words

from tests.speech_cases import (
    RATE,
    recording,
    write_moonshine,
    write_wav2vec2,
    write_whisper,
)

torch = pytest.importorskip("torch")
FLOAT32 = {"dtype": "float32", "param_dtype": "float32"}
NEVER = Thresholds(None, None, None)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transcriber, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    model = write_whisper(folder)
    return load_transcriber(folder, **FLOAT32), model


def their_segments(transcriber: Transcriber, model: Any, samples: np.ndarray, **options: Any):
    """Return start, end and tokens of the segments of `transformers`."""
    form = {} if len(samples) <= RATE else {"truncation": False, "padding": "longest"}
    features = transcriber.processor(samples, sampling_rate=RATE, return_tensors="pt", **form)
    found = model.generate(features.input_features, return_segments=True, **options)
    return [
        (round(float(s["start"]), 3), round(float(s["end"]), 3), s["tokens"].tolist())
        for s in found["segments"][0]
    ]


def ours(segments: tuple[Segment, ...]) -> list[tuple[float, float, list[int]]]:
    return [(round(s.start, 3), round(s.end, 3), list(s.tokens)) for s in segments]


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [0.7, 1.7])
@pytest.mark.parametrize(
    ("timestamps", "conditioned", "thresholds", "prompt"),
    [
        (False, False, NEVER, None),
        (True, True, NEVER, "ab cd"),
        (True, True, Thresholds(1.1, -4.0, 0.003), None),
        (True, False, Thresholds(1.1, -4.0, 0.003), "ab cd"),
    ],
)
def test_whisper_segments_equal_transformers(
    whisper: tuple[Transcriber, Any],
    seconds: float,
    timestamps: bool,
    conditioned: bool,
    thresholds: Thresholds,
    prompt: str | None,
) -> None:
    loaded, model = whisper
    transcriber = Transcriber(
        loaded.model,
        loaded.processor,
        thresholds=thresholds,
        condition_on_prev_tokens=conditioned,
    )
    samples = recording(seconds)
    found = transcriber.transcribe(
        samples, temperature=(0.0, 0.0), timestamps=timestamps, prompt=prompt
    )
    given = {}
    if prompt is not None:
        given["prompt_ids"] = torch.tensor(transcriber.processor.get_prompt_ids(prompt))
    expected = their_segments(
        transcriber,
        model,
        samples,
        task="transcribe",
        temperature=(0.0, 0.0),
        return_timestamps=timestamps or seconds > 1,
        condition_on_prev_tokens=conditioned,
        compression_ratio_threshold=thresholds.compression_ratio,
        logprob_threshold=thresholds.logprob,
        no_speech_threshold=thresholds.no_speech,
        **given,
    )
    assert ours(found.segments) == expected
    assert found.language in ("en", "de")
    assert found.duration == pytest.approx(seconds, abs=1e-4)


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize(("language", "task"), [("de", "translate"), ("English", "transcribe")])
def test_whisper_obeys_language_and_task(
    whisper: tuple[Transcriber, Any], language: str, task: str
) -> None:
    loaded, model = whisper
    samples = recording(0.8, seed=3)
    transcriber = Transcriber(loaded.model, loaded.processor, thresholds=NEVER)
    seen: list[Segment] = []
    found = transcriber.transcribe(samples, language=language, task=task, on_segment=seen.append)
    expected = their_segments(
        transcriber, model, samples, task=task, language=language.lower(), return_timestamps=False
    )
    assert ours(found.segments) == expected
    assert found.language == {"de": "de", "English": "en"}[language]
    assert tuple(seen) == found.segments
    text = transcriber.processor.tokenizer.decode(expected[0][2], skip_special_tokens=True)
    assert found.text == text.strip()


@pytest.mark.nightly
def test_whisper_draws_with_higher_temperatures_after_failed_attempts(
    whisper: tuple[Transcriber, Any],
) -> None:
    loaded, _ = whisper
    strict = Thresholds(compression_ratio=None, logprob=0.0, no_speech=None)
    transcriber = Transcriber(loaded.model, loaded.processor, thresholds=strict)
    (segment,) = transcriber.transcribe(recording(0.7), temperature=(0.0, 0.4, 0.9)).segments
    assert segment.temperature == 0.9
    again = transcriber.transcribe(recording(0.7), temperature=(0.0, 0.4, 0.9), seed=0)
    assert again.segments[0].tokens == segment.tokens
    assert segment.avg_logprob < 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "french"}, "language='french' is not a language .*known: de, en"),
        ({"task": "sing"}, "task='sing' is not a task of the model: transcribe, translate"),
        ({"temperature": 3.0}, "temperature is 3.0; it must be between 0 and 2"),
        ({"prompt": "x<|en|>"}, "prompt contains the special token '<|en|>'"),
    ],
)
def test_whisper_refuses_bad_arguments(
    whisper: tuple[Transcriber, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")):
        whisper[0].transcribe(recording(0.5), **options)


def test_transcriber_refuses_two_channels(whisper: tuple[Transcriber, Any]) -> None:
    with pytest.raises(ConfigError, match=r"samples have shape \[2, 5\]"):
        whisper[0].transcribe(np.zeros((2, 5), np.float32))


def test_checkpoint_that_is_no_model_for_speech_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": null}')
    with pytest.raises(CheckpointError, match="not for speech"):
        load_transcriber(tmp_path)


@pytest.mark.torch
def test_ctc_text_equals_transformers(tmp_path: Path) -> None:
    model = write_wav2vec2(tmp_path)
    transcriber = load_transcriber(tmp_path, **FLOAT32)
    samples = recording(1.3)
    values = transcriber.processor(samples, sampling_rate=RATE, return_tensors="pt").input_values
    with torch.no_grad():
        ids = model(values).logits.argmax(-1)
    expected = transcriber.processor.batch_decode(ids)[0]
    assert transcriber.transcribe(samples).text == expected
    assert expected
    with pytest.raises(ConfigError, match="language='en' has no effect"):
        transcriber.transcribe(samples, language="en")
    with pytest.raises(ConfigError, match=r"temperature=0\.5 has no effect"):
        transcriber.transcribe(samples, temperature=0.5)


@pytest.mark.torch
@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [3, 30])
def test_ctc_text_of_a_long_recording_equals_the_pipeline_of_transformers(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import pipeline

    monkeypatch.setattr(pieces, "PIECE_SECONDS", seconds)
    monkeypatch.setattr(pieces, "OVERLAP_SECONDS", seconds / 6)
    model = write_wav2vec2(tmp_path)
    transcriber = load_transcriber(tmp_path, **FLOAT32)
    samples = np.concatenate([recording(seconds * 17 / 30, seed) for seed in range(4)])
    recognize = pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=transcriber.processor.tokenizer,
        feature_extractor=transcriber.processor.feature_extractor,
        chunk_length_s=seconds,
        stride_length_s=seconds / 6,
    )
    assert transcriber.transcribe(samples).text == recognize(samples)["text"]


@pytest.mark.nightly
@pytest.mark.torch
def test_moonshine_tokens_equal_transformers(tmp_path: Path) -> None:
    model = write_moonshine(tmp_path)
    transcriber = load_transcriber(tmp_path, **FLOAT32)
    samples = recording(2.0)
    values = transcriber.processor.feature_extractor(
        samples, sampling_rate=RATE, return_tensors="pt"
    ).input_values
    expected = model.generate(values, max_new_tokens=13, do_sample=False)[0, 1:].tolist()
    (segment,) = transcriber.transcribe(samples).segments
    assert list(segment.tokens) == expected
    with pytest.raises(ConfigError, match="prompt='x' has no effect"):
        transcriber.transcribe(samples, prompt="x")


@pytest.mark.nightly
def test_long_recordings_are_cut_at_the_quietest_moment() -> None:
    samples = recording(40)
    quiet = int(27.3 * RATE)
    samples[quiet : quiet + 2000] *= 0.001
    assert quiet <= pause(samples, RATE) <= quiet + 2000
    assert pause(samples[: 20 * RATE], RATE) == 20 * RATE


@pytest.mark.nightly
@pytest.mark.torch
def test_masked_spans_have_the_statistics_of_transformers() -> None:
    from transformers.models.wav2vec2.modeling_wav2vec2 import _compute_mask_indices

    lengths, size = np.array([200, 120]), 200
    mask = (np.arange(size) < lengths[:, None]).astype(np.int64)
    np.random.seed(0)
    theirs = np.mean(
        [_compute_mask_indices((2, size), 0.3, 10, torch.tensor(mask), 2) for _ in range(400)],
        axis=0,
    )
    spans = Spans(0.3, 10, 2)
    draw = jax.vmap(lambda key: spans.mask(key, jnp.asarray(lengths), size))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 400)))
    assert not drawn[:, 1, 120:].any()
    np.testing.assert_allclose(drawn.mean(axis=(0, 2)), theirs.mean(axis=1), rtol=0.03)
    few = np.asarray(Spans(0.0001, 10, 2).mask(jax.random.key(1), jnp.asarray(lengths), size))
    assert (few.sum(axis=1) <= 20).all()
    assert (few.sum(axis=1) >= 10).all()


HEADS = [[0, 1], [1, 0], [1, 3]]


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transcriber, Any]:
    """A Whisper with alignment heads, and the model of transformers."""
    folder = tmp_path_factory.mktemp("aligned")
    model = write_whisper(folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "alignment_heads": HEADS}))
    model.generation_config.alignment_heads = HEADS
    loaded = load_transcriber(folder, **FLOAT32)
    return Transcriber(loaded.model, loaded.processor, thresholds=NEVER), model


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seconds", [0.43, 0.7, 1.7, 3.3])
def test_times_of_tokens_equal_transformers(
    aligned: tuple[Transcriber, Any], seconds: float, seed: int
) -> None:
    transcriber, model = aligned
    samples = recording(seconds, seed=seed)
    found = transcriber.transcribe(samples, temperature=0.0, word_timestamps=True)
    form = {} if len(samples) <= RATE else {"truncation": False, "padding": "longest"}
    inputs = transcriber.processor(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **form
    )
    theirs = model.generate(
        inputs.input_features,
        attention_mask=inputs.attention_mask,
        return_segments=True,
        return_timestamps=True,
        return_token_timestamps=True,
        task="transcribe",
        temperature=(0.0,),
        condition_on_prev_tokens=True,
    )["segments"][0]
    assert [list(s.tokens) for s in found.segments] == [s["tokens"].tolist() for s in theirs]
    for segment, other in zip(found.segments, theirs, strict=True):
        times = other["token_timestamps"].tolist()
        assert segment.token_times == pytest.approx(times, abs=1e-4)
    distinct = {time for segment in found.segments for time in segment.token_times or ()}
    assert len(distinct) > (2 if seconds > 1 else 1), "the times depend on the tokens"


@pytest.mark.torch
@pytest.mark.nightly
def test_words_equal_those_of_transformers(aligned: tuple[Transcriber, Any]) -> None:
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    transcriber, _ = aligned
    tokenizer = transcriber.processor.tokenizer
    texts = [
        ' Hello, world! It\'s a (small) test - 12.5% of "all" words...',
        "Grüße aus Köln 世界。 다음 ¿Qué? [a] {b}",
        "¿",
        " a\ufffd b",
    ]
    for language, name in (("en", "english"), ("zh", "chinese")):
        for text in texts:
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            times = [(float(n), float(n + 1)) for n in range(len(tokens))]
            words = split_words(tokens, times, transcriber.get_text, language)
            expected, _, places = _combine_tokens_into_words(tokenizer, tokens, name)
            assert [word.text for word in words] == expected
            assert [(w.start, w.end) for w in words] == [(p[0], p[-1] + 1) for p in places]
    (word,) = split_words([65], [(0.5, 1.0)], lambda tokens: "a", None)
    assert word == SpokenWord("a", 0.5, 1.0)


@pytest.mark.torch
def test_warped_path_equals_transformers() -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    rng = np.random.default_rng(0)
    for n, t in ((1, 1), (1, 5), (4, 1), (7, 11), (12, 5), (20, 50)):
        costs = rng.normal(size=(n, t))
        for matrix in (costs, np.round(costs)):  # without and with ties
            np.testing.assert_array_equal(find_warping_path(matrix), _dynamic_time_warping(matrix))
    costs = rng.normal(size=(9, 30))
    rows, columns = find_warping_path(costs)
    steps = set(zip(np.diff(rows).tolist(), np.diff(columns).tolist(), strict=True))
    assert steps == {(0, 1), (1, 0), (1, 1)}


@pytest.mark.nightly
@pytest.mark.torch
def test_times_of_words_require_valid_alignment_heads(
    whisper: tuple[Transcriber, Any], aligned: tuple[Transcriber, Any]
) -> None:
    samples = recording(0.5)
    with pytest.raises(ConfigError, match="requires alignment_heads in generation_config"):
        whisper[0].transcribe(samples, word_timestamps=True)
    transcriber = Transcriber(aligned[0].model, aligned[0].processor)
    decoder: Any = transcriber.decoder
    decoder.aligner = TokenAligner(transcriber.model, [[0, 1], [2, 0]])
    with pytest.raises(ConfigError, match=r"has \[2, 0\]; the decoder has 2 layers with 4 heads"):
        transcriber.transcribe(samples, word_timestamps=True)
