"""The geometric mixture samples from the normalized product of both models' probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers.online.mixture import GeometricMixture

NEW = 4


@pytest.fixture(scope="module")
def models():
    fields = tiny_llama(num_hidden_layers=1, vocab_size=32, sharding_axis_dims=(1, 1, 1, 1, 1))
    del fields["model_type"]
    config = LlamaConfig(**fields, initializer_range=0.3)
    return [LlamaForCausalLM.create(config, seed=seed) for seed in (0, 1)]


@pytest.mark.nightly
@pytest.mark.parametrize("coefficient", [0.3, pytest.param(1.0, marks=pytest.mark.nightly)])
def test_each_token_is_of_the_mixture(models, coefficient):
    mixture = GeometricMixture(*models, coefficient)
    output = mixture.generate(
        [[5, 6, 7], [0, 9, 8]],
        attention_mask=[[1, 1, 1], [0, 1, 1]],
        max_new_tokens=NEW,
        eos_token_id=[],
        output_logits=True,
    )
    for row, start in ((0, 0), (1, 1)):
        whole = jnp.asarray(output.sequences[row : row + 1, start:])
        first, second = (
            jax.nn.log_softmax(model(whole).logits[0, -NEW - 1 : -1]) for model in models
        )
        wanted = jax.nn.log_softmax((1 - coefficient) * first + coefficient * second)
        found = jax.nn.log_softmax(jnp.asarray(output.logits)[:, row])
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        np.testing.assert_array_equal(output.sequences[row, -NEW:], np.argmax(wanted, axis=-1))
