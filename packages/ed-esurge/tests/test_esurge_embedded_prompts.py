"""Prompts of embeddings: equal to the prompts of the same tokens, and bounded."""

from __future__ import annotations

import base64
import pickle
import re

import httpx
import numpy as np
import openai
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.embedded_prompts import EmbeddedPrompts
from ed_esurge.engine import AsyncEngine
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine
from ed_infra.errors import ConfigError
from ed_infra.testing import require_torch
from safetensors.numpy import save

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=3)
LENGTHS = (1, 25, 49, 65, 66, 100)


class Embedding(ScriptedEngine):
    """A scripted engine that checks prompts of embeddings with a real model."""

    def __init__(self, model, **options) -> None:
        super().__init__(lambda prompt, choice: f"{len(prompt)}", **options)
        self.config = self.config.replace(enable_prompt_embeds=True)
        self.embedded_prompt = EmbeddedPrompts(model, self.max_model_len, 512).prompt


def table(model) -> np.ndarray:
    return np.asarray(model.model.embed_tokens.embedding.get_value())


def sent(array, **more) -> str:
    return base64.b64encode(save({"prompt_embeds": array, **more})).decode()


def embeddings_engine(model, tokenizer=None, **options):
    """An engine whose chunks split prompts, and whose pages do not hold all requests."""
    known = {
        "max_num_seqs": 3,
        "max_num_seq_buckets": (3,),
        "page_size": 8,
        "num_pages": 18,
        "max_num_batched_tokens": 24,
        "max_model_len": 120,
        "compile_runner": False,
        "silent_mode": True,
        "enable_prompt_embeds": True,
    }
    return eSurge(model, tokenizer, **{**known, **options})


def tokens(outputs):
    return [out.outputs[0].token_ids for out in outputs]


def scores(outputs):
    """Log-probabilities of the generated tokens; steps of other sizes change their last bits."""
    return np.array([out.outputs[0].cumulative_logprob for out in outputs])


