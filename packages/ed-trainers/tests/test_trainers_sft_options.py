"""What SFT adds in training alone: label smoothing, z-loss, noise on embeddings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import Models, SFTArguments, SFTTrainer
from ed_trainers.losses.neftune import noisy_embeddings, segment_lengths
from pydantic import ValidationError

KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def llama():
    return LlamaForCausalLM.create(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            sharding_axis_dims=(1, 1, 1, 1, 1),
        )
    )


def loss_of(model, batch, key, **given):
    trainer = SFTTrainer(SFTArguments(**given), model=model)
    loss = trainer.loss(Models(model), trainer.prepare(batch), key)
    return float(loss.sums["main_loss"].value)


def full(model, batch):
    """Logits, targets and weights of every position, without any chunk."""
    prepared = SFTTrainer(SFTArguments(), model=model).prepare(batch)
    output = model(
        prepared["input_ids"],
        segment_ids=prepared["segment_ids"],
        position_ids=prepared["position_ids"],
    )
    hidden = output.last_hidden_state
    return np.asarray(model.head()(hidden), np.float64), prepared["targets"], prepared["weights"]


@pytest.mark.nightly
@pytest.mark.proves("loss_type")
def test_dynamic_fine_tuning_weights_each_token_with_its_probability(toy):
    model, batch = toy.model(), toy.loader(rows=4).batch_at(0)
    logits, targets, weights = full(model, batch)
    logps = jax.nn.log_softmax(jnp.asarray(logits), axis=-1)
    chosen = np.take_along_axis(np.asarray(logps), np.asarray(targets)[..., None], -1)[..., 0]
    expected = -(np.exp(chosen) * chosen * weights).sum() / weights.sum()
    assert loss_of(model, batch, KEY, loss_type="dft") == pytest.approx(expected, rel=1e-5)
    evaluated = loss_of(model, batch, None, loss_type="dft")
    assert evaluated == loss_of(model, batch, None), "an evaluation has the cross-entropy"
    with pytest.raises(ValidationError, match="omit label_smoothing_factor"):
        SFTArguments(loss_type="dft", label_smoothing_factor=0.1)


@pytest.mark.nightly
@pytest.mark.proves("label_smoothing_factor")
def test_label_smoothing_is_that_of_transformers(toy):
    torch = pytest.importorskip("torch")
    model, batch = toy.model(), toy.loader(rows=4).batch_at(0)
    logits, targets, weights = full(model, batch)
    labels = torch.tensor(np.where(weights > 0, targets, -100)).long()
    wanted = torch.nn.functional.cross_entropy(
        torch.tensor(logits).flatten(0, 1), labels.flatten(), label_smoothing=0.2
    )
    assert loss_of(model, batch, KEY, label_smoothing_factor=0.2) == pytest.approx(
        float(wanted), rel=1e-6
    )
    # An evaluation, which has no key, measures the plain cross-entropy.
    plain = loss_of(model, batch, None, label_smoothing_factor=0.2)
    assert plain == loss_of(model, batch, None)
    assert plain == pytest.approx(loss_of(model, batch, KEY), rel=1e-6)


@pytest.mark.nightly
@pytest.mark.proves("z_loss_coefficient")
def test_z_loss_is_the_square_of_the_log_partition(toy):
    model, batch = toy.model(), toy.loader(rows=4).batch_at(0)
    logits, _, weights = full(model, batch)
    squares = np.log(np.sum(np.exp(logits), -1)) ** 2
    wanted = loss_of(model, batch, KEY) + 0.1 * np.sum(weights * squares) / np.sum(weights)
    found = loss_of(model, batch, KEY, z_loss_coefficient=0.1)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert loss_of(model, batch, None, z_loss_coefficient=0.1) == loss_of(model, batch, None)


def packed():
    ids = np.random.default_rng(0).integers(1, 32, (3, 12)).astype(np.int32)
    segments = np.array([[1] * 12, [1] * 4 + [2] * 8, [1] * 3 + [0] * 9], np.int32)
    return {"input_ids": ids, "segment_ids": segments}


def test_segment_lengths_count_tokens_of_each_segment():
    lengths = segment_lengths(jnp.asarray(packed()["segment_ids"]))
    assert lengths.tolist() == [[12] * 12, [4] * 4 + [8] * 8, [3] * 3 + [0] * 9]


@pytest.mark.nightly
@pytest.mark.proves("neftune_noise_alpha")
def test_neftune_is_uniform_noise_of_the_papers_size(llama):
    batch = packed()
    plain = llama.model.embed_tokens(batch["input_ids"])
    noisy = noisy_embeddings(llama, batch, KEY, alpha=5.0)
    noise = np.asarray(noisy - plain)
    lengths = np.asarray(segment_lengths(jnp.asarray(batch["segment_ids"])))
    size = 5.0 / np.sqrt(np.maximum(lengths, 1) * 16) * (lengths > 0)
    assert np.all(np.abs(noise) <= size[..., None] + 1e-6)
    unit = noise[lengths > 0] / size[lengths > 0][:, None]
    # 432 draws of a uniform variable over [-1, 1): its mean is 0, its variance 1/3.
    assert abs(unit.mean()) < 0.1 and abs(unit.var() - 1 / 3) < 0.05
    assert not noise[lengths == 0].any()
    assert not np.array_equal(noise[0], noise[1])
    other = noisy_embeddings(llama, batch, jax.random.key(4), alpha=5.0)
    assert not np.array_equal(other, noisy)
    loss = loss_of(llama, batch, KEY, neftune_noise_alpha=5.0)
    assert loss == loss_of(llama, batch, KEY, neftune_noise_alpha=5.0)
    assert loss != loss_of(llama, batch, KEY)
    assert loss_of(llama, batch, None, neftune_noise_alpha=5.0) == loss_of(llama, batch, None)


def test_neftune_requires_an_embedding_table(toy):
    with pytest.raises(ConfigError, match="ToyModel lacks: omit neftune_noise_alpha"):
        loss_of(toy.model(), toy.loader(rows=4).batch_at(0), KEY, neftune_noise_alpha=5.0)


@pytest.mark.nightly
@pytest.mark.proves("disable_dropout")
def test_disabled_dropout_keeps_the_other_terms_of_training(llama):
    config = llama.config.replace(attention_dropout=0.5)
    model = LlamaForCausalLM.create(config).apply_lora_to_layers(2, ".*q_proj.*")
    batch, smooth = packed(), {"label_smoothing_factor": 0.2}
    plain = loss_of(model, batch, None)
    assert loss_of(model, batch, KEY) != plain
    assert loss_of(model, batch, KEY, disable_dropout=True) == pytest.approx(plain, rel=1e-6)
    without = LlamaForCausalLM.create(llama.config).apply_lora_to_layers(2, ".*q_proj.*")
    assert loss_of(model, batch, KEY, disable_dropout=True, **smooth) == pytest.approx(
        loss_of(without, batch, KEY, **smooth), rel=1e-6
    )
