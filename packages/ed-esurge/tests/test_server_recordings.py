"""Recordings in chat requests: replies equal `generate`, and invalid parts are refused."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from ed_esurge.command.load import create_engine, parse_model_arguments
from ed_esurge.server.generation.recordings import ChatRecordings
from ed_esurge.server.generation.requests import ChatMessage
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.launch import background
from ed_esurge.testing import byte_tokenizer
from ed_models.modalities.audio import RecordingForm

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% for part in message.content %}"
    "{% if part.type == 'audio' %}[BEGIN_AUDIO][AUDIO]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}<|assistant|>"
)
TOKENS = ["[AUDIO]", "[BEGIN_AUDIO]"]
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
AUDIO = {
    "hidden_size": 24,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_mel_bins": 80,
    "max_source_positions": 40,
    "initializer_range": 0.3,
}
#: Samples that the encoder reads at once, and their features (Voxtral).
SAMPLES, FEATURES = 80 * 160, 10


@pytest.fixture(scope="module", params=["voxtral", "qwen2_audio"])
def checkpoint(request, tmp_path_factory) -> Path:
    """Directory of a tiny random model with its feature extractor and a template."""
    from ed_models.auto import AutoEasyDeLAnyToAnyModel, AutoEasyDeLConfig

    tokens = byte_tokenizer(TEMPLATE)
    tokens.add_special_tokens({"additional_special_tokens": TOKENS})
    config = AutoEasyDeLConfig.for_model(
        request.param,
        text_config={**TEXT, "vocab_size": len(tokens)},
        audio_config=AUDIO,
        audio_token_id=tokens.convert_tokens_to_ids("[AUDIO]"),
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    path = tmp_path_factory.mktemp(request.param)
    model: Any = AutoEasyDeLAnyToAnyModel.from_config(config, "float32", "float32", seed=5)
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    extractor().save_pretrained(path)
    return path


def extractor() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=80, chunk_length=1)


def sound(seed: int, samples: int) -> np.ndarray:
    """16-bit samples of noise."""
    return np.random.default_rng(seed).integers(-20000, 20000, samples).astype(np.int16)


def wav(samples: np.ndarray) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())
    return data.getvalue()


def part(data: bytes, kind: str = "wav") -> dict[str, Any]:
    audio = {"data": base64.b64encode(data).decode(), "format": kind}
    return {"type": "input_audio", "input_audio": audio}


@pytest.mark.nightly
def test_replies_to_0_1_and_3_recordings_equal_generate(checkpoint):
    from ed_models.auto import AutoEasyDeLAnyToAnyModel
    from transformers import AutoTokenizer

    flags = "--max-model-len 128 --max-num-seqs 2 --max-num-seq-buckets 2 --page-size 16"
    flags += " --max-num-batched-tokens 16 --silent-mode"
    engine = create_engine(parse_model_arguments([str(checkpoint), *flags.split()]))
    before = engine.loop.runner.num_traces
    model: Any = AutoEasyDeLAnyToAnyModel.from_pretrained(checkpoint)
    tokens, extract = AutoTokenizer.from_pretrained(checkpoint), extractor()
    whole = "feature_attention_mask" not in model.input_names
    second = SAMPLES + 5000 if whole else 6000
    sounds = [sound(1, 9000), sound(2, second), sound(3, SAMPLES)]
    text = {"type": "text", "text": "what [AUDIO]?"}
    replies, wanted, logprobs = [], [], []
    with background(engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        for chosen in ([], sounds[:1], sounds, sounds[::-1]):
            content: Any = [text, *(part(wav(each)) for each in chosen)]
            answer: Any = client.chat.completions.create(
                model=engine.model_name,
                messages=[{"role": "user", "content": content}],
                max_tokens=8,
                temperature=0,
                logprobs=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            replies.append((answer.prompt_token_ids, answer.choices[0].token_ids))
            found = [each.logprob for each in answer.choices[0].logprobs.content]
            # The arrays and tokens of `VoxtralProcessor` of transformers.
            start = tokens("<|user|>what ", add_special_tokens=False)["input_ids"]
            prompt = start + tokens("[AUD", add_special_tokens=False)["input_ids"]
            prompt += tokens("IO]?", add_special_tokens=False)["input_ids"]
            features, masks = [], []
            for each in chosen:
                output = extract(
                    each.astype(np.float32) / 32768,
                    sampling_rate=16000,
                    padding=True,
                    truncation=False,
                    pad_to_multiple_of=SAMPLES,
                    return_tensors="np",
                )["input_features"]
                features += list(output.reshape(80, -1, 80).transpose(1, 0, 2))
                begin, audio = tokens.convert_tokens_to_ids(["[BEGIN_AUDIO]", "[AUDIO]"])
                frames = -(-len(each) // 160)
                count = FEATURES * -(-len(each) // SAMPLES) if whole else (frames + 1) // 2 // 2
                masks.append((np.arange(80) < frames).astype(np.int32))
                prompt += [begin, *[audio] * count]
            prompt += tokens("<|assistant|>", add_special_tokens=False)["input_ids"]
            arrays = {"input_features": np.stack(features)[None]} if features else {}
            if features and not whole:
                arrays["feature_attention_mask"] = np.stack(masks)[None]
            out = model.generate(
                np.array([prompt]),
                max_new_tokens=8,
                eos_token_id=[],
                output_logprobs=True,
                **arrays,
            )
            wanted.append((prompt, out.sequences[0, len(prompt) :].tolist()))
            logprobs.append(out.logprobs[0])
            np.testing.assert_allclose(found, logprobs[-1], atol=1e-4)
        chosen = [part(wav(each)) for each in sounds[:2]]
        messages: Any = [{"role": "user", "content": [text, *chosen]}]
        options = {"model": engine.model_name, "temperature": 0}
        chat = client.chat.completions.create(messages=messages, max_tokens=8, **options)
        items: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": text["text"]}, *chosen]}
        ]
        response = client.responses.create(input=items, max_output_tokens=16, **options)
        assert response.usage is not None
        assert chat.usage is not None
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.output_text.startswith(chat.choices[0].message.content or "?")
        items[0]["content"][1] = part(b"no sound")
        with pytest.raises(openai.BadRequestError, match="the data is no wav file") as refused:
            client.responses.create(input=items, **options)
        assert refused.value.param == "input[0].content[1].input_audio"
    assert replies == wanted
    # The most probable tokens of different recordings may be the same, their probabilities not.
    for one, other in itertools.combinations(logprobs, 2):
        assert np.abs(one - other).max() > 1e-2, "the recordings have no effect"
    assert engine.loop.runner.num_traces == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([part(b"no sound")], "the data is no wav file"),
        ([part(wav(sound(1, 9000)), "mp3")], "the data is no mp3 file"),
        ([part(wav(sound(1, 100)))], "the minimum is 0.1 seconds"),
        ([part(wav(sound(1, 4 * SAMPLES)))], "longer than"),
        ([{"type": "input_audio"}], "is missing"),
        (
            [{"type": "input_audio", "input_audio": {"data": "%", "format": "wav"}}],
            "valid base64",
        ),
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "does not accept images"),
        ([part(wav(sound(1, 9000)))] * 17, "at most 16 recordings"),
    ],
)
def test_invalid_recording_is_refused_with_its_field(content, message):
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda token: "[AUDIO]")
    form = RecordingForm(9, (80, 80), FEATURES)
    reader = ChatRecordings(form, extractor(), tokenizer, 3 * FEATURES)
    chat = ChatMessage.model_validate({"role": "user", "content": content})

    def read() -> None:
        sources = asyncio.run(reader.sources([chat]))
        reader.expand_placeholders("[AUDIO]" * len(sources), sources)

    with pytest.raises(APIError, match=message) as failed:
        read()
    assert str(failed.value.param).startswith("messages[0].content[")