def test_invalid_embeddings_are_rejected_with_value_bound_and_solution(llama):
    width = table(llama).shape[1]
    good = np.zeros((3, width), np.float32)
    bad = good.copy()
    bad[1, 2] = np.nan
    cases = [
        ("%%", "valid base64"),
        (base64.b64encode(pickle.dumps(good)).decode(), "not a safetensors file"),
        (sent(good, more=good), "2 tensors: send one tensor"),
        (sent(good.astype(np.int32)), "type I32: send F32, F16, BF16"),
        (sent(good[0]), rf"shape \[{width}\]"),
        (sent(good[:, 1:]), rf"shape \[3, {width - 1}\], and this model reads \[n, {width}\]"),
        (sent(np.zeros((300, width), np.float32)), "300 embeddings, and max_model_len is 256"),
        (sent(bad), "value of the embeddings is nan, and the limit is 65504"),
        (sent(good + 1e6), "value of the embeddings is 1000000.0, and the limit is 65504"),
    ]
    with background(Embedding(llama)) as url:
        for value, message in cases:
            answer = httpx.post(f"{url}/completions", json={"prompt_embeds": [sent(good), value]})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "prompt_embeds")
            assert re.search(message, error["message"]), error["message"]
        for name, value in (("echo", True), ("truncate_prompt_tokens", 2)):
            body = {"prompt_embeds": sent(good), name: value}
            answer = httpx.post(f"{url}/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        body = {"prompt_embeds": [sent(good)], "prompt": "ab", "return_token_ids": True}
        choices = httpx.post(f"{url}/completions", json=body).json()["choices"]
        assert [choice["text"] for choice in choices] == ["3", "3"]
        assert [choice["prompt_token_ids"] is None for choice in choices] == [True, False]
        assert httpx.post(f"{url}/completions", json={"max_tokens": 1}).status_code == 400
    with background(ScriptedEngine()) as url:
        answer = httpx.post(f"{url}/completions", json={"prompt_embeds": sent(good)})
        assert answer.status_code == 400
        assert "--enable-prompt-embeds" in answer.json()["error"]["message"]


@pytest.mark.nightly
def test_embeddings_of_tokens_equal_the_tokens_in_chunks_cache_and_preemption(llama):
    engine = embeddings_engine(llama)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 250, count).tolist() for count in LENGTHS]
    wanted = engine.generate(prompts, GREEDY)
    ids, items = zip(
        *(engine.embedded_prompt(table(llama)[prompt]) for prompt in prompts), strict=True
    )
    before = engine.stats()["num_preemptions"]
    got = engine.generate(ids, GREEDY, encoder_inputs=items)
    assert tokens(got) == tokens(wanted)
    np.testing.assert_allclose(scores(got), scores(wanted), atol=1e-4)
    assert [out.metrics.num_cached_tokens for out in got] == [0] * len(prompts)
    assert engine.stats()["num_preemptions"] > before
    last = [engine.generate([ids[4]], GREEDY, encoder_inputs=[items[4]])[0] for _ in range(2)]
    assert tokens(last) == tokens([wanted[4]]) * 2
    assert last[1].metrics.num_cached_tokens == 64
    changed = table(llama)[prompts[4]].copy()
    changed[0] += 1
    other, parts = engine.embedded_prompt(changed)
    (out,) = engine.generate([other], GREEDY, encoder_inputs=[parts])
    assert out.metrics.num_cached_tokens == 0
    assert abs(scores([out]) - scores([wanted[4]])) > 1e-3


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("family", ["llama", "gemma", "opt"])
def test_embeddings_of_no_tokens_equal_inputs_embeds_of_transformers(family, tmp_path):
    torch = require_torch()
    import transformers
    from ed_models.auto import AutoEasyDeLModelForCausalLM

    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {
        "llama": (transformers.LlamaConfig, {"intermediate_size": 48}),
        "gemma": (
            transformers.GemmaConfig,
            {"intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 2},
        ),
        "opt": (transformers.OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    }[family]
    torch.manual_seed(4)
    config = own[0](**sizes, **own[1], initializer_range=0.3, max_position_embeddings=128)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = AutoEasyDeLModelForCausalLM.from_pretrained(tmp_path, sharding_axis_dims=(1, 1, 1, 1, 1))
    width = theirs.get_input_embeddings().weight.shape[1]
    embeds = np.random.default_rng(1).normal(size=(40, width)).astype(np.float32)
    with torch.no_grad():
        wanted = theirs.generate(
            inputs_embeds=torch.tensor(embeds)[None],
            attention_mask=torch.ones(1, 40, dtype=torch.long),
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=12,
            eos_token_id=None,
        )[0].tolist()
    engine = embeddings_engine(ours, max_model_len=100)
    ids, items = engine.embedded_prompt(embeds)
    (out,) = engine.generate([ids], GREEDY, encoder_inputs=[items])
    assert out.outputs[0].token_ids == wanted


@pytest.mark.nightly
def test_official_client_sends_embeddings_that_equal_the_text(llama, tokenizer):
    engine = AsyncEngine(embeddings_engine(llama, tokenizer))
    engine.start()
    with background(engine) as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        embeds = table(llama)[tokenizer("An old house by the sea.")["input_ids"]]
        options = {"model": engine.model_name, "temperature": 0, "max_tokens": 9}
        text = client.completions.create(prompt="An old house by the sea.", **options)
        for kind in (np.float32, np.float16):
            same = table(llama).astype(kind)[tokenizer("An old house by the sea.")["input_ids"]]
            extra = {"prompt_embeds": sent(same)}
            answer = client.completions.create(prompt=None, extra_body=extra, **options)
            if kind is np.float32:
                assert answer.choices[0].text == text.choices[0].text
            assert answer.usage.prompt_tokens == len(embeds)
        pieces = client.completions.create(
            prompt=None, extra_body={"prompt_embeds": sent(embeds)}, stream=True, **options
        )
        assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
        extra = {"prompt_embeds": sent(embeds), "repetition_penalty": 1.1}
        with pytest.raises(
            openai.BadRequestError, match=r"repetition_penalty=1\.1 reads the token"
        ):
            client.completions.create(prompt=None, extra_body=extra, **options)


@pytest.mark.nightly
def test_models_that_read_more_than_embeddings_reject_the_option():
    from ed_models.families.gemma4_text import Gemma4TextConfig, Gemma4TextForCausalLM

    config = Gemma4TextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        hidden_size_per_layer_input=4,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    with pytest.raises(ConfigError, match="reads only the embeddings of its tokens"):
        embeddings_engine(Gemma4TextForCausalLM.create(config))
