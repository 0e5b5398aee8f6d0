"""Encoder-decoders: prompts are encoded once into slots, and tokens equal those of `generate`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from ed_esurge import PoolingParams, SamplingParams, eSurge
from ed_esurge.core.commands import EncoderInput
from ed_esurge.core.prefix_cache import prompt_keys
from ed_esurge.server import background
from ed_esurge.testing import byte_tokenizer
from ed_infra import registry
from ed_infra.errors import ConfigError
from ed_infra.testing import require_torch

FIELDS = {
    "vocab_size": 260,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    # Large weights, so that different prompts have different answers.
    "initializer_factor": 3.0,
}
OPTIONS = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "page_size": 8,
    "compile_runner": False,
    "silent_mode": True,
}
PROMPTS = [np.random.default_rng(n).integers(2, 260, n).tolist() for n in (5, 17, 40, 3, 29, 11)]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def model():
    config = registry.get_config("t5")(**FIELDS, sharding_axis_dims=(1, 1, 1, 1, 1))
    return registry.get_module("sequence-to-sequence", "t5").create(config, seed=4)


@pytest.fixture(scope="module")
def engine(model):
    return eSurge(model, **OPTIONS)


def tokens(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def completion(sequence: list[int]) -> list[int]:
    """The tokens of a sequence after the start token, to the first end-of-sequence token."""
    generated = sequence[1:]
    end = FIELDS["eos_token_id"]
    return generated[: generated.index(end) + 1] if end in generated else generated


@pytest.mark.nightly
def test_greedy_tokens_equal_generate(model, engine):
    found = tokens(engine.generate(PROMPTS, GREEDY))
    assert len({tuple(row) for row in found}) > 2, "the answers depend on the prompts"
    for prompt, row in zip(PROMPTS, found, strict=True):
        output = model.generate(np.array([prompt]), do_sample=False, max_new_tokens=20)
        assert row == completion(np.asarray(output.sequences)[0].tolist())


@pytest.mark.torch
def test_greedy_tokens_equal_transformers(model, engine, tmp_path):
    torch = require_torch()
    from transformers import T5ForConditionalGeneration

    model.save_pretrained(tmp_path)
    theirs: Any = T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    for prompt, row in zip(PROMPTS, tokens(engine.generate(PROMPTS, GREEDY)), strict=True):
        with torch.no_grad():
            output = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)
        assert row == completion(output[0].tolist())


@pytest.mark.nightly
def test_preempted_sequences_are_encoded_again(model, engine):
    endless = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    small = eSurge(model, **{**OPTIONS, "max_model_len": 64, "num_pages": 9})
    assert tokens(small.generate(PROMPTS, endless)) == tokens(engine.generate(PROMPTS, endless))
    assert small.stats()["num_preemptions"] > 0


@pytest.mark.nightly
def test_samples_do_not_depend_on_other_requests(engine):
    params = [SamplingParams(temperature=1, seed=n, max_tokens=12) for n in range(len(PROMPTS))]
    together = tokens(engine.generate(PROMPTS, params))
    pairs = zip(PROMPTS, params, strict=True)
    assert together == [tokens(engine.generate([p], one))[0] for p, one in pairs]


@pytest.mark.nightly
def test_slots_of_aborted_requests_are_used_again(engine):
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{number}", prompt, GREEDY)
    engine.step()
    for number in range(len(PROMPTS)):
        engine.abort_request(f"r{number}")
    both = [tokens(engine.generate(prompts, GREEDY)) for prompts in (PROMPTS[:2], PROMPTS)]
    assert both[0] == both[1][:2]


def test_keys_of_pages_contain_the_encoder_input():
    items = [EncoderInput.of({"input_ids": np.full(5, n, np.int32)}, 0, 5) for n in (2, 3)]
    first, second = (prompt_keys([0] * 16, b"", 8, [item]) for item in items)
    assert not set(first) & set(second)


@pytest.mark.nightly
def test_compiled_engine_is_not_traced_again(model):
    engine = eSurge(model, **{**OPTIONS, "max_model_len": 32, "compile_runner": True})
    traces = engine.loop.runner.num_traces
    engine.generate([prompt[:11] for prompt in PROMPTS], GREEDY)
    assert engine.loop.runner.num_traces == traces


@pytest.mark.parametrize("name", ["max_loras", "batch_invariant"])
def test_unsupported_options_raise_config_error(model, name):
    with pytest.raises(ConfigError, match=f"{name} is not supported for an encoder-decoder"):
        eSurge(model, config={**OPTIONS, name: 1})


def test_pooling_and_prompt_logprobs_raise_config_error(engine):
    with pytest.raises(ConfigError, match="has no pooled vector"):
        engine.embed(PROMPTS[:1], PoolingParams())
    with pytest.raises(ConfigError, match="no prompt_logprobs"):
        engine.generate(PROMPTS[:1], SamplingParams(max_tokens=2, prompt_logprobs=1))


TEXTS = ["translate: hello", "a", "The cat sleeps on the mat", "Grüße 世界"]


@pytest.fixture(scope="module")
def text_engine(model):
    return eSurge(model, byte_tokenizer(), model_name="t5", **OPTIONS)


@pytest.fixture(scope="module")
def url(text_engine):
    with background(text_engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def answers(client):
    """The answer to each text, requested one at a time."""
    return [complete(client, text) for text in TEXTS]


def complete(client, text: str, **options: Any):
    return client.completions.create(
        model="t5", prompt=text, temperature=0, max_tokens=20, **options
    )


@pytest.mark.nightly
def test_official_client_receives_the_tokens_of_generate(model, client, answers):
    tokenizer = byte_tokenizer()
    assert len({answer.choices[0].text for answer in answers}) > 1, "the answers differ"
    for text, answer in zip(TEXTS, answers, strict=True):
        ids = tokenizer(text)["input_ids"]
        output = model.generate(np.array([ids]), do_sample=False, max_new_tokens=20)
        wanted = completion(np.asarray(output.sequences)[0].tolist())
        (choice,) = complete(client, text, extra_body={"return_token_ids": True}).choices
        assert choice.token_ids == wanted
        assert answer.choices[0].text == tokenizer.decode(wanted, skip_special_tokens=True)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == len(wanted) > 0


@pytest.mark.nightly
def test_streamed_texts_equal_those_without_streaming(client, answers):
    for text, answer in zip(TEXTS, answers, strict=True):
        choices = [chunk.choices[0] for chunk in complete(client, text, stream=True)]
        assert "".join(choice.text for choice in choices) == answer.choices[0].text
        assert choices[-1].finish_reason == answer.choices[0].finish_reason


@pytest.mark.nightly
def test_simultaneous_requests_equal_requests_one_at_a_time(client, answers):
    with ThreadPoolExecutor(len(TEXTS)) as threads:
        together = list(threads.map(partial(complete, client), TEXTS))
    for alone, other in zip(answers, together, strict=True):
        assert other.choices[0].text == alone.choices[0].text
        assert other.usage == alone.usage


@pytest.mark.nightly
def test_too_long_prompt_is_rejected_without_disturbing_others(client, answers):
    openai = pytest.importorskip("openai")
    too_long = "a" * OPTIONS["max_model_len"]  # the tokenizer adds a token
    with ThreadPoolExecutor(len(TEXTS)) as threads:
        others = [threads.submit(complete, client, text) for text in TEXTS]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                complete(client, too_long, stream=stream)
            assert caught.value.code == "context_length_exceeded"
            assert "maximum context length is 128 tokens" in caught.value.message
            assert "shorten it" in caught.value.message
        texts = [other.result().choices[0].text for other in others]
    assert texts == [answer.choices[0].text for answer in answers]
    assert complete(client, TEXTS[0]).choices[0].text == texts[0]


def test_embeddings_of_an_encoder_decoder_are_rejected(client):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError, match="no model of this server returns embeddings"):
        client.embeddings.create(model="t5", input="a")


def test_classify_rejects_an_encoder_decoder_by_its_task(url):
    answer = httpx.post(f"{url}/../classify", json={"input": "a"})
    assert answer.status_code == 400
    assert "has the task 'sequence-to-sequence'" in answer.json()["error"]["message"]
