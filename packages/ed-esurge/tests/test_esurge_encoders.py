"""Embedding models and classifiers: whole prompts, one vector each, equal to the model's output."""

from __future__ import annotations

import gc
import weakref

import jax
import numpy as np
import pytest
from ed_esurge import PoolingParams, SamplingParams, eSurge
from ed_esurge.config import EngineConfig
from ed_esurge.core.plan import PlanRow
from ed_esurge.engine.encoder_setup import EncoderSetup
from ed_esurge.runner.encoder_runner import bucket_rows
from ed_infra import registry
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said
from ed_layers.native import library
from flax import nnx

FIELDS = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_labels": 3,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "compile_runner": False,
    "silent_mode": True,
}
PROMPTS = [np.random.default_rng(n).integers(3, 100, n).tolist() for n in (5, 1, 40, 17, 30, 63)]


def build(task: str):
    config = registry.get_config("bert")(**FIELDS)
    return registry.get_module(task, "bert").create(config, seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["embedding", "sequence-classification"])
def test_vectors_equal_those_of_the_model(task):
    model = build(task)
    engine = eSurge(model, **OPTIONS)
    raw = PoolingParams(normalize=False)
    outputs = engine.embed(PROMPTS, raw)
    assert engine.stats()["num_steps"] > 1  # a step has fewer tokens than all prompts
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        alone = model(np.array([prompt]))
        wanted = alone.logits if task != "embedding" else alone.embeddings
        np.testing.assert_allclose(output.pooled, wanted[0], atol=2e-5)
        assert output.prompt_token_ids == prompt
    unit = engine.embed(PROMPTS)
    if task == "embedding":
        lengths = [float(np.linalg.norm(output.pooled)) for output in unit]
        assert lengths == pytest.approx([1.0] * len(PROMPTS), abs=1e-5)
    else:  # scores of labels are never normalized
        np.testing.assert_allclose(unit[0].pooled, outputs[0].pooled, atol=1e-6)


def test_lowered_length_of_an_encoder_is_reported(caplog):
    model = build("embedding")
    forget_said()
    longest = model.config.max_position_embeddings
    setup = EncoderSetup.resolve(model, EngineConfig(max_model_len=longest + 100))
    assert setup.limits.max_model_len == longest
    assert f"max_model_len {longest + 100} exceeds the model's {longest} tokens" in caplog.text
    caplog.clear()
    EncoderSetup.resolve(model, EngineConfig())
    assert not caplog.text


@pytest.mark.nightly
def test_encoder_rejects_generation_and_options_of_pages():
    model = build("embedding")
    engine = eSurge(model, **OPTIONS)
    with pytest.raises(ConfigError, match="generates no tokens: use embed"):
        engine.generate([PROMPTS[0]], SamplingParams(max_tokens=2))
    with pytest.raises(ConfigError, match="max_model_len=64"):
        engine.embed([[5] * 65])
    with pytest.raises(ConfigError, match="max_loras is not supported for an encoder"):
        eSurge(model, **OPTIONS, max_loras=1)
    assert "an encoder with" in engine.describe()


@pytest.mark.nightly
def test_new_weights_change_vectors_and_compile_nothing():
    model = build("embedding")
    engine = eSurge(model, **OPTIONS)
    before = engine.embed(PROMPTS[:2])
    compiled = engine.stats()["num_compiled"]
    other = registry.get_module("embedding", "bert").create(model.config, seed=2)
    engine.update_model_weights(other)
    after = engine.embed(PROMPTS[:2])
    assert not np.allclose(before[0].pooled, after[0].pooled)
    assert engine.stats()["num_compiled"] == compiled


def test_long_prompt_does_not_pad_the_short_prompts_of_its_step():
    counts = [500, *[12] * 11, 40, 30, 33]
    rows = [PlanRow(f"r{n}", n, 0, [5] * count, {}) for n, count in enumerate(counts)]
    batches = list(bucket_rows(rows, (1, 4, 16), (16, 32, 64, 512)))
    assert sorted(row.slot for taken, _, _ in batches for row in taken) == list(range(len(rows)))
    for taken, seqs, length in batches:
        assert len(taken) <= seqs
        assert all(length // 2 < len(row.token_ids) <= length or length == 16 for row in taken)
    padded = sum(seqs * length for _, seqs, length in batches)
    assert padded == 512 + 16 * 16 + 2 * 64 + 32  # a batch of 15 x 512 would have 8192 tokens
    many = list(bucket_rows([rows[1]] * 37, (1, 4, 16), (16,)))
    assert [(len(taken), seqs) for taken, seqs, _ in many] == [(16, 16), (16, 16), (4, 4), (1, 1)]


@pytest.mark.nightly
@pytest.mark.skipif(library.level() is None, reason="not built: python -m ed_layers.native build")
@pytest.mark.parametrize("quantized", [False, True])
def test_packed_matrices_serve_given_and_new_weights(quantized, monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "1")
    config = registry.get_config("bert")(**{**FIELDS, "hidden_size": 128})
    models = [registry.get_module("embedding", "bert").create(config, seed=n) for n in (1, 2)]
    if quantized:
        models = [m.quantize([("layers", {"dtype": "w8a8"})]) for m in models]
    engine = eSurge(models[0], **OPTIONS)
    weights = engine.loop.runner.weights
    assert {leaf.shape for leaf in weights.leaves} & {(2, 128, 64), (2, 32, 64, 4)}
    raw = PoolingParams(normalize=False)
    for number in (0, 1, 0):
        if number:
            engine.update_model_weights(models[number])
        else:
            weights.replace(models[number], copy=False)
        weights.to_host(), weights.from_host()
        for prompt, output in zip(PROMPTS, engine.embed(PROMPTS, raw), strict=True):
            alone = models[number](np.array([prompt])).embeddings[0]
            # w8a8 rounds activations to 8 bits, so a difference of 1e-7 can become a whole level.
            np.testing.assert_allclose(output.pooled, alone, atol=1e-2 if quantized else 2e-5)
    small = registry.get_module("embedding", "bert").create(config.replace(vocab_size=90), seed=0)
    with pytest.raises(ConfigError, match="new weight"):
        engine.update_model_weights(small)


@pytest.mark.nightly
@pytest.mark.skipif(library.level() is None, reason="not built: python -m ed_layers.native build")
def test_engine_keeps_no_plain_copy_of_packed_matrices(monkeypatch):
    monkeypatch.setenv(library.VARIABLE, "1")
    config = registry.get_config("bert")(**{**FIELDS, "hidden_size": 128})
    model = registry.get_module("embedding", "bert").create(config, seed=1)
    model = model.to_layout("leaves")
    leaves = jax.tree.leaves(nnx.state(model))
    matrices = [weakref.ref(leaf) for leaf in leaves if leaf.shape == (128, 128)]
    engine = eSurge(model, **OPTIONS)
    del model, leaves
    gc.collect()
    assert len(matrices) >= 8 and [matrix() for matrix in matrices] == [None] * len(matrices)
    assert len(engine.embed(PROMPTS)) == len(PROMPTS)
